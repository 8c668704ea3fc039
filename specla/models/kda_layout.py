"""Which tensors of a KDA or Kimi-Linear checkpoint our parameters are made of.

transformers holds a Kimi-Linear model by other names in memory than in the files that it writes, some tensors joined.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import Tensor

from specla.models import fla_layout
from specla.models.kda_config import KDAConfig
from specla.models.kimi_config import SPARSE, KimiConfig
from specla.models.qwen_config import LINEAR
from specla.models.source import Shapes, Source, flat, rows, stack, swiglu, vocabulary

MLP, MOE = "mlp", "block_sparse_moe"
GATE = "forget_gate."  # in memory, before the names of what makes the decay


def kda(config: KDAConfig) -> dict[str, Source]:
    """For each of our parameters what to read from flash-linear-attention's layout."""
    low_rank = {"f": ("f_proj.0", "f_proj.1"), "g": ("g_proj.0", "g_proj.1")}
    mixer = _mixer(config, low_rank, (config.value_heads,))
    return fla_layout.sources(config, lambda layer: mixer)


def kimi(config: KimiConfig, stored: Collection[str]) -> dict[str, Source]:
    """The same for Kimi-Linear, where `stored` are the names of all tensors in the checkpoint."""
    found = vocabulary(config, "model.embed_tokens.weight")
    found["norm.weight"] = Source({"model.norm.weight": (config.hidden_size,)})
    # transformers writes the MLPs of all layers under one name and holds them under another; hubs use both
    under_mlp = {name.partition(f".{MLP}.")[0] for name in stored if f".{MLP}." in name}
    in_memory = any(f".{GATE}" in name or name.endswith(".experts.gate_up_proj") for name in stored)
    for i in range(config.num_hidden_layers):
        theirs = f"model.layers.{i}"
        mlp = MLP if theirs in under_mlp else MOE
        for name, (shapes, join) in _layer(config, i, mlp, in_memory).items():
            found[f"layers.{i}.{name}"] = Source({f"{theirs}.{part}": s for part, s in shapes.items()}, join)
    return found


def _mixer(
    config: KDAConfig, low_rank: dict[str, tuple[str, str]], rates: tuple[int, ...]
) -> dict[str, Shapes]:
    """Parameters of a recurrent layer; `low_rank` names both halves of the decay's and the gate's projections."""
    hidden, narrow, heads = config.hidden_size, config.head_v_dim, config.value_heads
    key, value = config.key_dim, config.value_dim
    streams = {"q": key, "k": key, "v": value}
    (f_in, f_out), (g_in, g_out) = low_rank["f"], low_rank["g"]
    decays = heads * config.head_dim
    joined = {**fla_layout.projections(hidden, streams), f"{f_in}.weight": (narrow, hidden)}
    joined |= {"b_proj.weight": (heads, hidden), f"{g_in}.weight": (narrow, hidden)}
    mixer: dict[str, Shapes] = {
        "in_proj.weight": joined,
        "decay_proj.weight": {f"{f_out}.weight": (decays, narrow)},
        "gate_proj.weight": {f"{g_out}.weight": (value, narrow)},
        "A_log": {"A_log": rates},
        "dt_bias": {"dt_bias": (decays,)},
        "norm.weight": {"o_norm.weight": (config.head_v_dim,)},
        "o_proj.weight": {"o_proj.weight": (hidden, value)},
    }
    if config.gate_bias:
        mixer["gate_bias"] = {f"{g_out}.bias": (value,)}
    if config.use_short_conv:
        mixer |= fla_layout.short_conv(streams, config.conv_size, bias=False)
    return mixer


def _layer(config: KimiConfig, layer: int, mlp: str, in_memory: bool) -> dict[str, Source]:
    hidden = config.hidden_size
    parts = {
        "attn_norm.weight": Source({"input_layernorm.weight": (hidden,)}),
        "mlp_norm.weight": Source({"post_attention_layernorm.weight": (hidden,)}),
    }
    if config.layer_types[layer] == LINEAR:
        delta = config.delta()
        low_rank = {"f": ("f_a_proj", "f_b_proj"), "g": ("g_a_proj", "g_b_proj")}
        mixer = _mixer(delta, low_rank, (1, 1, delta.num_heads, 1))
        for name, shapes in (_held(mixer) if in_memory else mixer).items():
            named = {f"self_attn.{part}": shape for part, shape in shapes.items()}
            parts[f"attn.{name}"] = Source(named, flat) if name == "A_log" else rows(named)
    else:
        parts |= {f"attn.{name}": source for name, source in _attention(config).items()}
    if config.mlp_layer_types[layer] == SPARSE:
        return parts | _experts(config, mlp, in_memory)
    return parts | swiglu("mlp.", f"{mlp}.", hidden, config.intermediate_size)


def _held(mixer: dict[str, Shapes]) -> dict[str, Shapes]:
    """The same parameters by their names in memory, where the convolutions are one."""
    decay = ("f_a_proj", "f_b_proj", "A_log", "dt_bias")
    held: dict[str, Shapes] = {
        name: {(GATE if part.startswith(decay) else "") + part: shape for part, shape in shapes.items()}
        for name, shapes in mixer.items()
    }
    _, *rest = next(iter(mixer["conv_weight"].values()))
    channels = sum(shape[0] for shape in mixer["conv_weight"].values())
    return held | {"conv_weight": {"conv1d.weight": (channels, *rest)}}


def _attention(config: KimiConfig) -> dict[str, Source]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = (heads * config.head_dim, hidden)
    up = {"self_attn.kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank)}
    split = partial(_heads, heads, [config.qk_nope_head_dim, config.v_head_dim])
    return {
        "in_proj.weight": Source({
            "self_attn.q_proj.weight": queries,
            "self_attn.kv_a_proj_with_mqa.weight": (rank + config.qk_rope_head_dim, hidden),
        }),
        "latent_norm.weight": Source({"self_attn.kv_a_layernorm.weight": (rank,)}),
        "query_up": Source(up, lambda parts: split(parts)[0].transpose(1, 2).contiguous()),
        "value_up": Source(up, lambda parts: split(parts)[1].contiguous()),
        "o_proj.weight": Source({"self_attn.o_proj.weight": (hidden, heads * config.v_head_dim)}),
    }  # fmt: skip


def _experts(config: KimiConfig, mlp: str, in_memory: bool) -> dict[str, Source]:
    hidden, count, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    if in_memory:
        up = Source({f"{mlp}.experts.gate_up_proj": (count, 2 * width, hidden)})
        down = Source({f"{mlp}.experts.down_proj": (count, hidden, width)})
    else:
        each = [f"{mlp}.experts.{i}" for i in range(count)]
        up_shapes = {f"{one}.{x}.weight": (width, hidden) for one in each for x in ("w1", "w3")}
        up = Source(up_shapes, partial(stack, 2))
        down = Source({f"{one}.w2.weight": (hidden, width) for one in each}, partial(stack, 1))
    return {
        "mlp.router.weight": Source({f"{mlp}.gate.weight": (count, hidden)}),
        "mlp.router.choice_bias": Source({f"{mlp}.gate.e_score_correction_bias": (count,)}),
        "mlp.gate_up_proj": up,
        "mlp.down_proj": down,
        **swiglu("mlp.shared.", f"{mlp}.shared_experts.", hidden, config.shared_size),
    }


def _heads(heads: int, sizes: list[int], parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Rows of each head, split in kinds: `[heads, size, rank]`."""
    return parts[0].unflatten(0, (heads, -1)).split(sizes, 1)
