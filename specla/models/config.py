"""The configuration of a Gated DeltaNet checkpoint in flash-linear-attention's layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

MODEL_TYPE = "gated_deltanet"
GATES = ("swish", "silu", "sigmoid")


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention at some layers of a hybrid: rotary positions, grouped key/value heads, optional window."""

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    qkv_bias: bool = False
    qk_norm: bool = False
    window_size: int | None = None
    rope_theta: float = 10000.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> AttentionConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ValueError(f"config.json: unknown attn fields {unknown}, known are {sorted(known)}")
        if not isinstance(raw.get("layers"), (list, tuple)) or not isinstance(raw.get("num_heads"), int):
            raise ValueError("config.json: attn needs 'layers' (a list) and 'num_heads' (an integer)")
        values = {key: value for key, value in raw.items() if value is not None}
        values["layers"] = tuple(raw["layers"])
        values.setdefault("num_kv_heads", raw["num_heads"])
        return cls(**values)


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Shape of a Gated DeltaNet language model; names and defaults are flash-linear-attention's.

    Raises:
        ValueError: for a value that contradicts another or that specla does not implement.
    """

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 21
    num_heads: int = 6
    num_v_heads: int | None = None
    head_dim: int = 256
    expand_v: float = 2.0
    use_gate: bool = True
    output_gate_activation: str = "swish"
    use_short_conv: bool = True
    conv_size: int = 4
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    hidden_ratio: int | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    attn: tuple[AttentionConfig, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"config.json: {name} must be a positive integer, got {value!r}")
        if self.value_heads % self.num_heads:
            raise ValueError(f"config.json: num_v_heads {self.num_v_heads} is no multiple of num_heads {self.num_heads}")
        if self.head_v_dim <= 0 or abs(self.head_dim * self.expand_v - self.head_v_dim) > 1e-5:
            raise ValueError(f"config.json: head_dim * expand_v = {self.head_dim * self.expand_v} is not an integer")
        if self.output_gate_activation not in GATES:
            raise ValueError(
                f"config.json: output_gate_activation must be one of {', '.join(GATES)}, "
                f"got {self.output_gate_activation!r}"
            )
        if self.hidden_act not in ("swish", "silu"):
            raise ValueError(f"config.json: hidden_act must be swish or silu, got {self.hidden_act!r}")
        if self.use_short_conv and self.conv_size < 1:
            raise ValueError(f"config.json: conv_size must be at least 1, got {self.conv_size}")
        if self.intermediate_size is None and self.hidden_ratio is None:
            raise ValueError("config.json: one of intermediate_size and hidden_ratio is needed")
        claimed: set[int] = set()
        for spec in self.attn:
            bad = [i for i in spec.layers if not 0 <= i < self.num_hidden_layers or i in claimed]
            if bad:
                raise ValueError(f"config.json: attn layers {bad} are out of range or named twice")
            claimed.update(spec.layers)
            if self.hidden_size % spec.num_heads or spec.num_heads % spec.num_kv_heads:
                raise ValueError("config.json: attn num_heads must divide hidden_size and num_kv_heads divide num_heads")
            if (self.hidden_size // spec.num_heads) % 2:
                raise ValueError("config.json: attn head size must be even for rotary positions")
            if spec.window_size is not None and spec.window_size <= 0:
                raise ValueError(f"config.json: attn window_size must be positive, got {spec.window_size}")

    @property
    def value_heads(self) -> int:
        return self.num_heads if self.num_v_heads is None else self.num_v_heads

    @property
    def head_v_dim(self) -> int:
        return int(self.head_dim * self.expand_v)

    @property
    def key_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.head_v_dim

    @property
    def mlp_dim(self) -> int:
        """`intermediate_size`, or two thirds of `hidden_size * hidden_ratio` rounded up to a multiple of 256."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        assert self.hidden_ratio is not None
        return -(-int(self.hidden_size * self.hidden_ratio * 2 / 3) // 256) * 256

    @property
    def window(self) -> int:
        """Width of the short convolution; 1 when there is none."""
        return self.conv_size if self.use_short_conv else 1

    def attention(self, layer: int) -> AttentionConfig | None:
        """The attention of this layer, or None for a recurrent one."""
        return next((spec for spec in self.attn if layer in spec.layers), None)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GatedDeltaNetConfig:
        """Read a `config.json`; fields that do not change the computation (kernel choices, training) are left out."""
        model_type = raw.get("model_type")
        if model_type != MODEL_TYPE:
            raise ValueError(f"model_type {model_type!r} is not supported; supported is {MODEL_TYPE!r}")
        if raw.get("attnres_block_size") is not None:
            raise ValueError("config.json: attnres_block_size (attention residuals) is not supported")
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in raw.items() if key in known and key != "attn"}
        attn = raw.get("attn") or []
        values["attn"] = tuple(AttentionConfig.from_dict(a) for a in ([attn] if isinstance(attn, Mapping) else attn))
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The same as `config.json` content that flash-linear-attention reads."""
        raw = asdict(self)
        raw["attn"] = [dict(a, layers=list(a["layers"])) for a in raw["attn"]] or None
        eos = raw["eos_token_id"]
        raw["eos_token_id"] = list(eos) if isinstance(eos, tuple) else eos
        return {"architectures": ["GatedDeltaNetForCausalLM"], "model_type": MODEL_TYPE, **raw}
