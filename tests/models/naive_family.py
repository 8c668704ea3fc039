"""The recurrent layers of DeltaNet, GLA and RetNet, token by token in float64, written from their equations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.models.naive_forward import norm, rotate, silu

MAPS = {
    "relu": lambda x: x * (x > 0), "elu": lambda x: torch.where(x > 0, x + 1, x.exp()), "identity": lambda x: x,
    "silu": silu, "swish": silu, "sigmoid": lambda x: 1 / (1 + torch.exp(-x)), None: lambda x: x,
}  # fmt: skip


def _stream(p: dict[str, Tensor], name: str, xs: list[Tensor], activation: str | None) -> list[Tensor]:
    """A projection, convolved where the checkpoint has taps for it, then activated."""
    ys = [p[f"attn.{name}_proj.weight"] @ x for x in xs]
    taps = p.get(f"attn.{name}_conv1d.weight")
    if taps is not None:
        width = taps.shape[2]
        ys = [
            sum(taps[:, 0, width - 1 - n] * ys[t - n] for n in range(min(width, t + 1)))
            for t in range(len(ys))
        ]
    return [MAPS[activation](y) for y in ys]


def _head(x: Tensor, head: int, heads: int) -> Tensor:
    return x.view(heads, -1)[head]


def delta_net(raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor]) -> list[Tensor]:
    heads, act = raw["num_heads"], raw.get("qk_activation", "silu")
    qs, ks = (_stream(p, name, xs, act) for name in "qk")
    vs, out = _stream(p, "v", xs, "silu"), []
    states = [torch.zeros(len(vs[0]) // heads, len(ks[0]) // heads).double() for _ in range(heads)]
    for x, q_all, k_all, v_all in zip(xs, qs, ks, vs, strict=True):
        parts = []
        for h in range(heads):
            q, k, v = (_head(y, h, heads) for y in (q_all, k_all, v_all))
            if raw.get("qk_norm") == "sum":
                q, k = (y / y.abs().sum().clamp(min=1e-6) for y in (q, k))
            else:
                q, k = (y / (y.square().sum() + 1e-6).sqrt() for y in (q, k))
            beta = torch.sigmoid(p["attn.b_proj.weight"] @ x)[h] if raw.get("use_beta", True) else 1.0
            beta = 2 * beta if raw.get("allow_neg_eigval") else beta
            states[h] = states[h] + torch.outer(beta * (v - states[h] @ k), k)
            o = norm(states[h] @ q * len(q) ** -0.5, p["attn.o_norm.weight"], 1e-6)
            if raw.get("use_gate"):
                o = o * silu(_head(p["attn.g_proj.weight"] @ x, h, heads))
            parts.append(o)
        out.append(p["attn.o_proj.weight"] @ torch.cat(parts))
    return out


def gla(raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor]) -> list[Tensor]:
    activation = "silu" if raw.get("use_short_conv") else None
    streams = [_stream(p, name, xs, activation) for name in "qkv"]
    decays = []
    for x in xs:
        g = p["attn.gk_proj.1.weight"] @ (p["attn.gk_proj.0.weight"] @ x) + p["attn.gk_proj.1.bias"]
        g = torch.log(torch.sigmoid(g)) / 16
        decays.append(g if raw.get("clamp_min") is None else g.clamp(min=raw["clamp_min"]))
    return _linear(raw, p, xs, streams, decays)


def retnet(raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor]) -> list[Tensor]:
    return _linear(raw, p, xs, [_stream(p, name, xs, None) for name in "qkv"], None)


def _linear(
    raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor], streams: list[list[Tensor]],
    decays: list[Tensor] | None,
) -> list[Tensor]:  # fmt: skip
    heads = raw["num_heads"]
    kv_heads = raw.get("num_kv_heads") or heads
    states: list[Tensor | None] = [None] * heads
    out = []
    for t, x in enumerate(xs):
        parts = []
        for h in range(heads):
            shared = h // (heads // kv_heads)
            q, k = _head(streams[0][t], h, heads), _head(streams[1][t], shared, kv_heads)
            q, k = (MAPS[raw.get("feature_map")](y) for y in (q, k))
            v = _head(streams[2][t], shared, kv_heads)
            if decays is None:
                q, k = (rotate(y, t, 10000.0) for y in (q, k))
                decay = torch.tensor(1 - 2 ** (-5.0 - h)).double()
            else:
                decay = _head(decays[t], shared, kv_heads).exp()
            before = states[h]
            states[h] = torch.outer(v, k) if before is None else before * decay + torch.outer(v, k)
            o = states[h] @ q / math.sqrt(len(q))
            weight = p.get("attn.g_norm.weight", p.get("attn.g_norm_swish_gate.weight", torch.ones(len(o))))
            o = norm(o, weight, 1e-6)
            if raw.get("use_output_gate", True):
                o = o * silu(_head(p["attn.g_proj.weight"] @ x, h, heads))
            parts.append(o)
        out.append(p["attn.o_proj.weight"] @ torch.cat(parts))
    return out
