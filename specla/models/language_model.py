"""What all targets are: embeddings, blocks of layers that an architecture chooses, and a head.

One definition serves training, prefill and verification: what differs is only the `Past` that the layers are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from specla.models.config import ModelConfig
from specla.models.layers import Block, LayerNorm, Linear, RMSNorm, draw_weights, linear, set_compute_dtype
from specla.models.past import FullText, Prefill, TargetPast, Verification
from specla.models.target import Tap
from specla.state import AttentionSpec, RecurrentSpec, StatePool
from specla.tree import Tree

# tokens of a prompt that go through the layers together: bounds the memory of a prefill
PREFILL_CHUNK, PREFILL_CHUNK_GPU = 512, 2048


class LanguageModel(nn.Module):
    """A language model of these blocks. Parameters are uninitialised until `reset_parameters` or a checkpoint fills
    them.
    """

    norm: RMSNorm | LayerNorm

    def __init__(self, config: ModelConfig, blocks: Iterable[nn.Module], norm: LayerNorm | None = None):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm or RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.compute_dtype: torch.dtype | None = None

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights as flash-linear-attention does."""
        draw_weights(self, self.config.initializer_range, generator)

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        """As the function of that name, for a tied head too."""
        self.compute_dtype = dtype
        set_compute_dtype(self, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to `[..., vocab]`, float32."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        return linear(hidden, self.embeddings.weight, self.compute_dtype)

    def forward(self, input_ids: Tensor, past: TargetPast | None = None, tap: Tap | None = None) -> Tensor:
        """Normalised hidden states `[B, T, hidden]` of `input_ids` `[B, T]`, by default a text from its start."""
        past = past or FullText(input_ids.shape[0], input_ids.shape[1], input_ids.device)
        streams = self.streams(self.embeddings(input_ids).to(self.norm.weight.dtype), past)
        if tap is not None:
            tap.read(torch.cat([streams[i] for i in tap.layer_ids], -1))
        return self.norm(streams[-1])

    def streams(self, stream: Tensor, past: TargetPast) -> list[Tensor]:
        """The residual streams `[B, T, hidden]` that enter each layer, and the one that leaves the last."""
        streams = [stream]
        for layer in self.layers:
            streams.append(layer(streams[-1], past))
        return streams

    def state_specs(self) -> list[RecurrentSpec | AttentionSpec]:
        return [cast(Block, block).mixer.state_spec() for block in self.layers]

    def new_pool(self, num_slots: int, max_nodes: int) -> StatePool:
        """Slots for `num_slots` sequences with draft trees of up to `max_nodes` nodes."""
        weight = self.norm.weight
        return StatePool(self.state_specs(), num_slots, max_nodes, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, slot: int, pool: StatePool, tap: Tap | None = None) -> None:
        """Read `token_ids` `[T]` into a slot's committed state, in stretches of bounded memory; `tap` sees each."""
        pool.flush([slot])
        chunk = PREFILL_CHUNK_GPU if token_ids.is_cuda else PREFILL_CHUNK
        for stretch in token_ids.split(chunk):
            past = Prefill(pool, slot, len(stretch), self.embeddings.weight.dtype)
            self(stretch[None], past, tap)
            past.close()

    @torch.inference_mode()
    def head(self, stream: Tensor) -> Tensor:
        """Logits of residual streams `[.., hidden]` that have left the last layer, as a `tap` sees them."""
        return self.logits(self.norm(stream))

    @torch.inference_mode()
    def verify(
        self,
        tokens: Tensor,
        tree: Tree,
        slots: list[int],
        pool: StatePool,
        mode: str = "auto",
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits `[B, N, vocab]` at every node of one draft tree a slot; `tokens` `[B, N]`, node 0 the root.

        What is pending in the slots is committed. The new nodes' factors stay in the pool until `pool.accept` says
        which of them to keep.
        """
        past = Verification(pool, slots, tree, mode)
        return self.logits(self(tokens, past, tap))
