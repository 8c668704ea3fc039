"""The short causal convolution on a tree, with the commit of the window in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton import MAX_TAPS
from specla.ops.triton.overlap import launch_options


def tree_conv(
    x: Tensor,
    parent: Tensor,
    num_nodes: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor | None = None,
    pending: tuple[Tensor, Tensor, Tensor] | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
    *,
    by_slot: bool = False,
    keep: Tensor | None = None,
) -> Tensor:
    """`specla.ops.tree_conv` without its checks, and zero at padding nodes.

    Args:
        x: `[B, N, D]`, any strides but the last, which is 1; sums are fp32, from the oldest tap to the newest.
        parent: int32 `[B, N]`; num_nodes: int32 `[B]`.
        weight: `[D, W]`, W up to 4; bias: `[D]`.
        conv_state: `[slots, D, W - 1]`, any strides; every input is rounded to its dtype, as it will be once committed.
        pending: x `[R, M, D]`, path `[B, P]` and count `[B]` of the inputs to commit first; R counts batch rows, or
            slots with `by_slot`.
        out: where to write `[B, N, D]`; x's dtype and a new tensor by default.
        keep: where the inputs go for a later commit, `[R, M, D]` with M >= N, never the pending ones; R as above.
    """
    batch, size, channels = x.shape
    width = weight.shape[1]
    assert width <= MAX_TAPS
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    x_prev, path, count = (None, None, None) if pending is None or width == 1 else pending
    BN = min(triton.next_power_of_2(size), 16)
    BD = 64 if BN > 1 else 128  # no more channels than threads: vectors then need no exchange between layouts
    tree_conv_kernel[(triton.cdiv(channels, BD), batch)](
        x, parent, num_nodes, weight, bias, conv_state, state_indices, x_prev, path, count, y, keep,
        size, channels,
        x.stride(0), x.stride(1), parent.stride(0), *weight.stride(), *conv_state.stride(),
        *_strides(x_prev, 2), *_strides(path, 1), y.stride(0), y.stride(1), *_strides(keep, 2),
        W=width, BN=BN, BD=BD, SILU=activation == "silu", BY_SLOT=by_slot, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return y


def conv_commit(
    conv_state: Tensor,
    x: Tensor,
    path: Tensor,
    count: Tensor,
    state_indices: Tensor | None = None,
    *,
    by_slot: bool = False,
) -> None:
    """Shift the inputs of the first `count` nodes of each row's path into its window; nothing is checked.

    Args:
        conv_state: `[slots, D, W - 1]`, any strides, or `[layers, slots, D, W - 1]` with x `[layers, R, M, D]`.
        x: raw inputs `[R, M, D]`; R counts batch rows, or slots with `by_slot`.
        path: `[B, P]` node ids; entries beyond the count may be anything.
        count: `[B]` nodes to commit, 0 for none.
        state_indices: slot of each row `[B]`, -1 for a padding row; None means row b is slot b.
    """
    if conv_state.dim() == 3:
        conv_state, x = conv_state[None], x[None]
    layers, _, channels, keep = conv_state.shape
    assert keep < MAX_TAPS
    if keep == 0:
        return
    BD = 128
    conv_commit_kernel[(triton.cdiv(channels, BD), path.shape[0], layers)](
        conv_state, x, path, count, state_indices,
        channels, *conv_state.stride(), *x.stride()[:3], path.stride(0),
        W=keep + 1, BD=BD, BY_SLOT=by_slot, num_warps=1,
    )  # fmt: skip


def _strides(x: Tensor | None, number: int) -> tuple[int, ...]:
    return (0,) * number if x is None else x.stride()[:number]


@triton.jit
def recent(
    p_state, p_prev, p_path, count, stride_w, stride_n, o_d, channels, BACK: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """The input BACK places before the root, once `count` nodes of the path are committed; zero beyond the window."""
    if BACK >= W:
        b_h = tl.zeros(o_d.shape, p_state.dtype.element_ty)
    elif p_prev is None:
        b_h = tl.load(p_state + (W - 1 - BACK) * stride_w, mask=o_d < channels, other=0.0)
    else:
        at = count - BACK  # on the path, or that far behind the old window's end
        m_old, m_new = o_d < tl.where(at < 0, channels, 0), o_d < tl.where(at < 0, 0, channels)
        b_h = tl.load(p_state + (W - 1 + at) * stride_w, mask=m_old, other=0.0)
        node = tl.load(p_path + at, mask=at >= 0, other=0).to(tl.int64)
        b_x = tl.load(p_prev + node * stride_n, mask=m_new, other=0.0)
        b_h = tl.where(m_new, b_x.to(b_h.dtype), b_h)
    return b_h


@triton.jit
def remember(p_state, b_1, b_2, b_3, stride_w, mask, W: tl.constexpr):
    """Write the window, newest input first among the arguments."""
    tl.debug_barrier()  # other threads may still read what these stores replace
    if W > 1:
        tl.store(p_state + (W - 2) * stride_w, b_1, mask=mask)
    if W > 2:
        tl.store(p_state + (W - 3) * stride_w, b_2, mask=mask)
    if W > 3:
        tl.store(p_state + (W - 4) * stride_w, b_3, mask=mask)


@triton.jit
def above(p_parent, p, m_n):
    """The node above each; past the root -1, -2, .. count into the history."""
    return tl.where(p >= 0, tl.load(p_parent + p, mask=m_n & (p >= 0), other=-1), p - 1)


@triton.jit
def tree_conv_kernel(
    x, parent, num_nodes, weight, bias, conv_state, state_indices, x_prev, path, count, y, keep,
    size, channels,
    stride_xb, stride_xn, stride_pb, stride_wd, stride_ww, stride_cs, stride_cd, stride_cw,
    stride_rb, stride_rn, stride_path, stride_yb, stride_yn, stride_kb, stride_kn,
    W: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, BY_SLOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    i_d, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_d = i_d * BD + tl.arange(0, BD)[None, :]
    m_d = o_d < channels
    nodes = tl.minimum(tl.load(num_nodes + i_b), size)
    slot = i_b
    if state_indices is not None:
        slot = tl.load(state_indices + i_b).to(tl.int64)
        nodes = tl.where(slot < 0, 0, nodes)

    p_state = conv_state + slot * stride_cs + o_d.to(tl.int64) * stride_cd
    bound = tl.where(slot < 0, 0, channels)
    p_prev, p_path, taken = None, None, 0
    if x_prev is not None:
        row = slot if BY_SLOT else i_b
        p_prev, p_path = x_prev + row * stride_rb + o_d, path + i_b * stride_path
        taken = tl.where(slot < 0, 0, tl.load(count + i_b))
    b_1 = recent(p_state, p_prev, p_path, taken, stride_cw, stride_rn, o_d, bound, 1, W)
    b_2 = recent(p_state, p_prev, p_path, taken, stride_cw, stride_rn, o_d, bound, 2, W)
    b_3 = recent(p_state, p_prev, p_path, taken, stride_cw, stride_rn, o_d, bound, 3, W)
    if taken > 0:
        remember(p_state, b_1, b_2, b_3, stride_cw, m_d, W)

    for i_n in range(0, size, BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < nodes
        p_1 = above(parent + i_b * stride_pb, o_n, m_n) if W > 1 else o_n
        p_2 = above(parent + i_b * stride_pb, p_1, m_n) if W > 2 else p_1
        p_3 = above(parent + i_b * stride_pb, p_2, m_n) if W > 3 else p_2
        b_y = tl.zeros([BN, BD], tl.float32)
        for back in tl.static_range(W - 1, -1, -1):
            p = (p_3 if back == 3 else p_2 if back == 2 else p_1 if back == 1 else o_n)[:, None]
            p_x = x + i_b * stride_xb + p.to(tl.int64) * stride_xn + o_d
            b_x = tl.load(p_x, mask=m_n[:, None] & (p >= 0) & m_d, other=0.0).to(b_1.dtype)
            if keep is not None and back == 0:
                p_keep = keep + (slot if BY_SLOT else i_b) * stride_kb + p.to(tl.int64) * stride_kn + o_d
                tl.store(p_keep, b_x.to(keep.dtype.element_ty), mask=m_n[:, None] & m_d)
            b_h = tl.where(p == -1, b_1, tl.where(p == -2, b_2, b_3))
            b_x = tl.where(p >= 0, b_x, b_h).to(tl.float32)
            b_w = tl.load(weight + o_d * stride_wd + (W - 1 - back) * stride_ww, mask=m_d, other=0.0)
            b_w = b_w.to(tl.float32)
            b_y = tl.fma(b_x, b_w, b_y)
        if bias is not None:
            b_y += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
        if SILU:
            b_y *= tl.sigmoid(b_y)
        b_y = tl.where(m_n[:, None], b_y, 0.0).to(y.dtype.element_ty)
        p_y = y + i_b * stride_yb + o_n.to(tl.int64)[:, None] * stride_yn + o_d
        tl.store(p_y, b_y, mask=(o_n < size)[:, None] & m_d)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def conv_commit_kernel(
    conv_state, x, path, count, state_indices,
    channels, stride_cl, stride_cs, stride_cd, stride_cw, stride_xl, stride_xr, stride_xn, stride_path,
    W: tl.constexpr, BD: tl.constexpr, BY_SLOT: tl.constexpr,
):  # fmt: skip
    i_d, i_b, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    taken = tl.load(count + i_b)
    slot = i_b
    if state_indices is not None:
        slot = tl.load(state_indices + i_b).to(tl.int64)
    if (taken <= 0) | (slot < 0):
        return

    row = slot if BY_SLOT else i_b
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < channels
    p_state = conv_state + i_l * stride_cl + slot * stride_cs + o_d.to(tl.int64) * stride_cd
    p_x, p_path = x + i_l * stride_xl + row * stride_xr + o_d, path + i_b * stride_path
    b_1 = recent(p_state, p_x, p_path, taken, stride_cw, stride_xn, o_d, channels, 1, W)
    b_2 = recent(p_state, p_x, p_path, taken, stride_cw, stride_xn, o_d, channels, 2, W)
    b_3 = recent(p_state, p_x, p_path, taken, stride_cw, stride_xn, o_d, channels, 3, W)
    remember(p_state, b_1, b_2, b_3, stride_cw, m_d, W)
