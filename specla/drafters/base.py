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
    limit: the most nodes to draft below the root, 0 for none; what the engine finds worth its while.
    room: the most that it can verify and that can still be of use, for drafts that cost nothing to make.
    temperature, seed: how the target will draw (`specla.sampling`): its noise is known before its logits are.
    """

    key: int
    tokens: list[int]
    limit: int
    room: int = 0
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Proposal:
    """tokens: int64 `[B, N]`, node 0 the root, padding 0. tree: the topology of the same `[B, N]`.

    budgeted: whether the rows' limits had a say.
    scores: float `[B, N]`, log-probability of each node's path in the drafter's eyes, NaN in rows without any; None
        when no row has them.
    """

    tokens: Tensor
    tree: Tree
    budgeted: bool = True
    scores: Tensor | None = None


class Exported(NamedTuple):
    """A drafter's memory of a prompt: tensors of its own, and the tokens that followed those not taken in yet."""

    tensors: tuple[Tensor, ...]
    following: list[int]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


class Drafter(Protocol):
    """`propose` answers with one tree a row, padded to the largest; `forget` drops a sequence.

    A drafter that looks at more than tokens names residual streams of the target in `layer_ids` (as in
    `specla.models.target.Tap`). For every token that the target reads, prompt included, `observe` then brings these
    streams `[T, len(layer_ids) * hidden]` and the token that followed each, before the next `propose`. What it then
    remembers of a prompt, `export` copies, as tensors and plain values, for `restore` to give it to a sequence that
    begins with the same tokens; whatever came after them, there `following` comes. None when there is nothing.
    """

    name: str
    layer_ids: tuple[int, ...]

    def propose(self, rows: Sequence[DraftRow]) -> Proposal: ...

    def observe(self, key: int, features: Tensor, following: Sequence[int]) -> None: ...

    def export(self, key: int) -> Exported | None: ...

    def restore(self, key: int, exported: Exported, following: int) -> None: ...

    def forget(self, key: int) -> None: ...


class TokenDrafter:
    """Base of drafters that look at tokens alone."""

    layer_ids: tuple[int, ...] = ()

    def observe(self, key: int, features: Tensor, following: Sequence[int]) -> None:
        raise AssertionError("a drafter without layer_ids is shown no features")

    def export(self, key: int) -> Exported | None:
        return None

    def restore(self, key: int, exported: Exported, following: int) -> None:
        raise AssertionError("a drafter without layer_ids remembers no prompts")


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
