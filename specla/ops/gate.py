"""Decay and write strength of a token from the raw projections that a layer makes of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specla.ops.elementwise import sigmoid, softplus


class Gate(NamedTuple):
    """How raw projections a and b become `g = -exp(A_log) softplus(a + dt_bias)` and `beta = beta_scale sigmoid(b)`."""

    A_log: Tensor  # [HV]
    dt_bias: Tensor | None  # [HV], or [HV, K] where the decay is one for each key channel
    beta_scale: float = 1.0  # 2.0 allows negative eigenvalues


def gates(
    g: Tensor | None, beta: Tensor | None, gate: Gate | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """g `[B, N, HV]` or `[B, N, HV, K]` and beta `[B, N, HV]` in `dtype`; with a gate, made there of a and b.

    None stays None, with its meaning: no decay, a beta of 1.

    Raises:
        ValueError: without an `a` for the gate.
    """
    g = None if g is None else g.to(dtype)
    beta = None if beta is None else beta.to(dtype)
    if gate is None:
        return g, beta
    if g is None:
        raise ValueError("a gate computes the decay from g, got None")
    rate, bias = torch.exp(gate.A_log.to(dtype)), gate.dt_bias
    rate = rate[:, None] if g.dim() == 4 else rate
    g = -rate * softplus(g if bias is None else g + bias.to(dtype))
    if beta is not None:
        beta = sigmoid(beta) if gate.beta_scale == 1 else gate.beta_scale * sigmoid(beta)
    return g, beta
