"""Kimi Delta Attention token by token in float64, from the stored tensors of a layer alone, in plain loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.naive_forward import norm, silu


def kda(raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor]) -> list[Tensor]:
    """What a recurrent layer adds to its stream."""
    heads, size, bound = raw["num_heads"], raw["head_dim"], raw.get("lower_bound")
    value_heads, value_size = raw["num_v_heads"] or heads, int(size * raw["expand_v"])
    streams = {}
    for name in "qkv":
        y = [p[f"attn.{name}_proj.weight"] @ x for x in xs]
        if raw["use_short_conv"]:
            kernel = p[f"attn.{name}_conv1d.weight"][:, 0]
            width = kernel.shape[1]
            y = [sum(kernel[:, width - 1 - back] * y[t - back] for back in range(min(width, t + 1)))
                 for t in range(len(y))]  # fmt: skip
        streams[name] = [silu(x) for x in y]
    state = [torch.zeros(value_size, size, dtype=torch.float64) for _ in range(value_heads)]
    out = []
    for t, x in enumerate(xs):
        f = p["attn.f_proj.1.weight"] @ (p["attn.f_proj.0.weight"] @ x) + p["attn.dt_bias"]
        gate = p["attn.g_proj.1.weight"] @ (p["attn.g_proj.0.weight"] @ x) + p["attn.g_proj.1.bias"]
        b = p["attn.b_proj.weight"] @ x
        parts = []
        for h in range(value_heads):
            key_head = h // (value_heads // heads)
            q, k = (streams[n][t][key_head * size : (key_head + 1) * size] for n in "qk")
            q, k = (y / (y.square().sum() + 1e-6).sqrt() for y in (q, k))
            v = streams["v"][t][h * value_size : (h + 1) * value_size]
            rate, own = torch.exp(p["attn.A_log"][h]), f[h * size : (h + 1) * size]
            g = -rate * torch.log1p(torch.exp(own)) if bound is None else bound * torch.sigmoid(rate * own)
            beta = torch.sigmoid(b[h]) * (2 if raw["allow_neg_eigval"] else 1)
            state[h] = state[h] * torch.exp(g)
            state[h] = state[h] + torch.outer(beta * (v - state[h] @ k), k)
            o = norm(state[h] @ (q * size**-0.5), p["attn.o_norm.weight"], raw["norm_eps"])
            parts.append(o * torch.sigmoid(gate[h * value_size : (h + 1) * value_size]))
        out.append(p["attn.o_proj.weight"] @ torch.cat(parts))
    return out
