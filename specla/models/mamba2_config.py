"""The configuration of a Mamba-2 checkpoint, as transformers or flash-linear-attention writes it.

Both say model_type "mamba2" and name their tensors alike; they differ in the names of a few fields, by which they are
told apart, and in what these allow.
"""

from __future__ import annotations

import math
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

# flash-linear-attention's names, which are ours, and transformers' for the same
NAMES = {"norm_eps": "layer_norm_epsilon", "dt_limit": "time_step_limit"}
FLA_ONLY = ("rmsnorm", "norm_before_gate", "D_has_hdim")
SIZES = "vocab_size hidden_size num_hidden_layers num_heads head_dim state_size n_groups conv_kernel".split()
SWITCHES = ("use_bias", "use_conv_bias", "tie_word_embeddings", *FLA_ONLY)
NO_LIMIT = 2**20  # tokens; a state holds any number, but a server wants one


@dataclass(frozen=True)
class Mamba2Config:
    """Shape of a Mamba-2 language model; names are flash-linear-attention's.

    Raises:
        ValueError: for a value that is missing, contradicts another or that specla does not implement.
    """

    model_type: ClassVar[str] = "mamba2"
    architecture: ClassVar[str] = "Mamba2ForCausalLM"

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    norm_eps: float = 1e-5
    expand: float = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, math.inf)
    rmsnorm: bool = True
    norm_before_gate: bool = False
    D_has_hdim: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = NO_LIMIT
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in (*SIZES, "max_position_embeddings"):
            check_size(name, getattr(self, name))
        for name in ("norm_eps", "expand", "initializer_range"):
            check_number(name, getattr(self, name), above=0)
        for name in SWITCHES:
            check_bool(name, getattr(self, name))
        check_layers(self.num_hidden_layers)
        if self.expand * self.hidden_size != self.inner_size:
            raise ValueError(
                f"config.json: expand * hidden_size is {self.expand * self.hidden_size:g}, "
                f"but num_heads * head_dim is {self.inner_size}"
            )
        if self.num_heads % self.n_groups:
            raise ValueError(
                f"config.json: num_heads {self.num_heads} is no multiple of n_groups {self.n_groups}"
            )
        check_size("the size of all projections", self.inner_size + self.conv_dim + self.num_heads)
        low, high = self.dt_limit
        if not 0 <= low <= high:
            raise ValueError(
                f"config.json: the limits of the time step must be 0 or more and ascend, got {low}, {high}"
            )
        check_special(self)

    @property
    def inner_size(self) -> int:
        """Channels of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: values, then keys and queries of all groups."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def mlp_dim(self) -> int:
        """There is no MLP, but a drafter has one."""
        return self.inner_size

    @property
    def output_gate(self) -> str:
        return "silu"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Mamba2Config:
        """Read a `config.json` of either library; what does not change the computation is left out."""
        if raw.get("quantization_config") is not None:
            raise ValueError("config.json: quantization_config (quantised weights) is not supported")
        for name, allowed in (("hidden_act", ("silu", "swish")), ("rms_norm", (True,))):
            if raw.get(name, allowed[0]) not in allowed:
                raise ValueError(
                    f"config.json: {name} {raw[name]!r} is not supported, only {' or '.join(map(repr, allowed))}"
                )
        known = {f.name for f in fields(cls)}
        if _is_transformers(raw):
            # older versions of transformers wrote norm_before_gate too, and never heeded it
            values = {name: raw[name] for name in known - set(FLA_ONLY) if name in raw}
            values |= {ours: raw[theirs] for ours, theirs in NAMES.items() if theirs in raw}
        else:
            values = {name: raw[name] for name in known if name in raw}
            _derive_heads(values)
        values = {name: value for name, value in values.items() if value is not None}
        if "dt_limit" in values:
            values["dt_limit"] = _limits(values["dt_limit"])
        return from_values(cls, values)


def _is_transformers(raw: Mapping[str, Any]) -> bool:
    ours, theirs = (sorted(name for name in names if name in raw) for names in (NAMES, NAMES.values()))
    if bool(ours) == bool(theirs):
        found = f"both {ours[0]} and {theirs[0]}" if ours else "neither"
        raise ValueError(
            f"config.json: a mamba2 checkpoint has {' or '.join(NAMES.values())} if transformers wrote it, "
            f"{' or '.join(NAMES)} if flash-linear-attention did, but this one has {found}"
        )
    return bool(theirs)


def _derive_heads(values: dict[str, Any]) -> None:
    """flash-linear-attention has as many heads as fit; a wrong count is found when the configuration is made."""
    if values.get("num_heads") is None and all(is_int(values.get(x)) for x in ("hidden_size", "head_dim")):
        expand, head_dim = values.get("expand", 2), values["head_dim"]
        check_number("expand", expand, above=0)
        check_size("head_dim", head_dim)
        values["num_heads"] = int(expand * min(values["hidden_size"], LARGEST) / head_dim)


def _limits(value: Any) -> tuple[float, float]:
    """Two numbers, where JSON has infinity as `Infinity` or, since transformers 5, as an object."""
    parts = value if isinstance(value, list | tuple) else []
    parts = [math.inf if part == {"__float__": "Infinity"} else part for part in parts]
    if len(parts) != 2 or not all(is_int(x) or isinstance(x, float) for x in parts):
        raise ValueError(
            f"config.json: the limits of the time step must be a list of two numbers, got {value!r}"
        )
    return float(parts[0]), float(parts[1])
