"""DeltaNet: the delta rule without decay (arXiv 2406.06484)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from specla.models.config import FlaConfig, check_bool, check_heads, check_number, check_one_of, check_size
from specla.models.fla_layout import projections, short_conv, sources
from specla.models.language_model import LanguageModel
from specla.models.layers import Linear, RMSNorm, blocks
from specla.models.past import Rule, TargetPast
from specla.models.source import Shapes, Source
from specla.ops.elementwise import elu_plus_one, sigmoid, silu, sum_norm
from specla.state import RecurrentSpec

QK_ACTIVATIONS = {"silu": silu, "relu": torch.relu, "elu": elu_plus_one, "identity": lambda x: x}
QK_NORMS = ("l2", "sum")


@dataclass(frozen=True)
class DeltaNetConfig(FlaConfig):
    """Shape of a DeltaNet language model."""

    model_type: ClassVar[str] = "delta_net"
    architecture: ClassVar[str] = "DeltaNetForCausalLM"

    num_heads: int = 16
    expand_k: float = 1.0
    expand_v: float = 1.0
    use_gate: bool = False
    use_short_conv: bool = True
    conv_size: int = 4
    use_beta: bool = True
    allow_neg_eigval: bool = False
    qk_norm: str = "l2"
    qk_activation: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "conv_size"):
            check_size(name, getattr(self, name))
        for name in ("use_gate", "use_short_conv", "use_beta", "allow_neg_eigval"):
            check_bool(name, getattr(self, name))
        for name in ("expand_k", "expand_v"):
            check_number(name, getattr(self, name), above=0)
            check_heads(f"hidden_size * {name}", self.hidden_size * getattr(self, name), self.num_heads)
        check_one_of("qk_norm", self.qk_norm, QK_NORMS)
        check_one_of("qk_activation", self.qk_activation, tuple(QK_ACTIVATIONS))

    @property
    def key_dim(self) -> int:
        return round(self.hidden_size * self.expand_k)

    @property
    def value_dim(self) -> int:
        return round(self.hidden_size * self.expand_v)

    @property
    def output_gate(self) -> str:
        return "swish" if self.use_gate else "none"


class DeltaNet(LanguageModel):
    """The language model in flash-linear-attention's shape."""

    config: DeltaNetConfig

    def __init__(self, config: DeltaNetConfig):
        super().__init__(config, blocks(config, partial(DeltaNetMixer, config)))


class DeltaNetMixer(nn.Module):
    def __init__(self, config: DeltaNetConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        self.head_v_dim = config.value_dim // config.num_heads
        self.conv_dim = 2 * config.key_dim + config.value_dim
        betas, gate = config.num_heads * config.use_beta, config.value_dim * config.use_gate
        self.splits = [self.conv_dim, betas, gate]
        self.in_proj = Linear(config.hidden_size, sum(self.splits))
        taps = torch.empty(self.conv_dim, config.conv_size)
        self.conv_weight = nn.Parameter(taps) if config.use_short_conv else None
        self.norm = RMSNorm(self.head_v_dim, config.norm_eps)
        self.o_proj = Linear(config.value_dim, config.hidden_size)
        self.rule = Rule(normalise=config.qk_norm == "l2")

    def state_spec(self) -> RecurrentSpec:
        """What the layer keeps of a sequence."""
        config = self.config
        heads, key_size = config.num_heads, config.key_dim // config.num_heads
        window = config.conv_size if config.use_short_conv else 1
        return RecurrentSpec(heads, heads, key_size, self.head_v_dim, self.conv_dim, window)

    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        config = self.config
        qkv, b, gate = self.in_proj(x).split(self.splits, -1)
        alike = config.qk_activation == "silu"  # q, k and v
        if self.conv_weight is not None:
            qkv = past.conv(self.layer, qkv, self.conv_weight, None, "silu" if alike else None)
        elif alike:
            qkv = silu(qkv)
        q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], -1)
        if not alike:
            activation = QK_ACTIVATIONS[config.qk_activation]
            q, k, v = activation(q), activation(k), silu(v)
        q, k, v = (y.unflatten(-1, (config.num_heads, -1)) for y in (q, k, v))
        if config.qk_norm == "sum":
            q, k = sum_norm(q), sum_norm(k)
        beta = sigmoid(b) if config.use_beta else v.new_ones(v.shape[:3])
        beta = 2.0 * beta if config.allow_neg_eigval else beta
        o = self.norm(past.delta(self.layer, q, k, v, None, beta, self.rule))
        if config.use_gate:
            o = o * silu(gate.unflatten(-1, (config.num_heads, -1)))
        return self.o_proj(o.flatten(-2))


def delta_net(config: DeltaNetConfig) -> dict[str, Source]:
    """Where the parameters come from."""
    hidden, key, value = config.hidden_size, config.key_dim, config.value_dim
    streams = {"q": key, "k": key, "v": value}
    further = {"b": config.num_heads * config.use_beta, "g": value * config.use_gate}
    mixer: dict[str, Shapes] = {
        "in_proj.weight": projections(hidden, streams | {name: n for name, n in further.items() if n}),
        "norm.weight": {"o_norm.weight": (value // config.num_heads,)},
        "o_proj.weight": projections(value, {"o": hidden}),
    }
    if config.use_short_conv:
        mixer |= short_conv(streams, config.conv_size, bias=False)
    return sources(config, lambda layer: mixer)
