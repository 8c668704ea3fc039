"""Requests in, tokens out: admission to slots, prefill, rounds, and the end of sequences. Knows no text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence as Tokens

import torch
from torch import Tensor

from specla.drafters.base import Drafter
from specla.engine.budget import Budget
from specla.engine.loop import run_round
from specla.engine.params import SamplingParams, SpeculativeConfig, check_integer
from specla.engine.sequence import Sequence
from specla.models.target import Tap, Target
from specla.state import StatePool


class Engine:
    """Runs up to `max_num_seqs` sequences of one target at a time; others wait their turn.

    Args:
        seed: requests without a seed of their own get one derived from it and their number.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        config: SpeculativeConfig | None = None,
        max_num_seqs: int = 8,
        seed: int = 0,
    ):
        check_integer("max_num_seqs", max_num_seqs, 1)
        self.target, self.drafter = target, drafter
        self.config = config or SpeculativeConfig()
        self.pool = self._new_pool(max_num_seqs)
        self.budget = Budget(self.config)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.seed, self.num_requests = seed, 0

    def add(
        self,
        token_ids: Tokens[int],
        params: SamplingParams,
        should_stop: Callable[[int], bool] | None = None,
        keep_slot: bool = False,
    ) -> Sequence:
        """Queue a request.

        Args:
            token_ids: the prompt, at least one token.
            should_stop: called with each new token; True ends the sequence with it.
            keep_slot: leave the state in place at the end, for `resume`; the caller calls `release` then.

        Raises:
            ValueError: for an empty prompt or token ids outside the vocabulary.
        """
        self._check_tokens(token_ids)
        if not len(token_ids):
            raise ValueError("the prompt is empty: at least one token is needed")
        seed = (self.seed << 20) + self.num_requests if params.seed is None else params.seed
        sequence = Sequence(
            list(token_ids),
            params,
            seed,
            self._stop_ids(params),
            should_stop,
            keep_slot,
            key=self.num_requests,
        )
        self.num_requests += 1
        self.waiting.append(sequence)
        return sequence

    def resume(
        self,
        sequence: Sequence,
        token_ids: Tokens[int],
        params: SamplingParams,
        should_stop: Callable[[int], bool] | None = None,
    ) -> None:
        """Go on from where a finished sequence with `keep_slot` stands, after `token_ids` (which may be empty)."""
        if sequence.slot is None or sequence.finish_reason is None:
            raise ValueError("only a finished sequence that kept its slot can be resumed")
        self._check_tokens(token_ids)
        sequence.tokens.extend(token_ids)
        sequence.prompt_length = len(sequence.tokens)
        sequence.params, sequence.should_stop = params, should_stop
        sequence.stop_ids = self._stop_ids(params)
        sequence.seed = sequence.seed if params.seed is None else params.seed
        sequence.finish_reason = None
        sequence.from_draft.clear()
        self._start(sequence)

    def release(self, sequence: Sequence) -> None:
        """End a sequence at any moment: its slot is free, what was pending there is dropped."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.slot is not None:
            self.pool.free(sequence.slot)
            sequence.slot = None
        self.drafter.forget(sequence.key)
        sequence.finish_reason = sequence.finish_reason or "abort"

    def prepare(self, params: SamplingParams) -> None:
        """Do beforehand what would delay the first rounds of a full batch of such requests."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Sequence]:
        """Admit what fits, run one round, and let go of what has ended.

        Returns:
            the sequences that grew.
        """
        self.admit()
        batch = sorted(
            self.running, key=lambda sequence: sequence.slot or 0
        )  # neighbours are views, not copies
        if not batch:
            return []
        budget = self.budget.choose()
        before = sum(s.metrics.num_tokens for s in batch)
        start = time.perf_counter()
        try:
            budgeted = run_round(batch, self.target, self.drafter, self.pool, budget, self.config.verify)
        except BaseException:
            for sequence in batch:  # their states are between two rounds
                sequence.finish_reason = "error"
                self.release(sequence)
            raise
        tokens = sum(s.metrics.num_tokens for s in batch) - before
        if budgeted:
            self.budget.observe(budget, tokens / len(batch), time.perf_counter() - start)
        self._let_go(batch)
        return batch

    def _new_pool(self, num_slots: int) -> StatePool:
        return self.target.new_pool(num_slots, self.config.max_draft + 1)

    def _let_go(self, batch: list[Sequence]) -> None:
        """Of the sequences of a round, those that have ended run no more."""
        for sequence in batch:
            if sequence.finish_reason:
                self.running.remove(sequence)
                if not sequence.keep_slot:
                    self.release(sequence)

    def admit(self) -> None:
        """Give free slots to those who wait, and read their prompts."""
        while self.waiting and self.pool.num_free:
            sequence = self.waiting.popleft()
            sequence.slot = self.pool.alloc()
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Read all tokens but the last, which is the first root, and let the sequence run."""
        assert sequence.slot is not None
        unread = sequence.tokens[sequence.num_prefilled : -1]
        try:
            if unread:
                ids = torch.tensor(unread, device=self.pool.device)
                self.target.prefill(ids, sequence.slot, self.pool, self._tap(sequence))
        except BaseException:
            sequence.finish_reason = "error"
            self.release(sequence)
            raise
        sequence.num_prefilled += len(unread)
        self.running.append(sequence)

    def _tap(self, sequence: Sequence) -> Tap | None:
        """Shows the drafter the stretches of a prompt, each with the tokens that follow its own."""
        following = sequence.tokens[sequence.num_prefilled + 1 :]
        done = 0

        def read(features: Tensor) -> None:
            nonlocal done
            count = features.shape[1]
            self._show(sequence, features[0], following[done : done + count])
            done += count

        return Tap(self.drafter.layer_ids, read) if self.drafter.layer_ids else None

    def _show(self, sequence: Sequence, features: Tensor, following: list[int]) -> None:
        """Let the drafter see features `[T, F]` of a prompt, and the token that follows each."""
        self.drafter.observe(sequence.key, features, following)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = self.target.config.eos_token_id
        eos = () if eos is None or params.ignore_eos else (eos,) if isinstance(eos, int) else tuple(eos)
        return frozenset(params.stop_token_ids) | frozenset(eos)

    def _check_tokens(self, token_ids: Tokens[int]) -> None:
        vocab = self.target.config.vocab_size
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise ValueError(f"token ids must be integers in 0..{vocab - 1}, got {token!r}")
