"""Kimi-Linear: KDA layers with latent attention at every few, dense or with experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specla.models.experts import Experts, SigmoidRouter
from specla.models.kda import KDAMixer
from specla.models.kimi_config import SPARSE, KimiConfig
from specla.models.language_model import LanguageModel
from specla.models.layers import Block, Linear, RMSNorm, SwiGLU, linear
from specla.models.past import Past
from specla.models.qwen_config import LINEAR
from specla.state import AttentionSpec

LATENT_EPS = 1e-6  # transformers' and the original's, not in the configuration


class Kimi(LanguageModel):
    """The language model."""

    config: KimiConfig

    def __init__(self, config: KimiConfig):
        super().__init__(config, [_block(config, i) for i in range(config.num_hidden_layers)])


def _block(config: KimiConfig, layer: int) -> Block:
    is_linear = config.layer_types[layer] == LINEAR
    mixer = KDAMixer(config.delta(), layer) if is_linear else LatentAttention(config, layer)
    mlp: nn.Module
    if config.mlp_layer_types[layer] == SPARSE:
        router = SigmoidRouter(
            config.hidden_size, config.num_experts, config.num_experts_per_token, config.num_expert_group,
            config.topk_group, config.moe_renormalize, config.routed_scaling_factor,
        )  # fmt: skip
        mlp = Experts(
            router, config.hidden_size, config.moe_intermediate_size, config.shared_size, gated=False
        )
    else:
        mlp = SwiGLU(config.hidden_size, config.intermediate_size)
    return Block(config.hidden_size, config.rms_norm_eps, mixer, mlp)


class LatentAttention(nn.Module):
    """Softmax attention without positions whose heads share one latent row a token, the only thing that is kept.

    A head's key is a projection of the latent, followed by channels that all heads share. Projecting its query the
    other way round instead lets it read the latent itself, of which its value is another projection.
    """

    def __init__(self, config: KimiConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        self.splits = [heads * config.head_dim, rank, config.qk_rope_head_dim]  # q, latent, shared channels
        self.in_proj = Linear(config.hidden_size, sum(self.splits))
        self.latent_norm = RMSNorm(rank, LATENT_EPS)
        self.query_up = nn.Parameter(torch.empty(heads, rank, config.qk_nope_head_dim))
        self.value_up = nn.Parameter(torch.empty(heads, config.v_head_dim, rank))
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size)

    def state_spec(self) -> AttentionSpec:
        """What the layer keeps of a sequence."""
        return AttentionSpec(1, self.config.kv_lora_rank + self.config.qk_rope_head_dim, None, shared=True)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        config = self.config
        q, latent, shared = self.in_proj(x).split(self.splits, -1)
        row = torch.cat([self.latent_norm(latent), shared], -1)[..., None, :]
        q = q.unflatten(-1, (config.num_attention_heads, -1))
        q, q_shared = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        q = torch.cat([self._each(q, self.query_up), q_shared], -1)
        q = q * (row.shape[-1] / config.head_dim) ** 0.5  # attention divides by the root of the row's size
        read = past.attend(self.layer, q, row, row, None)[..., : config.kv_lora_rank]
        return self.o_proj(self._each(read, self.value_up).flatten(-2))

    def _each(self, x: Tensor, weights: Tensor) -> Tensor:
        """Every head of x `[.., heads, in]` by its own weight `[out, in]`."""
        dtype = self.in_proj.dtype
        return torch.stack(
            [linear(part, w, dtype) for part, w in zip(x.unbind(-2), weights, strict=True)], -2
        )
