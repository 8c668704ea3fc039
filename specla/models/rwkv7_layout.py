"""Which tensors of an RWKV-7 checkpoint in flash-linear-attention's layout our parameters are made of."""

from __future__ import annotations

from collections.abc import Collection

import torch

from specla.models.fla_layout import EMBEDDINGS
from specla.models.rwkv7_config import Rwkv7Config
from specla.models.source import Shapes, Source, flat, vocabulary

MIXED = "rwkvag"  # the streams of time mixing, in our order
VECTORS = ("attn.mix", "attn.r_k")  # stored with further dimensions


def sources(config: Rwkv7Config, stored: Collection[str]) -> dict[str, Source]:
    """For each of our parameters what to read, where `stored` are the names of all tensors in the checkpoint."""
    found = vocabulary(config, EMBEDDINGS) | _norm(config, "norm", "model.norm")
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        if config.norm_first and i == 0:
            found |= _norm(config, f"{ours}.pre_norm", f"{theirs}.pre_norm")
        found |= _norm(config, f"{ours}.attn_norm", f"{theirs}.attn_norm")
        found |= _norm(config, f"{ours}.mlp_norm", f"{theirs}.ffn_norm")
        parts = _time_mixing(config, i, joined=f"{theirs}.attn.x_x" in stored) | _channel_mixing(config)
        for name, shapes in parts.items():
            stored_as = {f"{theirs}.{x}": shape for x, shape in shapes.items()}
            found[f"{ours}.{name}"] = Source(stored_as, flat if name in VECTORS else torch.cat)
    return found


def _norm(config: Rwkv7Config, ours: str, theirs: str) -> dict[str, Source]:
    leaves = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{ours}.{leaf}": Source({f"{theirs}.{leaf}": (config.hidden_size,)}) for leaf in leaves}


def _time_mixing(config: Rwkv7Config, layer: int, joined: bool) -> dict[str, Shapes]:
    """joined: how streams are mixed lies in one tensor, as that library's first version of the layer stored it."""
    hidden, values = config.hidden_size, config.values
    rows = {"r": hidden, "k": hidden, "v": values}
    shapes: dict[str, Shapes] = {
        f"{x}_proj.weight": {f"{x}_proj.weight": (n, hidden)} for x, n in rows.items()
    }
    shapes["o_proj.weight"] = {"o_proj.weight": (hidden, values)}
    shapes["mix"] = {"x_x": (6, hidden)} if joined else {f"x_{x}": (1, 1, hidden) for x in MIXED}
    shapes |= {name: {name: (hidden,)} for name in ("k_k", "k_a")}
    shapes["r_k"] = {"r_k": (config.heads, config.key_head_dim)}
    shapes |= {f"norm_{leaf}": {f"g_norm.{leaf}": (values,)} for leaf in ("weight", "bias")}
    low_rank = {"decay": ("w", hidden), "rate": ("a", hidden), "gate": ("g", values)}
    if layer:
        low_rank["share"] = ("v", values)
    for ours, (letter, out) in low_rank.items():
        theirs, rank = f"{letter}_lora.lora", config.ranks[letter]
        shapes[f"{ours}.down.weight"] = {f"{theirs}.0.weight": (rank, hidden)}
        shapes[f"{ours}.up.weight"] = {f"{theirs}.2.weight": (out, rank)}
        if ours != "gate":
            shapes[f"{ours}.bias"] = {f"{theirs}.2.bias": (out,)}
    return {f"attn.{ours}": {f"attn.{x}": s for x, s in parts.items()} for ours, parts in shapes.items()}


def _channel_mixing(config: Rwkv7Config) -> dict[str, Shapes]:
    hidden, width = config.hidden_size, config.mlp_dim
    return {
        "mlp.mix": {"ffn.x_k": (hidden,)},
        "mlp.key.weight": {"ffn.key.weight": (width, hidden)},
        "mlp.value.weight": {"ffn.value.weight": (hidden, width)},
    }
