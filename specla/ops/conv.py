"""The short causal convolution on a tree, and the commit of its window.

A node's window is its own nearest ancestors, then the slot's committed inputs; never its neighbours in memory.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from specla.ops import triton as kernels
from specla.ops.checks import check_path, require, select_rows
from specla.ops.elementwise import silu
from specla.ops.factors import PendingConv
from specla.tree import Tree

SUMMED = 4  # taps: of more, the order of torch's sums depends on how they lie in memory


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

    On a GPU a Triton kernel runs, where it is installed, for windows of up to four taps and nothing in fp64; it sums in
    fp32. Otherwise plain torch runs.

    Args:
        x: raw inputs `[B, N, D]`.
        weight: `[D, W]`, the newest input last; bias: `[D]` or None.
        conv_state: `[slots, D, W - 1]` committed inputs, oldest first; `pending` is committed into it first.
        state_indices: slot of each row `[B]`, -1 for a padding row; None means row b is slot b.
        activation: "silu" or None.

    Returns:
        `[B, N, D]` in x's dtype; zero in padding rows, unspecified at padding nodes.

    Raises:
        ValueError: on shapes, dtypes, devices or an activation that it does not support.
    """
    require(activation in ("silu", None), f"activation must be 'silu' or None, got {activation!r}")
    require(
        x.dim() == 3 and x.shape[:2] == (tree.batch, tree.size),
        f"x must be [B={tree.batch}, N={tree.size}, D] as the tree has it, got {list(x.shape)}",
    )
    require(weight.dim() == 2 and weight.shape[0] == x.shape[2], f"weight must be [D={x.shape[2]}, W]")
    require(bias is None or bias.shape == (x.shape[2],), f"bias must be [D={x.shape[2]}]")
    _check_state(conv_state, x.shape[2], weight.shape[1] - 1)
    for name, y in (("x", x), ("weight", weight), *((("bias", bias),) if bias is not None else ())):
        require(y.is_floating_point(), f"{name} must be floating point, got {y.dtype}")
        require(y.device == conv_state.device, f"{name} is on {y.device}, conv_state on {conv_state.device}")
    on_kernels = takes(conv_state, x, weight, bias, *(() if pending is None else pending[:1]))
    if pending is not None:
        held = pending[0].shape[0]
        require(held == x.shape[0], f"pending must be of B={x.shape[0]} rows, as x is, got {held}")
    if on_kernels:
        require(
            tree.parent.device == x.device,
            f"the tree is on {tree.parent.device}, x on {x.device}: use Tree.to",
        )
        _check_rows(x.shape[0])
    if pending is not None and on_kernels:
        _check_commit(conv_state, *pending)
    elif pending is not None:
        conv_commit(conv_state, pending[0], pending[1], pending[2] - 1, state_indices=state_indices)
    slots, rows = select_rows(state_indices, x.shape[0], conv_state)
    if on_kernels:
        return launch(x, tree, weight, bias, conv_state, activation, state_indices, pending)
    if rows is None:
        return _convolve(x, tree, weight, bias, conv_state[slots], activation)
    y = torch.zeros_like(x)
    if len(rows):
        some = Tree(tree.parent[rows], tree.num_nodes[rows])
        y[rows] = _convolve(x[rows], some, weight, bias, conv_state[slots], activation)
    return y


def conv_commit(
    conv_state: Tensor, x: Tensor, path: Tensor, num_accepted: Tensor, *, state_indices: Tensor | None = None
) -> None:
    """Move the accepted path's last W - 1 raw inputs into `conv_state` `[slots, D, W - 1]`, in place.

    Args:
        x: raw inputs of the verified nodes `[B, M, D]`.
        path: `[B, P]` node ids from the root down; num_accepted: `[B]` drafts, so 1 + num_accepted inputs move
            (-1: none).

    Raises:
        ValueError: as `tree_conv`.
    """
    require(
        not num_accepted.is_floating_point(), f"num_accepted must hold integers, got {num_accepted.dtype}"
    )
    count = num_accepted + 1
    _check_commit(conv_state, x, path, count)
    slots, rows = select_rows(state_indices, x.shape[0], conv_state)
    if takes(conv_state, x):
        _check_rows(x.shape[0])
        launch_commit(conv_state, x, path, count, state_indices)
        return
    if rows is not None:
        x, path, count = x[rows], path[rows], count[rows]
    if x.shape[0] and conv_state.shape[-1]:
        conv_state[slots] = shift(conv_state[slots], x, path.long(), count)


def convolve(
    x: Tensor,
    tree: Tree,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """`tree_conv` without checks and slots: `window` is `[B, D, W - 1]`, one row a tree.

    Plain torch also runs for a tree that was left on the host.
    """
    if takes(window, x, weight, bias) and tree.device.type == window.device.type:
        return launch(x, tree, weight, bias, window, activation)
    return _convolve(x, tree, weight, bias, window, activation)


def _convolve(
    x: Tensor, tree: Tree, weight: Tensor, bias: Tensor | None, window: Tensor, activation: str | None
) -> Tensor:
    """`convolve` in plain torch."""
    width = weight.shape[1]
    joined = torch.cat([window.transpose(1, 2), x.to(window.dtype)], 1)
    if tree.is_chain:  # a view; past the end of a shorter chain lies padding
        taps = joined.unfold(1, width, 1).transpose(2, 3)  # [B, N, W, D]
    else:
        taps = joined.flatten(0, 1).index_select(0, tree.window_rows(width))
        taps = taps.view(x.shape[0], x.shape[1], width, x.shape[2])
    products = taps * weight.t()
    y = products.sum(2) if width <= SUMMED else reduce(torch.add, products.unbind(2))
    y = y if bias is None else y + bias
    return (silu(y) if activation == "silu" else y).to(x.dtype)


def causal_convolve(
    joined: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = "silu"
) -> Tensor:
    """The convolution over a text `[B, W - 1 + T, D]` that begins with its window; differentiable."""
    length = joined.shape[1] - weight.shape[1] + 1
    y = sum(joined[:, w : w + length] * weight[:, w] for w in range(weight.shape[1]))
    assert isinstance(y, Tensor)
    y = y if bias is None else y + bias
    return silu(y) if activation == "silu" else y


def inputs_before(x: Tensor, tree: Tree, window: Tensor) -> Tensor:
    """The input of each node's parent `[B, N, D]`, of the root the newest of the window `[B, D, 1]`."""
    joined = torch.cat([window.transpose(1, 2), x.to(window.dtype)], 1)
    rows = tree.window_rows(2).view(-1, 2)[:, 0]
    return joined.flatten(0, 1).index_select(0, rows).view(x.shape).to(x.dtype)


def shift(window: Tensor, x: Tensor, path: Tensor, count: Tensor) -> Tensor:
    """The window `[B, D, W - 1]` after `count` `[B]` nodes of `path` `[B, P]`; x `[B, M, D]`.

    Leading dimensions before B (layers) may stand in front of window and x.
    """
    keep = window.shape[-1]
    if not path.shape[1]:
        return window
    at = torch.arange(keep, device=x.device) + count[:, None]  # position in [window, path]
    node = path.clamp(min=0).gather(1, (at - keep).clamp(0, path.shape[1] - 1)) + keep
    index = torch.where(at < keep, at, node)
    joined = torch.cat([window.transpose(-1, -2), x.to(window.dtype)], -2)
    rows = torch.arange(path.shape[0], device=x.device)[:, None]
    return joined[..., rows, index, :].transpose(-1, -2)


def launch(
    x: Tensor,
    tree: Tree,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    activation: str | None = "silu",
    state_indices: Tensor | None = None,
    pending: PendingConv | tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """`tree_conv` by a kernel; nothing is checked, nothing is read back."""
    from specla.ops.triton.conv import tree_conv as run

    if state_indices is not None:
        state_indices = kernels.integers(state_indices, x.device)
    if pending is not None:
        path, count = (kernels.integers(y, x.device) for y in pending[1:])
        pending = kernels.dense(pending[0]), path, count
    bias = bias if bias is None else bias.contiguous()
    with torch.cuda.device_of(conv_state):
        return run(
            kernels.dense(x), tree.parent.contiguous(), tree.num_nodes.contiguous(), weight, bias, conv_state,
            state_indices, pending, activation,
        )  # fmt: skip


def launch_commit(
    conv_state: Tensor,
    x: Tensor,
    path: Tensor,
    count: Tensor,
    state_indices: Tensor | None,
    *,
    by_slot: bool = False,
) -> None:
    """`conv_commit` of `count` nodes by a kernel; nothing is checked, nothing is read back."""
    from specla.ops.triton.conv import conv_commit as run

    path, count = (kernels.integers(y, x.device) for y in (path, count))
    if state_indices is not None:
        state_indices = kernels.integers(state_indices, x.device)
    with torch.cuda.device_of(conv_state):
        run(conv_state, kernels.dense(x), path, count, state_indices, by_slot=by_slot)


def takes(conv_state: Tensor, *inputs: Tensor | None) -> bool:
    """Whether the kernels take a window of this length and dtype, and what goes with it."""
    return (
        kernels.use_kernels(conv_state)
        and conv_state.shape[-1] < kernels.MAX_TAPS
        and not any(x is not None and x.dtype == torch.float64 for x in inputs)
        and not kernels.wants_gradient(conv_state, *inputs)
    )


def _check_commit(conv_state: Tensor, x: Tensor, path: Tensor, count: Tensor) -> None:
    require(
        x.dim() == 3 and x.is_floating_point(), f"x must be floating point [B, M, D], got {list(x.shape)}"
    )
    _check_state(conv_state, x.shape[2], conv_state.shape[-1])
    for name, y in (("x", x), ("path", path), ("num_accepted", count)):
        require(y.device == conv_state.device, f"{name} is on {y.device}, conv_state on {conv_state.device}")
    check_path(path, count, x.shape[0], x.shape[1])


def _check_rows(rows: int) -> None:
    require(rows <= kernels.MAX_ROWS, f"on a GPU a batch may have up to {kernels.MAX_ROWS} rows, got {rows}")


def _check_state(conv_state: Tensor, channels: int, keep: int) -> None:
    require(
        conv_state.dim() == 3 and conv_state.shape[1:] == (channels, keep) and conv_state.is_floating_point(),
        f"conv_state must be floating point [slots, D={channels}, W-1={keep}], "
        f"got {list(conv_state.shape)} {conv_state.dtype}",
    )
