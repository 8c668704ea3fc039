"""What a drafter is: it looks at token histories and proposes a tree of continuations for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specla.tree import Tree


@dataclass
class DraftRow:
    """One sequence of the batch.

    key: names the sequence; its history only grows until `Drafter.forget(key)`.
    tokens: the whole history, prompt included; the last one is the root, which the target has not read yet.
    limit: the most nodes to draft below the root, 0 for none.
    """

    key: int
    tokens: list[int]
    limit: int


@dataclass
class Proposal:
    """tokens: int64 `[B, N]`, node 0 the root, padding 0. tree: the topology of the same `[B, N]`."""

    tokens: Tensor
    tree: Tree


class Drafter(Protocol):
    """`propose` answers with one tree a row, padded to the largest; `forget` drops a sequence."""

    name: str

    def propose(self, rows: Sequence[DraftRow]) -> Proposal: ...

    def forget(self, key: int) -> None: ...


class Draft(NamedTuple):
    """The draft of one row, root included: `parents[0] == -1` and `parents[i] < i`."""

    tokens: list[int]
    parents: list[int]


def pack(drafts: Sequence[Draft]) -> Proposal:
    """Pad the rows' drafts to the largest of them."""
    size = max(len(draft.tokens) for draft in drafts)
    assert all(len(draft.tokens) == len(draft.parents) for draft in drafts)
    tokens = torch.tensor([draft.tokens + [0] * (size - len(draft.tokens)) for draft in drafts])
    if all(draft.parents == list(range(-1, size - 1)) for draft in drafts):
        return Proposal(tokens, _chain(size, len(drafts)))
    parent = [draft.parents + [-1] * (size - len(draft.parents)) for draft in drafts]
    return Proposal(tokens, Tree(parent, [len(draft.tokens) for draft in drafts]))


@lru_cache(maxsize=256)
def _chain(length: int, batch: int) -> Tree:
    """Chains come again and again, and what a tree derives from its topology is worth keeping."""
    return Tree.chain(length, batch)


def check_at_least_one(**sizes: int) -> None:
    """Raise ValueError for a size that is not an integer of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
