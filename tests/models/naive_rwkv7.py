"""The forward pass of an RWKV-7 checkpoint, token by token in float64, written from the stored tensors alone.

Shares no code with specla. Source of the formulas: the RWKV-7 paper (arXiv 2503.14456), and flash-linear-attention for
the names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def logits(raw: dict[str, Any], weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """`[T, vocab]` of a text, from a config.json's content and the checkpoint's tensors."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps = raw["norm_eps"]
    xs = [w["model.embeddings.weight"][i] for i in ids]
    shared: list[Tensor] = []  # the first layer's values at every token
    for layer in range(raw["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        p = {name.removeprefix(start): x for name, x in w.items() if name.startswith(start)}
        if "pre_norm.weight" in p:
            xs = [_norm(x, p, "pre_norm", eps) for x in xs]
        mixed = _time_mixing(raw, p, [_norm(x, p, "attn_norm", eps) for x in xs], shared)
        xs = [x + y for x, y in zip(xs, mixed, strict=True)]
        normed = [_norm(x, p, "ffn_norm", eps) for x in xs]
        for t, x in enumerate(xs):
            key = p["ffn.key.weight"] @ _blend(normed, t, p["ffn.x_k"])
            xs[t] = x + p["ffn.value.weight"] @ key.clamp(min=0) ** 2
    head = w["model.embeddings.weight"] if raw["tie_word_embeddings"] else w["lm_head.weight"]
    last = {name.removeprefix("model."): x for name, x in w.items() if name.startswith("model.norm.")}
    return torch.stack([head @ _norm(x, last, "norm", eps) for x in xs])


def _time_mixing(
    raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor], shared: list[Tensor]
) -> list[Tensor]:
    heads, size = p["attn.r_k"].shape
    values = p["attn.v_proj.weight"].shape[0] // heads
    state = [torch.zeros(values, size, dtype=torch.float64) for _ in range(heads)]
    out = []
    for t in range(len(xs)):
        x = {name: _blend(xs, t, p[f"attn.x_{name}"].flatten()) for name in "rwkvag"}
        r, k, v = (p[f"attn.{name}_proj.weight"] @ x[name] for name in "rkv")
        decay = torch.exp(-math.exp(-0.5) * _sigmoid(_low_rank(p, "w", x["w"], torch.tanh)))
        if "attn.v_lora.lora.0.weight" in p:
            v = v + (shared[t] - v) * _sigmoid(_low_rank(p, "v", x["v"]))
        else:
            shared.append(v)
        a = _sigmoid(_low_rank(p, "a", x["a"]))
        gate = _low_rank(p, "g", x["g"], _sigmoid)
        kappa = k * p["attn.k_k"]
        k = k * (1 + (a - 1) * p["attn.k_a"])
        parts = []
        for h in range(heads):
            keys, vals = slice(h * size, (h + 1) * size), slice(h * values, (h + 1) * values)
            removed = kappa[keys]
            if raw["fuse_norm"]:
                removed = removed / (removed.square().sum() + 1e-6).sqrt()
            else:
                removed = removed / max(float(removed.norm()), 1e-12)
            move = torch.diag(decay[keys]) - torch.outer(removed, a[keys] * removed)
            state[h] = state[h] @ move + torch.outer(v[vals], k[keys])
            o = state[h] @ r[keys]
            o = (o - o.mean()) / ((o - o.mean()).square().mean() + size * raw["norm_eps"]).sqrt()
            o = o * p["attn.g_norm.weight"][vals] + p["attn.g_norm.bias"][vals]
            parts.append(o + (r[keys] * k[keys] * p["attn.r_k"][h]).sum() * v[vals])
        out.append(p["attn.o_proj.weight"] @ (torch.cat(parts) * gate))
    return out


def _low_rank(p: dict[str, Tensor], name: str, x: Tensor, activation: Any = None) -> Tensor:
    inner = p[f"attn.{name}_lora.lora.0.weight"] @ x
    inner = inner if activation is None else activation(inner)
    return p[f"attn.{name}_lora.lora.2.weight"] @ inner + p.get(
        f"attn.{name}_lora.lora.2.bias", torch.tensor(0.0)
    )


def _blend(xs: list[Tensor], t: int, mix: Tensor) -> Tensor:
    before = xs[t - 1] if t else torch.zeros_like(xs[0])
    return xs[t] * (1 - mix) + before * mix


def _norm(x: Tensor, p: dict[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean()
    normed = centred / (centred.square().mean() + eps).sqrt() * p[f"{name}.weight"]
    return normed + p[f"{name}.bias"] if f"{name}.bias" in p else normed


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))
