"""The adaptive budget, fed with made-up costs: no real clock is involved."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from specla.drafters import Drafter, DraftRow, LookupFirst, NoDrafter, Proposal
from specla.drafters.base import Draft, TokenDrafter, pack
from specla.engine.budget import CHOICES, Budget
from specla.engine.drafting import make_drafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.sequence import Sequence as Request
from specla.models.gated_deltanet import GatedDeltaNet
from specla.tree import Tree
from tests.drafters.eagles import make_eagle
from tests.targets import VOCAB, build_target, make_config, prompt


def run(
    budget: Budget, rounds: int, tokens: Callable[[int], float], cost: Callable[[int], float]
) -> list[int]:
    chosen = []
    for _ in range(rounds):
        choice = budget.choose()
        budget.observe(choice, tokens(choice), cost(choice))
        chosen.append(choice)
    return chosen


def cost(choice: int) -> float:
    return 1.0 + 0.05 * choice  # plain steps


def test_a_fixed_budget_never_moves() -> None:
    budget = Budget(SpeculativeConfig(num_speculative_tokens=7))
    assert set(run(budget, 50, lambda n: 1.0, cost)) == {7}


def test_a_hopeless_drafter_costs_at_most_five_percent() -> None:
    chosen = run(Budget(SpeculativeConfig()), 500, lambda n: 1.0, cost)
    assert sum(map(cost, chosen)) <= 1.05 * 500
    assert chosen[-50:].count(0) >= 48


def test_a_good_drafter_gets_the_size_that_pays_most() -> None:
    gain = {0: 1.0, 4: 2.5, 8: 4.0, 16: 4.2}
    best = max(CHOICES, key=lambda n: gain[n] / cost(n))
    chosen = run(Budget(SpeculativeConfig()), 300, gain.__getitem__, cost)
    assert chosen.count(best) >= 0.85 * 300
    assert set(chosen) == set(CHOICES), "every choice was tried"


def test_it_follows_a_drafter_that_turns_good_and_bad_again() -> None:
    budget = Budget(SpeculativeConfig())
    run(budget, 200, lambda n: 1.0, cost)
    good = run(budget, 500, lambda n: 1.0 + n / 4, cost)
    assert good[-40:].count(16) >= 36
    bad = run(budget, 200, lambda n: 1.0, cost)
    assert bad[-100:].count(0) >= 90


# milliseconds of a round of an H200 with a trained drafter, by sequences and drafts (docs/results.md)
MEASURED = {
    1: {0: 1.21, 3: 1.51, 7: 1.85, 15: 1.84},
    8: {0: 1.52, 3: 2.05, 7: 2.87, 15: 3.21},
    32: {0: 2.20, 3: 3.56, 7: 5.84, 15: 9.43},
    128: {0: 4.86, 3: 11.2, 7: 19.4, 15: 34.1},
}


def decode(budget: Budget, batch: int, rate: float, seed: int, tokens: int = 256) -> float:
    """Milliseconds until so many tokens of each sequence are there on average, when drafts are right so often."""
    rng, written, spent = random.Random(seed), 0, 0.0
    while written < tokens * batch:
        choice = budget.choose(batch)
        steps = min(choice, 7)  # trees of 16 nodes are wider, not deeper
        chances = [(1 - rate) * rate**n for n in range(steps)] + [rate**steps]
        new = batch + sum(rng.choices(range(steps + 1), chances, k=batch))
        budget.observe(choice, new / batch, MEASURED[batch][choice], batch)
        written, spent = written + new, spent + MEASURED[batch][choice]
    return spent


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("batch", MEASURED)
def test_with_measured_costs_it_loses_little_to_any_fixed_size(batch: int, rate: float) -> None:
    fixed = [
        fmean(
            decode(Budget(SpeculativeConfig(num_speculative_tokens=n)), batch, rate, seed)
            for seed in range(16)
        )
        for n in MEASURED[batch]
    ]
    chosen = fmean(
        decode(Budget(SpeculativeConfig(), (0, 3, 7, 15)), batch, rate, seed) for seed in range(16)
    )
    assert chosen <= 1.12 * min(fixed) and chosen <= 1.03 * fixed[0]


def test_seconds_go_with_the_number_of_sequences() -> None:
    """Half of the sequences end, rounds take half as long, and what was known of their order stays known."""
    budget = Budget(SpeculativeConfig())
    gain = {0: 1.0, 4: 2.5, 8: 4.0, 16: 4.2}
    for _ in range(100):
        choice = budget.choose()
        budget.observe(choice, gain[choice], 2 * cost(choice), 8)
    best = budget.best
    budget.observe(0, gain[0], cost(0), 4)
    assert budget.best == best
    budget.observe(best, gain[best], cost(best), 4)
    assert budget.best == best


@pytest.mark.parametrize("slow", [1, 3, 10, 100])
def test_a_slow_first_round_of_more_sequences_is_not_taken_for_their_cost(slow: int) -> None:
    """Or all other sizes would be taken to cost as much more, and not be looked at for thousands of rounds."""
    budget, gain, spent = Budget(SpeculativeConfig(), (0, 3, 7, 15)), {0: 1.0, 3: 2.0, 7: 2.5, 15: 3.0}, []
    for turn in range(1100):
        batch, choice = 1 if turn < 100 else 128, budget.choose()
        seconds = MEASURED[batch][choice]
        budget.observe(choice, gain[choice], seconds * (slow if turn == 100 else 1), batch)
        spent.append((gain[choice], seconds))
    assert budget.best in (0, 3)
    tokens, total = (sum(column) for column in zip(*spent[-1000:], strict=True))
    assert tokens / total > 0.8 * max(gain[n] / MEASURED[128][n] for n in gain)


class Forwards:
    """A clock that counts what is spent in plain forwards of the target: 1 for each, `node` for each drafted node
    beyond its root, `step` for each step of drafting.
    """

    def __init__(self, node: float, step: float):
        self.node, self.step, self.now = node, step, 0.0

    def perf_counter(self) -> float:
        return self.now

    def watch(self, target: GatedDeltaNet) -> GatedDeltaNet:
        """The target, whose verifications are counted."""
        watched = copy.copy(target)

        def verify(tokens: Tensor, tree: Tree, *rest: Any) -> Tensor:
            self.now += 1 + self.node * (tree.size - 1)
            return target.verify(tokens, tree, *rest)

        watched.verify = verify
        return watched


class AlwaysWrong(TokenDrafter):
    """Drafts chains side by side in which nothing is what plain decoding says, as much as it may."""

    name = "wrong"

    def __init__(self, truth: list[int], clock: Forwards, num_steps: int = 8):
        self.truth, self.clock, self.num_steps = truth, clock, num_steps

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        return pack([self._draft(row) for row in rows])

    def forget(self, key: int) -> None:
        pass

    def _draft(self, row: DraftRow) -> Draft:
        tokens, parents = [row.tokens[-1]], [-1]
        for n in range(row.limit):
            branch, depth = divmod(n, self.num_steps)
            place = len(row.tokens) + depth
            right = self.truth[place] if place < len(self.truth) else 0
            tokens.append((right + 1 + branch) % VOCAB)
            parents.append(n if depth else 0)
        self.clock.now += self.clock.step * min(row.limit, self.num_steps)
        return Draft(tokens, parents)


@cache
def small_target() -> GatedDeltaNet:
    return build_target(make_config(num_hidden_layers=1))


def request(drafter: Drafter, clock: Forwards) -> Request:
    """One request of 500 tokens from an engine that lives by this clock."""
    engine = Engine(clock.watch(small_target()), drafter, SpeculativeConfig(), max_num_seqs=1)
    sequence = engine.add(prompt(9), SamplingParams(max_tokens=500, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(sequence.output) == 500
    return sequence


@cache
def truth() -> list[int]:
    return request(NoDrafter(), Forwards(0, 0)).tokens


@pytest.mark.parametrize(("node", "step"), [(0.05, 0.1), (0.08, 0.02)], ids=str)
def test_end_to_end_a_drafter_that_is_always_wrong_costs_at_most_five_percent(
    node, step, monkeypatch
) -> None:
    clock = Forwards(node, step)
    monkeypatch.setattr("specla.engine.engine.time", clock)
    sequence = request(AlwaysWrong(truth(), clock), clock)
    assert sequence.tokens == truth()
    assert sequence.metrics.num_draft_tokens > 20 and sequence.metrics.num_accepted_draft_tokens == 0
    assert 500 < clock.now <= 1.05 * 500


def test_end_to_end_an_untrained_drafter_costs_at_most_five_percent(monkeypatch) -> None:
    clock = Forwards(node=0.05, step=0.1)
    monkeypatch.setattr("specla.engine.engine.time", clock)
    network = make_eagle(small_target(), dtype=torch.float32, layer_ids=(0, 1))
    forward = network.forward

    def counted(*args: Any) -> Tensor:
        clock.now += clock.step
        return forward(*args)

    monkeypatch.setattr(network, "forward", counted)
    drafter = make_drafter(network, SpeculativeConfig(), VOCAB, seed=0, max_num_seqs=1)
    assert isinstance(drafter, LookupFirst)
    sequence = request(drafter, clock)
    assert sequence.tokens == truth() and sequence.metrics.num_draft_tokens > 100
    assert clock.now <= 1.05 * 500
