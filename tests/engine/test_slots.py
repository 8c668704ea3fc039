"""Cancellation, errors and refusals: slots come back, and whoever takes them next is not affected."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import pytest
import torch
from torch import Tensor

from specla.drafters import Drafter, DraftRow, NgramDrafter, Proposal
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.target import Tap
from specla.state import StatePool
from specla.tree import Tree
from tests.targets import ScriptedDrafter, build_target, make_config, make_target, prompt, run

PARAMS = SamplingParams(max_tokens=25)
VARIANTS = ["plain", "no_conv", "hybrid_two_kinds", "qwen_next", "mamba2", "kda", "kimi"]


class Interrupting:
    """A target that calls back after verification, before anything is accepted."""

    def __init__(self, target: Any, between) -> None:
        self.target, self.between, self.calls = target, between, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def verify(
        self,
        tokens: Tensor,
        tree: Tree,
        slots: list[int],
        pool: StatePool,
        mode: str = "auto",
        tap: Tap | None = None,
    ) -> Tensor:
        logits = self.target.verify(tokens, tree, slots, pool, mode, tap)
        self.calls += 1
        return self.between(self.calls, logits)


class BrokenDrafter(NgramDrafter):
    """Fails in its third round."""

    calls = 0

    def propose(self, rows: Tokens[DraftRow]) -> Proposal:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the drafter broke")
        return super().propose(rows)


def engine(target: Any, drafter: Drafter | None = None, slots: int = 2) -> Engine:
    return Engine(
        target, drafter or NgramDrafter(6, 4, 2), SpeculativeConfig(num_speculative_tokens=6), slots
    )


def finish(made: Engine) -> None:
    while made.has_work:
        made.step()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_a_cancelled_sequence_leaves_others_and_its_slots_next_owner_unaffected(
    variant: str, rounds: int
) -> None:
    target = make_target(variant)
    prompts = [prompt(30, 1) * 2, prompt(4, 2) * 3, prompt(9, 3)]
    want = run(target, None, prompts, PARAMS, drafts=0).outputs
    drafter = ScriptedDrafter(right=0.8)
    made = engine(target, drafter)
    victim, other, waiting = (made.add(p, PARAMS) for p in prompts)
    for number, sequence in enumerate((victim, other, waiting)):
        drafter.references[sequence.key] = prompts[number] + want[number]
    for _ in range(rounds):
        made.step()
    slot = victim.slot
    made.release(victim)
    assert victim.finish_reason == "abort" and victim.slot is None and victim.key in drafter.forgotten
    assert victim.output == want[0][: len(victim.output)]
    made.step()
    if rounds:
        assert waiting.slot == slot  # the next owner
    finish(made)
    assert [other.output, waiting.output] == want[1:]
    assert made.pool.num_free == 2
    made.release(victim)  # again is no error
    assert made.pool.num_free == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_that_fails_between_verify_and_accept_frees_all_slots(variant: str) -> None:
    """And the engine goes on: the next requests find slots without a trace of the lost round."""
    target = make_target(variant)
    prompts = [prompt(12, n) * 2 for n in range(4)]
    want = run(target, None, prompts, PARAMS, drafts=0).outputs

    def between(call: int, logits: Tensor) -> Tensor:
        if call == 3:
            raise KeyboardInterrupt
        return logits

    made = engine(Interrupting(target, between))
    lost = [made.add(p, PARAMS) for p in prompts[:2]]
    queued = [made.add(p, PARAMS) for p in prompts[2:]]
    made.step()
    made.step()
    with pytest.raises(KeyboardInterrupt):
        made.step()
    assert made.pool.num_free == 2 and not made.running
    assert [s.finish_reason for s in lost] == ["error"] * 2
    assert all(s.slot is None and s.output == want[n][: len(s.output)] for n, s in enumerate(lost))
    again = [made.add(p, PARAMS) for p in prompts[:2]]
    finish(made)
    assert [s.output for s in (*again, *queued)] == want


def test_a_broken_drafter_ends_everything_with_an_error() -> None:
    """Those who wait too: nobody would ever come to run them."""
    made = engine(make_target("plain"), BrokenDrafter(6, 4, 2))
    sequences = [made.add(prompt(6 + 200 * (n == 2), n), PARAMS) for n in range(4)]
    assert made.failure is None
    with pytest.raises(RuntimeError, match="the drafter broke"):
        finish(made)
    assert str(made.failure) == "the drafter broke"
    assert made.pool.num_free == 2 and not made.has_work and made.step() == []
    for sequence in sequences:
        assert sequence.finish_reason == "error" and sequence.error == "a round failed: the drafter broke"
    with pytest.raises(RuntimeError, match="failed and takes no more requests: the drafter broke"):
        made.add(prompt(6), PARAMS)


def test_a_call_back_that_fails_ends_its_own_sequence_alone() -> None:
    target = make_target("plain")
    want = run(target, None, [prompt(6)], PARAMS, drafts=0).outputs[0]

    def broken(token: int) -> bool:
        raise KeyError("no such character")

    made = engine(target)
    other, victim = made.add(prompt(6), PARAMS), made.add(prompt(7), PARAMS, broken, keep_slot=True)
    assert victim in made.step()
    assert (victim.finish_reason, victim.error, victim.slot) == ("error", "'no such character'", None)
    assert isinstance(victim.failure, KeyError) and made.failure is None
    finish(made)
    assert other.output == want and made.pool.num_free == 2


def test_a_prefill_that_fails_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the sequence that ran beside it goes on."""
    target = make_target("plain")
    want = run(target, None, [prompt(6)], PARAMS, drafts=0).outputs[0]
    made = engine(target)
    running = made.add(prompt(6), PARAMS)
    made.step()
    lost = made.add(prompt(7), PARAMS)

    def prefill(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(target), "prefill", prefill)
        assert made.step() == [lost, running]
    assert made.pool.num_free == 1 and lost.slot is None
    assert (lost.finish_reason, lost.error) == ("error", "MemoryError") and made.failure is None
    finish(made)
    assert running.output == want and made.pool.num_free == 2


@pytest.mark.parametrize(
    "params", [PARAMS, SamplingParams(temperature=1.0, seed=1)], ids=["greedy", "sampled"]
)
def test_logits_that_are_not_finite_end_all_that_have_them(params: SamplingParams) -> None:
    """One poisoned weight; the tokens drawn from NaN would be endless zeros."""
    target = build_target(make_config("plain"))
    target.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    made = engine(target)
    sequences = [made.add(prompt(5, n), params) for n in range(3)]
    finish(made)
    assert made.pool.num_free == 2 and isinstance(made.failure, FloatingPointError)
    for sequence in sequences:
        assert (sequence.finish_reason, sequence.output) == ("error", [])
        assert sequence.error == "the target's logits are not finite"
    with pytest.raises(RuntimeError, match="not finite"):
        made.add(prompt(5), params)


def test_logits_that_are_not_finite_end_their_own_row_alone() -> None:
    target = make_target("plain")
    want = [run(target, None, [prompt(5, n)], PARAMS, drafts=0).outputs[0] for n in (0, 2)]

    def between(call: int, logits: Tensor) -> Tensor:
        logits = logits.clone()
        if call == 2:
            logits[1, 0] = -torch.inf
        return logits

    made = engine(Interrupting(target, between))
    sequences = [made.add(prompt(5, n), PARAMS) for n in range(3)]
    finish(made)
    assert [s.finish_reason for s in sequences] == ["length", "error", "length"]
    assert [sequences[0].output, sequences[2].output] == want
    assert made.pool.num_free == 2 and made.failure is sequences[1].failure


def test_padding_nodes_may_hold_anything() -> None:
    """Logits of a short row's padding are never looked at."""
    target = make_target("plain")
    prompts = [prompt(9, 1), prompt(9, 2)]
    want = run(target, None, prompts, PARAMS, drafts=0)
    trees: list[Tree] = []

    class Padded(ScriptedDrafter):
        def propose(self, rows: Tokens[DraftRow]) -> Proposal:
            proposal = super().propose(rows)
            trees.append(proposal.tree)
            return proposal

    def between(call: int, logits: Tensor) -> Tensor:
        return logits.masked_fill(~trees[-1].valid[..., None], torch.nan)

    drafter = Padded(seed=3, right=0.8)
    got = run(Interrupting(target, between), drafter, prompts, PARAMS, references=want.tokens)
    assert got.outputs == want.outputs
    assert any(not bool(tree.valid.all()) for tree in trees)


def test_a_slots_cache_may_have_grown_before() -> None:
    """A long text in a hybrid grows the key/value cache; the next request in the slot must still get in."""
    target = make_target("hybrid_global")
    long, short = prompt(250, 1), prompt(6, 2)
    params = SamplingParams(max_tokens=20)
    want = [run(target, None, [p], params, drafts=0).outputs[0] for p in (long, short)]
    got = run(target, NgramDrafter(6, 4, 2), [long, short, long], params, slots=1)
    assert got.outputs == [*want, want[0]]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        ([48], "0..47"),
        ([-1], "0..47"),
        ([1, True], "0..47"),
        ([1.0], "0..47"),
        (["1"], "0..47"),
    ],
)
def test_a_bad_prompt_is_refused_and_takes_no_slot(tokens: list, message: str) -> None:
    made = engine(make_target("plain"))
    with pytest.raises(ValueError, match=message):
        made.add(tokens, PARAMS)
    assert not made.has_work and made.pool.num_free == 2 and made.num_requests == 0


@pytest.mark.parametrize("slots", [0, -1, 1.5])
def test_an_engine_needs_a_slot(slots) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Engine(make_target("plain"), NgramDrafter(), max_num_seqs=slots)


def test_a_step_without_work_does_nothing() -> None:
    assert engine(make_target("plain")).step() == []
