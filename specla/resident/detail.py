"""What a round leaves for requests that want to know more than their tokens: trees, and log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specla.resident.drafts import Drafts
from specla.resident.slots import Slots
from specla.resident.walk import Outcome

WIDTH = 20  # likeliest tokens that are told beside each


class Detail(NamedTuple):
    """By row: the tree that was verified, and for each token taken what the target thought of it."""

    tokens: Tensor  # int32 [B, N], as `Drafts` has them, and the next two
    parent: Tensor  # int32 [B, N]
    num_nodes: Tensor  # int32 [B]
    path: Tensor  # int32 [B, N], the nodes that drew the tokens taken, then anything
    logprob: Tensor  # fp32 [B, N], of the tokens taken, then anything
    top_ids: Tensor  # int32 [B, N, K], the likeliest tokens at these nodes, best first
    top: Tensor  # fp32 [B, N, K], their log-probabilities

    def host(self) -> Detail:
        """Pinned memory for a copy."""
        return Detail(*(torch.zeros_like(x, device="cpu").pin_memory() for x in self))


def new_detail(batch: int, size: int, vocab: int, device: torch.device | str) -> Detail:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(batch, *shape, dtype=dtype, device=device)

    width, real = min(WIDTH, vocab), torch.float32
    return Detail(
        zeros(size), zeros(size), zeros(), zeros(size), zeros(size, dtype=real), zeros(size, width),
        zeros(size, width, dtype=real),
    )  # fmt: skip


def tell(logits: Tensor, drafts: Drafts, slots: Slots, outcome: Outcome, out: Detail) -> None:
    """Fill `out` after the walk, from logits fp32 `[B, N, V]` at the nodes of the drafts."""
    batch, size, vocab = logits.shape
    for x, made in zip(out, drafts, strict=False):
        x.copy_(made)
    out.path.copy_(slots.path[:batch, :size])
    node = out.path.long().clamp(0, size - 1)[..., None]
    rows = logits.gather(1, node.expand(-1, -1, vocab)).log_softmax(-1)
    out.logprob.copy_(rows.gather(2, outcome.tokens.long()[..., None])[..., 0])
    top = rows.topk(out.top.shape[-1])
    out.top.copy_(top.values)
    out.top_ids.copy_(top.indices)
