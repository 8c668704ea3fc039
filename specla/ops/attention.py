"""Softmax attention of draft trees over a key/value cache, for the attention layers of hybrid models."""

from __future__ import annotations

import torch
from torch import Tensor

from specla.tree import Tree


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: Tree,
    *,
    keys: Tensor,
    values: Tensor,
    slots: list[int],
    lengths: list[int],
    window: int | None = None,
) -> Tensor:
    """Every node attends to its slot's committed rows, its ancestors and itself.

    The sums run in float64: the order of the keys differs between a tree and one-token decoding, and the rounding to
    the output's dtype hides it.

    Args:
        q: `[B, N, H, D]`; k, v: `[B, N, HKV, D]` of the nodes, rotary positions applied.
        keys, values: `[slots, capacity, HKV, D]`; position p lies in row `p % capacity`.
        lengths: committed positions of each row; the nodes sit at `length + depth`.
        window: attend to the last `window` positions only, the node's own included.

    Returns:
        `[B, N, H, D]` in q's dtype, zero at padding nodes.
    """
    size, dim = q.shape[1], q.shape[3]
    groups = q.shape[2] // k.shape[2]
    seen = tree.ancestors | torch.eye(size, dtype=torch.bool, device=q.device)
    out = torch.zeros_like(q)
    for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        real = int(tree.num_nodes[b])
        first = 0 if window is None else max(0, length - window + 1)
        committed = torch.arange(first, length, device=q.device)
        rows = committed % keys.shape[1]
        all_k = (
            torch.cat([keys[slot, rows], k[b, :real].to(keys.dtype)]).double().repeat_interleave(groups, 1)
        )
        all_v = (
            torch.cat([values[slot, rows], v[b, :real].to(values.dtype)])
            .double()
            .repeat_interleave(groups, 1)
        )
        depth = tree.depth[b, :real].long()
        position = torch.cat([committed, length + depth])
        visible = torch.cat([seen.new_ones(real, length - first), seen[b, :real, :real]], 1)
        if window is not None:
            visible &= position > (length + depth)[:, None] - window
        scores = torch.einsum("nhd,lhd->hnl", q[b, :real].double(), all_k) * dim**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[b, :real] = torch.einsum("hnl,lhd->nhd", weights, all_v).to(q.dtype)
    return out


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the two halves of each head of `x` `[B, T, H, D]` by its position `[B, T]`."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[..., None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
