"""Which tensors of a checkpoint in flash-linear-attention's layout our parameters are made of.

A parameter holds the rows of its tensors, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specla.models.config import AttentionConfig, FlaConfig, GatedDeltaNetConfig
from specla.models.source import Shapes, Source, rows, swiglu, vocabulary

EMBEDDINGS = "model.embeddings.weight"


def sources(config: FlaConfig, recurrent: Callable[[int], Mapping[str, Shapes]]) -> dict[str, Source]:
    """For each of our parameters what to read; `recurrent` tells that of a recurrent layer's mixer, names without
    `attn.`.
    """
    hidden = config.hidden_size
    found = vocabulary(config, EMBEDDINGS)
    found["norm.weight"] = rows({"model.norm.weight": (hidden,)})
    for i in range(config.num_hidden_layers):
        spec = config.attention(i)
        mixer = recurrent(i) if spec is None else attention(hidden, spec)
        parts: dict[str, Shapes] = {
            f"{norm}.weight": {f"{norm}.weight": (hidden,)} for norm in ("attn_norm", "mlp_norm")
        }
        parts |= {
            f"attn.{name}": {f"attn.{x}": s for x, s in shapes.items()} for name, shapes in mixer.items()
        }
        for name, shapes in parts.items():
            found[f"layers.{i}.{name}"] = rows({f"model.layers.{i}.{x}": s for x, s in shapes.items()})
        found |= swiglu(f"layers.{i}.mlp.", f"model.layers.{i}.mlp.", hidden, config.mlp_dim)
    return found


def projections(hidden: int, sizes: Mapping[str, int]) -> Shapes:
    """Matrices over the hidden state by the letters that name them."""
    return {f"{name}_proj.weight": (size, hidden) for name, size in sizes.items()}


def short_conv(sizes: Mapping[str, int], width: int, bias: bool) -> dict[str, Shapes]:
    """The convolutions of these streams, which are ours as one."""
    parts: dict[str, Shapes] = {
        "conv_weight": {f"{name}_conv1d.weight": (size, 1, width) for name, size in sizes.items()}
    }
    if bias:
        parts["conv_bias"] = {f"{name}_conv1d.bias": (size,) for name, size in sizes.items()}
    return parts


def attention(hidden: int, spec: AttentionConfig) -> dict[str, Shapes]:
    head_dim = hidden // spec.num_heads
    sizes = {"q": hidden, "k": spec.num_kv_heads * head_dim, "v": spec.num_kv_heads * head_dim}
    parts: dict[str, Shapes] = {
        "qkv_proj.weight": projections(hidden, sizes),
        "o_proj.weight": projections(hidden, {"o": hidden}),
    }
    if spec.qkv_bias:
        parts["qkv_bias"] = {f"{x}_proj.bias": (n,) for x, n in sizes.items()}
    if spec.qk_norm:
        parts |= {f"{x}_norm.weight": {f"{x}_norm.weight": (head_dim,)} for x in "qk"}
    return parts


def gated_deltanet(config: GatedDeltaNetConfig) -> dict[str, Source]:
    hidden, key, value, heads = config.hidden_size, config.key_dim, config.value_dim, config.value_heads
    streams = {"q": key, "k": key, "v": value}
    mixer: dict[str, Shapes] = {
        "in_proj.weight": projections(
            hidden, streams | {"a": heads, "b": heads} | ({"g": value} if config.use_gate else {})
        ),
        "A_log": {"A_log": (heads,)},
        "dt_bias": {"dt_bias": (heads,)},
        "norm.weight": {"o_norm.weight": (config.head_v_dim,)},
        "o_proj.weight": {"o_proj.weight": (hidden, value)},
    }
    if config.use_short_conv:
        mixer |= short_conv(streams, config.conv_size, config.conv_bias)
    return sources(config, lambda layer: mixer)
