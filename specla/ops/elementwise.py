"""Elementwise functions whose bits do not depend on how many elements are computed together.

torch's own silu, sigmoid and softplus round differently in a vector's tail than in its body, so that a token verified
among sixteen would not equal the same token decoded alone. exp, log1p, tanh, sqrt, rsqrt and the four operations do
not.
"""

from __future__ import annotations

import torch
from torch import Tensor

L2_EPS = 1e-6  # of queries and keys


def sigmoid(x: Tensor) -> Tensor:
    return torch.reciprocal(1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` without overflow."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def logsigmoid(x: Tensor) -> Tensor:
    return -softplus(-x)


def elu_plus_one(x: Tensor) -> Tensor:
    """`x + 1` above 0, `exp(x)` below."""
    return torch.where(x >= 0, x + 1, torch.exp(x.clamp(max=0)))


def sum_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sum(|x|)` over the last dimension."""
    return x / x.abs().sum(-1, keepdim=True).clamp(min=eps)


def l2norm(x: Tensor, eps: float = L2_EPS) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)
