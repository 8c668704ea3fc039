"""Laws of the lookup: the first match of the eager index, followed for as long as it is of use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specla.drafters.ngram import NgramIndex
from specla.resident.lookup import BLOCK, Drafts, lookup
from specla.resident.slots import Slots
from tests.ops.triton import full_size
from tests.resident import admit, copied, garbage_drafts, garbage_slots, ints, same_slots


def looked_up(rows: list[int], slots: Slots, limit: int, size: int, **ngram: Any) -> Drafts:
    out, before = garbage_drafts(len(rows), size), copied(slots)
    lookup(ints(rows), slots, ints([limit] * len(slots.root)), out, **ngram)
    assert same_slots(slots, before)
    return out


def chain(
    tokens: list[int], most: int, max_ngram: int = 4, min_ngram: int = 1, periodic: bool = False
) -> list[int]:
    """The tokens of the tree that the eager index leads to, the root first."""
    index = NgramIndex(min_ngram, max_ngram)
    index.extend(tokens)
    matches = index.matches(tokens)
    place = matches[0][0] if matches else len(tokens)
    after = tokens[place:] * (max(1, most) if periodic else 1)
    return [tokens[-1], *after[: max(0, most)]]


def check(out: Drafts, b: int, want: list[int]) -> None:
    size = out.tokens.shape[1]
    assert out.num_nodes[b] == len(want)
    assert out.tokens[b].tolist() == want + [0] * (size - len(want))
    assert out.parent[b].tolist() == [*range(-1, len(want) - 1)] + [-1] * (size - len(want))


histories = st.integers(1, 3).flatmap(lambda most: st.lists(st.integers(0, most), min_size=1, max_size=40))


@given(
    st.lists(st.tuples(histories, st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(-1, 12), st.integers(1, 10), st.integers(1, 5), st.integers(1, 5), st.integers(1, 12), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_latest_longest_match_is_followed(rows, limit, size, one, other, steps, periodic, random) -> None:
    min_ngram, max_ngram = sorted((one, other))
    slots = garbage_slots(6, size, 40, 1)
    owners = random.sample(range(6), len(rows))
    for slot, (tokens, remaining) in zip(owners, rows, strict=True):
        admit(slots, slot, tokens, remaining=remaining)
    owners.insert(random.randint(0, len(rows)), -1)
    theirs = ints(range(len(owners)))
    out = looked_up(
        owners, slots, limit, size, max_ngram=max_ngram, min_ngram=min_ngram, num_steps=steps, periodic=periodic,
        others=theirs,
    )  # fmt: skip
    assert theirs.tolist() == [(b + 1) // 2 if out.num_nodes[b] > 1 else b for b in range(len(owners))]
    held = dict(zip((slot for slot in owners if slot >= 0), rows, strict=True))
    for b, slot in enumerate(owners):
        if slot < 0:
            check(out, b, [0])
            continue
        tokens, remaining = held[slot]
        most = min(size - 1, limit, remaining - 1, steps)
        check(out, b, chain(tokens, most, max_ngram, min_ngram, periodic))


@given(st.integers(2, 4), st.integers(BLOCK - 9, 2 * BLOCK + 100), st.integers(0, 2**31))
def test_long_histories(vocab: int, length: int, seed: int) -> None:
    slots = garbage_slots(1, 8, 2 * BLOCK + 100, 1)
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (length,), generator=rng).tolist()
    suffix = list(range(90, 95))
    for at in torch.randint(length - 5, (4,), generator=rng).tolist():  # ends of it stand elsewhere
        part = suffix[int(torch.randint(5, (1,), generator=rng)) :]
        tokens[at : at + len(part)] = part
    tokens[-5:] = suffix
    admit(slots, 0, tokens, remaining=100)
    check(looked_up([0], slots, 99, 8), 0, chain(tokens, 7))


@pytest.mark.parametrize("far", [1, 2**31, 2**33])
def test_a_sequence_that_outgrew_its_history_drafts_nothing(far: int) -> None:
    slots = garbage_slots(2, 8, 16, 1)
    for slot in (0, 1):
        admit(slots, slot, [1] * 16, remaining=100)
    slots.position[0] += far
    out = looked_up([0, 1], slots, 99, 8)
    check(out, 0, [1])
    check(out, 1, [1] * 2)  # the latest occurrence lies one token back, and the history ends there


def test_a_history_does_not_reach_into_its_neighbour() -> None:
    slots = garbage_slots(2, 8, 16, 1)
    admit(slots, 0, [1] * 16, remaining=100)
    admit(slots, 1, [1, 5, 1, 1], remaining=100)
    check(looked_up([1], slots, 99, 8), 0, [1, 1])


@full_size
def test_at_the_size_of_models() -> None:
    slots = garbage_slots(64, 16, 1 << 15, 1)
    rng = torch.Generator().manual_seed(0)
    held = []
    for slot in range(64):
        vocab = [10, 1000, 32000][slot % 3]
        length = (1 << 15) - 999 * (slot % 7)
        held.append(torch.randint(vocab, (length,), generator=rng).tolist())
        admit(slots, slot, held[-1], remaining=100)
    out = looked_up(list(range(64)), slots, 99, 16)
    for slot, tokens in enumerate(held):
        check(out, slot, chain(tokens, 15))
