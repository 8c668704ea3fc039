"""Laws of the norms between layers: sums in a fixed order, rounded once, each row for itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.ops.triton.norm import add_norm, embed_norm, gated_norm
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE, full_size

GARBAGE = -77.0
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
EPS = 1e-5


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def naive(x: Tensor, weight: Tensor) -> Tensor:
    """The norm of each row in float64."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check(got: Tensor, want: Tensor) -> None:
    tol = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[got.dtype]  # the interpreter cuts where a GPU rounds
    torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol / 8)


def tap_of(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A view of rows that lie apart, and all that it is a view of."""
    whole = torch.full((rows, size + 5), GARBAGE, dtype=dtype, device=DEVICE)
    return whole[:, 3 : 3 + size], whole


def check_tap(tap: Tensor, whole: Tensor, stream: Tensor) -> None:
    torch.testing.assert_close(tap.float(), stream, rtol=2**-7 if tap.dtype == torch.bfloat16 else 0, atol=0)
    assert (whole[:, :3] == GARBAGE).all() and (whole[:, 3 + tap.shape[1] :] == GARBAGE).all()


@settings(max_examples=10)
@given(st.integers(1, 6), st.sampled_from([1, 7, 32, 100, 257]), DTYPES, DTYPES, st.integers(0, 99))
def test_the_stream_begins_with_embeddings(
    rows: int, size: int, dtype: torch.dtype, tapped: torch.dtype, seed: int
) -> None:
    table, weight = drawn(seed, 9, size, dtype=dtype), drawn(seed + 1, size)
    tokens = torch.randint(9, (rows,), generator=torch.Generator().manual_seed(seed)).int().to(DEVICE)
    tap, whole = tap_of(rows, size, tapped)
    stream, x = embed_norm(tokens, table, weight, EPS, tap)
    assert x.dtype == dtype and same_bits(stream, table[tokens.long()].float())
    check(x, naive(stream, weight))
    check_tap(tap, whole, stream)
    for got, want in zip(embed_norm(tokens, table, weight, EPS), (stream, x), strict=True):
        assert same_bits(got, want)


@settings(max_examples=10)
@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([1, 7, 32, 100, 257]),
    DTYPES,
    DTYPES,
    st.integers(0, 99),
)
def test_parts_are_added_in_their_order_before_the_stream(
    rows: int, number: int, size: int, dtype: torch.dtype, tapped: torch.dtype, seed: int
) -> None:
    stream, parts, weight = (
        drawn(seed, rows, size),
        drawn(seed + 1, number, rows, size),
        drawn(seed + 2, size),
    )
    want = parts[0].clone()
    for part in parts[1:]:
        want += part
    want = stream + want
    before, kept = stream.clone(), parts.clone()
    tap, whole = tap_of(rows, size, tapped)
    x = add_norm(stream, parts, weight, EPS, dtype, tap)
    assert same_bits(stream, want) and same_bits(parts, kept) and x.dtype == dtype
    check(x, naive(want, weight))
    check_tap(tap, whole, want)
    for row in range(rows):
        alone = before[row : row + 1].clone()
        y = add_norm(alone, parts[:, row : row + 1].contiguous(), weight, EPS, dtype)
        assert same_bits(alone[0], stream[row]) and same_bits(y[0], x[row])


@settings(max_examples=12)
@given(
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 5, 8, 64, 100]), DTYPES,
    st.sampled_from([None, "silu", "sigmoid"]), st.integers(0, 99),
)  # fmt: skip
def test_heads_are_normed_and_gated(
    rows: int, heads: int, size: int, dtype: torch.dtype, activation: str | None, seed: int
) -> None:
    o, weight = drawn(seed, rows, heads, size, dtype=dtype), drawn(seed + 1, size)
    gate = drawn(seed + 2, rows, heads * size + 9, dtype=dtype)[:, 4 : 4 + heads * size]
    want = naive(o, weight).flatten(1)
    if activation:
        g = gate.double()
        want *= g.sigmoid() if activation == "sigmoid" else g * g.sigmoid()
    given_gate = gate if activation else None
    groups = 2 if rows % 2 == 0 else 1
    wide = o.new_zeros(groups, rows // groups + 1, heads, size)  # as the last nodes of some trees lie
    wide[:, 1:] = o.unflatten(0, (groups, -1))
    grouped = None if given_gate is None else given_gate.unflatten(0, (groups, -1))
    y = gated_norm(wide[:, 1:], grouped, weight, EPS, activation == "sigmoid", dtype)
    assert y.shape == (rows, heads * size) and y.dtype == dtype
    check(y, want)
    for row in range(rows):
        one = None if given_gate is None else given_gate[None, row : row + 1]
        alone = gated_norm(o[None, row : row + 1], one, weight, EPS, activation == "sigmoid", dtype)
        assert same_bits(alone[0], y[row])


def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    stream, parts, weight = drawn(0, 3, 40), drawn(1, 2, 3, 40), drawn(2, 40)
    clean = add_norm(stream.clone(), parts, weight, EPS, torch.float32)
    parts[1, 1, 7] = torch.nan
    x = add_norm(stream, parts, weight, EPS, torch.float32)
    assert same_bits(x[::2], clean[::2]) and x[1].isnan().all()


def test_a_stream_of_zeros_stays_finite() -> None:
    zeros = torch.zeros(2, 16, device=DEVICE)
    assert not add_norm(zeros, zeros[None].clone(), zeros[0] + 1, EPS, torch.float32).any()
    assert not gated_norm(zeros[None, None], None, zeros[0] + 1, EPS, False, torch.float32).any()


def test_no_rows_are_no_work() -> None:
    weight = drawn(0, 16)
    stream, x = embed_norm(torch.empty(0, dtype=torch.int32, device=DEVICE), drawn(0, 4, 16), weight, EPS)
    assert stream.shape == x.shape == (0, 16)
    assert add_norm(stream, stream[None], weight, EPS, torch.bfloat16).shape == (0, 16)
    assert gated_norm(stream.view(0, 1, 2, 8), None, weight[:8], EPS, False, torch.bfloat16).shape == (0, 16)


@full_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1024, 2048, 5120])
def test_full_sizes(size: int, dtype: torch.dtype) -> None:
    rows, weight = 70, drawn(0, size)
    stream, parts = drawn(1, rows, size), drawn(2, 8, rows, size)
    want = stream + (
        ((((((parts[0] + parts[1]) + parts[2]) + parts[3]) + parts[4]) + parts[5]) + parts[6]) + parts[7]
    )
    tap, whole = tap_of(rows, size, dtype)
    x = add_norm(stream, parts, weight, EPS, dtype, tap)
    assert same_bits(stream, want)
    check(x, naive(want, weight))
    check_tap(tap, whole, want)
    o, gate, heads = (
        drawn(3, rows, size // 128, 128, dtype=dtype),
        drawn(4, rows, size, dtype=dtype),
        drawn(5, 128),
    )
    g = gate.double()
    check(
        gated_norm(o[None], gate[None], heads, EPS, False, dtype),
        naive(o, heads).flatten(1) * g * g.sigmoid(),
    )
    table, tokens = (
        drawn(6, 3000, size, dtype=dtype),
        torch.arange(0, 3000, 43, dtype=torch.int32, device=DEVICE),
    )
    start, x = embed_norm(tokens, table, weight, EPS)
    assert same_bits(start, table[::43].float())
    check(x, naive(start, weight))


@full_size
def test_there_may_be_more_rows_than_a_grid_has_along_its_second_axis() -> None:
    o, gate, weight = drawn(0, 70_000, 2, 8), drawn(1, 70_000, 16), drawn(2, 8)
    check(
        gated_norm(o[None], gate[None], weight, EPS, True, torch.float32),
        naive(o, weight).flatten(1) * gate.double().sigmoid(),
    )
