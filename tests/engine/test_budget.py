"""The adaptive budget, fed with made-up costs: no clock is involved."""

from __future__ import annotations

from collections.abc import Callable

from specla.engine.budget import CHOICES, Budget
from specla.engine.params import SpeculativeConfig


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
