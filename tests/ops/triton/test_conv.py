"""Laws of the convolution kernels: the naive twin's values, one-token decoding's bits, and the window moved once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.ops.naive import naive_conv_commit, naive_tree_conv
from specla.ops.triton import MAX_TAPS
from specla.ops.triton.conv import conv_commit, tree_conv
from specla.tree import Tree
from tests.ops.strategies import accepted, close, parents, path_to, poison, random_parent, same_bits
from tests.ops.test_conv import convs
from tests.ops.triton import DEVICE, full_size

widths = pytest.mark.parametrize("width", [1, 2, 3, 4])


def to_device(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, Tensor) else x


def run(call: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor]:
    """The kernel on arguments of `specla.ops.tree_conv`: y, NaN until it is written, and the window afterwards."""
    call = call | changes
    tree, pending = call["tree"], call["pending"]
    state = call["conv_state"].to(DEVICE, copy=True)
    moved = {name: to_device(x) for name, x in call.items() if name not in ("tree", "conv_state", "pending")}
    moved["pending"] = None if pending is None else tuple(map(to_device, pending))
    out = torch.full_like(moved["x"], float("nan")) if moved.get("out") is None else moved["out"]
    nodes = {"parent": to_device(tree.parent), "num_nodes": to_device(tree.num_nodes)}
    y = tree_conv(**moved | nodes | {"conv_state": state, "out": out})
    assert y is out
    return y.cpu(), state.cpu()


def commit(conv_state: Tensor, x: Tensor, path: Tensor, count: list[int], **kwargs: Any) -> Tensor:
    """The window after `conv_commit`; the one given stays as it is."""
    state = conv_state.to(DEVICE, copy=True)
    given = {name: to_device(value) for name, value in kwargs.items()}
    assert conv_commit(state, to_device(x), to_device(path), to_device(torch.tensor(count)), **given) is None
    return state.cpu()


def naive(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    state = call["conv_state"].clone()
    return naive_tree_conv(**call | {"conv_state": state}), state


@settings(max_examples=15)
@given(convs(torch.float32, widest=MAX_TAPS, poisoned=True))
def test_tree_conv_equals_the_naive_replay_and_leaks_no_padding(case: dict[str, Any]) -> None:
    (y, state), (y_naive, state_naive) = run(case["call"]), naive(case["call"])
    close(y, y_naive, 1e-5)  # zero at padding nodes and rows
    torch.testing.assert_close(state, state_naive, rtol=0, atol=0, equal_nan=True)
    foreign = [s for s in range(state.shape[0]) if s not in case["slots"]]
    assert same_bits(state[foreign], case["call"]["conv_state"][foreign])


@settings(max_examples=12)
@given(convs(torch.float32, widest=MAX_TAPS), st.sampled_from([torch.float32, torch.bfloat16]))
def test_bfloat16_inputs_are_summed_in_float32(case: dict[str, Any], window: torch.dtype) -> None:
    call = case["call"]
    low = {"x": call["x"].bfloat16(), "weight": call["weight"].bfloat16()}
    low["conv_state"] = call["conv_state"].bfloat16().to(window)
    if call["pending"] is not None:
        low["pending"] = call["pending"]._replace(x=call["pending"].x.bfloat16())
    (y, state), (y_naive, state_naive) = (
        run(call | low, out=torch.full(call["x"].shape, float("nan"), device=DEVICE)),
        naive(call | low | {"x": low["x"].float(), "weight": low["weight"].float()}),
    )
    close(y, y_naive, 1e-5)
    assert state.dtype == window and same_bits(state, state_naive)
    short, _ = run(call | low)
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(
        short.float(), y, rtol=2**-7, atol=0
    )  # the interpreter cuts where a GPU rounds


def decode(call: dict[str, Any], row: int, ids: list[int], pending: Any) -> tuple[list[Tensor], Tensor]:
    """One-token decoding of the nodes `ids` of a row: each token is what the next call commits first."""
    state, ys = call["conv_state"][row : row + 1].clone(), []
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    for i in ids:
        x = call["x"][row : row + 1, i : i + 1]
        y, state = run(call, x=x, tree=Tree.chain(1), conv_state=state, pending=pending)
        ys.append(y[0, 0])
        pending = (x, zero, one)
    return ys, commit(state, x, zero, [1])


@settings(max_examples=10)
@given(
    convs(torch.float32, widest=MAX_TAPS, slots=False),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_every_node_has_the_bits_of_one_token_decoding(
    case: dict[str, Any], dtype: torch.dtype, window: torch.dtype, data: st.DataObject
) -> None:
    call = case["call"]
    call |= {"x": call["x"].to(dtype), "conv_state": call["conv_state"].to(window)}
    y, state = run(call)
    row = data.draw(st.integers(0, len(case["rows"]) - 1))
    parent = case["rows"][row]
    ids = path_to(parent, data.draw(st.integers(0, len(parent) - 1)))
    before = call["pending"]
    before = None if before is None else tuple(x[row : row + 1] for x in before)
    ys, decoded = decode(call, row, ids, before)
    for i, y_i in zip(ids, ys, strict=True):
        assert same_bits(y[row, i], y_i)
    committed = commit(state[row : row + 1], call["x"][row : row + 1], torch.tensor([ids]), [len(ids)])
    assert same_bits(committed, decoded)


@widths
@pytest.mark.parametrize("shape", ["chain", "comb"])
def test_the_window_is_right_after_every_accepted_length(width: int, shape: str) -> None:
    rng = torch.Generator().manual_seed(width)
    parent = random_parent(shape, 9, rng)
    ids = path_to(parent, max(range(9), key=lambda i: len(path_to(parent, i))))[: width + 2]
    path = torch.tensor([ids + [10**9] * (9 - len(ids))])
    x, start = torch.randn(1, 9, 3, generator=rng), torch.randn(1, 3, width - 1, generator=rng)
    call = {"x": x, "tree": Tree(parent), "weight": torch.randn(3, width, generator=rng), "bias": None}
    for length in range(len(ids) + 1):  # 0: nothing committed; shorter than the window included
        stream = torch.cat([start[0], x[0, ids[:length]].T], 1)
        want = stream[:, stream.shape[1] - (width - 1) :]
        assert same_bits(commit(start, x, path, [length])[0], want)
        y, state = run(call, conv_state=start, pending=(x, path, torch.tensor([length])))
        assert same_bits(state[0], want)
        assert same_bits(y, run(call, conv_state=want[None], pending=None)[0])


@settings(max_examples=10)
@given(st.data(), st.integers(2, 4), st.sampled_from([torch.int32, torch.int64]))
def test_commit_in_one_go_in_parts_and_naive_have_the_same_bits(
    data: st.DataObject, width: int, integers: torch.dtype
) -> None:
    rows = data.draw(parents(3, 8))
    path, count = data.draw(accepted(rows))
    rng = torch.Generator().manual_seed(int(path.sum()) % 1000)
    used = torch.zeros(3, path.shape[1], dtype=torch.bool)
    for b in range(3):
        used[b, path[b, : int(count[b])].long()] = True
    x, start = torch.randn(3, path.shape[1], 5, generator=rng), torch.randn(5, 5, width - 1, generator=rng)
    x, slots = poison(x, used), torch.tensor([3, -1, 0], dtype=integers)
    want, path = start.clone(), path.to(integers)
    naive_conv_commit(want, x, path, count - 1, state_indices=slots)
    whole = commit(start, x, path, count.tolist(), state_indices=slots)
    cut = data.draw(st.integers(0, path.shape[1] - 1))
    parts = commit(start, x, path, count.clamp(max=cut).tolist(), state_indices=slots)
    rest = (count - cut).clamp(min=0).tolist()
    parts = commit(parts, x, path[:, cut:], rest, state_indices=slots)
    assert same_bits(whole, want) and same_bits(parts, want)


def test_all_layers_at_once_from_banks_by_slot_have_the_bits_of_each_alone() -> None:
    rng, slots = torch.Generator().manual_seed(0), torch.tensor([4, -1, 1], dtype=torch.int32)
    windows = torch.randn(2, 5, 3, 130, generator=rng).transpose(2, 3)  # one input after the other in memory
    bank = torch.randn(2, 5, 6, 130, generator=rng).bfloat16()
    path, count = torch.tensor([[0, 2, 5], [0, 1, 2], [0, 3, 10**9]]), [3, 3, 2]
    got = commit(windows, bank, path, count, state_indices=slots, by_slot=True)
    for layer in range(2):
        x = bank[layer, slots.clamp(min=0).long()]
        assert same_bits(got[layer], commit(windows[layer], x, path, count, state_indices=slots))
    call = {"x": torch.randn(3, 4, 130, generator=rng), "tree": Tree.chain(4, batch=3), "bias": None}
    call |= {"weight": torch.randn(130, 4, generator=rng), "state_indices": slots, "conv_state": windows[0]}
    y, state = run(call, pending=(bank[0], path, torch.tensor(count)), by_slot=True)
    y_rows, state_rows = run(call, pending=(bank[0, slots.clamp(min=0).long()], path, torch.tensor(count)))
    assert same_bits(y, y_rows) and same_bits(state, state_rows) and same_bits(state, got[0])


@settings(max_examples=12)
@given(
    convs(torch.float32, widest=MAX_TAPS, poisoned=True),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 3),
)
def test_inputs_are_kept_as_they_will_be_committed_and_nothing_else_is_written(
    case: dict[str, Any], window: torch.dtype, by_slot: bool, spare: int
) -> None:
    call, slots = case["call"], case["slots"]
    call |= {"conv_state": call["conv_state"].to(window)}
    if DEVICE.type == "cpu":  # the interpreter cuts where a GPU rounds
        call |= {"x": call["x"].to(window).float()}
    x, tree = call["x"], call["tree"]
    batch, size, channels = x.shape
    if by_slot and call["pending"] is not None:
        before = call["pending"].x
        bank = torch.full((len(call["conv_state"]), *before.shape[1:]), torch.nan)
        for b, slot in enumerate(slots):
            if slot >= 0:
                bank[slot] = before[b]
        call |= {"pending": call["pending"]._replace(x=bank)}
    rows = len(call["conv_state"]) if by_slot else batch
    whole = torch.full((rows, size + spare, channels + 3), -77.0)  # rows of a bank may lie apart
    want = whole.clone()
    for b, slot in enumerate(slots):
        nodes = int(tree.num_nodes[b])
        if slot >= 0:
            want[slot if by_slot else b, :nodes, :channels] = x[b, :nodes].to(window).float()
    whole = whole.to(DEVICE)
    y, state = run(call, by_slot=by_slot, keep=whole[..., :channels])
    assert same_bits(whole.cpu(), want)
    y_plain, state_plain = run(call, by_slot=by_slot)
    assert same_bits(y, y_plain) and same_bits(state, state_plain)


def test_rounds_that_commit_what_they_kept_are_rounds_that_commit_their_inputs() -> None:
    """Two banks by slot in turns, with rows in the order of slots and a row that pauses."""
    rng, size = torch.Generator().manual_seed(0), 6
    windows = torch.randn(3, 3, 70, generator=rng).transpose(1, 2)
    banks = torch.full((2, 3, size + 2, 70), torch.nan, device=DEVICE)
    weight, own, kept = torch.randn(70, 4, generator=rng), windows, windows
    pending, held = None, None
    for turn in range(4):
        parents = [random_parent("random", size, rng) for _ in range(3)]
        rows = torch.tensor([0, -1, 2], dtype=torch.int32)
        call = {
            "x": torch.randn(3, size, 70, generator=rng),
            "tree": Tree(parents),
            "weight": weight,
            "bias": None,
        }
        y, own = run(call, conv_state=own, pending=pending, state_indices=rows)
        y_kept, kept = run(
            call, conv_state=kept, pending=held, state_indices=rows, by_slot=True, keep=banks[turn % 2]
        )
        assert same_bits(y, y_kept) and same_bits(own, kept)
        paths = [path_to(parent, size - 1) for parent in parents]
        path = torch.tensor([ids + [10**9] * (size - len(ids)) for ids in paths])
        count = torch.tensor([len(ids) - turn % 2 for ids in paths])
        pending, held = (call["x"], path, count), (banks[turn % 2], path, count)
    assert banks[:, 1].isnan().all() and banks[:, :, size:].isnan().all()


def test_a_padding_row_writes_nothing_before_the_first_slot() -> None:
    rng = torch.Generator().manual_seed(0)
    pool, x = torch.randn(3, 5, 3, generator=rng).to(DEVICE), torch.randn(2, 4, 5, generator=rng).to(DEVICE)
    before, weight = pool.clone(), torch.ones(5, 4, device=DEVICE)
    path = torch.arange(4, dtype=torch.int32, device=DEVICE).expand(2, 4)
    rows, one = torch.tensor([[-1, 1], [1, 1]], dtype=torch.int32, device=DEVICE)
    for by_slot in (False, True):
        conv_commit(pool[1:], x, path, one, rows, by_slot=by_slot)
        assert same_bits(pool[:2], before[:2]) and not same_bits(pool[2], before[2])
        pending = (x, path, one)
        tree_conv(x, path - 1, 4 * one, weight, None, pool[1:], rows, pending, by_slot=by_slot)
        assert same_bits(pool[:2], before[:2])


def test_views_have_the_bits_of_contiguous_tensors() -> None:
    rng, size = torch.Generator().manual_seed(0), 20  # more nodes than a block of them
    tree = Tree(random_parent("random", size, rng))
    x, weight = torch.randn(2, size, 3, 70, generator=rng)[:, :, 1], torch.randn(4, 70, generator=rng).t()
    window = torch.randn(2, 3, 70, generator=rng).transpose(1, 2)
    path, count = torch.arange(size)[None, :2].expand(2, 2), torch.tensor([2, 1])
    call = {"x": x, "tree": Tree(tree.parent.expand(2, size)), "weight": weight, "conv_state": window}
    call |= {"bias": torch.randn(70, generator=rng), "pending": (x, path, count)}
    y, state = run(call, out=torch.full((2, size, 140), float("nan"), device=DEVICE)[..., 70:])
    plain = {name: call[name].contiguous() for name in ("x", "weight", "conv_state")}
    y_plain, state_plain = run(call, **plain, pending=(x.contiguous(), path, count))
    assert same_bits(y, y_plain) and same_bits(state, state_plain)


@full_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [1536, 6144, 10000])
def test_full_sizes(channels: int, width: int, dtype: torch.dtype) -> None:
    rng, batch, size = torch.Generator().manual_seed(0), 32, 33
    tree = Tree([random_parent("random", size, rng) for _ in range(batch)])
    x = torch.randn(batch, size, channels, generator=rng).to(dtype)
    window = torch.randn(batch, width - 1, channels, generator=rng).to(dtype).float().transpose(1, 2)
    path, count = torch.arange(size).expand(batch, size), torch.arange(batch) % (width + 2)
    call = {"x": x, "tree": tree, "weight": torch.randn(channels, width, generator=rng), "bias": None}
    call |= {"conv_state": window, "pending": (x, path, count)}
    y, state = run(call, out=torch.full(x.shape, float("nan"), device=DEVICE))
    assert same_bits(state, commit(window, x, path, count.tolist()))
    y_root, _ = run(
        call, x=x[:, :1], tree=Tree.chain(1, batch=batch), out=torch.empty_like(y[:, :1]).to(DEVICE)
    )
    assert same_bits(y[:, :1], y_root)
    joined = torch.cat([state.transpose(1, 2), x.float()], 1)
    at = torch.arange(size).expand(batch, size)
    want = torch.zeros(batch, size, channels)
    for w in reversed(range(width)):
        want += joined.gather(1, (at + width - 1)[..., None].expand_as(want)) * call["weight"][:, w]
        at = torch.where(at >= 0, tree.parent.long().gather(1, at.clamp(min=0)), at - 1)
    close(y, torch.nn.functional.silu(want), 1e-4)
