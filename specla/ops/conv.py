"""The short causal convolution on a tree, and the commit of its window.

A node's window is its own nearest ancestors, then the slot's committed inputs; never its neighbours in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.ops.checks import require, select_rows
from specla.ops.elementwise import silu
from specla.ops.factors import PendingConv
from specla.tree import Tree


def tree_conv(
    x: Tensor,
    tree: Tree,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_state: Tensor,
    state_indices: Tensor | None = None,
    pending: PendingConv | tuple[Tensor, Tensor, Tensor] | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Depthwise causal convolution of every node over its own ancestor path.

    Args:
        x: raw inputs `[B, N, D]`.
        weight: `[D, W]`, the newest input last; bias: `[D]` or None.
        conv_state: `[slots, D, W - 1]` committed inputs, oldest first; `pending` is committed into it first.
        state_indices: slot of each row `[B]`, -1 for a padding row; None means row b is slot b.
        activation: "silu" or None.

    Returns:
        `[B, N, D]`; zero in padding rows, unspecified at padding nodes.

    Raises:
        ValueError: on shapes or an activation that it does not support.
    """
    require(activation in ("silu", None), f"activation must be 'silu' or None, got {activation!r}")
    require(x.dim() == 3 and x.shape[:2] == (tree.batch, tree.size), f"x must be [{tree.batch}, {tree.size}, D]")
    width = weight.shape[-1]
    require(weight.shape == (x.shape[2], width), f"weight must be [D={x.shape[2]}, W], got {list(weight.shape)}")
    _check_state(conv_state, x.shape[2], width)
    slots, rows = select_rows(state_indices, x.shape[0], conv_state)
    if pending is not None:
        conv_commit(conv_state, pending[0], pending[1], pending[2] - 1, state_indices=state_indices)
    if rows is not None:
        y = torch.zeros_like(x)
        if len(rows):
            y[rows] = _windows(x[rows], tree.windows(width)[rows], weight, bias, conv_state[slots], activation)
        return y
    return _windows(x, tree.windows(width), weight, bias, conv_state[slots], activation)


def conv_commit(
    conv_state: Tensor, x: Tensor, path: Tensor, num_accepted: Tensor, *, state_indices: Tensor | None = None
) -> None:
    """Move the accepted path's last W - 1 raw inputs into `conv_state` `[slots, D, W - 1]`, in place.

    Args:
        x: raw inputs of the verified nodes `[B, M, D]`.
        path: `[B, P]` node ids from the root down; num_accepted: `[B]` drafts, so 1 + num_accepted inputs move
            (-1: none).
    """
    keep = conv_state.shape[-1]
    slots, rows = select_rows(state_indices, x.shape[0], conv_state)
    if rows is not None:
        x, path, num_accepted = x[rows], path[rows], num_accepted[rows]
    if keep == 0 or x.shape[0] == 0:
        return
    require(path.dim() == 2 and path.shape[0] == x.shape[0], f"path must be [{x.shape[0]}, P]")
    history = conv_state[slots].transpose(1, 2)
    at = torch.arange(keep, device=x.device) + num_accepted[:, None].long() + 1  # position in [history, path]
    node = path.long().clamp(min=0).gather(1, (at - keep).clamp(0, path.shape[1] - 1)) + keep
    index = torch.where(at < keep, at, node)
    joined = torch.cat([history, x.to(history.dtype)], 1)
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    conv_state[slots] = joined[batch, index].transpose(1, 2)


def _windows(
    x: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, activation: str | None
) -> Tensor:
    joined = torch.cat([history.transpose(1, 2), x.to(history.dtype)], 1)
    offset = torch.arange(x.shape[0], device=x.device)[:, None] * joined.shape[1]
    flat = joined.flatten(0, 1)
    y = None
    for w in range(weight.shape[1]):
        tap = flat[windows[:, :, w] + offset] * weight[:, w]
        y = tap if y is None else y + tap
    assert y is not None
    y = y if bias is None else y + bias
    return (silu(y) if activation == "silu" else y).to(x.dtype)


def _check_state(conv_state: Tensor, channels: int, width: int) -> None:
    require(
        conv_state.dim() == 3 and conv_state.shape[1:] == (channels, width - 1),
        f"conv_state must be [slots, D={channels}, W-1={width - 1}], got {list(conv_state.shape)}",
    )
