"""What makes exactness possible: a row's matrix product has the same bits alone and among others."""

from __future__ import annotations

import pytest
import torch

from specla.ops import linear
from specla.ops.linear import row_invariant_linear


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"]
)
@pytest.mark.parametrize("shape", [(32, 32), (104, 32), (80, 32), (32, 40), (48, 33), (384, 96), (130, 300)])
def test_a_rows_product_does_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The exact products are zero: what is left is the rounding of the sum's order, which bf16 would often hide."""
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(1)
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    weight = torch.randn(out_features, half, generator=generator)
    x = torch.randn(40, half, generator=generator)
    x = x * 2.0 ** torch.randint(-6, 7, x.shape, generator=generator)
    odd = in_features % 2
    weight = torch.cat([weight, weight[:, order], weight.new_ones(out_features, odd)], 1).to(dtype)
    x = torch.cat([x, -x[:, order], x.new_zeros(40, odd)], 1).to(dtype)
    alone = torch.cat([row_invariant_linear(row[None], weight) for row in x])
    assert (alone != 0).float().mean() > 0.2, "the sums leave no trace of their order"
    for rows in range(1, 41):
        assert torch.equal(row_invariant_linear(x[:rows], weight), alone[:rows]), rows
    shuffled = torch.randperm(40, generator=generator)
    assert torch.equal(row_invariant_linear(x[shuffled], weight), alone[shuffled])


def test_where_a_rows_place_matters_rows_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "least_rows", lambda *_: 0)
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(37, 16, generator=generator)
    got = row_invariant_linear(x, weight)
    torch.testing.assert_close(got, x @ weight.t())
    assert torch.equal(got, torch.cat([row_invariant_linear(row[None], weight) for row in x]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_threads_keep_the_law(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        test_a_rows_product_does_not_depend_on_the_rows_beside_it((1548, 384), dtype)
        test_a_rows_product_does_not_depend_on_the_rows_beside_it((384, 704), dtype)
    finally:
        torch.set_num_threads(before)
