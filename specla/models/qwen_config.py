"""The configuration of Qwen3-Next and Qwen3.5 checkpoints as transformers writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specla.models.config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    check_bool,
    check_layers,
    check_number,
    check_size,
    check_special,
    from_values,
    is_int,
)

NEXT = "qwen3_next"
WITH_IMAGES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # and what their text part is
QWEN_TYPES = (NEXT, *WITH_IMAGES, *WITH_IMAGES.values())
ARCHITECTURES = {
    NEXT: "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
CLASSES = {
    kind: (made,) if kind == text else (made.replace("ForCausalLM", "ForConditionalGeneration"), made)
    for kind, text, made in (
        (kind, WITH_IMAGES.get(kind, kind), ARCHITECTURES[WITH_IMAGES.get(kind, kind)]) for kind in QWEN_TYPES
    )
}  # that a checkpoint may name, the text model alone among them
LINEAR, FULL = "linear_attention", "full_attention"
MOST_EXPERTS = 4096  # beyond it a configuration is a mistake, and naming all weights would not end
EXPERT_SIZES = "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size".split()
SIZES = (
    "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim linear_num_key_heads "
    "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim max_position_embeddings"
).split()


@dataclass(frozen=True)
class QwenConfig:
    """Shape of the language model of a checkpoint; names are transformers'.

    Raises:
        ValueError: for a value that is missing, contradicts another or that specla does not implement.
    """

    model_type: str  # of the text part
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[str, ...]
    rope_theta: float
    partial_rotary_factor: float
    intermediate_size: int | None = None
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in SIZES:
            check_size(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
            check_number(name, getattr(self, name), above=0)
        for name in ("tie_word_embeddings", "norm_topk_prob"):
            check_bool(name, getattr(self, name))
        check_special(self)
        for i, kind in enumerate(self.layer_types):
            if kind not in (LINEAR, FULL):
                raise ValueError(
                    f"config.json: layer {i} is of type {kind!r}, supported are {LINEAR}, {FULL}"
                )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"config.json: layer_types has {len(self.layer_types)} entries, but num_hidden_layers "
                             f"is {self.num_hidden_layers}")  # fmt: skip
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"config.json: {many} {getattr(self, many)} is no multiple of {few} "
                                 f"{getattr(self, few)}")  # fmt: skip
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(f"config.json: head_dim {self.head_dim} times partial_rotary_factor "
                             f"{self.partial_rotary_factor} must be an even number of its channels")  # fmt: skip
        self._check_mlps()

    def _check_mlps(self) -> None:
        check_size("decoder_sparse_step", self.decoder_sparse_step)
        bad = [i for i in self.mlp_only_layers if not is_int(i) or not 0 <= i < self.num_hidden_layers]
        if bad:
            raise ValueError(f"config.json: mlp_only_layers {bad} are out of range")
        sparse = [self.is_sparse(i) for i in range(self.num_hidden_layers)]
        if any(sparse):
            for name in EXPERT_SIZES:
                check_size(name, getattr(self, name))
            if self.num_experts > MOST_EXPERTS:
                raise ValueError(
                    f"config.json: num_experts must be at most {MOST_EXPERTS}, got {self.num_experts}"
                )
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(f"config.json: num_experts_per_tok {self.num_experts_per_tok} is more than "
                                 f"num_experts {self.num_experts}")  # fmt: skip
        if not all(sparse):
            check_size("intermediate_size", self.intermediate_size)

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts rather than one MLP."""
        chosen = layer not in self.mlp_only_layers and not (layer + 1) % self.decoder_sparse_step
        return self.num_experts != 0 and chosen

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.model_type]

    @property
    def norm_eps(self) -> float:
        return self.rms_norm_eps

    @property
    def mlp_dim(self) -> int:
        return self.delta().mlp_dim

    @property
    def output_gate(self) -> str:
        return self.delta().output_gate

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def delta(self) -> GatedDeltaNetConfig:
        """The recurrent layers in flash-linear-attention's terms."""
        return GatedDeltaNetConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            num_heads=self.linear_num_key_heads, num_v_heads=self.linear_num_value_heads,
            head_dim=self.linear_key_head_dim, expand_v=self.linear_value_head_dim / self.linear_key_head_dim,
            conv_size=self.linear_conv_kernel_dim, intermediate_size=self.intermediate_size, norm_eps=self.rms_norm_eps,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip

    def attention(self) -> AttentionConfig:
        layers = tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)
        heads = self.num_attention_heads, self.num_key_value_heads
        return AttentionConfig(layers, *heads, qk_norm=True, rope_theta=self.rope_theta)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> QwenConfig:
        """Read a `config.json`, of a checkpoint with images its text part."""
        text: Any = raw
        kind = raw.get("model_type")
        if kind in WITH_IMAGES:
            text, kind = raw.get("text_config"), WITH_IMAGES[kind]
            if not isinstance(text, Mapping) or text.get("model_type", kind) != kind:
                raise ValueError(f"config.json: text_config must be an object of model_type {kind}")
        for part in (raw, text):
            _refuse(part)
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in text.items() if key in known and value is not None}
        for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id"):
            if raw.get(name) is not None and (name == "tie_word_embeddings" or name not in values):
                values[name] = raw[name]
        values["model_type"] = kind
        values.update(_rotary_positions(text))
        if kind == "qwen3_5_text":
            values["num_experts"] = 0
        elif kind == "qwen3_5_moe_text":
            values |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()}
            values.setdefault("num_experts", None)  # there is no such checkpoint without
        if "layer_types" not in values:
            values["layer_types"] = _layer_types(text)
        for name in ("layer_types", "mlp_only_layers"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
            elif not isinstance(values.get(name, ()), tuple):
                raise ValueError(f"config.json: {name} must be a list, got {values[name]!r}")
        return from_values(cls, values)


def _refuse(raw: Mapping[str, Any]) -> None:
    """Say what is not supported."""
    if raw.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config (quantised weights) is not supported")
    for name, only in (("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True)):
        if raw.get(name, only) != only:
            raise ValueError(f"config.json: {name} {raw[name]!r} is not supported, only {only!r}")


def _rotary_positions(raw: Mapping[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: rope_parameters must be an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ValueError(f"config.json: rope_type {kind!r} is not supported, only 'default'")
    names = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return {name: rope.get(name, raw.get(name, default)) for name, default in names.items()}


def _layer_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    layers, every = raw.get("num_hidden_layers"), raw.get("full_attention_interval", 4)
    check_layers(layers)
    check_size("full_attention_interval", every)
    assert layers is not None
    return tuple(LINEAR if (i + 1) % every else FULL for i in range(layers))
