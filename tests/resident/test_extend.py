"""Trees that go on where a chain does: all of a tree stays, and the chain's nodes hang below what both share."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from specla.resident.drafts import Drafts
from specla.resident.extend import extend
from tests.ops.strategies import SHAPES, random_parent
from tests.resident import GARBAGE, admit, garbage_drafts, garbage_slots, ints

SLOTS = 6


def filled(trees: list[tuple[list[int], list[int]]], size: int) -> Drafts:
    """Trees as tokens and parents, and garbage beyond them."""
    drafts = garbage_drafts(len(trees), size)
    for b, (tokens, parent) in enumerate(trees):
        drafts.tokens[b, : len(tokens)], drafts.parent[b, : len(parent)] = ints(tokens), ints(parent)
    drafts.num_nodes.copy_(ints([len(tokens) for tokens, _ in trees]))
    return drafts


def extended(
    tokens: list[int], parent: list[int], chain: list[int], most: int, branches: bool
) -> tuple[list[int], list[int]]:
    """The law."""
    at, shared = 0, 1
    while shared < len(chain):
        below = [n for n, above in enumerate(parent) if above == at and tokens[n] == chain[shared]]
        if not below:
            break
        at, shared = below[0], shared + 1
    if at in parent and not branches:
        return tokens, parent
    tokens, parent = list(tokens), list(parent)
    for token in chain[shared:]:
        if len(tokens) <= most:
            tokens, parent, at = [*tokens, token], [*parent, at], len(tokens)
    return tokens, parent


@given(st.data(), st.integers(1, 17), st.booleans(), st.integers(0, 2**31))
def test_trees_are_extended_as_the_law_says(
    data: st.DataObject, size: int, branches: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return [7, *torch.randint(3, (count - 1,), generator=rng).tolist()]

    rows = data.draw(
        st.lists(
            st.integers(-1, SLOTS - 1),
            min_size=1,
            max_size=SLOTS,
            unique_by=lambda r: r if r >= 0 else object(),
        )
    )
    slots, limit = garbage_slots(SLOTS, 8, 9, 1), [data.draw(st.integers(0, 20)) for _ in range(SLOTS)]
    remaining = [data.draw(st.integers(1, 20)) for _ in range(SLOTS)]
    for slot in range(SLOTS):
        admit(slots, slot, [1], remaining=remaining[slot])
    trees, chains, want = [], [], []
    for n, row in enumerate(rows):
        count, length = (data.draw(st.integers(1, size)) for _ in range(2))
        trees.append((tokens(count), random_parent(SHAPES[n % len(SHAPES)], count, rng)))
        chains.append(tokens(length))
        most = min(limit[row], remaining[row] - 1, size - 1)
        want.append(trees[-1] if row < 0 else extended(*trees[-1], chains[-1], most, branches))
    drafts = filled(trees, size)
    chain = filled([(ids, list(range(-1, len(ids) - 1))) for ids in chains], size)
    extend(drafts, chain, ints(rows), slots, ints(limit), branches=branches)
    for b, (ids, parent) in enumerate(want):
        count = int(drafts.num_nodes[b])
        assert (drafts.tokens[b, :count].tolist(), drafts.parent[b, :count].tolist()) == (ids, parent)


def test_a_chain_stays_a_chain() -> None:
    slots, limit = garbage_slots(1, 8, 9, 1), ints([9])
    admit(slots, 0, [1], remaining=20)
    for last, count in ((3, 5), (4, 3)):  # the same so far, or not
        drafts = filled([([1, 2, 3], [-1, 0, 1])], 6)
        extend(
            drafts,
            filled([([1, 2, last, 5, 6], [-1, 0, 1, 2, 3])], 6),
            ints([0]),
            slots,
            limit,
            branches=False,
        )
        assert drafts.num_nodes.tolist() == [count] and drafts.parent[0, :count].tolist() == list(
            range(-1, count - 1)
        )
    assert GARBAGE not in drafts.tokens[0, :count].tolist()
