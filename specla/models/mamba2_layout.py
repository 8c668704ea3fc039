"""Which tensors of a Mamba-2 checkpoint our parameters are made of: transformers and flash-linear-attention agree."""

from __future__ import annotations

from collections.abc import Collection

from specla.models.mamba2_config import Mamba2Config
from specla.models.source import Source, rows, vocabulary

EMBEDDINGS = "backbone.embeddings.weight"
OLD_EMBEDDINGS = "backbone.embedding.weight"  # as mamba_ssm has it, which both libraries read too


def sources(config: Mamba2Config, stored: Collection[str]) -> dict[str, Source]:
    """For each of our parameters what to read, where `stored` are the names of all tensors in the checkpoint."""
    found = vocabulary(config, OLD_EMBEDDINGS if OLD_EMBEDDINGS in stored else EMBEDDINGS)
    found["norm.weight"] = Source({"backbone.norm_f.weight": (config.hidden_size,)})
    for i in range(config.num_hidden_layers):
        for ours, (theirs, shape) in _layer(config).items():
            found[f"layers.{i}.{ours}"] = rows({f"backbone.layers.{i}.{theirs}": shape})
    return found


def _layer(config: Mamba2Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, inner, heads = config.hidden_size, config.inner_size, config.num_heads
    rows = inner + config.conv_dim + heads
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "norm.weight": ("norm.weight", (hidden,)),
        "mixer.in_proj.weight": ("mixer.in_proj.weight", (rows, hidden)),
        "mixer.conv_weight": ("mixer.conv1d.weight", (config.conv_dim, 1, config.conv_kernel)),
        "mixer.A_log": ("mixer.A_log", (heads,)),
        "mixer.dt_bias": ("mixer.dt_bias", (heads,)),
        "mixer.D": ("mixer.D", (inner if config.D_has_hdim else heads,)),
        "mixer.o_proj.weight": ("mixer.out_proj.weight", (hidden, inner)),
    }
    if config.use_bias:
        parts["mixer.in_bias"] = ("mixer.in_proj.bias", (rows,))
        parts["mixer.o_bias"] = ("mixer.out_proj.bias", (hidden,))
    if config.use_conv_bias:
        parts["mixer.conv_bias"] = ("mixer.conv1d.bias", (config.conv_dim,))
    if config.rmsnorm:
        parts["mixer.norm_weight"] = ("mixer.norm.weight", (inner,))
    return parts
