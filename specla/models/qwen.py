"""Qwen3-Next and Qwen3.5: recurrent layers with gated attention at every few, dense or with experts.

Norms hold the factor itself, not what a checkpoint stores of it.
"""

from __future__ import annotations

from torch import nn

from specla.models.experts import Experts, SoftmaxRouter
from specla.models.language_model import LanguageModel
from specla.models.layers import AttentionMixer, Block, DeltaMixer, SwiGLU
from specla.models.qwen_config import LINEAR, QwenConfig


class Qwen(LanguageModel):
    """The language model; of a checkpoint with images, its text part."""

    config: QwenConfig

    def __init__(self, config: QwenConfig):
        super().__init__(config, [block(config, i, kind) for i, kind in enumerate(config.layer_types)])


def block(config: QwenConfig, layer: int, kind: str) -> Block:
    """A layer, recurrent or with attention; its number says whether it has experts."""
    mixer: DeltaMixer | AttentionMixer
    if kind == LINEAR:
        mixer = DeltaMixer(config.delta(), layer)
    else:
        mixer = AttentionMixer(
            config.hidden_size, config.attention(), layer, head_dim=config.head_dim, qk_norm_eps=config.norm_eps,
            rotary_dim=config.rotary_dim, output_gate=True,
        )  # fmt: skip
    return Block(config.hidden_size, config.norm_eps, mixer, _mlp(config, layer))


def _mlp(config: QwenConfig, layer: int) -> nn.Module:
    if config.is_sparse(layer):
        router = SoftmaxRouter(
            config.hidden_size, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        )
        widths = config.moe_intermediate_size, config.shared_expert_intermediate_size
        return Experts(router, config.hidden_size, *widths, gated=True)
    assert config.intermediate_size is not None
    return SwiGLU(config.hidden_size, config.intermediate_size)
