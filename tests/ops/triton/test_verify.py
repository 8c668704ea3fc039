"""Laws of the verification kernels: the naive twin's values, one-token decoding's bits, and no stray write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.ops.factors import Factors, Pending
from specla.ops.gate import Gate
from specla.ops.naive import naive_gated_delta_verify
from specla.ops.triton.commit import commit
from specla.ops.triton.counters import counters
from specla.ops.triton.tuning import Config
from specla.ops.triton.verify import verify
from specla.tree import Tree
from tests.ops.strategies import (
    CHANNEL_DECAYS,
    DECAYS,
    Case,
    behind_gate,
    cases,
    make_inputs,
    path_to,
    random_parent,
    same_bits,
    tree_of,
)
from tests.ops.triton import DEVICE

# a program takes the interpreter about as long whatever its tile: few tiles, but more than one for the widest heads
SERIAL = Config("serial", 32, 4)
HYBRID = Config("hybrid", 32, 4, workers=2)
PARALLEL = Config("parallel", 32, 4, block_k=16)
MODES = {config.mode: config for config in (SERIAL, HYBRID, PARALLEL)}
EXACT_CONFIGS = (
    SERIAL,
    Config("serial", 8, 2, prepared=True),
    Config("serial", 4, 1, registers=128),
    Config("hybrid", 32, 4, workers=2),
    Config("hybrid", 16, 1, workers=3, prepared=True),
    Config("hybrid", 64, 8, workers=8),
)
every_mode = pytest.mark.parametrize("mode", MODES)
exact_configs = st.sampled_from(EXACT_CONFIGS)


def to_device(x: Any) -> Any:
    if isinstance(x, (Factors, Pending, Gate)):
        return type(x)(*map(to_device, x))
    return x.to(DEVICE) if isinstance(x, (Tensor, Tree)) else x


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(case: Case, config: Config, *, banks: int | None = None) -> tuple[Tensor, Factors, Tensor]:
    """o, factors and the state afterwards. With `banks`, factors lie by slot, that many nodes longer than needed."""
    state = case.state.to(DEVICE, copy=True)
    scale = case.q.shape[3] ** -0.5 if case.scale is None else case.scale
    call = {name: to_device(getattr(case, name)) for name in ("q", "k", "v", "g", "beta", "tree", "pending")}
    rest = {"scale": scale, "normalise": case.l2norm, "delta": case.delta, "gate": to_device(case.gate)}
    rest |= {"state": state, "state_indices": to_device(case.state_indices)}
    if banks is not None:
        shapes = factor_shapes(case)
        rest |= {"factors": to_device(by_slot(case, None, shapes, banks)), "by_slot": True}
        if case.pending is not None:
            held = case.pending.factors
            moved = by_slot(case, held, [x.shape[1:] for x in held], banks)
            call["pending"] = to_device(case.pending._replace(factors=moved))
    with poisoned_memory():
        o, factors = verify(**call, config=config, **rest)
    factors = Factors(*(x.cpu() for x in factors))
    if banks is not None:
        assert factors.k.shape[0] == case.state.shape[0]
        factors = from_slots(case, factors)
    return o.cpu(), factors, state.cpu()


def factor_shapes(case: Case) -> list[tuple[int, ...]]:
    gates = case.v.shape[2:3] if case.g is None else case.g.shape[2:]
    return [(case.tree.size, *inner) for inner in (case.k.shape[2:], case.v.shape[2:], gates)]


def by_slot(case: Case, rows: Factors | None, shapes: Any, longer: int) -> Factors:
    """Banks of NaN, longer in nodes than `shapes`, that hold the rows of factors at their slots."""
    banks = []
    for n, (nodes, *inner) in enumerate(shapes):
        bank = torch.full((case.state.shape[0], nodes + longer, *inner), float("nan"))
        for b, slot in enumerate(case.slots if rows is not None else []):
            if slot >= 0:
                bank[slot, :nodes] = rows[n][b]
        banks.append(bank)
    return Factors(*banks)


def from_slots(case: Case, banks: Factors) -> Factors:
    """The rows of banks, zero for padding rows, after a look at all that should still be NaN."""
    taken = []
    for bank in banks:
        foreign = [s for s in range(bank.shape[0]) if s not in case.slots]
        assert bank[foreign].isnan().all() and bank[:, case.tree.size :].isnan().all()
        rows = bank[torch.tensor(case.slots).clamp(min=0), : case.tree.size]
        rows[torch.tensor(case.slots) < 0] = 0
        taken.append(rows)
    return Factors(*taken)


def in_double(case: Case) -> Case:
    """The same call in float64, inputs as they were rounded."""

    def double(x: Any) -> Any:
        if isinstance(x, (Factors, Gate, Pending)):
            return type(x)(*map(double, x))
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    names = ("q", "k", "v", "g", "beta", "state", "pending", "gate")
    return replace(case, **{name: double(getattr(case, name)) for name in names})


def moved(case: Case) -> Case:
    """The same call on the device."""
    names = ("q", "k", "v", "g", "beta", "tree", "state", "state_indices", "pending", "gate")
    return replace(case, **{name: to_device(getattr(case, name)) for name in names})


def rms(got: Tensor, want: Tensor) -> float:
    """Root mean square of the error, relative to that of `want`."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-30))


def assert_near(
    case: Case, got: tuple[Tensor, Factors, Tensor], want: tuple[Tensor, Factors, Tensor]
) -> None:
    """o and factors everywhere, zero where there is padding, and the whole state."""
    (o, factors, state), (o_want, f_want, s_want) = got, want
    assert o.dtype == case.v.dtype and not o[~case.real].any()
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(o.double(), o_want.double(), **close)
    for x, y in zip(factors, f_want, strict=True):
        assert x.dtype == torch.float32 and x.shape == y.shape
        torch.testing.assert_close(x.double(), y, **close)
    torch.testing.assert_close(state.double(), s_want, **close, equal_nan=True)


def assert_same_bits(a: tuple[Tensor, Factors, Tensor], b: tuple[Tensor, Factors, Tensor]) -> None:
    for x, y in zip((a[0], *a[1], a[2]), (b[0], *b[1], b[2]), strict=True):
        assert same_bits(x, y)


def kernel_cases(
    *,
    max_size: int = 8,
    dims: tuple[int, ...] = (1, 3, 8, 17, 33, 40),
    channels: bool = True,
    with_pending: bool | None = None,
    with_slots: bool | None = None,
) -> st.SearchStrategy[Case]:
    """A call of few programs with NaN in every input and slot that must not matter."""
    return cases(
        torch.float32,
        max_batch=2,
        max_size=max_size,
        max_group=2,
        dims=dims,
        decays=(*DECAYS, *CHANNEL_DECAYS) if channels else DECAYS,
        with_pending=with_pending,
        with_slots=with_slots,
        poisoned=True,
    )


def plain_case(
    rows: list[list[int]],
    dims: tuple[int, int],
    heads: tuple[int, int] = (1, 1),
    *,
    dtype: torch.dtype = torch.float32,
    decay: str = "mild",
    counts: list[int] | None = None,
    seed: int = 0,
    gated: bool = False,
    **extra: Any,
) -> Case:
    """A call for these trees; of each row's deepest path, up to `counts` nodes are pending from a call like it."""
    rng, size = torch.Generator().manual_seed(seed), max(map(len, rows))
    inputs = make_inputs(rng, len(rows), size, heads, dims, decay, torch.float32, fused=True)
    inputs = behind_gate(rng, inputs) if gated else inputs
    low = {name: None if x is None else x.to(dtype) for name, x in inputs.items() if name != "gate"}
    state = torch.randn(len(rows), heads[1], *dims[::-1], generator=rng)
    pending = None
    if counts is not None:
        form = "channel-mild" if decay in CHANNEL_DECAYS else "mild"
        made = make_inputs(rng, len(rows), size, heads, dims, form, torch.float32)
        path = torch.full((len(rows), size), 10**9)
        taken = []
        for b, parent in enumerate(rows):
            ids = max((path_to(parent, i) for i in range(len(parent))), key=len)[: counts[b]]
            path[b, : len(ids)] = torch.tensor(ids)
            taken.append(len(ids))
        pending = Pending(Factors(made["k"], made["v"], made["g"]), path, torch.tensor(taken))
    named = {"state_indices": None, "pending": pending, "scale": None, "l2norm": True} | extra
    return Case(**inputs | low, parents=rows, tree=tree_of(rows, size), state=state, **named)


@every_mode
@settings(max_examples=10)
@given(data=st.data())
def test_every_mode_equals_the_naive_replay_in_float64(mode: str, data: st.DataObject) -> None:
    case = data.draw(kernel_cases(channels=mode != "parallel"))
    banks = data.draw(st.sampled_from([None, 0, 3]))
    config = MODES[mode]._replace(prepared=data.draw(st.booleans()))
    got, want = run(case, config, banks=banks), in_double(case).run(naive_gated_delta_verify)
    assert_near(case, got, want)
    foreign = [s for s in range(case.state.shape[0]) if s not in case.slots]
    assert same_bits(got[2][foreign], case.state[foreign])
    if case.pending is None:
        assert same_bits(got[2], case.state)


@settings(max_examples=4)
@given(kernel_cases(max_size=6, dims=(3, 17)))
def test_no_configuration_of_the_exact_modes_changes_a_bit(case: Case) -> None:
    first = run(case, EXACT_CONFIGS[0])
    for config in EXACT_CONFIGS[1:]:
        assert_same_bits(run(case, config), first)


def decode(
    case: Case, config: Config, row: int, ids: list[int]
) -> tuple[list[Tensor], list[Factors], Tensor]:
    """One-token decoding of the nodes `ids` of a row: each call commits the token of the call before."""
    state, outs, made = case.state[case.slots[row]][None], [], []
    one, zero, pending = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), None
    for i in ids:
        o, factors, state = run(replace(case.chain(row, [i]), state=state, pending=pending), config)
        pending = Pending(factors, zero, one)
        outs.append(o[0, 0])
        made.append(factors)
    return outs, made, committed(state, factors, zero, one)


def committed(state: Tensor, factors: Factors, path: Tensor, count: Tensor, indices: Any = None) -> Tensor:
    """The state after the commit kernel; the one given stays as it is."""
    state = state.to(DEVICE, copy=True)
    commit(state, *map(to_device, (factors, path, count, indices)))
    return state.cpu()


@settings(max_examples=6)
@given(kernel_cases(with_pending=False, with_slots=False), exact_configs, exact_configs, st.data())
def test_a_path_has_the_bits_of_one_token_decoding(
    case: Case, config: Config, other: Config, data: st.DataObject
) -> None:
    o, factors, state = run(case, config)
    row = data.draw(st.integers(0, len(case.parents) - 1))
    ids = path_to(case.parents[row], data.draw(st.integers(0, len(case.parents[row]) - 1)))
    outs, made, decoded = decode(case, other, row, ids)
    for i, out, one in zip(ids, outs, made, strict=True):
        assert same_bits(o[row, i], out)
        assert all(same_bits(x[row, i], y[0, 0]) for x, y in zip(factors, one, strict=True))
    rows = Factors(*(x[row : row + 1] for x in factors))
    path, count = torch.tensor([ids]), torch.tensor([len(ids)])
    assert same_bits(committed(state[row : row + 1], rows, path, count), decoded)
    # and fused: what the next verification writes
    then = replace(case.chain(row, ids[:1]), pending=Pending(rows, path, count))
    assert same_bits(run(then, config)[2], decoded)


def first_nodes(case: Case, size: int) -> Case:
    """The same call on the first nodes of its trees."""
    names = ("q", "k", "v", "g", "beta")
    named = {name: None if x is None else x[:, :size] for name in names for x in [getattr(case, name)]}
    rows = [row[:size] for row in case.parents]
    return replace(case, **named, parents=rows, tree=tree_of(rows, size))


@pytest.mark.parametrize(
    ("mode", "decay"),
    [
        ("serial", "channel-mild"),
        ("hybrid", "mild"),
        ("parallel", "none"),
    ],
)
def test_a_fused_commit_has_the_bits_of_a_separate_one_whatever_each_row_accepted(
    mode: str, decay: str
) -> None:
    rows = [list(range(-1, 6)) for _ in range(8)]
    indices = torch.tensor([3, 1, 2, 9, 4, 0, 8, 6])
    case = plain_case(rows, (17, 8), decay=decay, counts=list(range(8)), state_indices=indices)
    case = replace(first_nodes(case, 2), state=torch.randn(10, *case.state.shape[1:]))
    config, pending = MODES[mode], case.pending
    assert pending is not None
    o, factors, state = run(case, config)
    apart = committed(case.state, *pending, indices)
    assert same_bits(state, apart) and same_bits(state[[3, 5, 7]], case.state[[3, 5, 7]])
    o_apart, f_apart, untouched = run(replace(case, state=apart, pending=None), config)
    assert same_bits(untouched, apart)
    if mode != "parallel":
        assert same_bits(o, o_apart) and all(map(same_bits, factors, f_apart))
    else:
        assert rms(o, o_apart.double()) < 1e-5
    assert_same_bits(run(case, config, banks=2), (o, factors, state))


@pytest.mark.parametrize("counts", [None, [0, 3], [6, 1], [0, 0]])
def test_workers_without_a_chain_are_no_hindrance(counts: list[int] | None) -> None:
    case = plain_case(
        [list(range(-1, 5)), [-1, 0, 0]], (8, 20), counts=counts and [min(counts[0], 6), min(counts[1], 2)]
    )
    want = run(case, SERIAL)
    for workers in (2, 8):
        assert_same_bits(run(case, Config("hybrid", 16, 4, workers=workers)), want)
    assert not counters(1, DEVICE).any()  # all arrivals are taken back


@every_mode
@pytest.mark.parametrize("size", [1, 16, 33, 64])
def test_trees_from_one_node_to_the_largest(mode: str, size: int) -> None:
    for shape in ("random", "chain") if size == 64 else ("bushy",):
        parent = random_parent(shape, size, torch.Generator().manual_seed(size))
        heads = (2, 4) if size == 16 else (1, 1)
        case = plain_case([parent], (8, 8), heads, counts=[min(3, len(path_to(parent, size - 1)))])
        assert_near(case, run(case, MODES[mode]), in_double(case).run(naive_gated_delta_verify))


@pytest.mark.parametrize(
    ("config", "dtype", "rule"),
    [
        (SERIAL, torch.bfloat16, {"decay": "channel-mild", "gated": True}),
        (SERIAL._replace(prepared=True), torch.float16, {"gated": True}),
        (HYBRID, torch.bfloat16, {}),
        (HYBRID, torch.float16, {"decay": "channel-mild"}),
    ],
)
def test_low_precision_inputs_are_computed_in_float32(
    config: Config, dtype: torch.dtype, rule: dict[str, Any]
) -> None:
    case = plain_case([[-1, 0, 0, 1]], (17, 16), (1, 2), dtype=dtype, counts=[2], **rule)
    wide = {name: getattr(case, name).float() for name in ("q", "k", "v", "g", "beta")}
    o, factors, state = run(case, config)
    o_wide, f_wide, s_wide = run(replace(case, **wide), config)
    assert o.dtype == dtype and all(map(same_bits, factors, f_wide)) and same_bits(state, s_wide)
    # the interpreter cuts where a GPU rounds
    torch.testing.assert_close(o.float(), o_wide, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3), (torch.float16, 2e-3)]
)
def test_parallel_is_as_near_as_it_says(dtype: torch.dtype, bound: float) -> None:
    for shape in ("random", "chain", "star"):
        parent = random_parent(shape, 24, torch.Generator().manual_seed(1))
        case = plain_case([parent], (64, 32), dtype=dtype, counts=[2])
        o, factors, _ = run(case, PARALLEL)
        want, f_want, _ = in_double(case).run(naive_gated_delta_verify)
        # o is rounded to v's dtype, and the interpreter cuts there
        coarse = 2 if DEVICE.type == "cpu" and dtype == torch.bfloat16 else 1
        assert rms(o, want) < coarse * bound and rms(factors.d, f_want.d) < bound
