"""Kimi Delta Attention: the gated delta rule with a decay for each key channel, made by a projection of low rank."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from specla.models.kda_config import KDAConfig
from specla.models.language_model import LanguageModel
from specla.models.layers import Linear, RMSNorm, blocks
from specla.models.past import TargetPast
from specla.ops.elementwise import sigmoid, silu, softplus
from specla.state import RecurrentSpec


class KDA(LanguageModel):
    """The language model in flash-linear-attention's shape, with softmax attention where the configuration says so."""

    config: KDAConfig

    def __init__(self, config: KDAConfig):
        super().__init__(config, blocks(config, partial(KDAMixer, config)))


class KDAMixer(nn.Module):
    """Token mixing by the rule; the first halves of both projections of low rank are rows of the one that reads x."""

    def __init__(self, config: KDAConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        self.conv_dim = 2 * config.key_dim + config.value_dim
        heads, narrow = config.value_heads, config.head_v_dim
        self.splits = [self.conv_dim, narrow, heads, narrow]  # qkv, decay, beta, gate
        self.in_proj = Linear(config.hidden_size, sum(self.splits))
        self.conv_weight = (
            nn.Parameter(torch.empty(self.conv_dim, config.conv_size)) if config.use_short_conv else None
        )
        self.decay_proj = Linear(narrow, heads * config.head_dim)
        self.gate_proj = Linear(narrow, config.value_dim)
        self.gate_bias = nn.Parameter(torch.zeros(config.value_dim)) if config.gate_bias else None
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * config.head_dim))
        self.norm = RMSNorm(config.head_v_dim, config.norm_eps)
        self.o_proj = Linear(config.value_dim, config.hidden_size)

    def state_spec(self) -> RecurrentSpec:
        """What the layer keeps of a sequence."""
        config = self.config
        heads, dims = (config.num_heads, config.value_heads), (config.head_dim, config.head_v_dim)
        return RecurrentSpec(*heads, *dims, self.conv_dim, config.window, channel_decay=True)

    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        config = self.config
        qkv, f, b, z = self.in_proj(x).split(self.splits, -1)
        if self.conv_weight is not None:
            qkv = past.conv(self.layer, qkv, self.conv_weight, None)
        else:
            qkv = silu(qkv)
        q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], -1)
        q, k = (y.unflatten(-1, (config.num_heads, config.head_dim)) for y in (q, k))
        v = v.unflatten(-1, (config.value_heads, config.head_v_dim))
        beta = 2.0 * sigmoid(b) if config.allow_neg_eigval else sigmoid(b)
        o = self.norm(past.delta(self.layer, q, k, v, self._decay(f), beta))
        z = self.gate_proj(z)
        z = z if self.gate_bias is None else z + self.gate_bias
        return self.o_proj(o.flatten(-2) * sigmoid(z))

    def _decay(self, f: Tensor) -> Tensor:
        """Log-decay `[B, T, HV, K]`, with a lower bound if the configuration has one."""
        f = (self.decay_proj(f) + self.dt_bias).unflatten(-1, (self.config.value_heads, -1))
        rate = torch.exp(self.A_log)[:, None]
        if self.config.lower_bound is None:
            return -rate * softplus(f)
        return self.config.lower_bound * sigmoid(rate * f)
