"""RetNet: a fixed decay for each head and rotary positions, nothing corrected (arXiv 2307.08621)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from specla.models.fla_layout import sources
from specla.models.language_model import LanguageModel
from specla.models.layers import blocks
from specla.models.linear_attention import LinearConfig, LinearMixer, linear_attention
from specla.models.past import Rule, TargetPast
from specla.models.source import Source
from specla.ops.attention import rotary

ROPE_THETA = 10000.0
LARGEST_HEAD = 256  # of keys, in the library
RULE = Rule(delta=False, normalise=False)


@dataclass(frozen=True)
class RetNetConfig(LinearConfig):
    """Shape of a RetNet language model."""

    model_type: ClassVar[str] = "retnet"
    architecture: ClassVar[str] = "RetNetForCausalLM"
    channel_decay: ClassVar[bool] = False

    num_heads: int = 8
    expand_v: float = 2.0
    hidden_ratio: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2 or self.head_dim > LARGEST_HEAD:
            raise ValueError(
                f"config.json: hidden_size * expand_k / num_heads must be even and at most {LARGEST_HEAD} for rotary "
                f"positions, got {self.head_dim}"
            )


class RetNet(LanguageModel):
    """The language model in flash-linear-attention's shape."""

    config: RetNetConfig

    def __init__(self, config: RetNetConfig):
        super().__init__(config, blocks(config, partial(RetentionMixer, config)))


class RetentionMixer(LinearMixer):
    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        heads = self.config.num_heads
        q, k, v, gate, _ = self.in_proj(x).split(self.splits, -1)
        q, k = q.unflatten(-1, (heads, -1)), k.unflatten(-1, (self.config.kv_heads, -1))
        q, k = (rotary(self.features(y), past.positions, ROPE_THETA) for y in (q, k))
        g = torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=q.dtype, device=q.device)))
        o = past.delta(
            self.layer, q, self.heads(k.flatten(-2)), self.heads(v), g.expand(q.shape[:3]), None, RULE
        )
        return self.leave(o, gate)


def retnet(config: RetNetConfig, stored: Collection[str]) -> dict[str, Source]:
    """Where the parameters come from."""
    mixer = linear_attention(config, {}, stored)
    return sources(config, lambda layer: mixer)
