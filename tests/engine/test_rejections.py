"""Forced patterns of acceptance and rejection: whatever is drafted, the tokens and the logits stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Tokens
from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.drafters import DraftRow, Proposal
from specla.drafters.base import Draft, TokenDrafter, pack
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.state import StatePool
from tests.targets import FURTHER, VOCAB, Run, ScriptedDrafter, make_target, prompt, run, same_bits

PROMPTS = [prompt(n, n) for n in (5, 1, 17, 3, 8, 2, 70)]
LIMITS = [13, 30, 2, 21, 1, 26, 9]


def params(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=n) for i, n in enumerate(LIMITS)]


@cache
def plain(variant: str, temperature: float) -> Run:
    return run(make_target(variant), None, PROMPTS, params(temperature), drafts=0, slots=7)


class ExactDrafter(TokenDrafter):
    """Drafts a chain whose first `hits(row, round)` tokens are right and whose others are wrong."""

    name = "exact"

    def __init__(self, length: int, hits: dict[int, list[int]]):
        self.length, self.hits = length, hits
        self.references: dict[int, list[int]] = {}
        self.order: dict[int, int] = {}  # row number of a key
        self.rounds: dict[int, int] = {}

    def propose(self, rows: Tokens[DraftRow]) -> Proposal:
        return pack([self._draft(row) for row in rows])

    def forget(self, key: int) -> None:
        pass

    def _draft(self, row: DraftRow) -> Draft:
        number = self.order.setdefault(row.key, len(self.order))
        turn = self.rounds[row.key] = self.rounds.get(row.key, -1) + 1
        hits = self.hits[number][turn % len(self.hits[number])]
        ahead = self.references[row.key][len(row.tokens) :]
        length = min(self.length, row.limit, len(ahead))
        drafts = [ahead[i] if i < hits else (ahead[i] + 1) % VOCAB for i in range(length)]
        return Draft([row.tokens[-1], *drafts], list(range(-1, length)))


@given(
    seed=st.integers(0, 2**32),
    right=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    idle=st.sampled_from([0.0, 0.3, 0.8]),
    slots=st.integers(1, 7),
    drafts=st.integers(1, 14),
    variant=st.sampled_from(
        ["plain", "grouped_wide", "conv_2", "no_conv", "hybrid_two_kinds", "hybrid_narrow"]
    ),
    temperature=st.sampled_from([0.0, 1.0]),
    mode=st.sampled_from(["serial", "hybrid"]),
)
def test_any_pattern_of_rejections_leaves_tokens_and_logits_as_they_are(
    seed: int, right: float, idle: float, slots: int, drafts: int, variant: str, temperature: float, mode: str
) -> None:
    """Draft counts change by row and round, rows end early, and with fewer slots than requests others join later."""
    want = plain(variant, temperature)
    drafter = ScriptedDrafter(seed, right, idle)
    got = run(make_target(variant), drafter, PROMPTS, params(temperature), drafts=drafts, mode=mode, slots=slots,
              references=want.tokens)  # fmt: skip
    assert got.outputs == want.outputs
    assert all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert set(drafter.forgotten) == {s.key for s in got.sequences}


def test_the_script_mixes_rows_with_and_without_drafts() -> None:
    """Guards the test above: its patterns are as wild as it says."""
    want = plain("plain", 0.0)
    drafter = ScriptedDrafter(seed=1, right=0.7)
    got = run(make_target("plain"), drafter, PROMPTS, params(0.0), slots=4, references=want.tokens)
    assert any(0 in counts and max(counts) > 2 for counts in drafter.counts)
    assert any(len(set(counts)) == 4 for counts in drafter.counts)
    assert len({len(counts) for counts in drafter.counts}) > 2
    lengths = {n for s in got.sequences for n, times in enumerate(s.metrics.acceptance_histogram) if times}
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize(
    "variant", ["plain", "conv_2", "conv_3", "no_conv", "hybrid_narrow", "qwen_dense", *FURTHER]
)
def test_every_row_accepts_a_length_of_its_own(variant: str) -> None:
    """Lengths 0..5 cross the convolution window and the attention window in every order."""
    prompts, limit = [prompt(6, n) for n in range(6)], SamplingParams(max_tokens=40)
    target = make_target(variant)
    want = run(target, None, prompts, limit, drafts=0, slots=6)
    hits = {row: [(row + turn) % 6 for turn in range(6)] for row in range(6)}
    got = run(target, ExactDrafter(5, hits), prompts, limit, slots=6, references=want.tokens)
    assert got.outputs == want.outputs
    assert all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    for sequence in got.sequences:
        assert all(times > 0 for times in sequence.metrics.acceptance_histogram[:6])
        assert sequence.metrics.num_tokens == 40


@cache
def alone(variant: str) -> Run:
    return run(make_target(variant), None, [prompt(3)], SamplingParams(max_tokens=24), drafts=0)


@pytest.mark.parametrize("accepted", range(7))
@pytest.mark.parametrize(
    "variant", ["conv_2", "conv_3", "plain", "no_conv", "hybrid_window", "qwen_next", *FURTHER]
)
def test_the_state_is_right_after_every_accepted_length(variant: str, accepted: int) -> None:
    target, limit, want = make_target(variant), SamplingParams(max_tokens=24), alone(variant)
    got = run(target, ExactDrafter(6, {0: [accepted]}), [prompt(3)], limit, references=want.tokens)
    assert got.outputs == want.outputs and same_bits(got.logits[0], want.logits[0])
    histogram = got.sequences[0].metrics.acceptance_histogram
    assert histogram[accepted] >= 24 // (accepted + 1) - 1


def test_branching_changes_what_is_accepted() -> None:
    """A tree verified as a chain would accept nothing behind a wrong first sibling."""

    class Fork(ExactDrafter):
        def _draft(self, row: DraftRow) -> Draft:
            ahead = self.references[row.key][len(row.tokens) :]
            if min(row.limit, len(ahead)) < 2:
                return Draft([row.tokens[-1]], [-1])
            wrong = [(token + 1) % VOCAB for token in ahead[:2]]
            return Draft([row.tokens[-1], wrong[0], ahead[0], wrong[1], ahead[1]], [-1, 0, 0, 1, 2])

    target, limit = make_target("plain"), SamplingParams(max_tokens=30)
    want = run(target, None, [prompt(4)], limit, drafts=0)
    got = run(target, Fork(2, {}), [prompt(4)], limit, references=want.tokens)
    assert got.outputs == want.outputs
    assert got.sequences[0].metrics.acceptance_histogram == [0, 0, 10]


def test_more_requests_than_slots_take_turns() -> None:
    target = make_target("plain")
    engine = Engine(target, ScriptedDrafter(), SpeculativeConfig(num_speculative_tokens=4), max_num_seqs=2)
    sequences = [engine.add(p, s) for p, s in zip(PROMPTS, params(0.0), strict=True)]
    most = 0
    while engine.has_work:
        grown = engine.step()
        most = max(most, len(grown))
        assert len({s.slot for s in engine.running}) == len(engine.running) <= 2
    assert most == 2
    assert [s.output for s in sequences] == plain("plain", 0.0).outputs
    assert all(s.finish_reason == "length" and s.slot is None for s in sequences)


# One broken rollback each: the laws above must notice all of them.


def keep_all(path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(path.shape[1]).expand_as(path), torch.full_like(count, path.shape[1] - 1)


def one_too_few(path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return path, (count - 1).clamp(min=0)


def one_too_many(path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return path, (count + 1).clamp(max=path.shape[1] - 1)


def one_for_all(path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return path, count.min().expand_as(count)


def memory_order(path: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(path.shape[1]).expand_as(path), count


@pytest.mark.parametrize("broken", [keep_all, one_too_few, one_too_many, one_for_all, memory_order])
@pytest.mark.parametrize(
    "variant", ["plain", "no_conv", "hybrid_narrow", "qwen_dense", "mamba2", "kda", "kimi"]
)
def test_a_broken_rollback_is_noticed(
    broken: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = StatePool.accept

    def accept(self: StatePool, slots: list[int], path: Tensor, num_accepted: list[int]) -> None:
        path, count = broken(path, torch.as_tensor(num_accepted))
        right(self, slots, path, count.tolist())

    want = plain(variant, 0.0)
    monkeypatch.setattr(StatePool, "accept", accept)
    drafter = ScriptedDrafter(seed=2, right=0.7, idle=0.1)
    got = run(make_target(variant), drafter, PROMPTS, params(0.0), slots=7, references=want.tokens)
    assert got.outputs != want.outputs
    assert not all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))
