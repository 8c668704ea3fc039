"""Weights of eight bits: how far their products may be from the exact ones, and where they are not used at all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.models.layers import Linear, quantize_linears
from specla.ops.int8 import FEW, VECTOR, int8_linear, quantize
from tests.drafters.eagles import make_eagle
from tests.targets import make_target

HALF_BIT = 2.0**-9  # relative error of rounding to bfloat16
able = quantize(torch.ones(1, VECTOR)) is not None
needs_int8 = pytest.mark.skipif(not able, reason="this torch multiplies by no weights of eight bits")

sizes = st.tuples(st.integers(1, 40), st.integers(1, 4).map(lambda n: n * VECTOR))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def random_weight(out: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of very different sizes, some of them zero, some with one entry far above the others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, size, generator=generator)
    weight *= 10.0 ** torch.randint(-3, 3, (out, 1), generator=generator)
    weight[torch.rand(out, generator=generator) < 0.2] = 0
    weight[torch.rand(out, generator=generator) < 0.2, 0] *= 50
    return weight.to(dtype)


@needs_int8
@given(sizes, dtypes, st.integers(0, 99))
def test_every_weight_is_off_by_half_a_step_of_its_row_at_most(size, dtype, seed) -> None:
    weight = random_weight(*size, dtype, seed)
    values, scale = quantize(weight)
    assert values.dtype == torch.int8 and values.is_contiguous() and int(values.min()) >= -127
    step = scale.double()[:, None]
    error = (weight.double() - values.double() * step).abs()
    assert bool((error <= step / 2 * (1 + 1e-6)).all())
    largest = weight.double().abs().amax(1)
    assert bool((scale.double() <= largest / 127 * (1 + 2 * HALF_BIT) + 1e-11).all()), (
        "steps are no larger than needed"
    )


@needs_int8
@given(sizes, dtypes, st.lists(st.integers(1, 3), max_size=3), st.integers(0, 99))
def test_a_product_is_off_by_no_more_than_its_weights_and_the_rounding_of_x_explain(
    size, dtype, batch, seed
) -> None:
    out, features = size
    weight = random_weight(out, features, dtype, seed)
    x = torch.randn(*batch, features, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    quantized = quantize(weight)
    got = int8_linear(x, quantized)
    assert got.shape == (*batch, out) and got.dtype == x.dtype
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    half_steps = x.double().abs().sum(-1, keepdim=True) * quantized.scale.double() / 2
    bound = half_steps * 1.01 + 3 * HALF_BIT * (magnitude + half_steps)  # x, the result and sums in float32
    assert bool(((got.double() - exact).abs() <= bound + 1e-6).all())


@needs_int8
@given(sizes, st.integers(0, 99))
def test_rows_of_zeros_give_zeros(size, seed) -> None:
    weight = random_weight(*size, torch.float32, seed)
    weight[0] = 0
    x = torch.randn(3, size[1], generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    got = int8_linear(x, quantize(weight))
    assert bool((got[:, 0] == 0).all()) and bool((got[1] == 0).all()) and bool(got.isfinite().all())


@needs_int8
@given(sizes, st.integers(1, FEW), st.integers(0, 99))
def test_a_row_of_a_view_is_what_it_is_in_a_copy(size, rows, seed) -> None:
    out, features = size
    quantized = quantize(random_weight(out, features, torch.float32, seed))
    wide = torch.randn(rows, 2, features + 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
    view = wide[:, 1, 3:]
    assert torch.equal(int8_linear(view, quantized), int8_linear(view.clone(), quantized))


@pytest.mark.parametrize("features", [1, 7, 8, 31, 33, 48])
def test_weights_that_torch_would_read_past_their_end_stay_as_they_are(features: int) -> None:
    assert quantize(torch.ones(4, features)) is None


def test_float64_asks_for_exactness() -> None:
    assert quantize(torch.ones(4, VECTOR, dtype=torch.float64)) is None


@pytest.mark.parametrize("lacking", ["the op", "a CPU"])
def test_where_torch_cannot_the_weights_stay_as_they_are(lacking: str, monkeypatch) -> None:
    weight = torch.ones(4, VECTOR)
    if lacking == "the op":
        monkeypatch.setattr("specla.ops.int8.torch.ops.aten", object())
    else:
        weight = weight.to("meta")
    assert quantize(weight) is None
    layer = Linear(VECTOR, 4)
    layer.weight.data = torch.ones(4, VECTOR)
    expected = layer(torch.ones(2, VECTOR))
    if lacking == "the op":
        quantize_linears(layer)
        assert layer.int8 is None and torch.equal(layer(torch.ones(2, VECTOR)), expected)


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_few_rows_are_multiplied_in_eight_bits_and_more_by_the_weight_itself(dtype: torch.dtype) -> None:
    layer = Linear(2 * VECTOR, 9)
    layer.weight.data = random_weight(9, 2 * VECTOR, dtype, 3)
    quantize_linears(layer)
    for shape in ((1,), (FEW,), (3, 4), (FEW + 1,), (4, 4), (40,)):
        x = torch.randn(*shape, 2 * VECTOR, generator=torch.Generator().manual_seed(0))
        got = layer(x)
        assert got.dtype == torch.float32 and got.shape == (*shape, 9)
        if math.prod(shape) <= FEW:
            assert torch.equal(got, int8_linear(x, layer.int8))
        else:
            exact = torch.nn.functional.linear(x.to(dtype), layer.weight)
            assert torch.equal(got, exact.float())


@needs_int8
def test_every_linear_of_a_drafter_that_can_be_is_quantised_and_nothing_else() -> None:
    network = make_eagle(make_target(), "delta", dtype=torch.float32)
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    quantize_linears(network)
    linears = [part for part in network.modules() if isinstance(part, Linear)]
    assert [part.int8 is not None for part in linears] == [
        part.weight.shape[1] % VECTOR == 0 for part in linears
    ]
    assert network.lm_head.int8 is not None
    assert all(torch.equal(weight, before[name]) for name, weight in network.named_parameters())
