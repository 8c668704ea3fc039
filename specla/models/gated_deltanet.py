"""Gated DeltaNet, with softmax attention at some layers if the configuration says so."""

from __future__ import annotations

from specla.models.config import GatedDeltaNetConfig
from specla.models.language_model import LanguageModel
from specla.models.layers import AttentionMixer, Block, DeltaMixer, SwiGLU


class GatedDeltaNet(LanguageModel):
    """The language model in flash-linear-attention's shape."""

    config: GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig):
        super().__init__(config, [_block(config, i) for i in range(config.num_hidden_layers)])


def _block(config: GatedDeltaNetConfig, layer: int) -> Block:
    hidden, spec = config.hidden_size, config.attention(layer)
    mixer = DeltaMixer(config, layer) if spec is None else AttentionMixer(hidden, spec, layer)
    return Block(hidden, config.norm_eps, mixer, SwiGLU(hidden, config.mlp_dim))
