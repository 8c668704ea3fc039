"""The configuration of a KDA checkpoint in flash-linear-attention's layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specla.models.config import GatedDeltaNetConfig, check_bool, check_number

# Gated DeltaNet's fields and ours that no file of theirs decides: convolutions have no bias, the gate is always there
FIXED = {"use_gate": True, "output_gate_activation": "sigmoid", "conv_bias": False, "gate_bias": True}


@dataclass(frozen=True)
class KDAConfig(GatedDeltaNetConfig):
    """Shape of a KDA language model: Gated DeltaNet's, with a decay for each key channel.

    lower_bound: of the log-decay of a token; None: the decay is Gated DeltaNet's. gate_bias: whether the output gate's
    projection has one.
    """

    model_type: ClassVar[str] = "kda"
    architecture: ClassVar[str] = "KDAForCausalLM"

    num_hidden_layers: int = 24
    num_heads: int = 16
    head_dim: int = 128
    expand_v: float = 1.0
    output_gate_activation: str = "sigmoid"
    lower_bound: float | None = None
    gate_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        bound: Any = self.lower_bound
        if bound is not None:
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            check_number("-lower_bound", -bound if is_number else bound, above=0)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> KDAConfig:
        """Read a `config.json`; fields that do not change the computation (kernel choices, training) are left out."""
        safe = raw.get("safe_gate", False)
        check_bool("safe_gate", safe)
        if safe and raw.get("lower_bound") is None:
            raise ValueError("config.json: safe_gate needs a lower_bound (below 0), got none")
        return super().from_dict({**raw, **FIXED})
