"""Laws of the product of few rows: the product itself, and that a row does not notice its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.ops import triton as kernels
from specla.ops.linear import PROMPT, row_invariant_linear
from specla.ops.triton import linear as module
from specla.ops.triton.counters import counters
from specla.ops.triton.linear import linear, linear_parts, quantize, splits, swiglu
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE, full_size


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@settings(max_examples=12)
@given(st.integers(1, 150), st.integers(1, 900), st.integers(1, 70), st.integers(0, 99))
def test_the_product(out_features: int, in_features: int, rows: int, seed: int) -> None:
    x, weight = drawn(seed, rows, in_features), drawn(seed + 1, out_features, in_features)
    close = {"rtol": 1e-5, "atol": 1e-5 * in_features**0.5}
    torch.testing.assert_close(linear(x, weight).double(), x.double() @ weight.double().t(), **close)


@settings(max_examples=12)
@given(st.integers(1, 100), st.integers(1, 900), st.integers(1, 70), st.integers(0, 99))
def test_swiglu_is_made_of_gate_and_up(width: int, in_features: int, rows: int, seed: int) -> None:
    x, weight = drawn(seed, rows, in_features), drawn(seed + 1, 2 * width, in_features) / in_features**0.5
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    torch.testing.assert_close(swiglu(x, weight).double(), gate.sigmoid() * gate * up, rtol=1e-5, atol=1e-5)


@settings(max_examples=12)
@given(st.integers(1, 100), st.integers(1, 900), st.integers(1, 40), st.integers(0, 99))
def test_seven_bits_stand_for_the_weight_that_they_name(
    width: int, in_features: int, rows: int, seed: int
) -> None:
    x, weight = drawn(seed, rows, in_features), drawn(seed + 1, 2 * width, in_features) / in_features**0.5
    narrow = quantize(weight)
    named = (narrow.values.double() - 64) * narrow.scale.double()[:, None]
    assert ((named - weight.double()).abs() <= 0.501 * narrow.scale.double()[:, None]).all()
    for dtype in (torch.float32,) if DEVICE.type == "cpu" else (torch.float32, torch.bfloat16):
        x, out = x.to(dtype), x.new_empty(rows, 2 * width)
        expected = x.double() @ named.t()
        torch.testing.assert_close(linear(x, narrow, out).double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(linear_parts(x, narrow).sum(0), out, rtol=1e-5, atol=1e-5)
        gate, up = expected.chunk(2, -1)
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
        torch.testing.assert_close(swiglu(x, narrow).double(), gate.sigmoid() * gate * up, **close)


@settings(max_examples=12)
@given(
    st.integers(1, 150), st.sampled_from([1, 63, 300, 520, 900, 2100]), st.integers(1, 70), st.integers(0, 99)
)
def test_parts_add_up_in_their_order_to_the_bits_of_the_product(
    out_features: int, in_features: int, rows: int, seed: int
) -> None:
    x, weight = drawn(seed, rows, in_features), drawn(seed + 1, out_features, in_features)
    parts = linear_parts(x, weight)
    assert parts.shape == (splits(out_features, in_features), rows, out_features) and parts.is_contiguous()
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    assert same_bits(whole, linear(x, weight))


def test_each_part_is_the_product_of_inputs_of_its_own() -> None:
    """2100 inputs in eight parts of a multiple of 64: the last part has none."""
    x, weight = drawn(0, 3, 2100), drawn(1, 70, 2100)
    parts, step = linear_parts(x, weight), 320
    assert len(parts) == 8 and not parts[-1].any()
    for number, part in enumerate(parts):
        own = slice(number * step, (number + 1) * step)
        torch.testing.assert_close(
            part.double(), x[:, own].double() @ weight[:, own].double().t(), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("form", [linear, swiglu, linear_parts])
def test_views_and_no_rows(form: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = drawn(0, 6, 600), drawn(1, 40, 600)
    got = form(x[::2, 20:], weight[:, 20:])
    assert same_bits(got, form(x[::2, 20:].contiguous(), weight[:, 20:].contiguous()))
    assert form(x[:0], weight).shape[-2:] == (0, got.shape[-1])


@pytest.mark.parametrize("form", [linear, swiglu, linear_parts])
def test_a_row_that_is_not_finite_spoils_itself_alone(form: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = drawn(0, 5, 600), drawn(1, 40, 600)
    clean = form(x, weight)
    x[2, 599] = torch.nan
    got = form(x, weight)
    others = [0, 1, 3, 4]
    assert got[..., 2, :].isnan().any() and same_bits(got[..., others, :], clean[..., others, :])


def test_a_product_goes_where_it_is_told_to_go() -> None:
    """Into rows that lie apart, in another dtype, and nowhere else."""
    x, weight = drawn(0, 3, 600, dtype=torch.float16), drawn(1, 40, 600, dtype=torch.float16)
    whole = torch.full((3, 50), -77.0, device=DEVICE)
    out = whole[:, 4:44]
    assert linear(x, weight, out) is out
    assert (whole[:, :4] == -77).all() and (whole[:, 44:] == -77).all()
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


def test_a_split_is_a_matter_of_the_weight_and_leaves_its_counters_at_zero() -> None:
    assert (
        splits(32000, 2048) == 1
        and splits(2048, 2048) == 8
        and splits(40, 200) == 1
        and splits(64, 1024) == 4
    )
    x, weight = drawn(0, 3, 1024), drawn(1, 130, 1024) / 32
    for form in (linear, swiglu):
        first = form(x, weight)
        assert splits(130, 1024) > 1 and not counters(3, x.device).any()
        assert same_bits(form(x, weight), first)


def test_ops_multiply_by_the_kernel_unless_a_prompt_or_a_gradient_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "use_kernels", lambda state: True)
    seen: list[tuple[int, ...]] = []

    def spy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return linear(x, weight)

    monkeypatch.setattr(module, "linear", spy)
    x, weight = drawn(0, 2, 3, 24), drawn(1, 10, 24)
    want = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(row_invariant_linear(x, weight), want, rtol=1e-5, atol=1e-5)
    assert seen == [(6, 24)] and row_invariant_linear(x.half(), weight).dtype == torch.float16
    del seen[:]
    row_invariant_linear(x, weight.clone().requires_grad_())
    row_invariant_linear(x[:1, :1].expand(1, PROMPT + 1, 24), weight)
    assert not seen


@full_size
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8192, 2048), (2048, 5632), (32000, 2048), (704, 256)])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = drawn(0, 200, shape[1], dtype=dtype), drawn(1, *shape, dtype=dtype) / shape[1] ** 0.5
    product = x.double() @ weight.double().t()
    gate, up = product.chunk(2, -1)
    parts = linear_parts(x, weight)
    torch.testing.assert_close(parts.double().sum(0), product, rtol=1e-4, atol=1e-5)
    for form, want in (
        (linear, product),
        (swiglu, gate.sigmoid() * gate * up),
        (linear_parts, parts.double()),
    ):
        whole = form(x, weight)
        error = (whole.double() - want).norm() / want.norm()
        assert error < (3e-3 if whole.dtype == torch.bfloat16 else 1e-6)
        for rows in (1, 2, 5, 16, 17, 32, 33, 64, 65, 128):
            for first in (0, 3, 71):
                own = slice(first, first + rows)
                assert same_bits(form(x[own], weight), whole[..., own, :])
