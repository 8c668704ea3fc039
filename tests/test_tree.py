"""Laws of the draft tree: what is refused, and that each view agrees with a walk along the parents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specla.tree import Tree
from tests.ops.strategies import parents, path_to, tree_of

batches = st.integers(1, 4).flatmap(lambda batch: parents(batch, 14))
padding = st.integers(0, 3)


def subtree(parent: list[int], node: int) -> set[int]:
    return {i for i in range(len(parent)) if node in path_to(parent, i)}


@pytest.mark.parametrize(
    "parent",
    [
        [0, 0],
        [1, 0],
        [-1, 1],
        [-1, 2, 0],
        [-1, 0, 3, 0],
        [-1, -2],
        [-1, 0, -7],
        [-1, -1, 0],
        [-1, 0, -1, 1],
        [[-1, 0, 1], [-1, -1, 1]],
        [-1, 2**32],
        [],
        [[[-1, 0]]],
        [-1.0, 0.0],
        [True, False],
    ],
    ids=str,
)
def test_a_malformed_parent_raises_value_error(parent: list) -> None:
    with pytest.raises(ValueError):
        Tree(parent)
    with pytest.raises(ValueError):
        Tree(torch.tensor(parent))


@pytest.mark.parametrize("num_nodes", [[0], [4], [-1], [2, 2], [[2]], [1.5], 2])
def test_malformed_num_nodes_raise_value_error(num_nodes: list) -> None:
    with pytest.raises(ValueError):
        Tree([-1, 0, 1], num_nodes)


def test_a_padding_entry_within_num_nodes_raises_value_error() -> None:
    with pytest.raises(ValueError):
        Tree([-1, 0, -1], [3])


def test_lists_arrays_and_tensors_of_any_integer_type_give_the_same_tree() -> None:
    parent = [[-1, 0, 0, 1], [-1, 0, -1, -1]]
    forms = [
        parent,
        np.array(parent),
        np.array(parent, np.int16),
        torch.tensor(parent),
        torch.tensor(parent).int(),
    ]
    for form in forms:
        tree = Tree(form)
        assert (tree.batch, tree.size) == (2, 4)
        assert tree.parent.dtype == torch.int32 and tree.parent.tolist() == parent
        assert tree.num_nodes.dtype == torch.int32 and tree.num_nodes.tolist() == [4, 2]
        assert tree.device == tree.parent.device == torch.device("cpu")


def test_the_tree_keeps_its_own_copy_of_the_parents() -> None:
    parent = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    array = parent.numpy().copy()
    from_tensor, from_array = Tree(parent), Tree(array)
    parent[0, 2] = 0
    array[0, 2] = 0
    assert from_tensor.parent.tolist() == from_array.parent.tolist() == [[-1, 0, 1]]


def test_one_dimension_is_a_batch_of_one() -> None:
    assert Tree([-1, 0, 0]).parent.tolist() == [[-1, 0, 0]]


@given(batches, padding)
def test_num_nodes_and_trailing_padding_say_the_same(rows: list[list[int]], extra: int) -> None:
    size = max(map(len, rows)) + extra
    told = tree_of(rows, size)
    found = Tree(told.parent)
    assert found.num_nodes.tolist() == told.num_nodes.tolist() == [len(row) for row in rows]
    assert torch.equal(found.valid, told.valid)


@given(batches, padding)
def test_depth_valid_and_ancestors_agree_with_a_walk_to_the_root(rows: list[list[int]], extra: int) -> None:
    size = max(map(len, rows)) + extra
    tree = tree_of(rows, size)
    assert (tree.depth.dtype, tree.valid.dtype, tree.ancestors.dtype) == (torch.int32, torch.bool, torch.bool)
    assert tree.ancestors.shape == (len(rows), size, size)
    for b, parent in enumerate(rows):
        for i in range(size):
            path = path_to(parent, i) if i < len(parent) else []
            assert bool(tree.valid[b, i]) == bool(path)
            assert int(tree.depth[b, i]) == len(path) - 1
            assert tree.ancestors[b, i].nonzero().flatten().tolist() == path[:-1]
            assert int(tree.parent[b, i]) == (path[-2] if len(path) > 1 else -1)


@given(batches, padding)
def test_the_heavy_child_is_a_child_with_the_largest_subtree(rows: list[list[int]], extra: int) -> None:
    tree = tree_of(rows, max(map(len, rows)) + extra)
    assert tree.heavy_child.dtype == torch.int32
    for b, parent in enumerate(rows):
        for i in range(tree.size):
            weights = {c: len(subtree(parent, c)) for c in range(len(parent)) if parent[c] == i and c > 0}
            heavy = int(tree.heavy_child[b, i])
            assert heavy == (
                -1 if not weights else min(c for c in weights if weights[c] == max(weights.values()))
            )


@given(batches, padding, st.integers(1, 5))
def test_a_window_is_the_nodes_own_ancestors_then_the_history(
    rows: list[list[int]], extra: int, width: int
) -> None:
    size = max(map(len, rows)) + extra
    index = tree_of(rows, size).windows(width)
    assert index.dtype == torch.int64 and index.shape == (len(rows), size, width)
    assert int(index.min()) >= 0 and int(index.max()) < width - 1 + size  # padding must be in range too
    for b, parent in enumerate(rows):
        for i in range(len(parent)):
            stream = list(range(width - 1)) + [width - 1 + j for j in path_to(parent, i)]
            assert index[b, i].tolist() == stream[-width:]


@given(batches, padding, st.data())
def test_paths_go_from_the_root_down_to_the_node(
    rows: list[list[int]], extra: int, data: st.DataObject
) -> None:
    tree = tree_of(rows, max(map(len, rows)) + extra)
    nodes = [data.draw(st.integers(0, len(row) - 1)) for row in rows]
    for dtype in (torch.int32, torch.int64):
        paths = tree.paths(torch.tensor(nodes, dtype=dtype))
        assert paths.dtype == torch.int32 and paths.shape == (len(rows), tree.size)
        for b, parent in enumerate(rows):
            want = path_to(parent, nodes[b])
            assert paths[b].tolist() == want + [-1] * (tree.size - len(want))


@given(batches, padding, st.data())
def test_prune_keeps_the_relations_of_the_kept_nodes(
    rows: list[list[int]], extra: int, data: st.DataObject
) -> None:
    tree = tree_of(rows, max(map(len, rows)) + extra)
    keep = torch.zeros(len(rows), tree.size, dtype=torch.bool)
    for b, parent in enumerate(rows):
        for leaf in [0, *data.draw(st.lists(st.integers(0, len(parent) - 1), max_size=3))]:
            keep[b, path_to(parent, leaf)] = True
    small, index = tree.prune(keep)
    assert index.dtype == torch.int64 and index.shape == (len(rows), small.size)
    assert small.size == int(keep.sum(1).max()) and small.num_nodes.tolist() == keep.sum(1).tolist()
    for b, parent in enumerate(rows):
        old = index[b, : int(small.num_nodes[b])].tolist()
        assert old == keep[b].nonzero().flatten().tolist()
        for new, was in enumerate(old):
            above = int(small.parent[b, new])
            assert (old[above] if above >= 0 else -1) == parent[was]
    assert int(index.min()) >= 0 and int(index.max()) < tree.size


@pytest.mark.parametrize(
    "keep", [[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1], [[1] * 4, [1] * 4]]
)
def test_pruning_away_a_kept_nodes_parent_raises_value_error(keep: list) -> None:
    mask = torch.tensor(keep, dtype=torch.bool)
    with pytest.raises(ValueError):
        Tree([-1, 0, 1, 2]).prune(mask if mask.dim() == 2 else mask[None])


@pytest.mark.parametrize("nodes", [[-1, 0], [0, 2], [0, 3], [0], [0, 0, 0]])
def test_a_path_to_a_node_that_is_not_there_raises_value_error(nodes: list[int]) -> None:
    with pytest.raises(ValueError):
        Tree([[-1, 0, 0], [-1, 0, -1]]).paths(torch.tensor(nodes))


def test_a_chain_is_the_tree_whose_every_parent_is_the_node_before() -> None:
    tree = Tree.chain(4, batch=3, device="cpu")
    assert tree.parent.tolist() == [[-1, 0, 1, 2]] * 3
    assert tree.depth.tolist() == [[0, 1, 2, 3]] * 3
    assert Tree.chain(1).parent.tolist() == [[-1]]


@given(batches, padding)
def test_the_hybrid_schedule_visits_every_node_once_from_its_parents_state(
    rows: list[list[int]], extra: int
) -> None:
    tree = tree_of(rows, max(map(len, rows)) + extra)
    live: list[int | None] = [None] * len(rows)  # before depth 0: the start state of each row
    seen: list[int] = []
    for depth, level in enumerate(tree.levels):
        nodes = level.nodes.tolist()
        sources = range(len(live)) if level.rows is None else level.rows.tolist()
        assert len(nodes) == len(list(sources))
        for m, (node, source) in enumerate(zip(nodes, sources, strict=True)):
            b, i = divmod(node, tree.size)
            assert len(path_to(rows[b], i)) - 1 == depth
            assert (live[source] == b * tree.size + rows[b][i]) if depth else (source == b), f"place {m}"
        live = nodes[: level.num_inner]
        heavy = [n % tree.size in tree.heavy_child[n // tree.size].tolist() for n in live]
        assert heavy == sorted(heavy, reverse=True)  # light children start behind the chains that go on
        has_child = [int(tree.heavy_child[n // tree.size, n % tree.size]) >= 0 for n in nodes]
        assert has_child == sorted(has_child, reverse=True) and sum(has_child) == level.num_inner
        seen += nodes
    assert sorted(seen) == [b * tree.size + i for b, row in enumerate(rows) for i in range(len(row))]


@given(batches, padding)
def test_a_resident_tree_has_the_views_of_a_checked_one(rows: list[list[int]], extra: int) -> None:
    size = max(map(len, rows)) + extra
    checked = tree_of(rows, size)
    tree = Tree.resident(torch.where(checked.valid, checked.parent, 2**30), checked.num_nodes)
    assert (tree.batch, tree.size, tree.device) == (len(rows), size, checked.device)
    for name in ("valid", "depth", "ancestors", "lineage", "heavy_child"):
        assert torch.equal(getattr(tree, name), getattr(checked, name)), name
    assert torch.equal(tree.windows(3), checked.windows(3))
    assert (tree.is_full, tree.is_chain) == (checked.is_full, checked.is_chain)
    for mine, its in zip(tree.levels, checked.levels, strict=True):
        assert torch.equal(mine.nodes, its.nodes) and mine.num_inner == its.num_inner
    assert repr(tree) == repr(checked)


def test_a_resident_tree_is_the_given_tensors_and_reads_nothing_back() -> None:
    parent = torch.tensor([[-1, 0, 1], [-1, 5, 5]], dtype=torch.int32, device="meta")  # without values
    num_nodes = torch.tensor([3, 1], dtype=torch.int32, device="meta")
    tree = Tree.resident(parent, num_nodes)
    assert tree.parent is parent and tree.num_nodes is num_nodes
    assert tree.valid.shape == (2, 3) and tree.device.type == "meta"
    with pytest.raises(NotImplementedError):
        _ = tree.depth


def test_a_resident_tree_moves_to_another_device_without_its_garbage() -> None:
    parent = torch.tensor([[-1, 0, 1], [-1, 5, 5]], dtype=torch.int32)
    moved = Tree.resident(parent, torch.tensor([3, 1], dtype=torch.int32)).to("meta")
    assert moved.parent.device.type == "meta" and not moved.is_full
    assert moved.to("cpu").parent.tolist() == [[-1, 0, 1], [-1, -1, -1]]
