"""The forward pass of a Mamba-2 checkpoint, token by token in float64, written from the stored tensors alone.

Shares no code with specla: loops and dictionaries, so that what it computes can be read off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def logits(raw: dict[str, Any], weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """`[T, vocab]` of a text, from a config.json's content in flash-linear-attention's names and the tensors."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps = raw["norm_eps"]
    xs = [w["backbone.embeddings.weight"][i] for i in ids]
    for layer in range(raw["num_hidden_layers"]):
        start = f"backbone.layers.{layer}."
        p = {name.removeprefix(start): x for name, x in w.items() if name.startswith(start)}
        mixed = _mix(raw, p, [_norm(x, eps) * p["norm.weight"] for x in xs])
        xs = [x + y for x, y in zip(xs, mixed, strict=True)]
    head = w["backbone.embeddings.weight"] if raw["tie_word_embeddings"] else w["lm_head.weight"]
    return torch.stack([head @ (_norm(x, eps) * w["backbone.norm_f.weight"]) for x in xs])


def _mix(raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor]) -> list[Tensor]:
    heads, size, groups, n = raw["num_heads"], raw["head_dim"], raw["n_groups"], raw["state_size"]
    inner, low, high = heads * size, *raw["dt_limit"]
    kernel, bias = p["mixer.conv1d.weight"][:, 0], p.get("mixer.conv1d.bias", 0)
    width = kernel.shape[1]
    projected = [p["mixer.in_proj.weight"] @ x + p.get("mixer.in_proj.bias", 0) for x in xs]
    streams = [y[inner:-heads] for y in projected]
    state = [torch.zeros(size, n, dtype=torch.float64) for _ in range(heads)]
    out = []
    for t, y in enumerate(projected):
        taps = [kernel[:, width - 1 - back] * streams[t - back] for back in range(min(width, t + 1))]
        mixed = _silu(sum(taps) + bias)
        values, keys, queries = mixed[:inner], mixed[inner : inner + groups * n], mixed[inner + groups * n :]
        parts = []
        for h in range(heads):
            group = h // (heads // groups)
            b, c = (z[group * n : (group + 1) * n] for z in (keys, queries))
            x = values[h * size : (h + 1) * size]
            step = torch.log1p(torch.exp(y[inner + len(mixed) + h] + p["mixer.dt_bias"][h]))
            step = step.clamp(low, high)
            state[h] = torch.exp(-torch.exp(p["mixer.A_log"][h]) * step) * state[h] + step * torch.outer(x, b)
            d = p["mixer.D"][h * size : (h + 1) * size] if raw["D_has_hdim"] else p["mixer.D"][h]
            parts.append(state[h] @ c + d * x)
        gate, o = _silu(y[:inner]), torch.cat(parts)
        if not raw["rmsnorm"]:
            o = o * gate
        elif raw["norm_before_gate"]:
            o = _norm_groups(o, groups, raw["norm_eps"]) * p["mixer.norm.weight"] * gate
        else:
            o = _norm_groups(o * gate, groups, raw["norm_eps"]) * p["mixer.norm.weight"]
        out.append(p["mixer.out_proj.weight"] @ o + p.get("mixer.out_proj.bias", 0))
    return out


def _norm_groups(x: Tensor, groups: int, eps: float) -> Tensor:
    return torch.cat([_norm(part, eps) for part in x.chunk(groups)])


def _norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt()


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
