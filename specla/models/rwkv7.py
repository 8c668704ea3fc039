"""RWKV-7: the generalised delta rule over streams mixed with the token before, and channel mixing over the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specla.models.language_model import LanguageModel
from specla.models.layers import LayerNorm, Linear
from specla.models.past import TargetPast
from specla.models.rwkv7_config import Rwkv7Config
from specla.ops.elementwise import l2norm, sigmoid
from specla.state import RecurrentSpec

SLOWEST = -0.6065306597126334  # -exp(-1/2): the log-decay of a channel that forgets as fast as any may
SMALLEST = 1e-12  # length that removal keys are divided by at least


class Rwkv7(LanguageModel):
    """The language model in flash-linear-attention's shape."""

    config: Rwkv7Config

    def __init__(self, config: Rwkv7Config):
        blocks = [Rwkv7Block(config, i) for i in range(config.num_hidden_layers)]
        super().__init__(config, blocks, _norm(config))

    def streams(self, stream: Tensor, past: TargetPast) -> list[Tensor]:
        streams, first = [stream], None
        for layer in self.layers:
            stream, first = layer(stream, past, first)
            streams.append(stream)
        return streams


class Rwkv7Block(nn.Module):
    """Time mixing, then channel mixing, each with a residual around it; the embeddings may be normalised before."""

    def __init__(self, config: Rwkv7Config, layer: int):
        super().__init__()
        self.pre_norm = _norm(config) if config.norm_first and layer == 0 else None
        self.attn_norm = _norm(config)
        self.attn = TimeMixing(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = ChannelMixing(config, layer)

    @property
    def mixer(self) -> TimeMixing:
        return self.attn

    def forward(self, x: Tensor, past: TargetPast, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream, and the values of the first layer (`first` is None there)."""
        x = x if self.pre_norm is None else self.pre_norm(x)
        mixed, first = self.attn(self.attn_norm(x), past, first)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x), past), first


class TimeMixing(nn.Module):
    """Token mixing. Each of six projections reads the stream mixed in its own way with that of the token before."""

    def __init__(self, config: Rwkv7Config, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        hidden, values, ranks = config.hidden_size, config.values, config.ranks
        self.mix = nn.Parameter(torch.empty(6 * hidden))  # r, w, k, v, a, g
        self.r_proj = Linear(hidden, hidden)
        self.k_proj = Linear(hidden, hidden)
        self.v_proj = Linear(hidden, values)
        self.o_proj = Linear(values, hidden)
        self.decay = LowRank(hidden, ranks["w"], hidden, torch.tanh)
        self.rate = LowRank(hidden, ranks["a"], hidden)
        self.gate = LowRank(hidden, ranks["g"], values, sigmoid, bias=False)
        self.share = LowRank(hidden, ranks["v"], values) if layer else None
        self.k_k = nn.Parameter(torch.empty(hidden))
        self.k_a = nn.Parameter(torch.empty(hidden))
        self.r_k = nn.Parameter(torch.empty(hidden))
        self.norm_weight = nn.Parameter(torch.empty(values))
        self.norm_bias = nn.Parameter(torch.empty(values))

    def state_spec(self) -> RecurrentSpec:
        """What the layer keeps of a sequence: the state, and the last stream that each of its two halves has read."""
        config = self.config
        heads, dims = (config.heads, config.heads), (config.key_head_dim, config.value_head_dim)
        return RecurrentSpec(*heads, *dims, 2 * config.hidden_size, 2, channel_decay=True, halves=True)

    def forward(self, x: Tensor, past: TargetPast, first: Tensor | None) -> tuple[Tensor, Tensor]:
        config = self.config
        moved = past.previous(self.layer, x) - x
        xr, xw, xk, xv, xa, xg = (x + moved * mix for mix in self.mix.chunk(6))
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        if self.share is None or first is None:
            first = v
        else:
            v = v + (first - v) * sigmoid(self.share(xv))
        a = sigmoid(self.rate(xa))
        g = SLOWEST * sigmoid(self.decay(xw))
        removed = k * self.k_k
        k = k + k * (a - 1) * self.k_a
        r, k, g, a, removed = (y.unflatten(-1, (config.heads, -1)) for y in (r, k, g, a, removed))
        v = v.unflatten(-1, (config.heads, -1))
        removed = l2norm(removed) if config.fuse_norm else _unit(removed)
        o = self._group_norm(past.dplr(self.layer, r, k, v, g, -removed, removed * a))
        bonus = (r * k * self.r_k.view(k.shape[-2:])).sum(-1, keepdim=True) * v
        return self.o_proj((o + bonus.flatten(-2)) * self.gate(xg)), first

    def _group_norm(self, o: Tensor) -> Tensor:
        """Outputs `[B, T, H, V]`, each head normalised by itself: `[B, T, H V]`."""
        eps = self.config.key_head_dim * self.config.norm_eps
        normed = nn.functional.layer_norm(o, o.shape[-1:], eps=eps).flatten(-2)
        return normed * self.norm_weight + self.norm_bias


class ChannelMixing(nn.Module):
    """The MLP, over the stream mixed with that of the token before."""

    def __init__(self, config: Rwkv7Config, layer: int):
        super().__init__()
        self.hidden_size, self.layer = config.hidden_size, layer
        self.mix = nn.Parameter(torch.empty(config.hidden_size))
        self.key = Linear(config.hidden_size, config.mlp_dim)
        self.value = Linear(config.mlp_dim, config.hidden_size)

    def forward(self, x: Tensor, past: TargetPast) -> Tensor:
        moved = past.previous(self.layer, x, first=self.hidden_size) - x
        key = torch.relu(self.key(x + moved * self.mix))
        return self.value(key * key)


class LowRank(nn.Module):
    """Two matrices in a row, with an activation between and a bias behind them."""

    def __init__(
        self,
        in_features: int,
        rank: int,
        out_features: int,
        activation: Callable[[Tensor], Tensor] | None = None,
        bias: bool = True,
    ):
        super().__init__()
        self.down = Linear(in_features, rank)
        self.up = Linear(rank, out_features)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        y = self.up(y if self.activation is None else self.activation(y))
        return y if self.bias is None else y + self.bias


def _norm(config: Rwkv7Config) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True)).clamp(min=SMALLEST)
