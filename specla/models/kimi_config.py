"""The configuration of Kimi-Linear checkpoints, as hubs have it or transformers writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from specla.models.config import (
    LARGEST,
    check_bool,
    check_layers,
    check_number,
    check_size,
    check_special,
    from_values,
    is_int,
)
from specla.models.kda_config import KDAConfig
from specla.models.qwen_config import FULL, LINEAR, MOST_EXPERTS

DENSE, SPARSE = "dense", "sparse"
# ours, and how else a checkpoint may call it
NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_experts": "num_local_experts",
}
# ours, and the same in linear_attn_config
LINEAR_NAMES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
ONLY: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "q_lora_rank": None, "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "quantization_config": None,
}  # fmt: skip
SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim linear_num_heads linear_head_dim linear_conv_kernel_dim model_max_length"
).split()
EXPERT_SIZES = (
    "num_experts num_experts_per_token num_shared_experts moe_intermediate_size num_expert_group topk_group"
).split()


@dataclass(frozen=True)
class KimiConfig:
    """Shape of a Kimi-Linear model: KDA layers, latent attention at some, and experts; names are the checkpoints'.

    Raises:
        ValueError: for a value that is missing, contradicts another or that specla does not implement.
    """

    model_type: ClassVar[str] = "kimi_linear"
    architecture: ClassVar[str] = "KimiLinearForCausalLM"

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_num_heads: int
    linear_head_dim: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    intermediate_size: int
    linear_conv_kernel_dim: int = 4
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 1
    moe_intermediate_size: int = 0
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    model_max_length: int = 2**20
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in (*SIZES, "intermediate_size"):
            check_size(name, getattr(self, name))
        for name in ("routed_scaling_factor", "rms_norm_eps", "initializer_range"):
            check_number(name, getattr(self, name), above=0)
        for name in ("moe_renormalize", "tie_word_embeddings"):
            check_bool(name, getattr(self, name))
        for name, kinds in (("layer_types", (LINEAR, FULL)), ("mlp_layer_types", (DENSE, SPARSE))):
            found = getattr(self, name)
            if len(found) != self.num_hidden_layers:
                raise ValueError(
                    f"config.json: {name} has {len(found)} entries, but num_hidden_layers is {self.num_hidden_layers}"
                )
            wrong = next(((i, kind) for i, kind in enumerate(found) if kind not in kinds), None)
            if wrong is not None:
                raise ValueError(
                    f"config.json: layer {wrong[0]} of {name} must be {' or '.join(kinds)}, got {wrong[1]!r}"
                )
        if SPARSE in self.mlp_layer_types:
            self._check_experts()
        check_size("the size of all heads", self.num_attention_heads * max(self.head_dim, self.v_head_dim))
        self.delta()  # checks the sizes of recurrent layers
        check_special(self)

    def _check_experts(self) -> None:
        for name in EXPERT_SIZES:
            check_size(name, getattr(self, name))
        check_size("the size of shared experts", self.shared_size)
        experts, groups = self.num_experts, self.num_expert_group
        if experts > MOST_EXPERTS:
            raise ValueError(f"config.json: num_experts must be at most {MOST_EXPERTS}, got {experts}")
        if experts % groups or experts < 2 * groups:
            raise ValueError(
                f"config.json: num_experts {experts} must be a multiple of num_expert_group {groups}, at least twice it"
            )
        if self.topk_group > groups:
            raise ValueError(
                f"config.json: topk_group {self.topk_group} is more than num_expert_group {groups}"
            )
        if self.num_experts_per_token > experts // groups * self.topk_group:
            raise ValueError(
                f"config.json: num_experts_per_token {self.num_experts_per_token} is more than "
                f"{self.topk_group} of {groups} groups of {experts} experts have"
            )

    @property
    def head_dim(self) -> int:
        """Of queries and keys of attention."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_size(self) -> int:
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def norm_eps(self) -> float:
        return self.rms_norm_eps

    @property
    def max_position_embeddings(self) -> int:
        return self.model_max_length

    @property
    def mlp_dim(self) -> int:
        return self.intermediate_size

    @property
    def output_gate(self) -> str:
        return "sigmoid"

    def delta(self) -> KDAConfig:
        """The recurrent layers in flash-linear-attention's terms."""
        return KDAConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            num_heads=self.linear_num_heads, head_dim=self.linear_head_dim, conv_size=self.linear_conv_kernel_dim,
            intermediate_size=self.intermediate_size, norm_eps=self.rms_norm_eps, gate_bias=False, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> KimiConfig:
        """Read a `config.json`; what does not change the computation is left out."""
        for name, only in ONLY.items():
            if raw.get(name, only) != only:
                raise ValueError(f"config.json: {name} {raw[name]!r} is not supported, only {only!r}")
        values = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        for ours, theirs in NAMES.items():
            if ours not in values and raw.get(theirs) is not None:
                values[ours] = raw[theirs]
        heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            raise ValueError(
                f"config.json: num_key_value_heads {kv_heads!r} is not num_attention_heads {heads!r}"
            )
        if raw.get("use_grouped_topk") is False and values.get("num_expert_group", 1) != 1:
            raise ValueError(
                "config.json: use_grouped_topk false is not supported with num_expert_group above 1"
            )
        linear = raw.get("linear_attn_config") or {}
        if not isinstance(linear, Mapping):
            raise ValueError(f"config.json: linear_attn_config must be an object, got {linear!r}")
        values |= {ours: linear[theirs] for ours, theirs in LINEAR_NAMES.items() if theirs in linear}
        values |= _kinds_of_layers(raw, linear)
        return from_values(cls, values)


def _kinds_of_layers(raw: Mapping[str, Any], linear: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    layers = raw.get("num_hidden_layers")
    check_layers(layers)
    assert isinstance(layers, int)
    found = {}
    for name in ("layer_types", "mlp_layer_types"):
        if raw.get(name) is not None:
            if not isinstance(raw[name], list | tuple):
                raise ValueError(f"config.json: {name} must be a list, got {raw[name]!r}")
            found[name] = tuple(raw[name])
    if "layer_types" not in found:
        found["layer_types"] = _by_number(linear, layers)
    if "mlp_layer_types" not in found:
        dense = raw.get("first_k_dense_replace", 1)
        if not is_int(dense) or not 0 <= dense <= LARGEST:
            raise ValueError(
                f"config.json: first_k_dense_replace must be an integer of 0 or more, got {dense!r}"
            )
        found["mlp_layer_types"] = tuple(DENSE if i < dense else SPARSE for i in range(layers))
    return found


def _by_number(linear: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """From lists of layers that count from 1 and share all layers out."""
    lists = {LINEAR: linear.get("kda_layers"), FULL: linear.get("full_attn_layers")}
    kinds: dict[Any, str] = {}
    for kind, numbers in lists.items():
        if not isinstance(numbers, list | tuple):
            raise ValueError(
                "config.json needs layer_types, or kda_layers and full_attn_layers in linear_attn_config"
            )
        kinds |= dict.fromkeys(numbers, kind) if all(is_int(i) for i in numbers) else {None: kind}
    if sorted(map(str, kinds)) != sorted(map(str, range(1, layers + 1))) or len(kinds) != sum(
        len(numbers or ()) for numbers in lists.values()
    ):
        raise ValueError(
            f"config.json: kda_layers and full_attn_layers must name each layer of 1..{layers} once, "
            f"got {lists[LINEAR]} and {lists[FULL]}"
        )
    return tuple(kinds[i] for i in range(1, layers + 1))
