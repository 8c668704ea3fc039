"""Configurations of checkpoints: what all targets share, what flash-linear-attention's do, and Gated DeltaNet's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

MODEL_TYPE = "gated_deltanet"
GATES = ("swish", "silu", "sigmoid")
LARGEST = 2**24  # of any size: beyond it a configuration is a mistake, and building it would not end
MOST_LAYERS = 1024
Config = TypeVar("Config", bound="FlaConfig")
UNSUPPORTED = {"attnres_block_size": "attention residuals", "quantization_config": "quantised weights"}


class ModelConfig(Protocol):
    """What is asked of a target's configuration, whatever its architecture."""

    @property
    def model_type(self) -> str: ...
    @property
    def architecture(self) -> str:
        """The class that a checkpoint names."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | tuple[int, ...] | None: ...
    @property
    def mlp_dim(self) -> int:
        """Width of an MLP, as a drafter may take it over."""

    @property
    def output_gate(self) -> str:
        """The activation of the recurrent layers' output gate, or none."""


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
        layers = raw.get("layers")
        if (
            not isinstance(layers, (list, tuple))
            or not all(is_int(i) for i in layers)
            or "num_heads" not in raw
        ):
            raise ValueError(
                "config.json: attn needs 'layers' (a list of integers) and 'num_heads' (an integer)"
            )
        values = {key: value for key, value in raw.items() if value is not None}
        values["layers"] = tuple(layers)
        values.setdefault("num_kv_heads", raw["num_heads"])
        return cls(**values)

    def __post_init__(self) -> None:
        check_size("attn num_heads", self.num_heads)
        check_size("attn num_kv_heads", self.num_kv_heads)
        check_bool("attn qkv_bias", self.qkv_bias)
        check_bool("attn qk_norm", self.qk_norm)
        check_number("attn rope_theta", self.rope_theta, above=0)
        if self.window_size is not None:
            check_size("attn window_size", self.window_size)


@dataclass(frozen=True)
class FlaConfig:
    """What the configurations of all models in flash-linear-attention's layout share; names and defaults are its own.

    Raises:
        ValueError: for a value that contradicts another or that specla does not implement.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
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
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
            check_size(name, getattr(self, name))
        if self.intermediate_size is not None:
            check_size("intermediate_size", self.intermediate_size)
        check_bool("tie_word_embeddings", self.tie_word_embeddings)
        check_number("norm_eps", self.norm_eps, above=0)
        if self.hidden_ratio is not None:
            check_number("hidden_ratio", self.hidden_ratio, above=0)
        check_layers(self.num_hidden_layers)
        check_special(self)
        check_size("the size of MLP", self.mlp_dim)
        check_one_of("hidden_act", self.hidden_act, ("swish", "silu"))
        claimed = [layer for spec in self.attn for layer in spec.layers]
        bad = [i for i in claimed if not 0 <= i < self.num_hidden_layers or claimed.count(i) > 1]
        if bad:
            raise ValueError(f"config.json: attn layers {bad} are out of range or named twice")
        for spec in self.attn:
            if self.hidden_size % spec.num_heads or spec.num_heads % spec.num_kv_heads:
                raise ValueError(
                    "config.json: attn num_heads must divide hidden_size and num_kv_heads divide num_heads"
                )
            if (self.hidden_size // spec.num_heads) % 2:
                raise ValueError("config.json: attn head size must be even for rotary positions")

    @property
    def mlp_dim(self) -> int:
        """`intermediate_size`, or two thirds of `hidden_size * hidden_ratio` (4 if null) rounded up to 256s."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        return -(-int(self.hidden_size * ratio * 2 / 3) // 256) * 256

    def attention(self, layer: int) -> AttentionConfig | None:
        """The attention of this layer, or None for a recurrent one."""
        return next((spec for spec in self.attn if layer in spec.layers), None)

    @classmethod
    def from_dict(cls: type[Config], raw: Mapping[str, Any]) -> Config:
        """Read a `config.json`; fields that do not change the computation (kernel choices, training) are left out."""
        check_supported(raw, cls.model_type)
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in raw.items() if key in known and key != "attn"}
        attn = [] if raw.get("attn") is None else raw["attn"]
        specs = [attn] if isinstance(attn, Mapping) else attn
        if not isinstance(specs, list) or not all(isinstance(spec, Mapping) for spec in specs):
            raise ValueError(f"config.json: attn must be null, an object or a list of objects, got {attn!r}")
        values["attn"] = tuple(AttentionConfig.from_dict(spec) for spec in specs)
        return from_values(cls, values)

    def to_dict(self) -> dict[str, Any]:
        """The same as `config.json` content that flash-linear-attention reads."""
        raw = asdict(self)
        raw["attn"] = [dict(a, layers=list(a["layers"])) for a in raw["attn"]] or None
        eos = raw["eos_token_id"]
        raw["eos_token_id"] = list(eos) if isinstance(eos, tuple) else eos
        return {"architectures": [self.architecture], "model_type": self.model_type, **raw}


@dataclass(frozen=True)
class GatedDeltaNetConfig(FlaConfig):
    """Shape of a Gated DeltaNet language model."""

    model_type: ClassVar[str] = MODEL_TYPE
    architecture: ClassVar[str] = "GatedDeltaNetForCausalLM"

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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "head_dim", "conv_size"):
            check_size(name, getattr(self, name))
        if self.num_v_heads is not None:
            check_size("num_v_heads", self.num_v_heads)
        for name in ("use_gate", "use_short_conv", "conv_bias", "allow_neg_eigval"):
            check_bool(name, getattr(self, name))
        check_number("expand_v", self.expand_v, above=0)
        if self.value_heads % self.num_heads:
            raise ValueError(
                f"config.json: num_v_heads {self.num_v_heads} is no multiple of num_heads {self.num_heads}"
            )
        check_whole("head_dim * expand_v", self.head_dim * self.expand_v)
        for name, size in (("all key heads", self.key_dim), ("all value heads", self.value_dim)):
            check_size(f"the size of {name}", size)
        check_one_of("output_gate_activation", self.output_gate_activation, GATES)

    @property
    def value_heads(self) -> int:
        return self.num_heads if self.num_v_heads is None else self.num_v_heads

    @property
    def head_v_dim(self) -> int:
        return round(self.head_dim * self.expand_v)

    @property
    def key_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.head_v_dim

    @property
    def window(self) -> int:
        """Width of the short convolution; 1 when there is none."""
        return self.conv_size if self.use_short_conv else 1

    @property
    def output_gate(self) -> str:
        return self.output_gate_activation if self.use_gate else "none"


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_size(name: str, value: Any) -> None:
    if not is_int(value) or not 0 < value <= LARGEST:
        raise ValueError(f"config.json: {name} must be an integer in 1..{LARGEST}, got {value!r}")


def check_number(name: str, value: Any, above: float) -> None:
    if not (is_int(value) or isinstance(value, float)) or not above < value < math.inf or value > 2.0**64:
        raise ValueError(f"config.json: {name} must be a finite number above {above:g}, got {value!r}")


def check_whole(name: str, value: float) -> None:
    """A size that is a product with a fraction."""
    check_size(name, round(value))
    if abs(value - round(value)) > 1e-5:
        raise ValueError(f"config.json: {name} = {value} is not an integer")


def check_heads(name: str, size: float, heads: int) -> None:
    """All heads of a layer: a product with a fraction, which they share equally."""
    check_whole(name, size)
    if round(size) % heads:
        raise ValueError(f"config.json: {name} = {round(size)} is no multiple of num_heads {heads}")


def check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"config.json: {name} must be one of {', '.join(allowed)}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, got {value!r}")


def check_special(config: ModelConfig | FlaConfig) -> None:
    """The tokens that begin and end a text."""
    for name in ("bos_token_id", "eos_token_id"):
        given = getattr(config, name)
        for token in given if isinstance(given, tuple) else (given,):
            if token is not None and not (is_int(token) and 0 <= token < config.vocab_size):
                raise ValueError(
                    f"config.json: {name} must be null or in 0..{config.vocab_size - 1}, got {token!r}"
                )


def check_layers(count: Any) -> None:
    check_size("num_hidden_layers", count)
    if count > MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, got {count}")


def check_supported(raw: Mapping[str, Any], model_type: str) -> None:
    """Of a config.json of flash-linear-attention's."""
    if raw.get("model_type") != model_type:
        raise ValueError(f"model_type must be {model_type!r} here, got {raw.get('model_type')!r}")
    for name, what in UNSUPPORTED.items():
        if raw.get(name) is not None:
            raise ValueError(f"config.json: {name} ({what}) is not supported")


def from_values(cls: type[Any], values: dict[str, Any]) -> Any:
    """A configuration from its fields as JSON has them; ValueError that names those without a default that it lacks."""
    if isinstance(values.get("eos_token_id"), list):
        values = {**values, "eos_token_id": tuple(values["eos_token_id"])}
    needed = [f.name for f in fields(cls) if f.name not in values and f.default is MISSING]
    if needed:
        raise ValueError(f"config.json lacks {', '.join(needed)}")
    return cls(**values)
