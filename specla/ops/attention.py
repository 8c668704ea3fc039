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

    Each node is computed by itself, over keys laid out as one-token decoding would have them: the shapes and the
    order of summation are those of decoding, and so are the bits.

    Args:
        q: `[B, N, H, D]`; k, v: `[B, N, HKV, D]` of the nodes, rotary positions applied.
        keys, values: `[slots, capacity, HKV, D]`; position p lies in row `p % capacity`.
        lengths: committed positions of each row; the nodes sit at `length + depth`.
        window: attend to the last `window` positions only, the node's own included.

    Returns:
        `[B, N, H, D]` in q's dtype, zero at padding nodes.
    """
    out = torch.zeros_like(q)
    for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        for i in range(int(tree.num_nodes[b])):
            path = tree.lineage[b, i].nonzero()[:, 0]
            first = 0 if window is None else max(0, length + len(path) - window)
            path = path[max(0, first - length) :]
            rows = torch.arange(min(first, length), length, device=q.device) % keys.shape[1]
            seen_k = torch.cat([keys[slot, rows], k[b, path].to(keys.dtype)])
            seen_v = torch.cat([values[slot, rows], v[b, path].to(values.dtype)])
            asked = (q[b, i].to(keys.dtype) * q.shape[3] ** -0.5).unflatten(0, (k.shape[2], -1))
            weights = torch.einsum("kgd,lkd->kgl", asked, seen_k).softmax(-1)  # g: heads that share keys
            out[b, i] = torch.einsum("kgl,lkd->kgd", weights, seen_v).flatten(0, 1).to(q.dtype)
    return out


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the two halves of each head of `x` `[B, T, H, D]` by its position `[B, T]`."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[..., None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
