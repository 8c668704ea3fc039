"""Gated linear attention: a decay for each key channel, nothing corrected (arXiv 2312.06635)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from specla.models.config import LARGEST, check_bool, check_number, check_size
from specla.models.fla_layout import short_conv, sources
from specla.models.language_model import LanguageModel
from specla.models.layers import Linear, blocks
from specla.models.linear_attention import LinearConfig, LinearMixer, linear_attention
from specla.models.past import Rule, TargetPast
from specla.models.source import Source
from specla.ops.elementwise import logsigmoid

RANK, NORMALIZER = 16, 16  # of the decay's projection; the library's, not in its configuration
RULE = Rule(delta=False, normalise=False)


@dataclass(frozen=True)
class GLAConfig(LinearConfig):
    """Shape of a GLA language model."""

    model_type: ClassVar[str] = "gla"
    architecture: ClassVar[str] = "GLAForCausalLM"
    channel_decay: ClassVar[bool] = True

    expand_k: float = 0.5
    use_short_conv: bool = False
    conv_size: int = 4
    clamp_min: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("use_short_conv", self.use_short_conv)
        check_size("conv_size", self.conv_size)
        if self.clamp_min is not None:
            check_number("clamp_min", self.clamp_min, above=-LARGEST)
            if self.clamp_min > 0:
                raise ValueError(f"config.json: clamp_min must be at most 0, got {self.clamp_min}")

    @property
    def window(self) -> int:
        return self.conv_size if self.use_short_conv else 1


class GLA(LanguageModel):
    """The language model in flash-linear-attention's shape."""

    config: GLAConfig

    def __init__(self, config: GLAConfig):
        super().__init__(config, blocks(config, partial(GLAMixer, config)))


class GLAMixer(LinearMixer):
    config: GLAConfig

    def __init__(self, config: GLAConfig, layer: int):
        super().__init__(config, layer, RANK)
        streams = config.streams
        taps = torch.empty(sum(streams.values()), config.conv_size)
        self.conv_weight = nn.Parameter(taps) if config.use_short_conv else None
        self.decay_proj = Linear(RANK, streams["k"])
        self.decay_bias = nn.Parameter(torch.zeros(streams["k"]))

    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        config = self.config
        *qkv, gate, low = self.in_proj(x).split(self.splits, -1)
        if self.conv_weight is not None:
            qkv = past.conv(self.layer, torch.cat(qkv, -1), self.conv_weight, None).split(self.splits[:3], -1)
        q, k, v = qkv
        q, k = q.unflatten(-1, (config.num_heads, -1)), self.heads(k)
        g = logsigmoid(self.decay_proj(low) + self.decay_bias) / NORMALIZER
        if config.clamp_min is not None:
            g = g.clamp(min=config.clamp_min)
        o = past.delta(
            self.layer, self.features(q), self.features(k), self.heads(v), self.heads(g), None, RULE
        )
        return self.leave(o, gate)


def gla(config: GLAConfig, stored: Collection[str]) -> dict[str, Source]:
    """Where the parameters come from."""
    keys = config.streams["k"]
    mixer = linear_attention(config, {"gk_proj.0.weight": (RANK, config.hidden_size)}, stored)
    mixer |= {
        "decay_proj.weight": {"gk_proj.1.weight": (keys, RANK)},
        "decay_bias": {"gk_proj.1.bias": (keys,)},
    }
    if config.use_short_conv:
        mixer |= short_conv(config.streams, config.conv_size, bias=False)
    return sources(config, lambda layer: mixer)
