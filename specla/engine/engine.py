"""Requests in, tokens out: admission to slots, prompts beside rounds, and the end of sequences. Knows no text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Tokens
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters.base import Drafter, Exported
from specla.engine.budget import Budget
from specla.engine.logprobs import ROWS, token_logprobs
from specla.engine.loop import run_round
from specla.engine.params import SamplingParams, SpeculativeConfig, check_integer
from specla.engine.prefix import STRIDE, STRIDE_GPU, Found, Kept, PrefixCache
from specla.engine.reading import Pauses, default_step
from specla.engine.sequence import RoundError, Sequence, one_line
from specla.models.target import Tap, Target
from specla.state import StatePool


class EngineStats(NamedTuple):
    """Sequences that run, those that wait for a slot or are being read, and what the prefix cache did so far."""

    num_running: int
    num_waiting: int
    num_slots: int
    num_free_slots: int
    prefix_queries: int
    prefix_hits: int
    prefix_hit_tokens: int
    prefix_bytes: int


class PromptStretch(NamedTuple):
    """The next tokens of the prompt in a slot, and who sees the streams that they make."""

    slot: int
    token_ids: list[int]
    tap: Tap | None


class Engine:
    """Runs up to `max_num_seqs` sequences of one target at a time; others wait their turn. One thread owns it.

    Args:
        seed: requests without a seed of their own get one derived from it and their number.
        max_num_batched_tokens: tokens of prompts that a step reads at most, before it runs a round; None: 256 on a CPU,
            2048 on a GPU.
        prefix_cache_bytes: room for copies of states, from which prompts that begin alike go on; 0 keeps none.

    `failure` is what has spoilt it, if anything has: then it takes no more requests.

    Raises:
        ValueError: for a size out of range, and for a mode of verification that the target's kernels do not have.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        config: SpeculativeConfig | None = None,
        max_num_seqs: int = 8,
        seed: int = 0,
        max_num_batched_tokens: int | None = None,
        prefix_cache_bytes: int = 0,
    ):
        check_integer("max_num_seqs", max_num_seqs, 1)
        check_integer("prefix_cache_bytes", prefix_cache_bytes, 0)
        self.target, self.drafter = target, drafter
        self.config = config or SpeculativeConfig()
        self.pool = self._new_pool(max_num_seqs)
        if self.config.verify == "parallel" and not self.pool.takes_parallel:
            raise ValueError(
                "on a GPU verify 'parallel' needs one decay a head, and this model has one for each key channel: "
                "use 'serial', 'hybrid' or 'auto'"
            )
        self.budget = Budget(self.config)
        self.waiting: deque[Sequence] = deque()
        self.reading: deque[Sequence] = deque()  # have a slot, and the first of them is read now
        self.running: list[Sequence] = []
        self.seed, self.num_requests = seed, 0
        self.failure: BaseException | None = None
        self.pauses = Pauses.of(self.pool)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = default_step(self.pool)
        check_integer("max_num_batched_tokens", max_num_batched_tokens, self.pauses.unit)
        self.max_num_batched_tokens = max_num_batched_tokens
        stride = STRIDE if self.pool.device.type == "cpu" else STRIDE_GPU
        self.prefixes = PrefixCache(prefix_cache_bytes, self.pauses, stride) if prefix_cache_bytes else None
        self._found: dict[int, Found] = {}  # by the key of a sequence that is being read

    def add(
        self,
        token_ids: Tokens[int],
        params: SamplingParams,
        should_stop: Callable[[int], bool] | None = None,
        keep_slot: bool = False,
        trace: bool = False,
    ) -> Sequence:
        """Queue a request.

        Args:
            token_ids: the prompt, at least one token.
            should_stop: called with each new token; True ends the sequence with it.
            keep_slot: leave the state in place at the end, for `resume`; the caller calls `release` then.
            trace: keep the tree of its last round.

        Raises:
            ValueError: for an empty prompt, token ids outside the vocabulary, or more drafts than trees have room for.
            RuntimeError: once the engine has failed.
        """
        if self.failure is not None:
            raise RuntimeError(f"the engine has failed and takes no more requests: {one_line(self.failure)}")
        self._check_params(params)
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
            trace,
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
        if params.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs are not there for a prompt of which a part was read before: use None"
            )
        self._check_params(params)
        self._check_tokens(token_ids)
        self._clear(sequence)  # first, since it may fail
        sequence.tokens.extend(token_ids)
        sequence.prompt_length = len(sequence.tokens)
        sequence.params, sequence.should_stop = params, should_stop
        sequence.stop_ids = self._stop_ids(params)
        sequence.seed = sequence.seed if params.seed is None else params.seed
        sequence.finish_reason = None
        sequence.num_cached = 0
        for made in (sequence.from_draft, sequence.logprobs, sequence.prompt_logprobs):
            made.clear()
        self.reading.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """End a sequence at any moment: its slot is free, what was pending there is dropped."""
        for place in (self.waiting, self.reading, self.running):
            with suppress(ValueError):
                place.remove(sequence)
        self._found.pop(sequence.key, None)
        if sequence.slot is not None:
            self.pool.free(sequence.slot)
            sequence.slot = None
        self.drafter.forget(sequence.key)
        sequence.finish_reason = sequence.finish_reason or "abort"

    def prepare(self, params: SamplingParams) -> None:
        """Do beforehand what would delay the first rounds of a full batch of such requests."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.reading or self.running)

    def stats(self) -> EngineStats:
        cache = self.prefixes
        counts = (0, 0, 0, 0)
        if cache is not None:
            counts = (cache.queries, cache.hits, cache.hit_tokens, cache.nbytes)
        waiting = len(self.waiting) + len(self.reading)
        return EngineStats(len(self.running), waiting, len(self.pool.length), self.pool.num_free, *counts)

    def step(self) -> list[Sequence]:
        """Read prompts for as many tokens as a step may, run one round, and let go of what has ended.

        A request that fails alone ends with the reason "error"; what spoils the whole round is raised, after all that
        took part in it have ended so. After an `Exception` nobody runs any more.

        Returns:
            the sequences that grew or ended; none where prompts were read and nothing ran.
        """
        changed = self._read_prompts(self.max_num_batched_tokens)
        batch = sorted(
            self.running, key=lambda sequence: sequence.slot or 0
        )  # neighbours are views, not copies
        if not batch:
            return changed
        budget = self.budget.choose(len(batch))
        before = sum(s.metrics.num_tokens for s in batch)
        start = time.perf_counter()
        try:
            budgeted = run_round(batch, self.target, self.drafter, self.pool, budget, self.config.verify)
        except BaseException as error:
            self._fail(error, batch)  # their states are between two rounds
            raise
        tokens = sum(s.metrics.num_tokens for s in batch) - before
        if budgeted and tokens:
            self.budget.observe(budget, tokens / len(batch), time.perf_counter() - start, len(batch))
        self._let_go(batch)
        return changed + batch

    def admit(self) -> None:
        """Give free slots to those who wait, and read their prompts to the end."""
        while self.reading or (self.waiting and self.pool.num_free):
            self._read_prompts(self.max_num_batched_tokens)

    def _new_pool(self, num_slots: int) -> StatePool:
        return self.target.new_pool(num_slots, self.config.max_draft + 1)

    def _let_go(self, batch: list[Sequence]) -> None:
        """Of the sequences of a round, those that have ended run no more."""
        for sequence in batch:
            if isinstance(sequence.failure, FloatingPointError):
                self.failure = sequence.failure
            if sequence.finish_reason:
                self.running.remove(sequence)
                if sequence.finish_reason == "error" or not sequence.keep_slot:
                    self.release(sequence)

    def _fail(self, error: BaseException, lost: list[Sequence]) -> None:
        """End the sequences that are lost by an error, and all others too unless it only interrupts."""
        if isinstance(error, Exception):
            self.failure = error
            lost = [*self.running, *self.reading, *self.waiting]
        shared = RoundError(f"a round failed: {one_line(error)}")
        shared.__cause__ = error
        for sequence in lost:
            sequence.fail(shared)
            with suppress(RuntimeError):  # a device that has failed fails again
                self.release(sequence)

    def _read_prompts(self, budget: int) -> list[Sequence]:
        """Read up to `budget` tokens of prompts, first come, first served; the sequences that failed in it."""
        lost: list[Sequence] = []
        while group := self._next_group(budget, lost):
            with self._blaming([sequence for sequence, _ in group], lost):
                self._read(group)
                budget -= sum(count for _, count in group)
            for sequence, _ in group:
                if sequence.is_read and sequence.finish_reason is None:
                    with self._blaming([sequence], lost):
                        self._start(sequence)
                        self.reading.remove(sequence)
                        self.running.append(sequence)
        return lost

    def _next_group(self, budget: int, lost: list[Sequence]) -> list[tuple[Sequence, int]]:
        """The sequences to be read next, in their slots by now, and how many tokens of each."""
        group: list[tuple[Sequence, int]] = []
        while len(group) < len(self.reading) or (self.waiting and self.pool.num_free):
            sequence = self.reading[len(group)] if len(group) < len(self.reading) else self.waiting[0]
            if group and not self._joins(sequence, [other for other, _ in group]):
                break
            if sequence.slot is None:
                with self._blaming([sequence], lost):
                    self.reading.append(self.waiting.popleft())
                    self._begin(sequence)
                if sequence.finish_reason is not None:
                    continue
            count = 0 if sequence.is_read else self._stretch(sequence, budget)
            if not (count or sequence.is_read):
                break
            group.append((sequence, count))
            budget -= count
            if sequence.num_prefilled + count < len(sequence.tokens) - 1:
                break  # nobody starts before it
        return group

    def _joins(self, sequence: Sequence, group: list[Sequence]) -> bool:
        """Whether a sequence is read together with others."""
        return False

    @contextmanager
    def _blaming(self, sequences: list[Sequence], lost: list[Sequence]) -> Iterator[None]:
        """An error inside ends these sequences; one that may have spoilt the device ends all others, too."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) or self._is_fatal(error):
                self._fail(error, sequences)
                raise
            for sequence in sequences:
                sequence.fail(error)
                self.release(sequence)
            lost += sequences

    def _is_fatal(self, error: BaseException) -> bool:
        """Whether an error while a prompt was read may be more than that prompt's own."""
        return self.pool.device.type != "cpu" and not isinstance(
            error, (torch.OutOfMemoryError, MemoryError, ValueError)
        )

    def _begin(self, sequence: Sequence) -> None:
        """Take a slot, with the state of the longest beginning of the prompt that is known."""
        sequence.slot = self.pool.alloc()
        self._clear(sequence)
        if self.prefixes is None or sequence.params.prompt_logprobs is not None:
            return
        found = self._found[sequence.key] = self.prefixes.find(sequence.tokens[:-1])
        if found.kept is not None:
            self.pool.restore(sequence.slot, found.kept.state)
            sequence.num_prefilled = sequence.num_cached = found.kept.length
            if found.kept.memory is not None:
                self._recall(sequence, found.kept.memory)

    def _stretch(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt to read now, as many as `budget` at most; 0 when none can be."""
        done, end = sequence.num_prefilled, len(sequence.tokens) - 1
        found = self._found.get(sequence.key)
        most = budget if found is None else min(budget, found.next_place(done, end) - done)
        return self.pauses.stretch(done, end, most)

    def _read(self, group: list[tuple[Sequence, int]]) -> None:
        """Read so many tokens of each prompt, and keep a copy of the state where it is worth it."""
        group = [(sequence, count) for sequence, count in group if count]
        stretches = []
        for sequence, count in group:
            assert sequence.slot is not None
            ids = sequence.tokens[sequence.num_prefilled : sequence.num_prefilled + count]
            stretches.append(PromptStretch(sequence.slot, ids, self._tap(sequence, count)))
        if stretches:
            self._prefill(stretches)
        for sequence, count in group:
            sequence.num_prefilled += count
            self._keep_prefix(sequence)

    def _prefill(self, stretches: list[PromptStretch]) -> None:
        """Take stretches of prompts into their slots' committed states."""
        for slot, token_ids, tap in stretches:
            self.target.prefill(torch.tensor(token_ids, device=self.pool.device), slot, self.pool, tap)

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Copy the state of a slot where a beginning ends that other prompts may share."""
        done, found = sequence.num_prefilled, self._found.get(sequence.key)
        if found is not None and self.prefixes is not None and done in found.places:
            assert sequence.slot is not None
            state, memory = self.pool.export(sequence.slot), self._remember(sequence)
            nbytes = state.nbytes + (0 if memory is None else memory.nbytes)
            self.prefixes.keep(found.places[done], Kept(done, state, memory, nbytes))

    def _tap(self, sequence: Sequence, length: int) -> Tap | None:
        """Shows the drafter the next `length` tokens of a prompt, each with the token that follows it."""
        first = sequence.num_prefilled + 1
        following = sequence.tokens[first : first + length]
        layer_ids, count = self.drafter.layer_ids, sequence.params.prompt_logprobs
        done = 0

        def read(features: Tensor) -> None:
            nonlocal done
            rows = features[0]
            then = following[done : done + len(rows)]
            done += len(rows)
            if count is not None:
                width = self.target.config.hidden_size
                rows, streams = rows.split([rows.shape[1] - width, width], 1)
                told = sequence.prompt_logprobs = sequence.prompt_logprobs or [None]
                for n in range(0, len(then), ROWS):
                    logits = self.target.head(streams[n : n + ROWS])
                    told += token_logprobs(logits, then[n : n + ROWS], count)
            if layer_ids:
                self._show(sequence, rows, then)

        if count is not None:
            return Tap((*layer_ids, self.target.config.num_hidden_layers), read)
        return Tap(layer_ids, read) if layer_ids else None

    def _clear(self, sequence: Sequence) -> None:
        """A sequence is about to be read in its slot."""

    def _start(self, sequence: Sequence) -> None:
        """Its prompt is read, and it runs from now on."""
        self._found.pop(sequence.key, None)
        if sequence.params.prompt_logprobs is not None and not sequence.prompt_logprobs:
            sequence.prompt_logprobs = [None]  # of a prompt of one token

    def _show(self, sequence: Sequence, features: Tensor, following: list[int]) -> None:
        """Let the drafter see features `[T, F]` of a prompt, and the token that follows each."""
        self.drafter.observe(sequence.key, features, following)

    def _remember(self, sequence: Sequence) -> Exported | None:
        """A copy of what the drafter has seen of a prompt."""
        return self.drafter.export(sequence.key)

    def _recall(self, sequence: Sequence, memory: Exported) -> None:
        """Give it to the drafter for a prompt that begins alike."""
        self.drafter.restore(sequence.key, memory, sequence.tokens[sequence.num_prefilled])

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = self.target.config.eos_token_id
        eos = () if eos is None or params.ignore_eos else (eos,) if isinstance(eos, int) else tuple(eos)
        return frozenset(params.stop_token_ids) | frozenset(eos)

    def _check_params(self, params: SamplingParams) -> None:
        most, asked = self.config.max_draft, params.num_speculative_tokens
        if asked is not None and asked > most:
            raise ValueError(f"num_speculative_tokens of a request must be in 0..{most} here, got {asked}")

    def _check_tokens(self, token_ids: Tokens[int]) -> None:
        vocab = self.target.config.vocab_size
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise ValueError(f"token ids must be integers in 0..{vocab - 1}, got {token!r}")
