"""The engine whose rounds never leave the GPU: a round is launched before the one ahead of it has been looked at."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters import Drafter, NoDrafter
from specla.drafters.base import Exported
from specla.engine.budget import Budget
from specla.engine.engine import Engine, PromptStretch
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.sequence import NOT_FINITE as NOT_FINITE_LOGITS, RoundTrace, Sequence, TokenLogprobs
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.target import Target
from specla.ops.chunk import takes as takes_prompt
from specla.ops.triton import MAX_NODES
from specla.ops.triton.linear import FEW
from specla.resident.capture import Captures
from specla.resident.detail import Detail
from specla.resident.forward import supports
from specla.resident.prompt import Prompts
from specla.resident.proposers import has_twin, twin_of
from specla.resident.rounds import HISTORY, STOPS, Flight, Rounds, Shape, num_banks
from specla.resident.walk import NOT_FINITE
from specla.resident.writes import Writes
from specla.sampling import Plan
from specla.state import StatePool

PAUSE = 0.02  # seconds between two steps from which they are the caller's own, and no cost of a round
MOST = 1 << 30  # tokens that a slot counts down from
CHOICES = (0, 3, 7, 15)  # drafts, so that trees have 1, 4, 8 or 16 nodes


class _Launched(NamedTuple):
    """A round whose outcome has not been looked at."""

    flight: Flight
    sequences: dict[int, Sequence]  # by slot
    budget: int
    timed: bool  # whether rounds alone have kept device and host since the launch before


class ResidentEngine(Engine):
    """Runs rounds as CUDA graphs, one ahead of what the host has seen.

    A sequence that ends by its length or by one of its first stop tokens (STOPS of them) ends on the device, where the
    round is. One that the host ends, by a further stop token or `should_stop`, has run a round too many by then, which
    is dropped with its slot; those that keep their slot hence run in step. A trained drafter begins anew where such a
    sequence is resumed.
    """

    target: GatedDeltaNet

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        config: SpeculativeConfig,
        max_num_seqs: int = 8,
        seed: int = 0,
        max_num_batched_tokens: int | None = None,
        prefix_cache_bytes: int = 0,
    ):
        """Raises ValueError when the states do not fit the device."""
        assert isinstance(target, GatedDeltaNet)
        device, max_nodes = target.norm.weight.device, config.max_draft + 1
        check_memory(target, max_nodes, max_num_seqs, device, prefix_cache_bytes)
        super().__init__(
            target, drafter, config, max_num_seqs, seed, max_num_batched_tokens, prefix_cache_bytes
        )
        self.captures = Captures(device)
        # beyond so many rows of a level, drafts cost more than they bring
        most = FEW if config.num_speculative_tokens == "auto" else None
        proposer = twin_of(drafter, max_num_seqs, max_nodes, HISTORY, self.captures, most)
        self.rounds = Rounds(target, self.pool, proposer, max_nodes, config.verify, self.captures)
        by_graph = takes_prompt(self.rounds.layers.state)  # not heads too large, nor under the interpreter
        self.prompts = Prompts(target, self.rounds.layers, self.captures) if by_graph else None
        if isinstance(drafter, NoDrafter):
            config = replace(config, num_speculative_tokens=0)
        self.budget = Budget(config, CHOICES)
        self._flights: deque[_Launched] = deque()
        self._timed, self._landed_at, self._left_at = False, 0.0, 0.0

    @staticmethod
    def takes(target: Target, drafter: Drafter, config: SpeculativeConfig) -> bool:
        """Whether all of a round can run on the device."""
        return (
            isinstance(target, GatedDeltaNet)
            and supports(target)
            and config.max_draft < MAX_NODES
            and has_twin(drafter)
        )

    @torch.inference_mode()
    def prepare(self, params: SamplingParams) -> None:
        batch = self.rounds.bucket(self.rounds.num_slots)
        for budget in self.budget.sizes:
            size, telling = budget + 1, params.logprobs is not None
            for read in {self.rounds.proposer.reading(last, size) for last in (size, 0)}:
                self.rounds.prepare(Shape(batch, size, plan_of([params]), 0, read, telling))
        if self.prompts is not None:
            self.prompts.prepare(self.rounds.proposer.layer_ids)
        self.rounds.proposer.prepare()

    @torch.inference_mode()
    def admit(self) -> None:
        super().admit()

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """As that of `Engine`, by the oldest round in flight: when it returns, a later one may be running already."""
        if time.perf_counter() - self._left_at > PAUSE:
            self._disturb()
        changed = self._read_prompts(self.max_num_batched_tokens)
        try:
            while self.running or self._flights:
                in_step = any(sequence.keep_slot for sequence in self.running)
                while self._wanted() and len(self._flights) < (1 if in_step else 2):
                    self._launch()
                landed = self._land()
                if landed:
                    self._left_at = time.perf_counter()
                    return changed + landed
        except BaseException as error:
            self._flights.clear()
            self._fail(error, list(self.running))  # nobody knows where they stand
            raise
        return changed

    def _fail(self, error: BaseException, lost: list[Sequence]) -> None:
        if isinstance(error, Exception):
            self._flights.clear()
        super()._fail(error, lost)

    def _new_pool(self, num_slots: int) -> StatePool:
        return self.target.new_pool(num_slots, 1)  # rounds have banks of their own

    def release(self, sequence: Sequence) -> None:
        try:
            if sequence.slot is not None:
                self.rounds.stop(sequence.slot)
        finally:  # of a device that has failed too
            super().release(sequence)

    def _read(self, group: list[tuple[Sequence, int]]) -> None:
        self._disturb()
        super()._read(group)

    def _joins(self, sequence: Sequence, group: list[Sequence]) -> bool:
        """Whether one graph can read them: none could go on from a copy of what another leaves, none wants
        log-probabilities of its prompt, and there is room.
        """
        all_of_them = [*group, sequence]
        if self.prompts is None or any(each.params.prompt_logprobs is not None for each in all_of_them):
            return False
        if self.prefixes is not None:
            texts = {tuple(each.tokens[:-1]) for each in all_of_them}
            if len(texts) < len(all_of_them) or max(map(len, texts)) > self.pauses.unit:
                return False
        lengths = [len(each.tokens) - 1 - each.num_prefilled for each in all_of_them if not each.is_read]
        return not lengths or len(lengths) <= self.prompts.room(max(lengths))

    def _prefill(self, stretches: list[PromptStretch]) -> None:
        if self.prompts is None:
            super()._prefill(stretches)
            return
        first = stretches[0].tap  # reads the same streams as all others
        parts = [(slot, token_ids) for slot, token_ids, _ in stretches]
        streams = self.prompts.read(parts, () if first is None else first.layer_ids)
        for (slot, token_ids, tap), rows in zip(stretches, streams, strict=True):
            self.pool.length[slot] += len(token_ids)
            if tap is not None:
                tap.read(rows[None])

    def _clear(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.rounds.proposer.clear(sequence.slot)

    def _start(self, sequence: Sequence) -> None:
        super()._start(sequence)
        assert sequence.slot is not None
        self._disturb()
        rounds, params, vocab = self.rounds, sequence.params, self.target.config.vocab_size
        writes = Writes(rounds.device)
        rounds.slots.admit(
            writes, sequence.slot, sequence.tokens, remaining=min(params.max_tokens, MOST),
            temperature=params.temperature, seed=sequence.seed,
            stop_ids=sorted(i for i in sequence.stop_ids if i < vocab)[:STOPS],
        )  # fmt: skip
        rounds.narrow.admit(
            writes, sequence.slot, sequence.tokens, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
        )  # fmt: skip
        rounds.proposer.admit(writes, sequence.slot, sequence.key, rounds.size)
        most = params.num_speculative_tokens
        rounds.begin(writes, sequence.slot, MAX_NODES if most is None else most)
        writes.make()

    def _show(self, sequence: Sequence, features: Tensor, following: list[int]) -> None:
        assert sequence.slot is not None
        self.rounds.proposer.read(sequence.slot, features, following)

    def _remember(self, sequence: Sequence) -> Exported | None:
        assert sequence.slot is not None
        return self.rounds.proposer.export(sequence.slot)

    def _recall(self, sequence: Sequence, memory: Exported) -> None:
        assert sequence.slot is not None
        following = sequence.tokens[sequence.num_prefilled]
        self.rounds.proposer.restore(sequence.slot, memory, following)

    def _wanted(self) -> bool:
        """Whether a further round can bring anything: every round in flight takes a token at least."""
        return any(sequence.draft_limit + 1 > len(self._flights) for sequence in self.running)

    def _launch(self) -> None:
        sequences = {sequence.slot: sequence for sequence in self.running if sequence.slot is not None}
        params = [sequence.params for sequence in self.running]
        asked = [p.num_speculative_tokens for p in params if p.num_speculative_tokens is not None]
        budget = self.budget.choose(len(params))
        if len(asked) == len(params):  # in a tree no larger than needed
            budget = min([budget, *(n for n in CHOICES if n >= max(asked))])
        telling = any(sequence.trace or sequence.params.logprobs is not None for sequence in self.running)
        captured = self.captures.count
        flight = self.rounds.launch(max(sequences) + 1, budget + 1, budget, plan_of(params), telling)
        if self.captures.count > captured:
            self._disturb()
        self._flights.append(_Launched(flight, sequences, budget, self._timed and not asked))
        self._timed = True

    def _disturb(self) -> None:
        """A prompt or a capture comes between rounds: the times of those around it tell nothing."""
        self._timed = False
        self._flights = deque(launched._replace(timed=False) for launched in self._flights)

    def _land(self) -> list[Sequence]:
        """Take in the oldest round in flight; the sequences that grew or ended in it."""
        launched = self._flights.popleft()
        outcome = launched.flight.wait()
        now = time.perf_counter()
        landed: list[Sequence] = []
        tokens = grown = 0
        for slot, sequence in launched.sequences.items():
            if sequence.finish_reason:  # in the round before
                continue
            row = outcome.tokens[slot].tolist()
            taken, accepted, drafted, reason = outcome.counts[slot].tolist()
            landed.append(sequence)
            if reason == NOT_FINITE:
                sequence.fail(FloatingPointError(NOT_FINITE_LOGITS))
                continue
            before = len(sequence.tokens)
            kept = sequence.extend(row[:accepted], row[accepted] if taken > accepted else -1, drafted)
            if sequence.finish_reason is not None and sequence.keep_slot:
                self._settle(slot, kept)
            if launched.flight.detail is not None:
                note(sequence, sequence.tokens[before:], accepted, slot, launched.flight.detail)
            tokens += kept
            grown += 1
        if grown and launched.timed:
            self.budget.observe(launched.budget, tokens / grown, now - self._landed_at, grown)
        self._landed_at = now
        self._let_go(landed)
        return landed

    def _settle(self, slot: int, kept: int) -> None:
        """Commit what a sequence that keeps its slot has taken of its last round, and leave it out of the next ones."""
        self.rounds.stop(slot)
        self.rounds.flush(slot, kept)


def note(sequence: Sequence, taken: list[int], accepted: int, row: int, detail: Detail) -> None:
    """Keep of a round what a sequence wants to know of it."""
    if sequence.params.logprobs is not None:
        count, width = len(taken), sequence.params.logprobs
        ids, top = detail.top_ids[row, :count, :width].tolist(), detail.top[row, :count, :width].tolist()
        for n, value in enumerate(detail.logprob[row, :count].tolist()):
            pairs = list(zip(ids[n], top[n], strict=True))
            sequence.logprobs.append(TokenLogprobs(taken[n], value, pairs))
    if sequence.trace:
        count, path = int(detail.num_nodes[row]), detail.path[row, : 1 + min(accepted, len(taken))]
        tokens, parent = (x[row, :count].tolist() for x in (detail.tokens, detail.parent))
        sequence.last_round = RoundTrace(tokens, parent, None, path.tolist())


def check_memory(
    target: GatedDeltaNet, max_nodes: int, num_slots: int, device: torch.device, prefix_cache_bytes: int = 0
) -> None:
    """ValueError when states of so many sequences, the banks of their drafts and copies for prompts that begin alike
    do not fit beside the weights.
    """
    if device.type != "cuda":
        return
    one = target.new_pool(1, max_nodes)
    needed = num_slots * (one.bytes_per_sequence() + num_banks(num_slots) * max_nodes * one.bytes_per_node())
    torch.cuda.empty_cache()  # of an engine that has gone, say
    free, _ = torch.cuda.mem_get_info(device)
    if needed + prefix_cache_bytes > free:
        raise ValueError(
            f"{num_slots} sequences with up to {max_nodes - 1} drafts need {needed:,} bytes for states and drafts, "
            f"prefix_cache_bytes is {prefix_cache_bytes:,}, and {free:,} are free on {device}: lower max_num_seqs, "
            f"num_speculative_tokens or prefix_cache_bytes"
        )


def plan_of(params: list[SamplingParams]) -> Plan:
    """What the draws of these requests need; few plans, since each has its own graphs."""
    warm = [p for p in params if p.temperature > 0]
    whole = any(p.top_p < 1 and p.top_k < 0 for p in warm)
    most = max((p.top_k for p in warm), default=-1)
    return Plan(
        noise=bool(warm),
        penalty=any(p.repetition_penalty != 1 for p in params),
        ranks=-1 if whole else 1 << (most - 1).bit_length() if most > 0 else 0,
        min_p=any(p.min_p > 0 for p in warm),
    )
