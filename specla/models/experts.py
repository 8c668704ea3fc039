"""A layer of experts: few of many MLPs for each token, and one that all tokens share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specla.models.layers import Linear, SwiGLU, linear
from specla.ops.elementwise import sigmoid, silu


class Experts(nn.Module):
    """Each token reads its `top_k` likeliest experts; `normalise` lets their weights sum to one.

    A token's bits do not depend on which other tokens are there: its experts are added in ascending order.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, width: int, shared_width: int, normalise: bool
    ):
        super().__init__()
        self.top_k, self.normalise = top_k, normalise
        self.router = Linear(hidden_size, num_experts)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))
        self.shared = SwiGLU(hidden_size, shared_width)
        self.shared_gate = Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        share, chosen = self.router(rows).softmax(-1).topk(self.top_k, -1)
        if self.normalise:
            share = share / share.sum(-1, keepdim=True)
        out = sigmoid(self.shared_gate(rows)) * self.shared(rows)
        for expert in chosen.unique().tolist():
            at, place = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, at, self._read(rows[at], expert) * share[at, place, None])
        return out.view(x.shape)

    def _read(self, rows: Tensor, expert: int) -> Tensor:
        dtype = self.router.dtype
        gate, up = linear(rows, self.gate_up_proj[expert], dtype).chunk(2, -1)
        return linear(silu(gate) * up, self.down_proj[expert], dtype)
