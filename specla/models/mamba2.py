"""Mamba-2: a state space per head, which is the gated rule without correction, and no MLP beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specla.models.language_model import LanguageModel
from specla.models.layers import Linear, RMSNorm
from specla.models.mamba2_config import Mamba2Config
from specla.models.past import Rule, TargetPast
from specla.ops.elementwise import silu, softplus
from specla.state import RecurrentSpec

STATE_SPACE = Rule(delta=False, normalise=False, scale=1.0)


class Mamba2(LanguageModel):
    """The language model; heads of a group share keys (B) and queries (C)."""

    config: Mamba2Config

    def __init__(self, config: Mamba2Config):
        super().__init__(config, [Mamba2Block(config, i) for i in range(config.num_hidden_layers)])


class Mamba2Block(nn.Module):
    """Token mixing with a residual around it, which stays in fp32."""

    def __init__(self, config: Mamba2Config, layer: int):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = Mamba2Mixer(config, layer)

    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        return x + self.mixer(self.norm(x), past)


class Mamba2Mixer(nn.Module):
    """Token mixing by `S = exp(dt A) S + dt x B^T`, read with C and skipped past with D."""

    def __init__(self, config: Mamba2Config, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        inner, hidden = config.inner_size, config.hidden_size
        self.splits = [inner, config.conv_dim, config.num_heads]  # gate, xBC, dt
        self.in_proj = Linear(hidden, sum(self.splits))
        self.in_bias = nn.Parameter(torch.zeros(sum(self.splits))) if config.use_bias else None
        self.conv_weight = nn.Parameter(torch.empty(config.conv_dim, config.conv_kernel))
        self.conv_bias = nn.Parameter(torch.zeros(config.conv_dim)) if config.use_conv_bias else None
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.D = nn.Parameter(torch.ones(inner if config.D_has_hdim else config.num_heads))
        self.norm_weight = nn.Parameter(torch.ones(inner)) if config.rmsnorm else None
        self.o_proj = Linear(inner, hidden)
        self.o_bias = nn.Parameter(torch.zeros(hidden)) if config.use_bias else None

    def state_spec(self) -> RecurrentSpec:
        """What the layer keeps of a sequence."""
        config = self.config
        heads, dims = (config.n_groups, config.num_heads), (config.state_size, config.head_dim)
        return RecurrentSpec(*heads, *dims, config.conv_dim, config.conv_kernel)

    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        config = self.config
        projected = self.in_proj(x)
        projected = projected if self.in_bias is None else projected + self.in_bias
        gate, xbc, dt = projected.split(self.splits, -1)
        xbc = past.conv(self.layer, xbc, self.conv_weight, self.conv_bias)
        group = config.n_groups * config.state_size
        v, k, q = xbc.split([config.inner_size, group, group], -1)
        q, k = (y.unflatten(-1, (config.n_groups, config.state_size)) for y in (q, k))
        v = v.unflatten(-1, (config.num_heads, config.head_dim))
        dt = softplus(dt + self.dt_bias).clamp(*config.dt_limit)
        g = -torch.exp(self.A_log) * dt
        o = past.delta(self.layer, q, k, v * dt[..., None], g, None, STATE_SPACE)
        o = self._gated((o + v * self.D.view(config.num_heads, -1)).flatten(-2), silu(gate))
        o = self.o_proj(o)
        return o if self.o_bias is None else o + self.o_bias

    def _gated(self, o: Tensor, gate: Tensor) -> Tensor:
        config = self.config
        if self.norm_weight is None:
            return o * gate
        if not config.norm_before_gate:
            o = o * gate
        size = config.inner_size // config.n_groups
        o = nn.functional.rms_norm(o.unflatten(-1, (-1, size)), (size,), eps=config.norm_eps).flatten(-2)
        return o * self.norm_weight * gate if config.norm_before_gate else o * self.norm_weight
