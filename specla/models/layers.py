"""The layers that targets and drafters are made of. They see the tokens before their own only through a `Past`.

Projections that read the same input are one weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from specla.models.config import AttentionConfig, FlaConfig, GatedDeltaNetConfig
from specla.models.past import Past, TargetPast
from specla.ops.attention import rotary
from specla.ops.elementwise import sigmoid, silu, softplus
from specla.ops.int8 import FEW, Int8Weight, int8_linear, quantize
from specla.ops.linear import row_invariant_linear
from specla.state import AttentionSpec, RecurrentSpec

QK_NORM_EPS = 1e-5  # flash-linear-attention's default, not in the configuration


class Linear(nn.Module):
    """`x @ weight.T`, multiplied in the weight's dtype (or `dtype`, for training) and returned in x's.

    Each row's product is what it is alone, unless there is `int8` to multiply few rows by.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.dtype: torch.dtype | None = None
        self.int8: Int8Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.int8 is None:
            return linear(x, self.weight, self.dtype)
        if x.numel() <= FEW * x.shape[-1]:
            return int8_linear(x, self.int8)
        return linear(x, self.weight, self.weight.dtype)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    if torch.is_grad_enabled() or dtype is not None:
        work = dtype or weight.dtype
        return nn.functional.linear(x.to(work), weight.to(work)).to(x.dtype)
    return row_invariant_linear(x, weight)


def set_compute_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Multiply matrices in `dtype` whatever they are stored in, for training with fp32 weights; None: in their own,
    row by row exact.
    """
    for part in module.modules():
        if isinstance(part, Linear):
            part.dtype = dtype


def quantize_linears(module: nn.Module) -> None:
    """Let a drafter multiply few rows by weights of eight bits, on a CPU that can."""
    for part in module.modules():
        if isinstance(part, Linear):
            part.int8 = quantize(part.weight)


@torch.no_grad()
def draw_weights(module: nn.Module, deviation: float, generator: torch.Generator | None) -> None:
    """Fresh weights: matrices normal with this deviation, decay rates over three orders of magnitude, norms of one."""
    for name, weight in module.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            weight.uniform_(1e-3, 16, generator=generator).log_()
        elif leaf == "dt_bias":
            step = torch.empty_like(weight).uniform_(-6.9078, -2.3026, generator=generator).exp()
            weight.copy_(step + torch.log(-torch.expm1(-step)))
        elif leaf == "conv_weight":
            bound = weight.shape[1] ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
        elif leaf in ("conv_bias", "qkv_bias", "decay_bias"):
            weight.zero_()
        elif weight.dim() > 1:
            weight.normal_(0, deviation, generator=generator)
        else:
            weight.fill_(1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class DeltaMixer(nn.Module):
    """Token mixing by the gated delta rule; reads `in_features` channels (by default the hidden size)."""

    def __init__(self, config: GatedDeltaNetConfig, layer: int, in_features: int | None = None):
        super().__init__()
        self.config, self.layer = config, layer
        self.conv_dim = 2 * config.key_dim + config.value_dim
        heads = config.value_heads
        self.splits = [
            self.conv_dim,
            heads,
            heads,
            config.value_dim if config.use_gate else 0,
        ]  # qkv, a, b, gate
        self.in_proj = Linear(in_features or config.hidden_size, sum(self.splits))
        self.conv_weight = (
            nn.Parameter(torch.empty(self.conv_dim, config.conv_size)) if config.use_short_conv else None
        )
        has_bias = config.use_short_conv and config.conv_bias
        self.conv_bias = nn.Parameter(torch.zeros(self.conv_dim)) if has_bias else None
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(config.head_v_dim, config.norm_eps)
        self.o_proj = Linear(config.value_dim, config.hidden_size)

    def state_spec(self) -> RecurrentSpec:
        """What the layer keeps of a sequence."""
        config = self.config
        heads, dims = (config.num_heads, config.value_heads), (config.head_dim, config.head_v_dim)
        return RecurrentSpec(*heads, *dims, self.conv_dim, config.window)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        config = self.config
        qkv, a, b, gate = self.in_proj(x).split(self.splits, -1)
        if self.conv_weight is not None:
            qkv = past.conv(self.layer, qkv, self.conv_weight, self.conv_bias)
        else:
            qkv = silu(qkv)
        q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], -1)
        q, k = (y.unflatten(-1, (config.num_heads, config.head_dim)) for y in (q, k))
        v = v.unflatten(-1, (config.value_heads, config.head_v_dim))
        g = -torch.exp(self.A_log) * softplus(a + self.dt_bias)
        beta = 2.0 * sigmoid(b) if config.allow_neg_eigval else sigmoid(b)
        o = self.norm(past.delta(self.layer, q, k, v, g, beta))
        if config.use_gate:
            activation = sigmoid if config.output_gate_activation == "sigmoid" else silu
            o = o * activation(gate.unflatten(-1, (config.value_heads, config.head_v_dim)))
        return self.o_proj(o.flatten(-2))


class AttentionMixer(nn.Module):
    """Token mixing by softmax attention with rotary positions.

    in_features: channels that it reads (default: `hidden_size`). head_dim: default `hidden_size / num_heads`.
    qk_norm_eps: of the norms of queries and keys, if `spec` has them. rotary_dim: channels of a head that rotate
    (default: all). output_gate: multiply what each head reads by a sigmoid of a projection of its own.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionConfig,
        layer: int,
        in_features: int | None = None,
        head_dim: int | None = None,
        qk_norm_eps: float = QK_NORM_EPS,
        rotary_dim: int | None = None,
        output_gate: bool = False,
    ):
        super().__init__()
        self.spec, self.layer = spec, layer
        self.head_dim = head_dim or hidden_size // spec.num_heads
        self.rotary_dim = rotary_dim or self.head_dim
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads if output_gate else 0]
        self.splits = [n * self.head_dim for n in heads]  # q, k, v, gate
        self.qkv_proj = Linear(in_features or hidden_size, sum(self.splits))
        self.qkv_bias = nn.Parameter(torch.zeros(sum(self.splits))) if spec.qkv_bias else None
        self.q_norm = RMSNorm(self.head_dim, qk_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, qk_norm_eps) if spec.qk_norm else None
        self.o_proj = Linear(self.splits[0], hidden_size)

    def state_spec(self) -> AttentionSpec:
        """What the layer keeps of a sequence."""
        return AttentionSpec(self.spec.num_kv_heads, self.head_dim, self.spec.window_size)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        qkv = self.qkv_proj(x)
        qkv = qkv if self.qkv_bias is None else qkv + self.qkv_bias
        *heads, gate = qkv.split(self.splits, -1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self._rotate(y, past.positions) for y in (q, k))
        o = past.attend(self.layer, q, k, v, self.spec.window_size).flatten(-2)
        return self.o_proj(o * sigmoid(gate) if gate.shape[-1] else o)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.rotary_dim == self.head_dim:
            return rotary(x, positions, self.spec.rope_theta)
        turned, kept = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], -1)
        return torch.cat([rotary(turned, positions, self.spec.rope_theta), kept], -1)


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * width)
        self.down_proj = Linear(width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(silu(gate) * up)


class Mixer(Protocol):
    """A layer's token mixing."""

    def state_spec(self) -> RecurrentSpec | AttentionSpec:
        """What the layer keeps of a sequence."""

    def __call__(self, x: Tensor, past: TargetPast) -> Tensor:
        """`[B, T, hidden]` of normalised streams to what is added to them."""


class Block(nn.Module):
    """Token mixing, then an MLP or experts, each with a residual around it."""

    def __init__(self, hidden_size: int, eps: float, attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.attn_norm = RMSNorm(hidden_size, eps)
        self.attn = attn
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.mlp = mlp

    @property
    def mixer(self) -> Mixer:
        return cast(Mixer, self.attn)

    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        x = x + self.attn(self.attn_norm(x), past)
        return x + self.mlp(self.mlp_norm(x))


def blocks(config: FlaConfig, mixer: Callable[[int], nn.Module]) -> list[Block]:
    """Those of a model in flash-linear-attention's shape: attention where the configuration has some, else a mixer."""
    made = []
    for i in range(config.num_hidden_layers):
        spec = config.attention(i)
        attn = mixer(i) if spec is None else AttentionMixer(config.hidden_size, spec, i)
        made.append(
            Block(config.hidden_size, config.norm_eps, attn, SwiGLU(config.hidden_size, config.mlp_dim))
        )
    return made
