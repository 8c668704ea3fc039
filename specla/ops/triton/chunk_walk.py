"""The walk of `chunk_scan` for half precision, with the state lying on its side, `[K, V]`.

A group of four warps multiplies 64 rows at a time. Rows of K and of tokens are many, so that a tile of V may be narrow
and there may be more programs; the price is that the state goes through shared memory once a block, and values twice.
Operands are halves for bf16 inputs too, which round eight times finer than bf16: rows are unit vectors, and values are
counted in units of their own largest.
"""

import triton
import triton.language as tl

from specla.ops.triton.chunk_scan import power_of_two


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["state_indices", "lengths"])
def walk_kernel(
    v, state, state_indices, lengths, sides, mixes, scalars, peaks, o, scale,
    s_vb, s_vt, s_vh, s_sr, s_sh, s_sv, s_ob, s_ot, s_oh, size,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PEAKS: tl.constexpr, NORM: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of V, value heads, rows)."""
    R: tl.constexpr = 2 * C
    half = sides.dtype.element_ty
    i_v, i_hv, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, length = i_b, size
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths + i_b).to(tl.int32), size)
    if HAS_SLOTS:
        slot = tl.load(state_indices + i_b).to(tl.int64)
        length = tl.where(slot < 0, 0, length)
    blocks, most = tl.cdiv(length, C), tl.cdiv(size, C)
    first = (i_b * HV + i_hv) * most
    sides += (i_b * H + i_hv // (HV // H)) * most * R * KP
    mixes += first * R * R
    scalars += first * 4 * R
    peaks += first * V
    v += i_b * s_vb + i_hv * s_vh
    o += i_b * s_ob + i_hv * s_oh
    o_r, o_k, o_v = tl.arange(0, R), tl.arange(0, KP), i_v * BV + tl.arange(0, BV)
    m_v = (o_v < V)[None, :]
    p_s = state + slot * s_sr + i_hv * s_sh + o_v[None, :] * s_sv + o_k[:, None]
    m_s = m_v & (o_k < tl.where(length > 0, K, 0))[:, None]
    S = tl.load(p_s, m_s, other=0.0)

    peak = tl.max(tl.abs(S), 0)
    o_p = tl.arange(0, PEAKS)
    for i_p in range(0, blocks, PEAKS):
        p_p = peaks + (i_p + o_p)[:, None] * V + o_v[None, :]
        peak = tl.maximum(peak, tl.max(tl.load(p_p, m_v & (i_p + o_p < blocks)[:, None], other=0.0), 0))
    unit = power_of_two(tl.maximum(peak, 1e-30))[None, :]
    S *= 1.0 / unit

    p_side = sides + o_r[:, None] * KP + o_k[None, :]
    p_mix = mixes + o_r[:, None] * R + o_r[None, :]
    p_v = v + o_r[:, None] * s_vt + o_v[None, :]
    # read a block ahead into registers, so that two programs fit into the shared memory of a multiprocessor; as
    # integers, without which the mix would lie there from the start of the step
    n_mix = tl.load(p_mix, (o_r < tl.where(length > 0, R, 0))[:, None], other=0.0).to(tl.int16, bitcast=True)
    n_v = tl.load(p_v, m_v & (o_r < tl.minimum(length, C))[:, None], other=0.0)
    for i_c in range(blocks):
        left = length - i_c * C
        t_side = tl.load(p_side)
        t_mix, t_v = n_mix, n_v
        p_mix += R * R
        p_v += C * s_vt
        n_mix = tl.load(p_mix, (o_r < tl.where(left > C, R, 0))[:, None], other=0.0)
        n_mix = n_mix.to(tl.int16, bitcast=True)
        n_v = tl.load(p_v, m_v & (o_r < tl.minimum(left - C, C))[:, None], other=0.0)
        rise, fall = tl.load(scalars + o_r), tl.load(scalars + R + o_r)
        whole = tl.load(scalars + 2 * R + tl.arange(0, BV) % R)

        made = t_v.to(tl.float32)
        if not NORM:
            made *= tl.load(scalars + 3 * R + o_r)[:, None]
        made -= tl.dot(t_side, S.to(half)) * rise[:, None] * unit
        made *= 1.0 / unit
        made = tl.dot(t_mix.to(half, bitcast=True), made.to(half))
        S = tl.dot(tl.trans(t_side), (made * fall[:, None]).to(half), S * whole[None, :])

        made *= unit * scale
        if not NORM:
            made *= tl.load(scalars + 3 * R + o_r)[:, None]
        m_q = m_v & ((o_r >= C) & (o_r - C < size - i_c * C))[:, None]
        tl.store(o + (o_r - C)[:, None] * s_ot + o_v[None, :], made.to(o.dtype.element_ty), m_q)
        p_side += R * KP
        scalars += 4 * R
        o += C * s_ot

    tl.store(p_s, S * unit, m_s)
    o_t = tl.arange(0, C)
    for i_c in range(blocks, most):
        m_q = m_v & (o_t < size - i_c * C)[:, None]
        tl.store(o + o_t[:, None] * s_ot + o_v[None, :], tl.zeros([C, BV], o.dtype.element_ty), m_q)
        o += C * s_ot
