"""Laws of the step lists: equal to lists made here in plain Python, and right when they are run."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.ops.triton import MAX_NODES, schedule
from specla.ops.triton.schedule import READ, RESET, STORE, UPDATE, Schedule, build, envelope
from specla.tree import Tree
from tests.ops.strategies import SHAPES, path_to, random_parent, tree_of
from tests.ops.triton import DEVICE

Steps = list[tuple[int, int]]  # (node, flags)
VISIT = READ | STORE

workers = st.sampled_from([1, 1, 2, 3, 4, 7, 70])


@st.composite
def forests(draw: st.DrawFn, max_batch: int = 4) -> list[list[int]]:
    """Rows of different sizes and shapes, small ones and some of up to 64 nodes."""
    largest = draw(st.sampled_from([8, 16, 17, 33, MAX_NODES]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = [draw(st.integers(1, largest)) for _ in range(draw(st.integers(1, max_batch)))]
    return [random_parent(draw(st.sampled_from(SHAPES)), size, rng) for size in sizes]


def broom(spine: int, arms: int, arm: int = 2) -> list[int]:
    """A path of `spine` nodes, then `arms` paths of `arm` nodes from its end: long replays, and many of them."""
    parent = list(range(-1, spine - 1))
    for _ in range(arms):
        parent += [spine - 1, *range(len(parent), len(parent) + arm - 1)]
    return parent


def every_tree(size: int) -> list[list[int]]:
    return [[-1, *rest] for rest in product(*(range(i) for i in range(1, size)))]


def garbled(rows: list[list[int]], size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """parent and num_nodes on the device, with garbage in the padding."""
    rng = torch.Generator().manual_seed(seed)
    parent = torch.randint(-(2**31), 2**31, (len(rows), size), generator=rng).to(torch.int32)
    for b, row in enumerate(rows):
        parent[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return parent.to(DEVICE), torch.tensor([len(row) for row in rows], dtype=torch.int32, device=DEVICE)


def poisoned(batch: int, size: int, workers: int) -> Schedule:
    return Schedule(
        torch.full((batch, size), -77, dtype=torch.int64, device=DEVICE),
        torch.full((batch, size), -77, dtype=torch.int32, device=DEVICE),
        torch.full((batch, workers, envelope(size)), 2**31 - 1, dtype=torch.int32, device=DEVICE),
        torch.full((batch, workers), -77, dtype=torch.int32, device=DEVICE),
    )


def unpack(made: Schedule) -> list[list[Steps]]:
    """Steps of every worker of every row, after a look at the bounds."""
    rows = []
    for lists, counts in zip(made.steps.tolist(), made.count.tolist(), strict=True):
        assert all(0 <= count <= len(steps) for steps, count in zip(lists, counts, strict=True))
        rows.append(
            [
                [(step & 255, step >> 8) for step in steps[:count]]
                for steps, count in zip(lists, counts, strict=True)
            ]
        )
    return rows


def reference(parent: list[int], workers: int) -> list[Steps]:
    """The lists of one tree, chain by chain."""
    children: list[list[int]] = [
        [c for c, above in enumerate(parent) if above == i] for i in range(len(parent))
    ]

    def weight(node: int) -> int:
        return 1 + sum(map(weight, children[node]))

    heavy = [max(kids, key=lambda c: (weight(c), -c)) if kids else -1 for kids in children]
    heads = [i for i in range(len(parent)) if i == 0 or (children[i] and heavy[parent[i]] != i)]
    lists: dict[int, Steps] = {}
    for head in heads:
        steps = [(a, UPDATE if workers == 1 else READ | UPDATE) for a in path_to(parent, head)[:-1]]
        if steps:
            steps[0] = (steps[0][0], steps[0][1] | RESET)
        steps.append((head, VISIT | (UPDATE if children[head] else 0)))
        node = head
        while children[node]:
            steps += [(c, VISIT) for c in children[node] if c != heavy[node] and not children[c]]
            node = heavy[node]
            steps.append((node, VISIT | (UPDATE if children[node] else 0)))
        lists[head] = steps
    owner = dict.fromkeys(heads, 0)
    turns = [*range(workers), *reversed(range(workers))]
    for rank, head in enumerate(sorted(heads, key=lambda h: (-len(lists[h]), h))):
        owner[head] = turns[rank % len(turns)]
    return [[step for h in heads if owner[h] == w for step in lists[h]] for w in range(workers)]


def run(parent: list[int], lists: list[Steps]) -> None:
    """Run the lists of one tree; a state is the path of the nodes whose updates it holds."""
    stored: list[int] = []
    for steps in lists:
        state: list[int] = []
        own: set[int] = set()
        for node, flags in steps:
            assert 0 <= node < len(parent) and 0 < flags < 16
            if flags & RESET:
                state = []
            if flags & READ:
                assert state == path_to(parent, node)[:-1]
            if flags & UPDATE:
                assert state == path_to(parent, node)[:-1]
                assert flags & READ or node in own
                state = [*state, node]
            if flags & STORE:
                assert flags & READ
                own.add(node)
                stored.append(node)
    assert sorted(stored) == list(range(len(parent)))


@given(forests(), st.integers(0, 3), workers, st.integers(0, 2**31))
def test_lists_are_those_made_chain_by_chain_and_run_right(
    rows: list[list[int]], extra: int, workers: int, seed: int
) -> None:
    size = min(max(map(len, rows)) + extra, MAX_NODES)
    made = build(*garbled(rows, size, seed), workers, out=poisoned(len(rows), size, workers))
    for parent, lists in zip(rows, unpack(made), strict=True):
        assert lists == reference(parent, workers)
        run(parent, lists)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_small_tree_in_one_batch(workers: int) -> None:
    rows = [row for size in range(1, 7) for row in every_tree(size)]
    made = build(*garbled(rows, 6), workers, out=poisoned(len(rows), 6, workers))
    assert unpack(made) == [reference(row, workers) for row in rows]


@pytest.mark.parametrize(
    ("parent", "workers"),
    [
        (Tree.chain(64).parent[0].tolist(), 1),
        ([-1, *[0] * 63], 2),
        (broom(31, 16), 1),
        (broom(31, 16), 4),
        (broom(20, 11, 4), 3),
        ([-1, *((i - 1) // 2 for i in range(1, 64))], 8),
        ([-1, *((i - 1) // 3 for i in range(1, 47))], 5),
    ],
    ids=["chain", "star", "broom", "shared-broom", "long-arms", "binary", "ternary"],
)
def test_trees_of_many_nodes(parent: list[int], workers: int) -> None:
    made = build(*garbled([parent], len(parent)), workers, out=poisoned(1, len(parent), workers))
    (lists,) = unpack(made)
    assert lists == reference(parent, workers)
    assert torch.equal(made.depth.cpu(), Tree(parent).depth)
    run(parent, lists)


@given(forests(), st.integers(0, 3))
def test_lineage_and_depth_are_those_of_the_trees(rows: list[list[int]], extra: int) -> None:
    size = min(max(map(len, rows)) + extra, MAX_NODES)
    made = build(*garbled(rows, size), out=poisoned(len(rows), size, 1))
    lineage = made.lineage.cpu()
    bits = (lineage[..., None] >> torch.arange(size)) & 1
    tree = tree_of(rows, size)
    assert torch.equal(bits.bool(), tree.lineage & tree.valid[..., None])
    assert torch.equal(made.depth.cpu(), tree.depth)


@given(forests(), workers)
def test_rows_do_not_depend_on_their_batch(rows: list[list[int]], workers: int) -> None:
    size = max(map(len, rows))
    parent, num_nodes = garbled(rows, size)
    whole = unpack(build(parent, num_nodes, workers))
    for b in range(len(rows)):
        assert unpack(build(parent[b : b + 1], num_nodes[b : b + 1], workers)) == whole[b : b + 1]


def test_a_row_without_nodes_has_no_steps() -> None:
    made = build(*garbled([[], [-1]], 3), 2, out=poisoned(2, 3, 2))
    assert made.count.tolist() == [[0, 0], [1, 0]]
    assert made.lineage.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert made.depth.tolist() == [[-1, -1, -1], [0, -1, -1]]


def test_a_batch_without_rows_has_a_schedule_without_rows() -> None:
    made = build(*garbled([], 3), 2)
    assert [list(x.shape) for x in made] == [[0, 3], [0, 3], [0, 2, envelope(3)], [0, 2]]


@pytest.mark.parametrize("size", range(1, 9))
def test_no_small_tree_has_a_longer_list_than_the_envelope_and_one_fills_it(size: int) -> None:
    lengths = [len(reference(row, 1)[0]) for row in every_tree(size)]
    assert max(lengths) == envelope(size)


@pytest.mark.parametrize("size", [9, 16, 17, 31, 32, 63, 64])
def test_a_broom_fills_the_envelope(size: int) -> None:
    longest = max(
        (broom(size - 2 * arms, arms) for arms in range((size + 1) // 2)),
        key=lambda parent: len(reference(parent, 1)[0]),
    )
    parent, num_nodes = garbled([longest], size)
    assert int(build(parent, num_nodes).count) == envelope(size)
    assert int(build(parent, num_nodes, 2).count.max()) <= envelope(size)


def test_parents_and_counts_may_be_views() -> None:
    rows = [broom(2, 3), [-1, 0, 1, 0, 3], [-1]]
    parent, num_nodes = garbled(rows, 8)
    parent = parent.T.contiguous().T
    num_nodes = torch.stack([num_nodes, torch.zeros_like(num_nodes)], 1)[:, 0]
    assert not parent.is_contiguous() and not num_nodes.is_contiguous()
    assert unpack(build(parent, num_nodes, 2)) == [reference(row, 2) for row in rows]


def test_out_is_what_comes_back() -> None:
    parent, num_nodes = garbled([[-1, 0, 0]], 3)
    out = poisoned(1, 3, 2)
    made = build(parent, num_nodes, 2, out=out)
    assert all(a is b for a, b in zip(made, out, strict=True))


def test_a_schedule_is_built_once_a_tree_and_goes_with_it() -> None:
    tree = Tree.resident(*garbled([[-1, 0, 0, 1]], 6))
    one, two = schedule.schedule_of(tree, 1), schedule.schedule_of(tree, 2)
    assert schedule.schedule_of(tree, 1) is one and schedule.schedule_of(tree, 2) is two
    assert one.steps.shape[1] == 1 and two.steps.shape[1] == 2
    other = Tree.resident(tree.parent, tree.num_nodes)
    assert schedule.schedule_of(other, 1) is not one
    known = len(schedule._made)
    del tree
    gc.collect()
    assert len(schedule._made) == known - 1
    assert unpack(schedule.schedule_of(other, 1)) == [reference([-1, 0, 0, 1], 1)]


@pytest.mark.parametrize(
    ("parent", "num_nodes"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
        (torch.zeros(1, 65, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
        (torch.zeros(1, 0, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
        (torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, dtype=torch.int32)),
        (torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, dtype=torch.int64)),
        (torch.zeros(1, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)),
        (torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)),
        (torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, dtype=torch.int32, device="meta")),
    ],
    ids=lambda x: f"{list(x.shape)}-{x.dtype}-{x.device}",
)
def test_trees_in_another_form_raise_value_error(parent: Tensor, num_nodes: Tensor) -> None:
    with pytest.raises(ValueError, match="must be int32"):
        build(parent, num_nodes)


@pytest.mark.parametrize("workers", [0, -1, True, 1.0, "2", None])
def test_a_count_of_workers_that_is_none_raises_value_error(workers: object) -> None:
    with pytest.raises(ValueError, match="workers"):
        build(*garbled([[-1, 0]], 2), workers)
    with pytest.raises(ValueError, match="workers"):
        schedule.schedule_of(Tree.chain(2, device=DEVICE), workers)


@pytest.mark.parametrize("field", Schedule._fields)
def test_out_of_another_form_raises_value_error(field: str) -> None:
    parent, num_nodes = garbled([[-1, 0, 0], [-1]], 3)
    out = poisoned(2, 3, 2)
    good: Tensor = getattr(out, field)
    for bad in (good[:1], good.float(), good.to("meta"), torch.stack([good, good], -1)[..., 0]):
        with pytest.raises(ValueError, match=f"out.{field}"):
            build(parent, num_nodes, 2, out=out._replace(**{field: bad}))
