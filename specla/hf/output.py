"""What `generate` returns with `return_dict_in_generate`."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation import GenerateDecoderOnlyOutput

from specla.engine.sequence import SequenceMetrics


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """metrics: for each row, what speculation did for it. Of the other fields only `sequences` is there."""

    metrics: list[SequenceMetrics] | None = None
