"""What GLA and RetNet share: heads that may share keys and values, feature maps, and a gated norm of the outputs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from specla.models.config import FlaConfig, check_bool, check_heads, check_number, check_one_of, check_size
from specla.models.fla_layout import projections
from specla.models.layers import Linear, RMSNorm
from specla.models.source import Shapes
from specla.ops.elementwise import sigmoid, silu
from specla.state import RecurrentSpec

FEATURE_MAPS = {"relu": torch.relu, "sigmoid": sigmoid, "silu": silu, "swish": silu}


@dataclass(frozen=True)
class LinearConfig(FlaConfig):
    """Sizes of linear attention; names are flash-linear-attention's."""

    channel_decay: ClassVar[bool]

    num_heads: int = 4
    num_kv_heads: int | None = None
    expand_k: float = 1.0
    expand_v: float = 1.0
    feature_map: str | None = None
    use_output_gate: bool = True
    elementwise_affine: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("num_heads", self.num_heads)
        if self.num_kv_heads is not None:
            check_size("num_kv_heads", self.num_kv_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"config.json: num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        for name in ("expand_k", "expand_v"):
            check_number(name, getattr(self, name), above=0)
            check_heads(f"hidden_size * {name}", self.hidden_size * getattr(self, name), self.num_heads)
        for name in ("use_output_gate", "elementwise_affine"):
            check_bool(name, getattr(self, name))
        if self.feature_map is not None:
            check_one_of("feature_map", self.feature_map, tuple(FEATURE_MAPS))

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return round(self.hidden_size * self.expand_k) // self.num_heads

    @property
    def head_v_dim(self) -> int:
        return round(self.hidden_size * self.expand_v) // self.num_heads

    @property
    def streams(self) -> dict[str, int]:
        """Channels of queries, keys and values."""
        q, k, v = (
            self.num_heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.head_v_dim,
        )
        return {"q": q, "k": k, "v": v}

    @property
    def window(self) -> int:
        """Width of the short convolution; 1 when there is none."""
        return 1

    @property
    def output_gate(self) -> str:
        return "swish" if self.use_output_gate else "none"


class LinearMixer(nn.Module):
    """Token mixing without its recurrence; `further` channels are projected beside those of q, k, v and gate."""

    def __init__(self, config: LinearConfig, layer: int, further: int = 0):
        super().__init__()
        self.config, self.layer = config, layer
        value_dim = config.num_heads * config.head_v_dim
        self.splits = [*config.streams.values(), value_dim * config.use_output_gate, further]
        self.in_proj = Linear(config.hidden_size, sum(self.splits))
        self.norm: nn.Module = (
            RMSNorm(config.head_v_dim, config.norm_eps)
            if config.elementwise_affine
            else nn.RMSNorm(config.head_v_dim, config.norm_eps, elementwise_affine=False)
        )
        self.o_proj = Linear(value_dim, config.hidden_size)

    def state_spec(self) -> RecurrentSpec:
        """What the layer keeps of a sequence."""
        config = self.config
        heads, channels = config.num_heads, sum(config.streams.values())
        sizes = config.head_dim, config.head_v_dim
        return RecurrentSpec(heads, heads, *sizes, channels, config.window, config.channel_decay)

    def heads(self, x: Tensor) -> Tensor:
        """Keys, values or decays, of which several heads may share one: `[B, T, num_heads, ..]`."""
        x = x.unflatten(-1, (self.config.kv_heads, -1))
        groups = self.config.num_heads // self.config.kv_heads
        return x.repeat_interleave(groups, 2) if groups > 1 else x

    def features(self, x: Tensor) -> Tensor:
        """Queries or keys as the recurrence takes them."""
        return x if self.config.feature_map is None else FEATURE_MAPS[self.config.feature_map](x)

    def leave(self, o: Tensor, gate: Tensor) -> Tensor:
        """Outputs `[B, T, num_heads, V]` to the residual stream."""
        o = self.norm(o).flatten(-2)
        return self.o_proj(o * silu(gate) if self.config.use_output_gate else o)


def linear_attention(config: LinearConfig, further: Shapes, stored: Collection[str]) -> dict[str, Shapes]:
    """Where a mixer's parameters come from, those of `further` channels included.

    The library names the norm by how it computes it: alone, or fused with the gate.
    """
    hidden, value = config.hidden_size, config.num_heads * config.head_v_dim
    sizes = config.streams | ({"g": value} if config.use_output_gate else {})
    parts: dict[str, Shapes] = {
        "in_proj.weight": {**projections(hidden, sizes), **further},
        "o_proj.weight": projections(value, {"o": hidden}),
    }
    if config.elementwise_affine:
        fused = any(name.endswith("attn.g_norm_swish_gate.weight") for name in stored)
        norm = "g_norm_swish_gate" if fused else "g_norm"
        parts["norm.weight"] = {f"{norm}.weight": (config.head_v_dim,)}
    return parts
