"""A layer of experts: few of many MLPs for each token, and one that all tokens share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specla.models.layers import Linear, SwiGLU, linear
from specla.ops.elementwise import sigmoid, silu


class SoftmaxRouter(Linear):
    """Chooses the `top_k` likeliest of all experts; `normalise` lets their weights sum to one."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, normalise: bool):
        super().__init__(hidden_size, num_experts)
        self.top_k, self.normalise = top_k, normalise

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers `[T, top_k]` of each token's experts."""
        share, chosen = self(rows).softmax(-1).topk(self.top_k, -1)
        return (share / share.sum(-1, keepdim=True) if self.normalise else share), chosen


class SigmoidRouter(Linear):
    """Chooses the best `top_k` of the experts in the `top_groups` best groups, by a sigmoid and a bias for each expert.

    A group is as good as its two best experts. The bias has no part in the weights, which are `scaling` times the
    sigmoids, or with `normalise` their shares.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, groups: int, top_groups: int, normalise: bool,
        scaling: float,
    ):  # fmt: skip
        super().__init__(hidden_size, num_experts)
        self.top_k, self.groups, self.top_groups = top_k, groups, top_groups
        self.normalise, self.scaling = normalise, scaling
        self.choice_bias = nn.Parameter(torch.zeros(num_experts))

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers `[T, top_k]` of each token's experts."""
        scores = sigmoid(self(rows))
        merit = (scores + self.choice_bias).unflatten(-1, (self.groups, -1))
        best = merit.topk(2, -1).values.sum(-1).topk(self.top_groups, -1).indices
        kept = torch.zeros_like(merit[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        merit = merit.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        chosen = merit.topk(self.top_k, -1).indices
        share = scores.gather(-1, chosen)
        if self.normalise:
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return share * self.scaling, chosen


class Experts(nn.Module):
    """Each token reads the experts that the router chooses, and a shared one, behind a gate of its own if `gated`.

    A token's bits do not depend on which other tokens are there: its experts are added in ascending order.
    """

    def __init__(
        self,
        router: SoftmaxRouter | SigmoidRouter,
        hidden_size: int,
        width: int,
        shared_width: int,
        gated: bool,
    ):
        super().__init__()
        num_experts = router.weight.shape[0]
        self.router = router
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))
        self.shared = SwiGLU(hidden_size, shared_width)
        self.shared_gate = Linear(hidden_size, 1) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        share, chosen = self.router.choose(rows)
        out = self.shared(rows)
        if self.shared_gate is not None:
            out = sigmoid(self.shared_gate(rows)) * out
        for expert in chosen.unique().tolist():
            at, place = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, at, self._read(rows[at], expert) * share[at, place, None])
        return out.view(x.shape)

    def _read(self, rows: Tensor, expert: int) -> Tensor:
        dtype = self.router.dtype
        gate, up = linear(rows, self.gate_up_proj[expert], dtype).chunk(2, -1)
        return linear(silu(gate) * up, self.down_proj[expert], dtype)
