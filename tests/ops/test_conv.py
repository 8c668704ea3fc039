"""Laws of the short convolution on a tree: a node's window is its own ancestors', and the commit keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specla.ops import conv_commit, tree_conv
from specla.ops.factors import PendingConv
from specla.ops.naive import naive_conv_commit, naive_tree_conv
from specla.tree import Tree
from tests.ops.strategies import (
    accepted,
    close,
    parents,
    path_to,
    poison,
    random_parent,
    same_bits,
    slot_maps,
    tree_of,
)

widths = pytest.mark.parametrize("width", [1, 2, 3, 4])


@st.composite
def convs(
    draw: st.DrawFn,
    dtype: torch.dtype = torch.float64,
    *,
    widest: int = 9,
    pending: bool | None = None,
    slots: bool = True,
    poisoned: bool = False,
) -> dict[str, Any]:
    """`call`: arguments of tree_conv; `rows`: the ragged parents; `slots`: slot of each row."""
    batch, channels = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 16]))
    width = draw(st.integers(1, widest))
    rows = draw(parents(batch, 10))
    size = max(map(len, rows)) + draw(st.integers(0, 2))
    count, indices = draw(slot_maps(batch)) if slots else (batch, None)
    of_row = list(range(batch)) if indices is None else indices.tolist()
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    x, state = randn(batch, size, channels), randn(count, channels, width - 1)
    before = None
    if pending or (pending is None and draw(st.booleans())):
        old = draw(parents(batch, 10))
        path, taken = draw(accepted(old))
        x_old = randn(batch, path.shape[1], channels)
        if poisoned:
            used = torch.zeros(batch, path.shape[1], dtype=torch.bool)
            for b in range(batch):
                used[b, path[b, : int(taken[b])].long()] = of_row[b] >= 0
            x_old = poison(x_old, used)
        before = PendingConv(x_old, path, taken)
    if poisoned:
        real = torch.zeros(batch, size, dtype=torch.bool)
        owned = torch.zeros(count, dtype=torch.bool)
        for b, slot in enumerate(of_row):
            real[b, : len(rows[b])] = slot >= 0
            owned[slot] = owned[slot] or slot >= 0
        x, state = poison(x, real), poison(state, owned)
    call = {
        "x": x,
        "tree": tree_of(rows, size),
        "weight": randn(channels, width),
        "bias": randn(channels) if draw(st.booleans()) else None,
        "conv_state": state,
        "state_indices": indices,
        "pending": before,
        "activation": draw(st.sampled_from(["silu", None])),
    }
    return {"call": call, "rows": rows, "slots": of_row}


def run(op: Any, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    state = call["conv_state"].clone()
    return op(**call | {"conv_state": state}), state


def assert_same(case: dict[str, Any], got: tuple, want: tuple) -> None:
    for b, (parent, slot) in enumerate(zip(case["rows"], case["slots"], strict=True)):
        if slot >= 0:
            close(got[0][b, : len(parent)], want[0][b, : len(parent)])
        else:
            assert not got[0][b].any()
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0, equal_nan=True)


@given(convs())
def test_tree_conv_equals_the_naive_replay_in_float64(case: dict[str, Any]) -> None:
    assert_same(case, run(tree_conv, case["call"]), run(naive_tree_conv, case["call"]))


@given(convs(poisoned=True))
def test_padding_and_foreign_slots_never_leak(case: dict[str, Any]) -> None:
    got = run(tree_conv, case["call"])
    assert_same(case, got, run(naive_tree_conv, case["call"]))
    foreign = [s for s in range(got[1].shape[0]) if s not in case["slots"]]
    assert same_bits(got[1][foreign], case["call"]["conv_state"][foreign])


@pytest.mark.parametrize("width", [2, 3, 4])
def test_naive_on_a_chain_equals_torch_conv1d(width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    x, state = torch.randn(2, 9, 5, generator=rng), torch.randn(2, 5, width - 1, generator=rng)
    weight, bias = torch.randn(5, width, generator=rng), torch.randn(5, generator=rng)
    stream = torch.cat([state, x.transpose(1, 2)], 2)
    want = torch.nn.functional.conv1d(stream, weight[:, None], bias, groups=5).transpose(1, 2)
    y = naive_tree_conv(x, Tree.chain(9, batch=2), weight, bias, conv_state=state, activation=None)
    close(y, want, 1e-5)
    y = naive_tree_conv(x, Tree.chain(9, batch=2), weight, bias, conv_state=state)
    close(y, torch.nn.functional.silu(want), 1e-5)


@given(convs(torch.float32, pending=False))
def test_every_node_has_the_bits_of_its_ancestor_path_run_alone_as_a_chain(case: dict[str, Any]) -> None:
    call, (y, _) = case["call"], run(tree_conv, case["call"])
    for b, (parent, slot) in enumerate(zip(case["rows"], case["slots"], strict=True)):
        for i in range(len(parent)) if slot >= 0 else []:
            path = path_to(parent, i)
            alone = {"x": call["x"][b : b + 1, path], "tree": Tree.chain(len(path)), "state_indices": None}
            y_alone, _ = run(tree_conv, call | alone | {"conv_state": call["conv_state"][slot : slot + 1]})
            assert same_bits(y[b, i], y_alone[0, -1])


@given(convs(torch.float32, pending=False, slots=False), st.data())
def test_forward_of_n_has_the_bits_of_n_times_forward_of_one(
    case: dict[str, Any], data: st.DataObject
) -> None:
    call, (y, state) = case["call"], run(tree_conv, case["call"])
    rows = [path_to(parent, data.draw(st.integers(0, len(parent) - 1))) for parent in case["rows"]]
    size = max(map(len, rows))
    path = torch.tensor([ids + [-1] * (size - len(ids)) for ids in rows])
    conv_commit(state, call["x"], path, torch.tensor([len(ids) - 1 for ids in rows]))
    decoded = call["conv_state"].clone()
    for t in range(size):
        live = torch.tensor([t < len(ids) for ids in rows])
        indices = torch.where(live, torch.arange(len(rows)), -1)
        x = call["x"][torch.arange(len(rows)), path[:, t].clamp(min=0)][:, None]
        token = {
            "x": x,
            "tree": Tree.chain(1, batch=len(rows)),
            "conv_state": decoded,
            "state_indices": indices,
        }
        y_t = tree_conv(**call | token)
        conv_commit(
            decoded, x, torch.zeros(len(rows), 1, dtype=torch.int32), live.int() - 1, state_indices=indices
        )
        for b in live.nonzero().flatten().tolist():
            assert same_bits(y[b, rows[b][t]], y_t[b, 0])
    assert same_bits(state, decoded)


@widths
@pytest.mark.parametrize("shape", ["chain", "random", "comb"])
def test_the_window_is_right_after_every_accepted_length(width: int, shape: str) -> None:
    rng = torch.Generator().manual_seed(width)
    parent = random_parent(shape, 9, rng)
    leaf = max(range(9), key=lambda i: len(path_to(parent, i)))
    ids = path_to(parent, leaf)
    path = torch.tensor([ids + [-1] * (9 - len(ids))])
    x, start = torch.randn(1, 9, 3, generator=rng), torch.randn(1, 3, width - 1, generator=rng)
    for length in range(len(ids) + 1):  # 0: nothing committed; shorter than the window included
        stream = torch.cat([start[0], x[0, ids[:length]].T], 1)
        want = stream[:, stream.shape[1] - (width - 1) :]
        for op in (conv_commit, naive_conv_commit):
            state = start.clone()
            assert op(state, x, path, torch.tensor([length - 1])) is None
            assert torch.equal(state[0], want), f"{op.__name__} after {length}"
        state = start.clone()
        pending = PendingConv(x, path, torch.tensor([length]))
        tree_conv(x, Tree(parent), torch.ones(3, width), conv_state=state, pending=pending)
        assert torch.equal(state[0], want), f"pending after {length}"


@widths
def test_every_row_may_accept_another_length(width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    x, start = torch.randn(7, 6, 3, generator=rng), torch.randn(7, 3, width - 1, generator=rng)
    state = start.clone()
    conv_commit(state, x, torch.arange(6).expand(7, 6), torch.arange(7) - 1)
    for n in range(7):
        stream = torch.cat([start[n], x[n, :n].T], 1)
        assert torch.equal(state[n], stream[:, stream.shape[1] - (width - 1) :])


@given(convs(torch.float32, pending=True))
def test_delayed_pending_has_the_bits_of_a_separate_commit(case: dict[str, Any]) -> None:
    call, (y, state) = case["call"], run(tree_conv, case["call"])
    p, committed = call["pending"], call["conv_state"].clone()
    conv_commit(committed, p.x, p.path, p.num_nodes - 1, state_indices=call["state_indices"])
    y_then, state_then = run(tree_conv, call | {"conv_state": committed, "pending": None})
    assert same_bits(state, committed) and same_bits(state_then, committed)
    for b, parent in enumerate(case["rows"]):
        assert same_bits(y[b, : len(parent)], y_then[b, : len(parent)])


@given(convs(pending=False))
def test_tree_conv_without_pending_only_reads(case: dict[str, Any]) -> None:
    x = case["call"]["x"].clone()
    _, state = run(tree_conv, case["call"])
    assert same_bits(state, case["call"]["conv_state"]) and same_bits(x, case["call"]["x"])


@given(convs(torch.float32, pending=False, slots=False), st.data())
def test_siblings_never_see_each_other(case: dict[str, Any], data: st.DataObject) -> None:
    call, (y, _) = case["call"], run(tree_conv, case["call"])
    b = data.draw(st.integers(0, len(case["rows"]) - 1))
    parent = case["rows"][b]
    node = data.draw(st.integers(0, len(parent) - 1))
    x = call["x"].clone()
    x[b, node] = float("nan")
    y_new, _ = run(tree_conv, call | {"x": x})
    width = call["weight"].shape[1]
    for i in range(len(parent)):
        if node in path_to(parent, i)[-width:]:
            assert y_new[b, i].isnan().all()
        else:
            assert same_bits(y[b, i], y_new[b, i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype_and_stays_near_float32(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    tree = Tree(random_parent("random", 8, rng))
    x, weight, state = (torch.randn(*s, generator=rng).to(dtype) for s in ((1, 8, 16), (16, 4), (1, 16, 3)))
    y = tree_conv(x, tree, weight, conv_state=state)
    want = naive_tree_conv(x.double(), tree, weight.double(), conv_state=state.double())
    assert y.dtype == dtype
    close(y.double(), want, 0.05)
    conv_commit(state, x, tree.paths(torch.tensor([7])), (tree.depth[:, 7] - 0))
    assert state.dtype == dtype and torch.equal(state[0, :, -1], x[0, 7])


def test_wide_channels_have_the_bits_of_one_token() -> None:
    rng = torch.Generator().manual_seed(1)
    x, weight, state = (torch.randn(*s, generator=rng) for s in ((3, 33, 1536), (1536, 4), (3, 1536, 3)))
    tree = tree_of([random_parent("random", 33, rng) for _ in range(3)], 33)
    y = tree_conv(x, tree, weight, conv_state=state)
    for b in range(3):
        single = tree_conv(x[b : b + 1, :1], Tree.chain(1), weight, conv_state=state[b : b + 1])
        assert same_bits(single[0, 0], y[b, 0])


def bad_calls() -> dict[str, dict[str, Any]]:
    """Changes to a good call (B 2, N 3, D 4, W 3, 3 slots) that make it unsupported."""
    z, path, two = torch.zeros, torch.tensor([[0, 1], [0, 2]]), torch.tensor([2, 2])
    x = torch.ones(2, 3, 4)
    return {
        "the activation is unknown": {"activation": "gelu"},
        "x has fewer nodes": {"x": z(2, 2, 4)},
        "x has another batch": {"x": z(1, 3, 4)},
        "x has two dimensions": {"x": z(2, 12)},
        "x is integer": {"x": z(2, 3, 4, dtype=torch.int64)},
        "x is on another device": {"x": z(2, 3, 4, device="meta")},
        "the tree has another N": {"tree": Tree.chain(4, batch=2)},
        "weight has other channels": {"weight": z(5, 3)},
        "weight is of torch's conv1d shape": {"weight": z(4, 1, 3)},
        "bias has other channels": {"bias": z(5)},
        "bias is on another device": {"bias": z(4, device="meta")},
        "conv_state keeps W columns": {"conv_state": z(3, 4, 3)},
        "conv_state is [W - 1, D]": {"conv_state": z(3, 2, 4)},
        "conv_state has other channels": {"conv_state": z(3, 5, 2)},
        "conv_state is integer": {"conv_state": z(3, 4, 2, dtype=torch.int32)},
        "too few slots and no indices": {"conv_state": z(1, 4, 2), "state_indices": None},
        "state_indices have another batch": {"state_indices": torch.tensor([0])},
        "state_indices name a slot twice": {"state_indices": torch.tensor([1, 1])},
        "state_indices are beyond the slots": {"state_indices": torch.tensor([0, 3])},
        "pending has other channels": {"pending": PendingConv(torch.ones(2, 3, 5), path, two)},
        "pending has another batch": {"pending": PendingConv(x[:1], path[:1], two[:1])},
        "pending.path has another batch": {"pending": PendingConv(x, path[:1], two)},
        "pending.path is of floats": {"pending": PendingConv(x, path.float(), two)},
        "pending.path names a node that is not there": {"pending": PendingConv(x, path + 2, two)},
        "pending.path is padded within count": {"pending": PendingConv(x, path - 1, two)},
        "pending.num_nodes has two dimensions": {"pending": PendingConv(x, path, two[:, None])},
        "pending.num_nodes is beyond the path": {"pending": PendingConv(x, path, two + 1)},
        "pending is on another device": {"pending": PendingConv(x.to("meta"), path, two)},
    }


@pytest.mark.parametrize("fault", [None, *bad_calls()])
def test_unsupported_input_raises_value_error_before_the_window_is_touched(fault: str | None) -> None:
    z, path = torch.zeros, torch.tensor([[0, 1], [0, 2]])
    call: dict[str, Any] = {
        "x": z(2, 3, 4),
        "tree": Tree.chain(3, batch=2),
        "weight": z(4, 3),
        "bias": z(4),
        "conv_state": z(3, 4, 2),
        "state_indices": torch.tensor([2, 0]),
        "pending": PendingConv(torch.ones(2, 3, 4), path, torch.tensor([2, 2])),
        "activation": "silu",
    }
    if fault is None:  # the call without a fault commits
        tree_conv(**call)
        assert call["conv_state"][[0, 2]].all()
        return
    call |= bad_calls()[fault]
    with pytest.raises(ValueError):
        tree_conv(**call)
    assert not call["conv_state"].any()


BAD_COMMITS: dict[str, dict[str, Any]] = {
    "x has other channels": {"x": torch.ones(2, 3, 5)},
    "x has another batch": {"x": torch.ones(1, 3, 4)},
    "x has two dimensions": {"x": torch.ones(2, 12)},
    "path has another batch": {"path": torch.tensor([[0, 1]])},
    "path has one dimension": {"path": torch.tensor([0, 0])},
    "path names a node that is not there": {"path": torch.tensor([[0, 3], [0, 1]])},
    "path is padded within the accepted part": {"path": torch.tensor([[0, -1], [0, 1]])},
    "num_accepted has another batch": {"num_accepted": torch.tensor([1])},
    "num_accepted has two dimensions": {"num_accepted": torch.tensor([[1], [1]])},
    "num_accepted is beyond the path": {"num_accepted": torch.tensor([1, 2])},
    "num_accepted is below -1": {"num_accepted": torch.tensor([0, -2])},
    "state_indices have another batch": {"state_indices": torch.tensor([0])},
    "state_indices name a slot twice": {"state_indices": torch.tensor([0, 0])},
    "conv_state has two dimensions": {"conv_state": torch.zeros(3, 8)},
}


@pytest.mark.parametrize("fault", BAD_COMMITS)
def test_an_unsupported_commit_raises_value_error_before_the_window_is_touched(fault: str) -> None:
    call: dict[str, Any] = {
        "conv_state": torch.zeros(3, 4, 2),
        "x": torch.ones(2, 3, 4),
        "path": torch.tensor([[0, 1], [0, 2]]),
        "num_accepted": torch.tensor([1, 1]),
        "state_indices": torch.tensor([2, 0]),
    } | BAD_COMMITS[fault]
    with pytest.raises(ValueError):
        conv_commit(**call)
    assert not call["conv_state"].any()
