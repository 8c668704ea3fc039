"""Lossless speculative decoding for linear-attention language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specla.engine.llm import LLM
    from specla.engine.params import SamplingParams, SpeculativeConfig
    from specla.tree import Tree

__version__ = "0.2.0"
__all__ = ["LLM", "SamplingParams", "SpeculativeConfig", "Tree"]

_HOMES = {
    "LLM": "specla.engine.llm",
    "SamplingParams": "specla.engine.params",
    "SpeculativeConfig": "specla.engine.params",
    "Tree": "specla.tree",
}


def __getattr__(name: str) -> Any:
    # `specla --help` and `import specla` must not wait for torch
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'specla' has no attribute {name!r}")
