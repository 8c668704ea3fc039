"""Draft trees: who follows whom, and every schedule or mask that layers derive from it.

A tree is built once a round and shared by all layers. Node 0 is the root, the last token of the output that the
target has not read yet; a chain is the tree whose every parent is the node before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Level(NamedTuple):
    """One depth of the hybrid schedule: live chains advance by one node together.

    `rows` says which live state each node starts from (None: node m starts from live state m), `inner` which of the
    level's nodes have children and so stay live (None: all of them). Heavy children come first, in the order of
    their parents, so that a chain keeps its place and its state is updated where it lies.
    """

    nodes: Tensor  # int64 [M] flat ids b * N + i
    rows: Tensor | None  # int64 [M]
    inner: Tensor | None  # int64 [P]


class Tree:
    """A batch of draft trees.

    Args:
        parent: integers `[B, N]` or `[N]`, topologically ordered: `parent[0] == -1`, `0 <= parent[i] < i`.
        num_nodes: `[B]` real nodes of each row (at least 1). Without it, trailing entries of -1 are padding.

    Raises:
        ValueError: when a row is not such a tree.
    """

    def __init__(self, parent: Tensor | np.ndarray | Sequence, num_nodes: Tensor | np.ndarray | Sequence | None = None):
        self.device = parent.device if isinstance(parent, Tensor) else torch.device("cpu")
        grid = np.array(parent.cpu() if isinstance(parent, Tensor) else parent)
        if grid.dtype.kind not in "iu":
            raise ValueError(f"parent must hold integers, got dtype {grid.dtype}")
        if grid.ndim == 1:
            grid = grid[None]
        if grid.ndim != 2 or grid.shape[1] == 0:
            raise ValueError(f"parent must have shape [B, N] or [N] with N >= 1, got {list(grid.shape)}")
        self._parent = grid.astype(np.int32)
        self._count = _real_nodes(self._parent, num_nodes)
        ids = np.arange(self.size)
        self._valid = ids < self._count[:, None]
        self._parent[~self._valid] = -1
        inner = self._valid & (ids > 0)
        if (self._parent[:, 0] != -1).any():
            raise ValueError("parent[0] must be -1: node 0 is the root")
        wrong = inner & ((self._parent < 0) | (self._parent >= ids))
        if wrong.any():
            b, i = np.argwhere(wrong)[0]
            raise ValueError(f"parent[{b}][{i}] is {self._parent[b, i]}, allowed are 0..{i - 1} (topological order)")

    @classmethod
    def chain(cls, length: int, batch: int = 1, device: torch.device | str | None = None) -> Tree:
        """The tree of `length` nodes in a row, the root included, for each of `batch` rows."""
        parent = torch.arange(-1, length - 1, dtype=torch.int32, device=device)
        return cls(parent.expand(batch, length))

    @property
    def batch(self) -> int:
        return self._parent.shape[0]

    @property
    def size(self) -> int:
        return self._parent.shape[1]

    @cached_property
    def parent(self) -> Tensor:
        """int32 `[B, N]`, -1 for the root and for padding."""
        return self._tensor(self._parent)

    @cached_property
    def num_nodes(self) -> Tensor:
        """int32 `[B]` real nodes, the root included."""
        return self._tensor(self._count)

    @cached_property
    def valid(self) -> Tensor:
        """bool `[B, N]`, False for padding."""
        return self._tensor(self._valid)

    @cached_property
    def depth(self) -> Tensor:
        """int32 `[B, N]` edges from the root; -1 for padding."""
        return self._tensor(self._depth)

    @cached_property
    def ancestors(self) -> Tensor:
        """bool `[B, N, N]`: entry (i, j) says that j lies strictly above i."""
        return self._tensor(self._ancestors)

    @cached_property
    def heavy_child(self) -> Tensor:
        """int32 `[B, N]` the child with the largest subtree (the lowest id among equals), -1 for a leaf."""
        return self._tensor(self._heavy_child)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every real node follows the node before it."""
        return bool((self._parent == np.arange(-1, self.size - 1))[self._valid].all())

    def windows(self, width: int) -> Tensor:
        """Rows that each node's causal window reads, oldest first.

        Returns:
            int64 `[B, N, width]` into `cat([history, nodes])`, where history holds the `width - 1` inputs before the
            root. A padding node reads its own row.
        """
        if width not in self._windows:
            index = np.empty((self.batch, self.size, width), np.int64)
            at = np.broadcast_to(np.arange(self.size), self._parent.shape).astype(np.int64)
            beyond = np.zeros_like(at)  # steps taken above the root
            for back in range(width):
                index[:, :, width - 1 - back] = np.where(beyond > 0, width - 1 - beyond, width - 1 + at)
                above = np.take_along_axis(self._parent, at, 1)
                beyond += (above < 0) | (beyond > 0)
                at = np.maximum(above, 0)
            index[~self._valid] = (np.arange(self.size) + width - 1)[None, :, None].repeat(self.batch, 0)[~self._valid]
            self._windows[width] = self._tensor(index)
        return self._windows[width]

    def paths(self, node: Tensor) -> Tensor:
        """Node ids from the root down to `node` `[B]`: int32 `[B, N]`, padded with -1."""
        target = np.array(node.cpu()).reshape(-1, 1, 1)
        if target.shape[0] != self.batch or ((target < 0) | (target[:, 0] >= self._count[:, None])[..., None]).any():
            raise ValueError(f"node must name one real node for each of the {self.batch} rows")
        on_path = np.take_along_axis(self._ancestors, target, 1)[:, 0]
        on_path[np.arange(self.batch), target[:, 0, 0]] = True
        ids = np.where(on_path, np.arange(self.size), self.size)
        ids.sort(1)
        return self._tensor(np.where(ids == self.size, -1, ids).astype(np.int32))

    def prune(self, keep: Tensor) -> tuple[Tree, Tensor]:
        """Drop all nodes but those in `keep` (bool `[B, N]`), which must hold the root and every kept node's parent.

        Returns:
            the smaller tree, and int64 `[B, N']`: the old id of each of its nodes (0 where it is padding).

        Raises:
            ValueError: when `keep` is not closed under parents.
        """
        kept = np.array(keep.cpu(), dtype=bool) & self._valid
        if kept.shape != self._parent.shape or not kept[:, 0].all():
            raise ValueError(f"keep must be bool {list(self._parent.shape)} and hold every row's root")
        inner = kept.copy()
        inner[:, 0] = False
        if (inner & ~np.take_along_axis(kept, np.maximum(self._parent, 0), 1)).any():
            raise ValueError("keep must be ancestor-closed: a kept node's parent was dropped")
        count = kept.sum(1)
        size = int(count.max())
        old = np.argsort(~kept, axis=1, kind="stable")[:, :size]
        new_id = np.cumsum(kept, 1) - 1
        parent = np.take_along_axis(new_id, np.maximum(np.take_along_axis(self._parent, old, 1), 0), 1)
        parent[:, 0] = -1
        old[np.arange(size) >= count[:, None]] = 0
        tree = Tree(parent, count)
        tree.device = self.device
        return tree, self._tensor(old.astype(np.int64))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The depth-synchronous heavy-light schedule of the whole batch."""
        levels = []
        heavy_rank = self._heavy_rank
        live = np.arange(self.batch)  # flat ids of the states' owners; before depth 0, one start state a row
        for depth in range(int(self._depth.max()) + 1):
            b, i = np.nonzero(self._depth == depth)
            nodes = b * self.size + i
            if depth == 0:
                rows = b
            else:
                place = np.full(self.batch * self.size, -1)
                place[live] = np.arange(len(live))
                rows = place[b * self.size + self._parent[b, i]]
            has_child = self._heavy_child[b, i] >= 0
            order = np.lexsort((rows, ~has_child, heavy_rank[b, i]))
            nodes, rows, has_child = nodes[order], rows[order], has_child[order]
            inner = np.flatnonzero(has_child)
            same_place = len(rows) == len(live) and (rows == np.arange(len(live))).all()
            levels.append(
                Level(
                    self._tensor(nodes.astype(np.int64)),
                    None if same_place else self._tensor(rows.astype(np.int64)),
                    None if len(inner) == len(nodes) else self._tensor(inner.astype(np.int64)),
                )
            )
            live = nodes[inner]
        return tuple(levels)

    @cached_property
    def _depth(self) -> np.ndarray:
        depth = np.full(self._parent.shape, -1, np.int32)
        depth[:, 0] = 0
        for i in range(1, self.size):
            depth[:, i] = np.take_along_axis(depth, np.maximum(self._parent[:, i : i + 1], 0), 1)[:, 0] + 1
        depth[~self._valid] = -1
        return depth

    @cached_property
    def _ancestors(self) -> np.ndarray:
        above = np.zeros((self.batch, self.size, self.size), bool)
        rows = np.arange(self.batch)
        for i in range(1, self.size):
            parent = np.maximum(self._parent[:, i], 0)
            above[:, i] = above[rows, parent]
            above[rows, i, parent] = True
        above[~self._valid] = False
        return above

    @cached_property
    def _heavy_child(self) -> np.ndarray:
        weight = self._ancestors.sum(1) + 1  # size of the subtree below and including each node
        heavy = np.full(self._parent.shape, -1, np.int32)
        best = np.zeros(self._parent.shape, np.int64)
        rows = np.arange(self.batch)
        for i in range(1, self.size):
            parent = np.maximum(self._parent[:, i], 0)
            better = self._valid[:, i] & (weight[:, i] > best[rows, parent])
            heavy[rows[better], parent[better]] = i
            best[rows[better], parent[better]] = weight[better, i]
        return heavy

    @cached_property
    def _heavy_rank(self) -> np.ndarray:
        """0 for the root and heavy children, 1 for light ones."""
        ids = np.arange(self.size)
        heavy_of_parent = np.take_along_axis(self._heavy_child, np.maximum(self._parent, 0), 1)
        return ((heavy_of_parent != ids) & (ids > 0)).astype(np.int64)

    @cached_property
    def _windows(self) -> dict[int, Tensor]:
        return {}

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def __repr__(self) -> str:
        return f"Tree(batch={self.batch}, size={self.size}, num_nodes={self._count.tolist()})"


def _real_nodes(parent: np.ndarray, num_nodes: Tensor | np.ndarray | Sequence | None) -> np.ndarray:
    batch, size = parent.shape
    if num_nodes is None:
        real = parent >= 0
        real[:, 0] = True
        return np.where(real.all(1), size, np.argmin(real, 1)).astype(np.int32) if _trailing(real) else _fail_padding()
    count = np.array(num_nodes.cpu() if isinstance(num_nodes, Tensor) else num_nodes)
    if count.shape != (batch,) or count.dtype.kind not in "iu" or (count < 1).any() or (count > size).any():
        raise ValueError(f"num_nodes must be {batch} integers in 1..{size}, got {count.tolist()}")
    return count.astype(np.int32)


def _trailing(real: np.ndarray) -> bool:
    return not (real[:, 1:] & ~real[:, :-1]).any()


def _fail_padding() -> np.ndarray:
    raise ValueError("padding (-1) must come after all real nodes of its row")
