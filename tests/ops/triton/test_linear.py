"""Laws of the product of few rows: the product itself, and that a row does not notice its neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specla.ops import triton as kernels
from specla.ops.linear import PROMPT, row_invariant_linear
from specla.ops.triton import linear as module
from specla.ops.triton.counters import counters
from specla.ops.triton.linear import linear, splits
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


def test_views_and_no_rows() -> None:
    x, weight = drawn(0, 6, 100), drawn(1, 40, 100)
    assert same_bits(
        linear(x[::2, 20:], weight[:, 20:]), linear(x[::2, 20:].contiguous(), weight[:, 20:].contiguous())
    )
    assert linear(x[:0], weight).shape == (0, 40)


def test_a_split_is_a_matter_of_the_weight_and_leaves_its_counters_at_zero() -> None:
    assert (
        splits(32000, 2048) == 1
        and splits(2048, 2048) == 8
        and splits(40, 200) == 1
        and splits(64, 1024) == 4
    )
    x, weight = drawn(0, 3, 1024), drawn(1, 130, 1024)
    first = linear(x, weight)
    assert splits(130, 1024) > 1 and not counters(3, x.device).any()
    assert same_bits(linear(x, weight), first)


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
    x, weight = drawn(0, 200, shape[1], dtype=dtype), drawn(1, *shape, dtype=dtype)
    whole = linear(x, weight)
    error = (whole.double() - x.double() @ weight.double().t()).norm() / whole.double().norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 1e-6)
    for rows in (1, 2, 5, 16, 17, 32, 33, 64, 65, 128):
        for first in (0, 3, 71):
            assert same_bits(linear(x[first : first + rows], weight), whole[first : first + rows])
