"""Bits of elementwise functions and norms must not depend on how much is computed together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from specla.ops.elementwise import elu_plus_one, l2norm, logsigmoid, sigmoid, silu, softplus, sum_norm

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": sigmoid, "silu": silu, "softplus": softplus, "logsigmoid": logsigmoid, "elu_plus_one": elu_plus_one,
    "tanh": torch.tanh,
}  # fmt: skip
REFERENCES = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "logsigmoid": functional.logsigmoid,
    "elu_plus_one": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "tanh": torch.tanh,
}
THREADS = [1, 2]


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_elements_bits_do_not_depend_on_the_length(name: str, threads: int) -> None:
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0)) * 8
    whole = FUNCTIONS[name](x)
    for length in [*range(1, 130), 1000, 32_769, 39_999]:
        assert torch.equal(FUNCTIONS[name](x[:length].clone()), whole[:length]), length
        assert torch.equal(FUNCTIONS[name](x[-length:].clone()), whole[-length:]), length


def test_the_law_can_fail() -> None:
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0)) * 8
    softplus_of_torch = functional.softplus
    whole = softplus_of_torch(x)
    assert any(not torch.equal(softplus_of_torch(x[:n].clone()), whole[:n]) for n in range(1, 130))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_definition(name: str) -> None:
    x = torch.cat([torch.linspace(-60, 60, 1001), torch.tensor([-1e4, 1e4])]).double()
    torch.testing.assert_close(FUNCTIONS[name](x), REFERENCES[name](x), rtol=1e-9, atol=1e-30)
    single = FUNCTIONS[name](x.float())
    torch.testing.assert_close(single.double(), REFERENCES[name](x), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("size", [8, 33, 64, 384, 2048])
@pytest.mark.parametrize(
    "norm",
    [
        "rms_norm",
        "rms_norm without a weight",
        "l2norm",
        "sum_norm",
        "layer_norm",
        "layer_norm without a weight",
    ],
)
def test_a_rows_norm_does_not_depend_on_the_other_rows(norm: str, size: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(200, size, generator=generator), torch.randn(size, generator=generator)

    def run(rows: Tensor) -> Tensor:
        scale = None if norm.endswith("without a weight") else weight
        if norm in ("l2norm", "sum_norm"):
            return l2norm(rows) if norm == "l2norm" else sum_norm(rows)
        if norm.startswith("layer_norm"):
            return functional.layer_norm(rows, (size,), scale, None if scale is None else scale.flip(0))
        return functional.rms_norm(rows, (size,), scale, 1e-6)

    whole = run(x)
    for rows in [*range(1, 40), 64, 199]:
        assert torch.equal(run(x[:rows]), whole[:rows]), rows
        assert torch.equal(run(x[-rows:].clone()), whole[-rows:]), rows


def test_a_sum_norm_divides_by_the_sum_of_magnitudes() -> None:
    x = torch.tensor([[1.0, -3.0], [0.0, 0.0]])
    assert torch.equal(sum_norm(x), torch.tensor([[0.25, -0.75], [0.0, 0.0]]))
