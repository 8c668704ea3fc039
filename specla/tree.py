"""Draft trees: who follows whom, and every schedule or mask that layers derive from it.

A tree is built once a round and shared by all layers. Node 0 is the root, the last token of the output that the
target has not read yet; a chain is the tree whose every parent is the node before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Level(NamedTuple):
    """One depth of the hybrid schedule: live chains advance by one node together.

    `rows` says which live state each node starts from (None: node m starts from live state m). The first
    `num_inner` nodes have children and stay live: heavy children before light ones, in the order of their
    parents, so that a chain keeps its place and its state is updated where it lies.
    """

    nodes: Tensor  # int64 [M] flat ids b * N + i
    rows: Tensor | None  # int64 [M]
    num_inner: int


class Tree:
    """A batch of draft trees.

    Args:
        parent: integers `[B, N]` or `[N]`, topologically ordered: `parent[0] == -1`, `0 <= parent[i] < i`.
        num_nodes: `[B]` real nodes of each row (at least 1). Without it, trailing entries of -1 are padding.

    Raises:
        ValueError: when a row is not such a tree.
    """

    def __init__(
        self,
        parent: Tensor | np.ndarray | Sequence[Any],
        num_nodes: Tensor | np.ndarray | Sequence[int] | None = None,
    ):
        self.device = parent.device if isinstance(parent, Tensor) else torch.device("cpu")
        grid = _array(parent)
        if grid.dtype.kind not in "iu":
            raise ValueError(f"parent must hold integers, got dtype {grid.dtype}")
        if grid.ndim == 1:
            grid = grid[None]
        if grid.ndim != 2 or grid.shape[1] == 0:
            raise ValueError(f"parent must have shape [B, N] or [N] with N >= 1, got {list(grid.shape)}")
        self.batch, self.size = grid.shape
        rows = grid.tolist()
        counts = _real_nodes(rows, self.size) if num_nodes is None else _checked(num_nodes, *grid.shape)
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row[0] != -1:
                raise ValueError(f"parent[{b}][0] must be -1: node 0 is the root; got {row[0]}")
            for i in range(1, count):
                if not 0 <= row[i] < i:
                    raise ValueError(
                        f"parent[{b}][{i}] is {row[i]}, allowed are 0..{i - 1} (topological order)"
                    )
        self._count = counts
        self._rows = [row[:count] for row, count in zip(rows, counts, strict=True)]

    @classmethod
    def chain(cls, length: int, batch: int = 1, device: torch.device | str | None = None) -> Tree:
        """The tree of `length` nodes in a row, the root included, for each of `batch` rows.

        Raises:
            ValueError: unless both are integers in 1..65536.
        """
        for name, value in (("length", length), ("batch", batch)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 16:
                raise ValueError(f"{name} must be an integer in 1..65536, got {value!r}")
        return cls(torch.arange(-1, length - 1, dtype=torch.int32, device=device).expand(batch, length))

    @classmethod
    def resident(
        cls,
        parent: Tensor,
        num_nodes: Tensor,
        *,
        depth: Tensor | None = None,
        ancestors: Tensor | None = None,
    ) -> Tree:
        """Trees that were made where they lie and are known to be right: nothing is checked, copied or read back.

        Args:
            parent: int32 `[B, N]` as the class wants it; entries beyond `num_nodes` may hold anything.
            num_nodes: int32 `[B]` on the same device.
            depth, ancestors: these views, int32 `[B, N]` and bool `[B, N, N]`, where they are known already.

        The first other view that is worked out on the host (`depth`, `levels`, ...) reads both back, once.
        """
        tree = cls.__new__(cls)
        tree.batch, tree.size = parent.shape
        tree.device = parent.device
        tree.parent, tree.num_nodes = parent, num_nodes
        if depth is not None:
            tree.depth = depth
        if ancestors is not None:
            tree.ancestors = ancestors
        return tree

    def to(self, device: torch.device | str) -> Tree:
        """The same trees with their tensors on `device`."""
        device = torch.device(device)
        if device == self.device:
            return self
        moved = Tree.__new__(Tree)
        moved.batch, moved.size, moved.device = self.batch, self.size, device
        moved._count, moved._rows = self._count, self._rows
        return moved

    @cached_property
    def parent(self) -> Tensor:
        """int32 `[B, N]`, -1 for the root and (unless `resident`) for padding."""
        return self._padded(self._rows, torch.int32)

    @cached_property
    def num_nodes(self) -> Tensor:
        """int32 `[B]` real nodes, the root included."""
        return torch.tensor(self._count, dtype=torch.int32, device=self.device)

    @cached_property
    def valid(self) -> Tensor:
        """bool `[B, N]`, False for padding."""
        return torch.arange(self.size, device=self.device) < self.num_nodes[:, None]

    @cached_property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        return all(count == self.size for count in self._count)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every real node follows the node before it."""
        return all(above == i - 1 for row in self._rows for i, above in enumerate(row))

    @cached_property
    def depth(self) -> Tensor:
        """int32 `[B, N]` edges from the root; -1 for padding."""
        return self._padded(self._depth, torch.int32)

    @cached_property
    def ancestors(self) -> Tensor:
        """bool `[B, N, N]`: entry (i, j) says that j lies strictly above i."""
        above = np.zeros((self.batch, self.size, self.size), bool)
        for b, row in enumerate(self._rows):
            for i, parent in enumerate(row[1:], 1):
                above[b, i] = above[b, parent]
                above[b, i, parent] = True
        return torch.from_numpy(above).to(self.device)

    @cached_property
    def lineage(self) -> Tensor:
        """bool `[B, N, N]`: entry (i, j) says that j is i or lies above i."""
        return self.ancestors | torch.eye(self.size, dtype=torch.bool, device=self.device)

    @cached_property
    def heavy_child(self) -> Tensor:
        """int32 `[B, N]` the child with the largest subtree (the lowest id among equals), -1 for a leaf."""
        return self._padded(self._heavy_child, torch.int32)

    def windows(self, width: int) -> Tensor:
        """Rows that each node's causal window reads, oldest first.

        Returns:
            int64 `[B, N, width]` into `cat([history, nodes])`, where history holds the `width - 1` inputs before the
            root. A padding node reads its own row.
        """
        if width not in self._windows:
            whole = []
            for row in self._rows:
                seen = [list(range(width))]
                for i, parent in enumerate(row[1:], 1):
                    seen.append([*seen[parent][1:], width - 1 + i])
                seen += [[width - 1 + i] * width for i in range(len(row), self.size)]
                whole.append(seen)
            self._windows[width] = torch.tensor(whole, device=self.device)
        return self._windows[width]

    def window_rows(self, width: int) -> Tensor:
        """`windows` as flat ids int64 `[B * N * width]` into the rows of the whole batch, history included."""
        if width not in self._window_rows:
            first = torch.arange(self.batch, device=self.device)[:, None, None] * (width - 1 + self.size)
            self._window_rows[width] = (self.windows(width) + first).flatten()
        return self._window_rows[width]

    def paths(self, node: Tensor) -> Tensor:
        """Node ids from the root down to `node` `[B]`: int32 `[B, N]`, padded with -1."""
        ends = _array(node).reshape(-1).tolist()
        if len(ends) != self.batch or any(not 0 <= n < c for n, c in zip(ends, self._count, strict=True)):
            raise ValueError(f"node must name one real node for each of the {self.batch} rows, got {ends}")
        paths = []
        for row, end in zip(self._rows, ends, strict=True):
            path = [end]
            while row[path[-1]] >= 0:
                path.append(row[path[-1]])
            paths.append(path[::-1])
        return self._padded(paths, torch.int32)

    def prune(self, keep: Tensor) -> tuple[Tree, Tensor]:
        """Drop all nodes but those in `keep` (bool `[B, N]`), which must hold the root and every kept node's parent.

        Returns:
            the smaller tree, and int64 `[B, N']`: the old id of each of its nodes (0 where it is padding).

        Raises:
            ValueError: when `keep` is not closed under parents.
        """
        chosen = _array(keep).astype(bool).tolist()
        if tuple(keep.shape) != (self.batch, self.size) or not all(row[0] for row in chosen):
            raise ValueError(f"keep must be bool {[self.batch, self.size]} and hold every row's root")
        parents, old = [], []
        for row, kept in zip(self._rows, chosen, strict=True):
            ids = [i for i in range(len(row)) if kept[i]]
            place = {i: n for n, i in enumerate(ids)}
            if any(row[i] not in place for i in ids[1:]):
                raise ValueError("keep must be ancestor-closed: a kept node's parent was dropped")
            parents.append([place.get(row[i], -1) for i in ids])
            old.append(ids)
        size = max(map(len, old))
        padded = [row + [-1] * (size - len(row)) for row in parents]
        tree = Tree(padded, [len(row) for row in parents]).to(self.device)
        index = torch.tensor([ids + [0] * (size - len(ids)) for ids in old], device=self.device)
        return tree, index

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The depth-synchronous heavy-light schedule of the whole batch."""
        by_depth: list[list[tuple[bool, bool, int]]] = []  # (is a leaf, is light, flat id)
        parents: dict[int, int] = {}
        for b, (row, depths, heavy) in enumerate(
            zip(self._rows, self._depth, self._heavy_child, strict=True)
        ):
            first = b * self.size
            for i, (parent, depth) in enumerate(zip(row, depths, strict=True)):
                if depth == len(by_depth):
                    by_depth.append([])
                parents[first + i] = first + parent
                by_depth[depth].append((heavy[i] < 0, i > 0 and heavy[parent] != i, first + i))
        place = {
            parents[b * self.size]: b for b in range(self.batch)
        }  # of each live state, by its owner's flat id
        nodes: list[int] = []
        rows: list[int] = []
        shape = []
        for unsorted in by_depth:
            level = sorted((leaf, light, place[parents[node]], node) for leaf, light, node in unsorted)
            nodes += [node for *_, node in level]
            from_place = [at for _, _, at, _ in level]
            rows += from_place
            num_inner = sum(not leaf for leaf, *_ in level)
            shape.append((len(level), num_inner, from_place != list(range(len(place)))))
            place = {node: n for n, (*_, node) in enumerate(level[:num_inner])}
        sizes = [size for size, *_ in shape]
        parts = zip(self._index(nodes).split(sizes), self._index(rows).split(sizes), shape, strict=True)
        return tuple(Level(n, r if moved else None, inner) for n, r, (_, inner, moved) in parts)

    @cached_property
    def order(self) -> Tensor | None:
        """Flat ids of all real nodes, level by level: int64; None when they lie in memory so."""
        order = torch.cat([level.nodes for level in self.levels])
        in_place = self.is_full and torch.equal(
            order, torch.arange(self.batch * self.size, device=self.device)
        )
        return None if in_place else order

    @cached_property
    def _count(self) -> list[int]:
        return self.num_nodes.tolist()

    @cached_property
    def _rows(self) -> list[list[int]]:
        return [row[:count] for row, count in zip(self.parent.tolist(), self._count, strict=True)]

    @cached_property
    def _depth(self) -> list[list[int]]:
        depths = []
        for row in self._rows:
            depth = [0]
            for parent in row[1:]:
                depth.append(depth[parent] + 1)
            depths.append(depth)
        return depths

    @cached_property
    def _heavy_child(self) -> list[list[int]]:
        whole = []
        for row in self._rows:
            weight, heavy, best = [1] * len(row), [-1] * len(row), [0] * len(row)
            for i in range(len(row) - 1, 0, -1):
                parent = row[i]
                weight[parent] += weight[i]
                if weight[i] >= best[parent]:
                    heavy[parent], best[parent] = i, weight[i]
            whole.append(heavy)
        return whole

    @cached_property
    def _windows(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _window_rows(self) -> dict[int, Tensor]:
        return {}

    def _index(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self.device)

    def _padded(self, rows: list[list[int]], dtype: torch.dtype) -> Tensor:
        whole = [row + [-1] * (self.size - len(row)) for row in rows]
        return torch.tensor(whole, dtype=dtype, device=self.device).reshape(self.batch, self.size)

    def __repr__(self) -> str:
        return f"Tree(batch={self.batch}, size={self.size}, num_nodes={self._count})"


def _array(values: Tensor | np.ndarray | Sequence[Any]) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _real_nodes(rows: list[list[int]], size: int) -> list[int]:
    counts = []
    for row in rows:
        count = next((i for i in range(1, size) if row[i] == -1), size)
        if any(above != -1 for above in row[count:]):
            raise ValueError("padding (-1) must come after all real nodes of its row")
        counts.append(count)
    return counts


def _checked(num_nodes: Tensor | np.ndarray | Sequence[int], batch: int, size: int) -> list[int]:
    count = _array(num_nodes)
    if count.shape != (batch,) or count.dtype.kind not in "iu" or (count < 1).any() or (count > size).any():
        raise ValueError(f"num_nodes must be {batch} integers in 1..{size}, got {count.tolist()}")
    return count.tolist()
