"""The walk along a prompt: states and outputs block after block, from what `chunk` knows of each block alone.

The state of one tile of V stays in registers from the first block to the last. It is the left operand of every product
that it enters, as are the values made of it, so nothing but what was prepared goes through shared memory. This is how
fp32 inputs are read; `chunk_walk` is for the others. Values are counted in units of their own largest.
"""

import triton
import triton.language as tl


@triton.jit
def power_of_two(x):
    """The largest power of two up to x, for x > 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["state_indices", "lengths"])
def scan_kernel(
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
    m_v = (o_v < V)[:, None]
    p_s = state + slot * s_sr + i_hv * s_sh + o_v[:, None] * s_sv + o_k[None, :]
    m_s = m_v & (o_k < tl.where(length > 0, K, 0))[None, :]
    S = tl.load(p_s, m_s, other=0.0)

    peak = tl.max(tl.abs(S), 1)
    o_p = tl.arange(0, PEAKS)
    for i_p in range(0, blocks, PEAKS):
        p_p = peaks + (i_p + o_p)[None, :] * V + o_v[:, None]
        peak = tl.maximum(peak, tl.max(tl.load(p_p, m_v & (i_p + o_p < blocks)[None, :], other=0.0), 1))
    unit = power_of_two(tl.maximum(peak, 1e-30))[:, None]
    S *= 1.0 / unit

    # the decay over a block, the same R times: read a block ahead, and not as a scalar, for which a warp would wait
    p_whole = scalars + 2 * R + tl.arange(0, BV) % R
    whole = tl.load(p_whole, o_v < tl.where(length > 0, V, 0), other=0.0)
    for i_c in range(blocks):
        left = length - i_c * C
        t_side = tl.load(sides + o_r[:, None] * KP + o_k[None, :])
        t_mix = tl.load(mixes + o_r[:, None] * R + o_r[None, :])
        p_whole += 4 * R
        n_whole = tl.load(p_whole, o_v < tl.where(left > C, V, 0), other=0.0)
        read = tl.dot(S.to(half), tl.trans(t_side), input_precision="tf32x3")
        # loaded where they are used: over the product above they would not fit into registers
        m_k = m_v & (o_r < tl.minimum(left, C))[None, :]
        made = tl.load(v + o_v[:, None] + o_r[None, :] * s_vt, m_k, other=0.0).to(tl.float32) * (1.0 / unit)
        if not NORM:
            made *= tl.load(scalars + 3 * R + o_r)[None, :]
        made -= read * tl.load(scalars + o_r)[None, :]
        made = tl.dot(made.to(half), tl.trans(t_mix), input_precision="tf32x3")
        S *= whole[:, None]
        whole = n_whole
        S = tl.dot((made * tl.load(scalars + R + o_r)[None, :]).to(half), t_side, S, input_precision="tf32x3")

        made *= unit * scale
        if not NORM:
            made *= tl.load(scalars + 3 * R + o_r)[None, :]
        m_q = m_v & ((o_r >= C) & (o_r - C < size - i_c * C))[None, :]
        tl.store(o + o_v[:, None] + (o_r - C)[None, :] * s_ot, made.to(o.dtype.element_ty), m_q)
        sides += R * KP
        mixes += R * R
        scalars += 4 * R
        v += C * s_vt
        o += C * s_ot

    tl.store(p_s, S * unit, m_s)
    o_t = tl.arange(0, C)
    for i_c in range(blocks, most):
        m_q = m_v & (o_t < size - i_c * C)[None, :]
        tl.store(o + o_v[:, None] + o_t[None, :] * s_ot, tl.zeros([BV, C], o.dtype.element_ty), m_q)
        o += C * s_ot
