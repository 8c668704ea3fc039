"""The forward pass of a checkpoint, token by token in float64, written from the stored tensors alone.

Shares no code with specla: loops and dictionaries, so that what it computes can be read off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Mixer = Callable[[dict[str, Any], dict[str, Tensor], list[Tensor]], list[Tensor]]


def logits(
    raw: dict[str, Any], weights: dict[str, Tensor], ids: list[int], mixer: Mixer | None = None
) -> Tensor:
    """`[T, vocab]` of a text, from a config.json's content and the checkpoint's tensors.

    mixer: what its recurrent layers compute; those of Gated DeltaNet by default.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps = raw["norm_eps"]
    xs = [w["model.embeddings.weight"][i] for i in ids]
    specs = raw.get("attn") or []
    specs = [specs] if isinstance(specs, dict) else specs
    for layer in range(raw["num_hidden_layers"]):
        p = {
            name.removeprefix(f"model.layers.{layer}."): x
            for name, x in w.items()
            if f"model.layers.{layer}." in name
        }
        spec = next((s for s in specs if layer in s["layers"]), None)
        normed = [norm(x, p["attn_norm.weight"], eps) for x in xs]
        mixed = (mixer or _delta)(raw, p, normed) if spec is None else _attention(spec, p, normed)
        xs = [x + y for x, y in zip(xs, mixed, strict=True)]
        for t, x in enumerate(xs):
            y = norm(x, p["mlp_norm.weight"], eps)
            gate, up = p["mlp.gate_proj.weight"] @ y, p["mlp.up_proj.weight"] @ y
            xs[t] = x + p["mlp.down_proj.weight"] @ (silu(gate) * up)
    head = w["model.embeddings.weight"] if raw["tie_word_embeddings"] else w["lm_head.weight"]
    return torch.stack([head @ norm(x, w["model.norm.weight"], eps) for x in xs])


def _delta(raw: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor]) -> list[Tensor]:
    heads, size = raw["num_heads"], raw["head_dim"]
    value_heads, value_size = raw["num_v_heads"] or heads, int(size * raw["expand_v"])
    streams = {}
    for name in "qkv":
        y = [p[f"attn.{name}_proj.weight"] @ x for x in xs]
        if raw["use_short_conv"]:
            kernel = p[f"attn.{name}_conv1d.weight"][:, 0]
            bias = p[f"attn.{name}_conv1d.bias"] if raw["conv_bias"] else 0
            width = kernel.shape[1]
            y = [sum(kernel[:, width - 1 - back] * y[t - back] for back in range(min(width, t + 1))) + bias
                 for t in range(len(y))]  # fmt: skip
        streams[name] = [silu(x) for x in y]
    state = [torch.zeros(value_size, size, dtype=torch.float64) for _ in range(value_heads)]
    out = []
    for t, x in enumerate(xs):
        a, b = p["attn.a_proj.weight"] @ x, p["attn.b_proj.weight"] @ x
        parts = []
        for h in range(value_heads):
            key_head = h // (value_heads // heads)
            q, k = (streams[n][t][key_head * size : (key_head + 1) * size] for n in "qk")
            q, k = (y / (y.square().sum() + 1e-6).sqrt() for y in (q, k))
            v = streams["v"][t][h * value_size : (h + 1) * value_size]
            decay = torch.exp(
                -torch.exp(p["attn.A_log"][h]) * torch.log1p(torch.exp(a[h] + p["attn.dt_bias"][h]))
            )
            beta = torch.sigmoid(b[h]) * (2 if raw["allow_neg_eigval"] else 1)
            state[h] = decay * state[h]
            state[h] = state[h] + torch.outer(beta * (v - state[h] @ k), k)
            o = norm(state[h] @ (q * size**-0.5), p["attn.o_norm.weight"], raw["norm_eps"])
            if raw["use_gate"]:
                gate = (p["attn.g_proj.weight"] @ x)[h * value_size : (h + 1) * value_size]
                o = o * (torch.sigmoid(gate) if raw["output_gate_activation"] == "sigmoid" else silu(gate))
            parts.append(o)
        out.append(p["attn.o_proj.weight"] @ torch.cat(parts))
    return out


def _attention(spec: dict[str, Any], p: dict[str, Tensor], xs: list[Tensor]) -> list[Tensor]:
    heads, kv_heads = spec["num_heads"], spec.get("num_kv_heads") or spec["num_heads"]
    size = len(xs[0]) // heads
    rows = {"q": [], "k": [], "v": []}
    for t, x in enumerate(xs):
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            y = p[f"attn.{name}_proj.weight"] @ x
            if spec.get("qkv_bias"):
                y = y + p[f"attn.{name}_proj.bias"]
            parts = [y[h * size : (h + 1) * size] for h in range(count)]
            if name != "v":
                if spec.get("qk_norm"):
                    parts = [norm(part, p[f"attn.{name}_norm.weight"], 1e-5) for part in parts]
                parts = [rotate(part, t, spec.get("rope_theta", 10000.0)) for part in parts]
            rows[name].append(parts)
    out = []
    for t in range(len(xs)):
        first = 0 if spec.get("window_size") is None else max(0, t - spec["window_size"] + 1)
        parts = []
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = torch.stack(
                [rows["q"][t][h] @ rows["k"][s][kv] for s in range(first, t + 1)]
            ) / math.sqrt(size)
            weights = torch.softmax(scores, 0)
            parts.append(sum(weights[s - first] * rows["v"][s][kv] for s in range(first, t + 1)))
        out.append(p["attn.o_proj.weight"] @ torch.cat(parts))
    return out


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position / theta ** (i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i] * sin + x[i + half] * cos
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
