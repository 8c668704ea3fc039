"""Verification of all nodes of a tree at once: the mode `parallel`.

With the lineage as a mask, `A_ij = beta_i exp(G_i - G_j) (k_i . k_j)` for j above i, and the values solve
`(I + A) D = beta (V - exp(G) S K)` (the UT transform of the chunked algorithm). The state is streamed once, in chunks
of K, through the matrix units. Bits differ from those of one-token decoding.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton.pending import keep_touched, pending_state, touch_nodes
from specla.ops.triton.prepare import BETA, FIELDS, KEY_SCALE, LOG_DECAY, QUERY_SCALE, prepare_nodes

LEAST_LOG = tl.constexpr(
    -110.0
)  # of a decay that is more than zero in fp32; sums of far less would lose all digits


@triton.jit
def halves(x):
    """x `[.., ..]` fp32 as the sum of two bf16, cut rather than rounded, which a slow unit of its own would do."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    rest = (x - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return high, (rest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def parallel_kernel(
    q, k, v, g, beta, A_log, dt_bias, o,
    state, state_indices, num_nodes, lineage,
    pending_k, pending_d, pending_g, path, count,
    factor_k, factor_d, factor_g,
    scalars, mixes,
    scale, beta_scale,
    s_qb, s_qn, s_qh, s_kb, s_kn, s_kh, s_vb, s_vn, s_vh, s_gb, s_gn, s_gh, s_bb, s_bn,
    s_pkr, s_pkm, s_pdr, s_pdm, s_pgr, s_pgm, s_path,
    s_fkr, s_fkm, s_fdr, s_fdm, s_fgr, s_fgm,
    size,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KC: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, NP: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_PENDING: tl.constexpr,
    BY_SLOT: tl.constexpr, PREPARED: tl.constexpr, TOUCH: tl.constexpr,
    HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of V x value heads, rows)."""
    if PDL:
        gdc_wait()
    i_v, i_hv = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    i_b = tl.program_id(1).to(tl.int64)
    i_h = i_hv // (HV // H)
    slot = i_b
    if HAS_SLOTS:
        slot = tl.load(state_indices + i_b).to(tl.int64)
    row = slot if BY_SLOT else i_b
    nodes = tl.minimum(tl.load(num_nodes + i_b), size)
    if slot < 0:
        nodes = 0
    ahead = 0
    if HAS_PENDING:
        path += i_b * s_path
        if slot >= 0:
            ahead = tl.load(count + i_b).to(tl.int32)
        pending_k += row * s_pkr + i_h * K
        pending_d += row * s_pdr + i_hv * V
        pending_g += row * s_pgr + i_hv
    q += i_b * s_qb + i_h * s_qh
    k += i_b * s_kb + i_h * s_kh
    v += i_b * s_vb + i_hv * s_vh
    state += (tl.maximum(slot, 0) * HV + i_hv) * V * K
    factor_g += row * s_fgr + i_hv
    scalars += (i_b * HV + i_hv) * size * FIELDS
    mixes += (i_b * HV + i_hv) * NP * NP
    o_n, o_v = tl.arange(0, NP), i_v * BV + tl.arange(0, BV)
    m_n, m_v = o_n < nodes, o_v < V if V % BV else tl.full([BV], True, tl.int1)
    o_k = tl.broadcast_to(tl.max_contiguous(tl.arange(0, BK), 4)[None, None, :], [BV, 1, BK])
    p_s = state + o_v[:, None, None] * K + o_k
    m_k = o_k < K if K % BK else tl.full([BV, 1, BK], True, tl.int1)
    n_s = tl.load(p_s, m_k & m_v[:, None, None], other=0.0)
    if HAS_PENDING and TOUCH:
        b_k, b_d = touch_nodes(ahead, path, pending_k, pending_d, s_pkm, s_pdm, o_v, K, KC * KI, V)
    if not PREPARED:
        for i_n in range(0, size if row >= 0 else 0, BN):
            prepare_nodes(
                q, k, g + i_b * s_gb + i_hv * s_gh, beta + i_b * s_bb + i_hv, A_log + i_hv, dt_bias + i_hv, scalars,
                factor_k + row * s_fkr + i_h * K, factor_g, factor_k, i_n + tl.arange(0, BN),
                nodes, size, scale, beta_scale, s_qn, s_kn, s_gn, s_bn, s_fkm, s_fgm, 0,
                (i_v == 0) & (i_hv % (HV // H) == 0),
                K, KC, KI, BN, DECAY, GATE, NORM, HAS_BETA, HAS_BIAS, False,
            )  # fmt: skip
        tl.debug_barrier()  # other threads read the scalars than wrote them

    if HAS_PENDING and TOUCH:
        keep_touched(ahead, b_k, b_d, scalars, KC * KI, BV)

    # reads of the state [BV, N], and products of keys and queries with keys [N, N], chunk by chunk
    read_k, read_q = tl.zeros([BV, NP], tl.float32), tl.zeros([BV, NP], tl.float32)
    kk, qk = tl.zeros([NP, NP], tl.float32), tl.zeros([NP, NP], tl.float32)
    for i_k in range(0, K, BK):
        m_k = o_k < K if K % BK else tl.full([BV, 1, BK], True, tl.int1)
        m_s = m_k & m_v[:, None, None]
        S = n_s
        if BK < K:  # after the last chunk, that one again
            o_next = tl.minimum(i_k + BK, (K - 1) // BK * BK) - i_k
            m_next = o_k + o_next < K if K % BK else m_k
            n_s = tl.load(p_s + o_next, m_next & m_v[:, None, None], other=0.0)
        r_k = (i_k + tl.arange(0, BK))[:, None]
        m_kn = (r_k < K) & m_n[None, :]
        t_k = tl.load(k + o_n[None, :] * s_kn + r_k, m_kn, other=0.0)
        t_q = tl.load(q + o_n[None, :] * s_qn + r_k, m_kn, other=0.0)
        if HAS_PENDING:
            S = pending_state(
                S,
                ahead,
                path,
                pending_k,
                pending_d,
                pending_g,
                s_pkm,
                s_pdm,
                s_pgm,
                o_k,
                m_k,
                o_v,
                m_v,
                DECAY,
            )
            if ahead > 0:
                tl.store(p_s, S, m_s)
        if not HALVES:
            t_k, t_q = t_k.to(tl.float32), t_q.to(tl.float32)
        S = tl.reshape(S, [BV, BK])
        if (
            HALVES
        ):  # bf16 keys and queries are exact, so two products with the halves of S carry 16 bits of it
            high, low = halves(S)
            read_k = tl.dot(low, t_k, tl.dot(high, t_k, read_k))
            read_q = tl.dot(low, t_q, tl.dot(high, t_q, read_q))
        else:
            read_k = tl.dot(S, t_k, read_k, input_precision="tf32x3")
            read_q = tl.dot(S, t_q, read_q, input_precision="tf32x3")
        kk = tl.dot(tl.trans(t_k), t_k, kk, input_precision="tf32x3")
        qk = tl.dot(tl.trans(t_q), t_k, qk, input_precision="tf32x3")
        o_k += BK
        p_s += BK

    p_n = scalars + o_n * FIELDS
    k_scale = tl.load(p_n + KEY_SCALE, m_n, other=0.0)
    q_scale = tl.load(p_n + QUERY_SCALE, m_n, other=0.0)
    b_beta = tl.load(p_n + BETA, m_n, other=0.0)
    t_v = tl.load(v + o_n[None, :] * s_vn + o_v[:, None], (o_n < size)[None, :] & m_v[:, None], other=0.0)
    line = tl.load(lineage + i_b * size + o_n, o_n < size, other=0)
    on = ((line[:, None] >> o_n.to(tl.int64)[None, :]) & 1) != 0
    total = tl.zeros([NP], tl.float32)
    between = tl.where(on, 1.0, 0.0)  # exp(G_i - G_j) where j is i or above it
    if DECAY == 1:
        b_g = tl.maximum(tl.load(p_n + LOG_DECAY, m_n, other=0.0), LEAST_LOG)
        total = tl.sum(tl.where(on, b_g[None, :], 0.0), 1)
        between = tl.exp(tl.where(on, total[:, None] - total[None, :], float("-inf")))
    scaled = between * k_scale[None, :]
    decay = tl.exp(total)

    t_v = tl.where(m_n[None, :], t_v, 0.0).to(tl.float32)  # padding may hold anything
    if DELTA:
        above = on & (o_n[:, None] != o_n[None, :])
        A = tl.where(above, scaled * kk * (b_beta * k_scale)[:, None], 0.0)
        D = (t_v - read_k * (decay * k_scale)[None, :]) * b_beta[None, :]
        depth = tl.max(tl.sum(on.to(tl.int32), 1), 0) - 1
        if depth * 4 < nodes:  # a sweep gets one more depth right
            right, t_A = D, tl.trans(A)
            for _ in range(depth):
                D = right - tl.dot(D, t_A, input_precision="tf32x3")
        else:  # a step gets one more node right: what lies above it comes before it
            # through memory, since no row of a tile in registers can be picked by n; all of a head write the same
            tl.store(mixes + o_n[:, None] * NP + o_n[None, :], A)
            tl.debug_barrier()
            n_mix = tl.load(mixes + NP + o_n)
            for n in range(1, nodes):
                mix = n_mix
                n_mix = tl.load(mixes + (n + 1) * NP + o_n, o_n < tl.where(n + 1 < nodes, NP, 0), other=0.0)
                D = tl.where(o_n[None, :] == n, D - tl.sum(D * mix[None, :], 1)[:, None], D)
    else:
        D = t_v * b_beta[None, :]
    outputs = read_q * (decay * q_scale)[None, :]
    outputs = tl.dot(D, tl.trans(scaled * qk * q_scale[:, None]), outputs, input_precision="tf32x3")

    if PDL:
        gdc_launch_dependents()
    m_o = (o_n < size)[None, :] & m_v[:, None]
    p_o = o + ((i_b * size + o_n[None, :]) * HV + i_hv) * V + o_v[:, None]
    tl.store(p_o, tl.where(m_n[None, :], outputs, 0.0).to(o.dtype.element_ty), m_o)
    p_d = factor_d + row * s_fdr + o_n[None, :] * s_fdm + i_hv * V + o_v[:, None]
    if row >= 0:
        tl.store(p_d, tl.where(m_n[None, :], D, 0.0), m_o)
