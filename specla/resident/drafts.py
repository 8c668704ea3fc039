"""The trees of a round as device tensors, which every proposer fills."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Drafts(NamedTuple):
    """One tree a row. Padding nodes hold token 0 and parent -1, padding rows a root of token 0 alone."""

    tokens: Tensor  # int32 [B, N], node 0 the slot's root
    parent: Tensor  # int32 [B, N]
    num_nodes: Tensor  # int32 [B]


def new_drafts(batch: int, size: int, device: torch.device | str) -> Drafts:
    """Room for `batch` trees of up to `size` nodes, all of them a root alone."""
    return Drafts(
        torch.zeros(batch, size, dtype=torch.int32, device=device),
        torch.full((batch, size), -1, dtype=torch.int32, device=device),
        torch.ones(batch, dtype=torch.int32, device=device),
    )
