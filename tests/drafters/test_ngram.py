"""NgramDrafter: what it proposes really followed, whatever the order in which the history grew."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, strategies as st

from specla.drafters import DraftRow, NgramDrafter
from specla.drafters.ngram import NgramIndex

histories = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def draft_paths(proposal, row: int) -> list[list[int]]:
    """The tokens below the root on the way to every drafted node."""
    tokens, parent = proposal.tokens[row].tolist(), proposal.tree.parent[row].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, int(proposal.tree.num_nodes[row])):
        paths.append(paths[parent[node]] + [tokens[node]])
    return paths[1:]


@given(histories, st.integers(1, 12), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.data())
def test_proposals_follow_an_occurrence_of_the_suffix(history, budget, steps, topk, max_ngram, data) -> None:
    min_ngram = data.draw(st.integers(1, max_ngram))
    limit = data.draw(st.integers(0, 14))
    drafter = NgramDrafter(budget, steps, topk, max_ngram, min_ngram)
    proposal = drafter.propose([DraftRow(0, history, limit)])
    assert proposal.tokens.shape == proposal.tree.parent.shape == (1, proposal.tree.num_nodes[0])
    assert proposal.tokens.dtype == torch.int64
    assert proposal.tokens[0, 0] == history[-1]
    paths = draft_paths(proposal, 0)
    assert len(paths) <= min(budget, limit)
    assert len({tuple(path) for path in paths}) == len(paths)  # no two siblings alike
    assert all(len(path) <= steps for path in paths)
    children = proposal.tree.parent[0, 1 : 1 + len(paths)].bincount() if paths else torch.zeros(1)
    assert children.max() <= topk
    for path in paths:
        pattern = history[len(history) - min_ngram :] + path  # the shortest suffix that may be looked up
        assert len(history) >= min_ngram
        starts = range(len(history) - len(pattern) + 1)
        assert any(history[start : start + len(pattern)] == pattern for start in starts)
    if len(history) > min_ngram and limit and not paths:
        suffix = history[-min_ngram:]
        assert not any(history[i : i + min_ngram] == suffix for i in range(len(history) - min_ngram))


def places_by_definition(tokens: list[int], max_ngram: int) -> dict[tuple[int, ...], list[int]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for place in range(1, len(tokens)):
        for start in range(max(0, place - max_ngram), place):
            places.setdefault(tuple(tokens[start:place]), []).append(place)
    return places


@given(histories, st.lists(st.lists(st.integers(0, 3), max_size=7), max_size=5))
def test_an_index_that_grew_equals_a_fresh_one(history, additions) -> None:
    grown, tokens = NgramIndex(1, 4), list(history)
    grown.extend(tokens)
    drafter = NgramDrafter(8, 4, 3)
    for addition in additions:
        tokens.extend(addition)
        grown.extend(tokens)
        fresh = NgramIndex(1, 4)
        fresh.extend(tokens)
        assert grown.starts == fresh.starts == places_by_definition(tokens, 4)
        old = drafter.propose([DraftRow(5, tokens, 8)])
        new = NgramDrafter(8, 4, 3).propose([DraftRow(5, tokens, 8)])
        assert torch.equal(old.tokens, new.tokens)
        assert torch.equal(old.tree.parent, new.tree.parent)


def test_extending_reads_only_what_is_new() -> None:
    class Counting(list):
        reads = 0

        def __getitem__(self, item):
            Counting.reads += 1
            return super().__getitem__(item)

    index, tokens = NgramIndex(1, 4), Counting(range(1000))
    index.extend(tokens)
    Counting.reads = 0
    tokens.append(7)
    index.extend(tokens)
    assert Counting.reads <= 4


def test_different_continuations_make_a_tree() -> None:
    history = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 6, 9, 1, 2, 3]
    proposal = NgramDrafter(9, 2, 3).propose([DraftRow(0, history, 9)])
    first = [path[0] for path in draft_paths(proposal, 0) if len(path) == 1]
    assert first == [6, 5, 4]  # the latest first
    chain = NgramDrafter(9, 2, 1).propose([DraftRow(0, history, 9)])
    assert draft_paths(chain, 0) == [[6], [6, 9]]


def test_longer_matches_win_and_repetition_counts() -> None:
    longer = [1, 2, 3, 7, 0, 9, 3, 8, 0, 1, 2, 3]
    assert draft_paths(NgramDrafter(1).propose([DraftRow(0, longer, 1)]), 0) == [[7]]
    for times, first in ((1, 8), (2, 8), (3, 7)):  # the latest wins against two, three win against the latest
        history = [3, 7, 0] * times + [3, 8, 5, 3]
        assert draft_paths(NgramDrafter(1, 1).propose([DraftRow(0, history, 1)]), 0) == [[first]]


def test_rows_are_independent_and_unmatched_rows_get_their_root() -> None:
    rows = [
        DraftRow(0, [1, 2, 3, 1, 2], 4),
        DraftRow(1, [1, 2, 3, 4], 4),
        DraftRow(2, [1, 2, 3, 1, 2], 0),
        DraftRow(3, [5], 4),
    ]
    together = NgramDrafter(4).propose(rows)
    assert together.tree.num_nodes.tolist() == [4, 1, 1, 1]
    assert together.tokens[:, 0].tolist() == [2, 4, 2, 5]
    for i, row in enumerate(rows):
        alone = NgramDrafter(4).propose([row])
        assert torch.equal(alone.tokens[0], together.tokens[i, : alone.tree.size])
        assert torch.equal(alone.tree.parent[0], together.tree.parent[i, : alone.tree.size])
        assert not together.tokens[i, alone.tree.size :].any()


def test_forget_drops_memory_and_lets_the_key_be_used_again() -> None:
    drafter = NgramDrafter(4)
    drafter.propose([DraftRow(3, [1, 2, 1, 2, 1], 4)])
    assert drafter._indexes
    drafter.forget(3)
    drafter.forget(3)
    assert not drafter._indexes
    assert drafter.propose([DraftRow(3, [8, 9], 4)]).tree.num_nodes.tolist() == [1]


def test_a_periodic_history_is_predicted() -> None:
    pattern = random.Random(0).choices(range(100), k=20)
    history = pattern * 3
    proposal = NgramDrafter(6, 6).propose([DraftRow(0, history, 6)])
    assert pattern[:6] in draft_paths(proposal, 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_speculative_tokens": 0},
        {"num_steps": 0},
        {"topk": -1},
        {"min_ngram": 0},
        {"max_ngram": 1, "min_ngram": 2},
        {"topk": 1.5},
    ],
)
def test_bad_config(bad) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        NgramDrafter(**bad)
