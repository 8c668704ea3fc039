"""SyntheticDrafter: right as often as told, wrong otherwise, the same every time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from specla.drafters import DraftRow, Proposal, SyntheticDrafter

VOCAB = 50


def reference(key: int, length: int = 400) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(key)).tolist()


def accepted(proposal: Proposal, row: int, truth: list[int]) -> list[int]:
    """Node ids on the path that follows `truth` from the root."""
    tokens, parent = proposal.tokens[row].tolist(), proposal.tree.parent[row].tolist()
    count, path = int(proposal.tree.num_nodes[row]), [0]
    for want in truth:
        below = [i for i in range(1, count) if parent[i] == path[-1] and tokens[i] == want]
        assert len(below) <= 1
        if not below:
            break
        path += below
    return path


def drafter_for(acceptance, budget: int, steps: int, topk: int, keys=(0,), seed: int = 0) -> SyntheticDrafter:
    drafter = SyntheticDrafter(acceptance, budget, steps, topk, VOCAB, seed)
    drafter.references = {key: reference(key) for key in keys}
    return drafter


@pytest.mark.parametrize(("budget", "topk"), [(4, 1), (12, 3), (6, 4)])
@pytest.mark.parametrize("rates", [0.7, [0.9, 0.6, 0.3, 0.8]])
def test_empirical_acceptance(budget, topk, rates) -> None:
    keys = range(60)
    drafter = drafter_for(rates, budget, 4, topk, keys)
    tried, right = [0] * 4, [0] * 4
    for length in range(5, 300, 5):
        proposal = drafter.propose([DraftRow(key, reference(key)[:length], 99) for key in keys])
        for key in keys:
            depth = len(accepted(proposal, key, drafter.references[key][length:])) - 1
            for i in range(min(depth + 1, 4)):
                tried[i] += 1
                right[i] += depth > i
    for i, rate in enumerate([rates] * 4 if isinstance(rates, float) else rates):
        sigma = (rate * (1 - rate) / tried[i]) ** 0.5
        assert abs(right[i] / tried[i] - rate) < 4 * sigma


def test_always_right_and_always_wrong() -> None:
    for length in range(1, 200):
        row = DraftRow(0, reference(0)[:length], 99)
        for topk, budget in ((1, 5), (3, 15)):
            right = drafter_for(1, budget, 5, topk).propose([row])
            assert len(accepted(right, 0, reference(0)[length:])) == 6
            wrong = drafter_for(0.0, budget, 5, topk).propose([row])
            assert accepted(wrong, 0, reference(0)[length:]) == [0]


@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 6), st.integers(1, 4), st.integers(390, 400))
def test_shape_budget_and_end_of_reference(limit, budget, steps, topk, length) -> None:
    drafter = drafter_for(0.5, budget, steps, topk)
    proposal = drafter.propose([DraftRow(0, reference(0)[:length], limit)])
    count, spine = int(proposal.tree.num_nodes[0]), min(steps, limit, budget, 400 - length)
    assert int(proposal.tree.depth.max()) == spine
    assert proposal.tokens.shape == (1, count)
    assert count - 1 == min(limit, budget, spine * topk)
    assert ((proposal.tokens >= 0) & (proposal.tokens < VOCAB)).all()
    siblings = list(zip(proposal.tree.parent[0].tolist(), proposal.tokens[0].tolist(), strict=True))[:count]
    assert len(set(siblings)) == count


def test_deterministic_by_seed_key_and_position() -> None:
    rows = [DraftRow(key, reference(key)[: 10 + key], 99) for key in range(4)]
    first = drafter_for(0.5, 9, 3, 3, range(4)).propose(rows)
    other = drafter_for(0.5, 9, 3, 3, range(4))
    other.propose(rows[2:])
    assert torch.equal(first.tokens[[3, 1]], other.propose([rows[3], rows[1]]).tokens)
    assert not torch.equal(first.tokens, drafter_for(0.5, 9, 3, 3, range(4), seed=1).propose(rows).tokens)


def test_ids_on_a_path_have_gaps() -> None:
    drafter = drafter_for(1.0, 12, 4, 3)
    proposals = {n: drafter.propose([DraftRow(0, reference(0)[:n], 99)]) for n in range(1, 40)}
    starts = [accepted(proposal, 0, reference(0)[n:])[1] for n, proposal in proposals.items()]
    assert set(starts) == {1, 2, 3}


def test_forget_and_unknown_keys() -> None:
    drafter = drafter_for(1.0, 3, 3, 1)
    drafter.forget(0)
    drafter.forget(0)
    assert drafter.propose([DraftRow(0, [1], 0)]).tree.num_nodes.tolist() == [1]
    with pytest.raises(ValueError, match="no reference for key 0"):
        drafter.propose([DraftRow(0, [1], 3)])


@pytest.mark.parametrize(
    "bad",
    [
        {"acceptance": 1.5},
        {"acceptance": [0.5, 0.5]},
        {"acceptance": [0.5, 0.5, -0.1]},
        {"acceptance": float("nan")},
        {"num_steps": 0},
        {"num_speculative_tokens": 0},
        {"vocab_size": 2},
    ],
)
def test_bad_config(bad) -> None:
    good = {"acceptance": 0.5, "num_speculative_tokens": 6, "num_steps": 3, "topk": 2, "vocab_size": 9}
    with pytest.raises(ValueError, match=r"must be"):
        SyntheticDrafter(**{**good, **bad})
