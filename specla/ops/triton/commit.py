"""The commit of accepted factors, in place and in exact order: one read and one write of the state."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.ops.factors import Factors
from specla.ops.triton.common import CHUNK
from specla.ops.triton.pending import keep_touched, pending_state, touch_nodes


def commit(
    state: Tensor,
    factors: Factors,
    path: Tensor,
    count: Tensor,
    state_indices: Tensor | None = None,
    *,
    by_slot: bool = False,
) -> None:
    """Apply the first `count` nodes of each row's path to its slot's state; nothing is checked.

    Args:
        state: fp32 `[slots, HV, V, K]`, contiguous within a slot, or `[layers, slots, HV, V, K]`; then the factors have
            that leading dimension too, and all layers take one launch.
        factors: k `[R, M, H, K]`, d `[R, M, HV, V]`, g `[R, M, HV]` or, per key channel, `[R, M, HV, K]`; any strides
            but the last, which is 1. R counts batch rows, or slots with `by_slot`.
        path: `[B, P]` node ids; entries beyond the count may be anything.
        count: `[B]` nodes to apply, 0 for none.
        state_indices: slot of each row `[B]`, -1 for a padding row; None means row b is slot b.
        by_slot: the factors of a row lie at its slot, as in the engine's banks.
    """
    *_, HV, V, K = state.shape
    assert state.stride()[-3:] == (V * K, K, 1)
    if state.dim() == 4:
        state, factors = state[None], Factors(*(x[None] for x in factors))
    k, d, g = factors
    KC = triton.next_power_of_2(triton.cdiv(K, CHUNK))
    BV = max(1, min(16, 4096 // (KC * CHUNK)))  # at most 16 KB in the registers of four warps
    commit_kernel[(triton.cdiv(V, BV) * HV, path.shape[0], state.shape[0])](
        state, k, d, g, path, count, state_indices,
        *state.stride()[:2], *k.stride()[:4], *d.stride()[:4], *g.stride()[:4], path.stride(0),
        H=k.shape[3], HV=HV, K=K, V=V, BV=BV, KC=KC, KI=CHUNK,
        PER_CHANNEL=g.dim() == d.dim(), BY_SLOT=by_slot, num_warps=4,
    )  # fmt: skip


@triton.jit
def commit_kernel(
    state, k, d, g, path, count, state_indices,
    stride_sl, stride_ss,
    stride_kl, stride_kr, stride_kn, stride_kh,
    stride_dl, stride_dr, stride_dn, stride_dh,
    stride_gl, stride_gr, stride_gn, stride_gh,
    stride_path,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr,
    PER_CHANNEL: tl.constexpr, BY_SLOT: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = tl.cdiv(V, BV)
    i_v, i_h = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_b, i_l = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    steps = tl.load(count + i_b).to(tl.int32)
    slot = i_b
    if state_indices is not None:
        slot = tl.load(state_indices + i_b).to(tl.int64)
    if (steps <= 0) | (slot < 0):
        return

    row = slot if BY_SLOT else i_b
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V if V % BV else tl.full([BV], True, tl.int1)
    o_c, o_i = tl.arange(0, KC)[None, :, None], tl.max_contiguous(tl.arange(0, KI), 4)[None, None, :]
    o_k = tl.broadcast_to(o_c * KI + o_i, [BV, KC, KI])
    m_k = o_k < K if K < KC * KI else tl.full([BV, KC, KI], True, tl.int1)
    m_s = m_v[:, None, None] & m_k
    path += i_b * stride_path
    k += i_l * stride_kl + row * stride_kr + (i_h // (HV // H)) * stride_kh
    d += i_l * stride_dl + row * stride_dr + i_h * stride_dh
    g += i_l * stride_gl + row * stride_gr + i_h * stride_gh
    p_s = state + i_l * stride_sl + slot * stride_ss + i_h * V * K + o_v[:, None, None] * K + o_k
    b_s = tl.load(p_s, m_s, other=0.0)
    t_k, t_d = touch_nodes(steps, path, k, d, stride_kn, stride_dn, o_v, K, KC * KI, V)
    keep_touched(steps, t_k, t_d, state, KC * KI, BV)
    DECAY: tl.constexpr = 2 if PER_CHANNEL else 1
    b_s = pending_state(b_s, steps, path, k, d, g, stride_kn, stride_dn, stride_gn, o_k, m_k, o_v, m_v, DECAY)
    tl.store(p_s, b_s, m_s)
