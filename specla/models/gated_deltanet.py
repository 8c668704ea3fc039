"""Gated DeltaNet, with softmax attention at some layers if the configuration says so."""

from __future__ import annotations

from functools import partial

from specla.models.config import GatedDeltaNetConfig
from specla.models.language_model import LanguageModel
from specla.models.layers import DeltaMixer, blocks


class GatedDeltaNet(LanguageModel):
    """The language model in flash-linear-attention's shape."""

    config: GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig):
        super().__init__(config, blocks(config, partial(DeltaMixer, config)))
