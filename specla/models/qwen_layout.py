"""Which tensors of a Qwen3-Next or Qwen3.5 checkpoint our parameters are made of, and how.

Theirs are fused and interleaved in other ways than ours, and their norms stored less one. All of that ends here.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from specla.models.qwen_config import FULL, LINEAR, NEXT, QwenConfig
from specla.models.source import Join, Source, rows, stack, swiglu, vocabulary

MTP = "mtp."  # how the names of a drafting head begin
UNUSED: tuple[str, ...] = (MTP, "model.visual.")  # tensors that a target has no use for
WITH_IMAGES, ALONE = "model.language_model", "model"  # where a text part lies


def sources(config: QwenConfig, stored: Collection[str]) -> dict[str, Source]:
    """For each of our parameters what to read, where `stored` are the names of all tensors in the checkpoint."""
    start = WITH_IMAGES if any(name.startswith(f"{WITH_IMAGES}.") for name in stored) else ALONE
    found = vocabulary(config, f"{start}.embed_tokens.weight")
    found["norm.weight"] = Source({f"{start}.norm.weight": (config.hidden_size,)}, _one_more)
    for i, kind in enumerate(config.layer_types):
        found |= _layer(config, i, kind, f"layers.{i}.", f"{start}.layers.{i}.", stored)
    return found


def mtp_sources(config: QwenConfig, stored: Collection[str]) -> dict[str, Source]:
    """The same for the parameters of a drafting head that it does not share with the target."""
    hidden = config.hidden_size
    norms = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
    found = {
        f"{ours}.weight": Source({f"{MTP}{theirs}.weight": (hidden,)}, _one_more)
        for ours, theirs in norms.items()
    }
    found["fc.weight"] = Source({f"{MTP}fc.weight": (hidden, 2 * hidden)})
    return found | _layer(config, 0, FULL, "block.", f"{MTP}layers.0.", stored)


def _layer(
    config: QwenConfig, layer: int, kind: str, ours: str, theirs: str, stored: Collection[str]
) -> dict[str, Source]:
    hidden = config.hidden_size
    parts = {
        "attn_norm.weight": Source({"input_layernorm.weight": (hidden,)}, _one_more),
        "mlp_norm.weight": Source({"post_attention_layernorm.weight": (hidden,)}, _one_more),
    }
    parts |= _recurrent(config) if kind == LINEAR else _attention(config)
    if config.is_sparse(layer):
        parts |= _experts(config, fused=f"{theirs}mlp.experts.gate_up_proj" in stored)
    else:
        assert config.intermediate_size is not None
        parts |= swiglu("mlp.", "mlp.", hidden, config.intermediate_size)
    return {
        ours + name: Source({theirs + part: shape for part, shape in shapes.items()}, join)
        for name, (shapes, join) in parts.items()
    }


def _recurrent(config: QwenConfig) -> dict[str, Source]:
    delta, hidden = config.delta(), config.hidden_size
    heads, channels = delta.value_heads, 2 * delta.key_dim + delta.value_dim
    if config.model_type == NEXT:
        shapes = {"qkvz": (channels + delta.value_dim, hidden), "ba": (2 * heads, hidden)}
        join: Join = partial(_apart, config)
    else:
        shapes = {
            "qkv": (channels, hidden),
            "a": (heads, hidden),
            "b": (heads, hidden),
            "z": (delta.value_dim, hidden),
        }
        join = torch.cat
    return {
        "attn.in_proj.weight": Source(
            {f"linear_attn.in_proj_{x}.weight": s for x, s in shapes.items()}, join
        ),
        "attn.conv_weight": rows({"linear_attn.conv1d.weight": (channels, 1, delta.conv_size)}),
        "attn.A_log": Source({"linear_attn.A_log": (heads,)}),
        "attn.dt_bias": Source({"linear_attn.dt_bias": (heads,)}),
        "attn.norm.weight": Source({"linear_attn.norm.weight": (delta.head_v_dim,)}),
        "attn.o_proj.weight": Source({"linear_attn.out_proj.weight": (hidden, delta.value_dim)}),
    }


def _attention(config: QwenConfig) -> dict[str, Source]:
    hidden, dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    rows = {
        "q": 2 * heads * dim,
        "k": config.num_key_value_heads * dim,
        "v": config.num_key_value_heads * dim,
    }
    return {
        "attn.qkv_proj.weight": Source(
            {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}, partial(_gate_last, dim)
        ),
        "attn.q_norm.weight": Source({"self_attn.q_norm.weight": (dim,)}, _one_more),
        "attn.k_norm.weight": Source({"self_attn.k_norm.weight": (dim,)}, _one_more),
        "attn.o_proj.weight": Source({"self_attn.o_proj.weight": (hidden, heads * dim)}),
    }


def _experts(config: QwenConfig, fused: bool) -> dict[str, Source]:
    hidden, count, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    if fused:
        up = Source({"mlp.experts.gate_up_proj": (count, 2 * width, hidden)})
        down = Source({"mlp.experts.down_proj": (count, hidden, width)})
    else:
        each = [f"mlp.experts.{i}" for i in range(count)]
        up_shapes = {f"{one}.{x}_proj.weight": (width, hidden) for one in each for x in ("gate", "up")}
        up = Source(up_shapes, partial(stack, 2))
        down = Source({f"{one}.down_proj.weight": (hidden, width) for one in each}, partial(stack, 1))
    return {
        "mlp.router.weight": Source({"mlp.gate.weight": (count, hidden)}),
        "mlp.gate_up_proj": up,
        "mlp.down_proj": down,
        "mlp.shared_gate.weight": Source({"mlp.shared_expert_gate.weight": (1, hidden)}),
        **swiglu("mlp.shared.", "mlp.shared_expert.", hidden, config.shared_expert_intermediate_size),
    }


def _one_more(parts: list[Tensor]) -> Tensor:
    return 1 + parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))


def _gate_last(dim: int, parts: list[Tensor]) -> Tensor:
    """Rows of q, k, v and gate, where theirs of q and gate take turns from head to head."""
    q, gate = parts[0].unflatten(0, (-1, 2, dim)).unbind(1)
    return torch.cat([q.flatten(0, 1), *parts[1:], gate.flatten(0, 1)])


def _apart(config: QwenConfig, parts: list[Tensor]) -> Tensor:
    """Rows of q, k, v, a, b and z, where theirs follow one key head after the other."""
    delta = config.delta()
    heads, each = delta.num_heads, delta.value_heads // delta.num_heads
    wide = each * delta.head_v_dim
    qkvz, ba = (x.unflatten(0, (heads, -1)) for x in parts)
    q, k, v, z = qkvz.split([delta.head_dim, delta.head_dim, wide, wide], 1)
    b, a = ba.split([each, each], 1)
    return torch.cat([x.flatten(0, 1) for x in (q, k, v, a, b, z)])
