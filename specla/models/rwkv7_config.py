"""The configuration of an RWKV-7 checkpoint in flash-linear-attention's layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from specla.models.config import (
    check_bool,
    check_layers,
    check_number,
    check_one_of,
    check_size,
    check_special,
    check_supported,
    from_values,
)

ACTIVATION = "sqrelu"


@dataclass(frozen=True)
class Rwkv7Config:
    """Shape of an RWKV-7 language model; names and defaults are flash-linear-attention's.

    Args:
        head_dim, num_heads: either may be null, not both; the heads make up `hidden_size`.
        value_dim: of all heads, one number for every layer: layers add the first one's values to their own.
        *_low_rank_dim: inner sizes of the projections for decay, gate, removal rate and values; null: by `ranks`.
        norm_first: a norm of the embeddings, before the first layer.
        fuse_norm: removal keys are divided by `sqrt(|k|^2 + 1e-6)` rather than by `max(|k|, 1e-12)`.

    Raises:
        ValueError: for a value that contradicts another or that specla does not implement.
    """

    model_type: ClassVar[str] = "rwkv7"
    architecture: ClassVar[str] = "RWKV7ForCausalLM"

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    head_dim: int | None = 64
    num_heads: int | None = None
    value_dim: int | None = None
    decay_low_rank_dim: int | None = 64
    gate_low_rank_dim: int | None = 128
    a_low_rank_dim: int | None = 64
    v_low_rank_dim: int | None = 16
    hidden_ratio: float | None = 4
    intermediate_size: int | None = None
    hidden_act: str = ACTIVATION
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    fuse_norm: bool = True
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
            check_size(name, getattr(self, name))
        ranks = [f"{x}_low_rank_dim" for x in ("decay", "gate", "a", "v")]
        for name in ("head_dim", "num_heads", "value_dim", "intermediate_size", *ranks):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name in ("norm_first", "norm_bias", "fuse_norm", "tie_word_embeddings"):
            check_bool(name, getattr(self, name))
        check_number("norm_eps", self.norm_eps, above=0)
        if self.hidden_ratio is not None:
            check_number("hidden_ratio", self.hidden_ratio, above=0)
        check_layers(self.num_hidden_layers)
        check_special(self)
        if self.head_dim is None and self.num_heads is None:
            raise ValueError("config.json: head_dim or num_heads must be given, both are null")
        if self.heads * self.key_head_dim != self.hidden_size or self.num_heads not in (None, self.heads):
            raise ValueError(
                f"config.json: head_dim {self.head_dim} and num_heads {self.num_heads} do not make up "
                f"hidden_size {self.hidden_size}"
            )
        if self.values % self.hidden_size:
            raise ValueError(
                f"config.json: value_dim {self.values} must be a multiple of hidden_size {self.hidden_size}"
            )
        check_size("the size of channel mixing", self.mlp_dim)
        check_one_of("hidden_act", self.hidden_act, (ACTIVATION,))

    @property
    def heads(self) -> int:
        return self.hidden_size // self.key_head_dim

    @property
    def key_head_dim(self) -> int:
        """Of keys; as in flash-linear-attention, `head_dim` counts where `num_heads` stands beside it."""
        if self.head_dim is not None:
            return self.head_dim
        assert self.num_heads is not None
        return max(1, self.hidden_size // self.num_heads)

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.hidden_size if self.value_dim is None else self.value_dim

    @property
    def value_head_dim(self) -> int:
        return self.values // self.heads

    @property
    def mlp_dim(self) -> int:
        """`intermediate_size`, or `hidden_size * hidden_ratio` (4 if null) rounded up to 32s."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        return -(-int(self.hidden_size * ratio) // 32) * 32

    @property
    def output_gate(self) -> str:
        return f"of rank {self.ranks['g']}"

    @property
    def ranks(self) -> dict[str, int]:
        """Inner sizes of the low-rank projections, by the letters of a checkpoint: w is the decay's."""
        root, factor = self.hidden_size**0.5, self.key_head_dim / 64
        by_size = {
            "w": 2.5 * root * factor,
            "g": 5 * root,
            "a": 2.5 * root * factor,
            "v": 1.7 * root * factor,
        }
        given = (self.decay_low_rank_dim, self.gate_low_rank_dim, self.a_low_rank_dim, self.v_low_rank_dim)
        return {
            letter: max(32, round(size / 32) * 32) if rank is None else rank
            for (letter, size), rank in zip(by_size.items(), given, strict=True)
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Rwkv7Config:
        """Read a `config.json`; fields that do not change the computation (kernel choices, training) are left out."""
        check_supported(raw, cls.model_type)
        if raw.get("attn") is not None:
            raise ValueError("config.json: attn (softmax attention at some layers) is not supported for rwkv7, "
                             "nor does flash-linear-attention run it")  # fmt: skip
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in raw.items() if key in known}
        if isinstance(values.get("value_dim"), list):
            values["value_dim"] = _one_size(values["value_dim"], values)
        return from_values(cls, values)

    def to_dict(self) -> dict[str, Any]:
        """The same as `config.json` content that flash-linear-attention reads."""
        raw = asdict(self)
        eos = raw["eos_token_id"]
        raw["eos_token_id"] = list(eos) if isinstance(eos, tuple) else eos
        return {"architectures": [self.architecture], "model_type": self.model_type, **raw}


def _one_size(sizes: list[Any], values: Mapping[str, Any]) -> Any:
    """The value_dim of all layers, as flash-linear-attention stores it: once a layer."""
    layers = values.get("num_hidden_layers", Rwkv7Config.num_hidden_layers)
    if not sizes or len(sizes) != layers:
        raise ValueError(f"config.json: value_dim has {len(sizes)} entries, num_hidden_layers is {layers!r}")
    if any(size != sizes[0] for size in sizes):
        raise ValueError(f"config.json: value_dim must be the same for all layers, got {sizes}")
    return sizes[0]
