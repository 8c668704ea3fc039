"""Laws of the gate: its formulas, and that computing it inside a call changes no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from specla.ops import Gate, gated_delta_verify
from specla.ops.elementwise import sigmoid, softplus
from specla.ops.gate import gates
from specla.ops.naive import naive_gated_delta_verify
from specla.tree import Tree
from tests.ops.strategies import MODES, Case, cases, close, same_bits


def projections(*channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Gate]:
    """a, b and the gate of 3 heads."""
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 3, *channels, generator=rng) * 4, torch.randn(2, 5, 3, generator=rng) * 4
    gate = Gate(torch.randn(3, generator=rng), torch.randn(3, *channels, generator=rng), 2.0)
    return a.to(dtype), b.to(dtype), gate


def test_without_a_gate_only_the_dtype_changes() -> None:
    a, b, _ = projections()
    g, beta = gates(a, b, None, torch.float64)
    assert g is not None and same_bits(g, a.double()) and beta is not None and same_bits(beta, b.double())
    assert gates(None, None, None, torch.float32) == (None, None)


@pytest.mark.parametrize("channels", [(), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_has_the_bits_of_a_layer_that_computes_it(
    channels: tuple[int, ...], dtype: torch.dtype
) -> None:
    a, b, gate = projections(*channels, dtype=dtype)
    assert gate.dt_bias is not None
    rate = gate.A_log.exp().view(3, *[1] * len(channels))
    for scale in (1.0, 2.0):
        g, beta = gates(a, b, gate._replace(beta_scale=scale), torch.float32)
        assert g is not None and same_bits(g, -rate * softplus(a.float() + gate.dt_bias))
        assert beta is not None and same_bits(beta, scale * sigmoid(b.float()))
    g, beta = gates(a, None, gate._replace(dt_bias=None), torch.float32)
    assert g is not None and same_bits(g, -rate * softplus(a.float())) and beta is None


def test_a_gate_of_one_token_has_the_bits_of_many() -> None:
    a, b, gate = projections(7)
    g, beta = gates(a, b, gate, torch.float32)
    assert g is not None and beta is not None
    for t in range(5):
        g_t, beta_t = gates(a[:1, t : t + 1], b[:1, t : t + 1], gate, torch.float32)
        assert g_t is not None and same_bits(g_t[0, 0], g[0, t])
        assert beta_t is not None and same_bits(beta_t[0, 0], beta[0, t])


def test_large_projections_neither_overflow_nor_vanish() -> None:
    a = torch.tensor([-200.0, 0, 200])[None, :, None]
    g, _ = gates(a, None, Gate(torch.zeros(1), None), torch.float32)
    assert g is not None
    close(g.flatten(), torch.tensor([0, -(torch.tensor(2.0).log()), -200.0]), 1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(case=cases(torch.float32, poisoned=True))
def test_a_call_with_a_gate_has_the_bits_of_the_gate_and_then_the_call(mode: str, case: Case) -> None:
    assume(case.gate is not None)
    g, beta = gates(case.g, case.beta, case.gate, torch.float32)
    o, factors, state = case.run(gated_delta_verify, mode=mode)
    o_then, f_then, state_then = replace(case, g=g, beta=beta, gate=None).run(gated_delta_verify, mode=mode)
    assert same_bits(o, o_then) and same_bits(state, state_then)
    assert all(same_bits(x, y) for x, y in zip(factors, f_then, strict=True))
    assert g is not None and same_bits(factors.g[case.real], g[case.real])


@pytest.mark.parametrize("op", [gated_delta_verify, naive_gated_delta_verify])
def test_a_gate_without_a_projection_is_refused(op: object) -> None:
    x = torch.zeros(1, 1, 1, 2)
    call = {"q": x, "k": x, "v": x, "g": None, "beta": x[..., 0], "gate": Gate(torch.zeros(1), None)}
    with pytest.raises(ValueError, match="got None"):
        op(**call, tree=Tree.chain(1), state=torch.zeros(1, 1, 2, 2))  # type: ignore[operator]
    with pytest.raises(ValueError, match="got None"):
        gates(None, None, Gate(torch.zeros(1), None), torch.float32)
