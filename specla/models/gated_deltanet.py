"""Gated DeltaNet, with softmax attention at some layers if the configuration says so.

One definition serves training, prefill and verification: what differs is only the `Past` that the layers are given.
Projections that read the same input are one weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specla.models.config import AttentionConfig, GatedDeltaNetConfig
from specla.models.past import FullText, Past, Prefill, Verification
from specla.ops.attention import rotary
from specla.ops.elementwise import sigmoid, silu, softplus
from specla.ops.linear import row_invariant_linear
from specla.state import AttentionSpec, RecurrentSpec, StatePool
from specla.tree import Tree

PREFILL_CHUNK = 512  # tokens of a prompt that go through the layers together: bounds the memory of a prefill
QK_NORM_EPS = 1e-5  # flash-linear-attention's default, not in the configuration


class Linear(nn.Module):
    """`x @ weight.T`, multiplied in the weight's dtype (or `dtype`, for training) and returned in x's."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.dtype)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    if torch.is_grad_enabled() or dtype is not None:
        work = dtype or weight.dtype
        return nn.functional.linear(x.to(work), weight.to(work)).to(x.dtype)
    return row_invariant_linear(x, weight)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DeltaMixer(nn.Module):
    """Token mixing by the gated delta rule."""

    def __init__(self, config: GatedDeltaNetConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        self.conv_dim = 2 * config.key_dim + config.value_dim
        heads = config.value_heads
        self.splits = [
            self.conv_dim,
            heads,
            heads,
            config.value_dim if config.use_gate else 0,
        ]  # qkv, a, b, gate
        self.in_proj = Linear(config.hidden_size, sum(self.splits))
        self.conv_weight = (
            nn.Parameter(torch.empty(self.conv_dim, config.conv_size)) if config.use_short_conv else None
        )
        has_bias = config.use_short_conv and config.conv_bias
        self.conv_bias = nn.Parameter(torch.zeros(self.conv_dim)) if has_bias else None
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(config.head_v_dim, config.norm_eps)
        self.o_proj = Linear(config.value_dim, config.hidden_size)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        config = self.config
        qkv, a, b, gate = self.in_proj(x).split(self.splits, -1)
        if self.conv_weight is not None:
            qkv = past.conv(self.layer, qkv, self.conv_weight, self.conv_bias)
        else:
            qkv = silu(qkv)
        q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], -1)
        q, k = (y.unflatten(-1, (config.num_heads, config.head_dim)) for y in (q, k))
        v = v.unflatten(-1, (config.value_heads, config.head_v_dim))
        g = -torch.exp(self.A_log) * softplus(a + self.dt_bias)
        beta = 2.0 * sigmoid(b) if config.allow_neg_eigval else sigmoid(b)
        o = self.norm(past.delta(self.layer, q, k, v, g, beta))
        if config.use_gate:
            activation = sigmoid if config.output_gate_activation == "sigmoid" else silu
            o = o * activation(gate.unflatten(-1, (config.value_heads, config.head_v_dim)))
        return self.o_proj(o.flatten(-2))


class AttentionMixer(nn.Module):
    """Token mixing by softmax attention with rotary positions."""

    def __init__(self, config: GatedDeltaNetConfig, spec: AttentionConfig, layer: int):
        super().__init__()
        self.spec, self.layer = spec, layer
        self.head_dim = config.hidden_size // spec.num_heads
        self.splits = [config.hidden_size, *[spec.num_kv_heads * self.head_dim] * 2]
        self.qkv_proj = Linear(config.hidden_size, sum(self.splits))
        self.qkv_bias = nn.Parameter(torch.zeros(sum(self.splits))) if spec.qkv_bias else None
        self.q_norm = RMSNorm(self.head_dim, QK_NORM_EPS) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, QK_NORM_EPS) if spec.qk_norm else None
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        qkv = self.qkv_proj(x)
        qkv = qkv if self.qkv_bias is None else qkv + self.qkv_bias
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in qkv.split(self.splits, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotary(y, past.positions, self.spec.rope_theta) for y in (q, k))
        return self.o_proj(past.attend(self.layer, q, k, v, self.spec.window_size).flatten(-2))


class Block(nn.Module):
    """Token mixing, then a SwiGLU MLP, each with a residual around it."""

    def __init__(self, config: GatedDeltaNetConfig, layer: int):
        super().__init__()
        spec = config.attention(layer)
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = DeltaMixer(config, layer) if spec is None else AttentionMixer(config, spec, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.mlp_dim)
        self.down_proj = Linear(config.mlp_dim, config.hidden_size)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = x + self.attn(self.attn_norm(x), past)
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down_proj(silu(gate) * up)


class GatedDeltaNet(nn.Module):
    """The language model. Parameters are uninitialised until `reset_parameters` or a checkpoint fills them."""

    def __init__(self, config: GatedDeltaNetConfig):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.compute_dtype: torch.dtype | None = None

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights as flash-linear-attention does (normal; decay rates over three orders of magnitude)."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                leaf = name.rsplit(".", 1)[-1]
                if leaf == "A_log":
                    weight.uniform_(1e-3, 16, generator=generator).log_()
                elif leaf == "dt_bias":
                    step = torch.empty_like(weight).uniform_(-6.9078, -2.3026, generator=generator).exp()
                    weight.copy_(step + torch.log(-torch.expm1(-step)))
                elif leaf == "conv_weight":
                    bound = weight.shape[1] ** -0.5
                    weight.uniform_(-bound, bound, generator=generator)
                elif leaf in ("conv_bias", "qkv_bias"):
                    weight.zero_()
                elif weight.dim() == 2:
                    weight.normal_(0, self.config.initializer_range, generator=generator)
                else:
                    weight.fill_(1)

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        """Multiply matrices in `dtype` whatever they are stored in, for training with fp32 weights; None: in their own,
        row by row exact.
        """
        self.compute_dtype = dtype
        for module in self.modules():
            if isinstance(module, Linear):
                module.dtype = dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to `[..., vocab]`, float32."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        return linear(hidden, self.embeddings.weight, self.compute_dtype)

    def forward(self, input_ids: Tensor, past: Past | None = None) -> Tensor:
        """Normalised hidden states `[B, T, hidden]` of `input_ids` `[B, T]`, by default a text from its start."""
        past = past or FullText(input_ids.shape[0], input_ids.shape[1], input_ids.device)
        x = self.embeddings(input_ids).to(self.norm.weight.dtype)
        for layer in self.layers:
            x = layer(x, past)
        return self.norm(x)

    def state_specs(self) -> list[RecurrentSpec | AttentionSpec]:
        config = self.config
        specs: list[RecurrentSpec | AttentionSpec] = []
        for layer in range(config.num_hidden_layers):
            attention = config.attention(layer)
            if attention is not None:
                head_dim = config.hidden_size // attention.num_heads
                specs.append(AttentionSpec(attention.num_kv_heads, head_dim, attention.window_size))
            else:
                channels = 2 * config.key_dim + config.value_dim
                heads, value_heads = config.num_heads, config.value_heads
                dims = (config.head_dim, config.head_v_dim)
                specs.append(RecurrentSpec(heads, value_heads, *dims, channels, config.window))
        return specs

    def new_pool(self, num_slots: int, max_nodes: int) -> StatePool:
        """Slots for `num_slots` sequences with draft trees of up to `max_nodes` nodes."""
        weight = self.norm.weight
        return StatePool(self.state_specs(), num_slots, max_nodes, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, slot: int, pool: StatePool) -> None:
        """Read `token_ids` `[T]` into a slot's committed state, in stretches of bounded memory."""
        pool.flush([slot])
        for stretch in token_ids.split(PREFILL_CHUNK):
            past = Prefill(pool, slot, len(stretch))
            self(stretch[None], past)
            past.close()

    @torch.inference_mode()
    def verify(
        self, tokens: Tensor, tree: Tree, slots: list[int], pool: StatePool, mode: str = "auto"
    ) -> Tensor:
        """Logits `[B, N, vocab]` at every node of one draft tree a slot; `tokens` `[B, N]`, node 0 the root.

        What is pending in the slots is committed. The new nodes' factors stay in the pool until `pool.accept` says
        which of them to keep.
        """
        past = Verification(pool, slots, tree, mode)
        return self.logits(self(tokens, past))
