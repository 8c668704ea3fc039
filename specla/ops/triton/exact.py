"""Verification in the order of one-token decoding: the modes `serial` and `hybrid`.

A program keeps a tile of the state, all of K and some rows of V, in registers and runs the steps of its worker's list
(`schedule`) through it. Serial has one worker for a tree; hybrid has several, each with its own chains, which derive
the states at light edges again rather than exchange them. Whatever the size of a tile, its warps or the tree, a node
is read from its parent's state by the same operations in the same order: every schedule gives the bits of every other,
and those of a tree of one node.
"""

import triton
import triton.language as tl

from specla.ops.triton.common import advance
from specla.ops.triton.pending import keep_touched, pending_state, touch_nodes
from specla.ops.triton.prepare import (
    BETA,
    DECAY_FACTOR,
    FIELDS,
    OVERLAP,
    contract,
    prepare_nodes,
    touch_prepared,
)
from specla.ops.triton.schedule import READ as _READ, RESET as _RESET, STORE as _STORE, UPDATE as _UPDATE

READ, RESET, STORE, UPDATE = (tl.constexpr(flag) for flag in (_READ, _RESET, _STORE, _UPDATE))


@triton.jit
def exact_kernel(
    q, k, v, g, beta, A_log, dt_bias, o,
    state, state_indices, num_nodes, steps, num_steps,
    pending_k, pending_d, pending_g, path, count,
    factor_k, factor_d, factor_g, query, scalars, arrived,
    scale, beta_scale,
    s_qb, s_qn, s_qh, s_kb, s_kn, s_kh, s_vb, s_vn, s_vh, s_gb, s_gn, s_gh, s_bb, s_bn,
    s_pkr, s_pkm, s_pdr, s_pdm, s_pgr, s_pgm, s_path,
    s_fkr, s_fkm, s_fdr, s_fdm, s_fgr, s_fgm,
    size, envelope,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KC: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, NP: tl.constexpr,
    WORKERS: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_PENDING: tl.constexpr,
    BY_SLOT: tl.constexpr, PREPARED: tl.constexpr, TOUCH: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of V x value heads, rows, workers)."""
    NV: tl.constexpr = tl.cdiv(V, BV)
    i_v, i_hv = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_b, i_w = tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_h = i_hv // (HV // H)
    # all that decides where to read is asked for at once
    steps += (i_b * WORKERS + i_w) * envelope
    slot = i_b
    if HAS_SLOTS:
        slot = tl.load(state_indices + i_b).to(tl.int64)
    nodes = tl.minimum(tl.load(num_nodes + i_b), size)
    total = tl.load(num_steps + i_b * WORKERS + i_w)
    first_step = tl.load(steps)
    ahead = 0
    if HAS_PENDING:
        path += i_b * s_path
        ahead = tl.load(count + i_b).to(tl.int32)
    if slot < 0:
        nodes = 0
        total = 0
        ahead = 0
    if total == 0:
        first_step = 0
    row = slot if BY_SLOT else i_b
    p_arrived = arrived + (i_b * HV + i_hv) * NV + i_v
    if WORKERS > 1:
        if (total == 0) & (i_w > 0) & ((ahead == 0) | (i_w < WORKERS - 1)):  # a tree of few chains
            if ahead > 0:
                tl.atomic_add(p_arrived, 1)
            return

    o_c, o_i = tl.arange(0, KC)[None, :, None], tl.max_contiguous(tl.arange(0, KI), 4)[None, None, :]
    o_k = tl.broadcast_to(o_c * KI + o_i, [BV, KC, KI])
    # masks that are always true are constants: loads need no predicates then
    m_k = o_k < K if K < KC * KI else tl.full([BV, KC, KI], True, tl.int1)
    o_n = tl.arange(0, NP)[None, :]

    v += i_b * s_vb + i_hv * s_vh
    query += (i_b * size * H + i_h) * K
    scalars += (i_b * HV + i_hv) * size * FIELDS
    factor_k += row * s_fkr + i_h * K
    factor_d += row * s_fdr + i_hv * V
    factor_g += row * s_fgr + i_hv * (K if DECAY == 2 else 1)
    o += (i_b * size * HV + i_hv) * V
    state += (tl.maximum(slot, 0) * HV + i_hv) * V * K
    if HAS_PENDING:
        pending_k += row * s_pkr + i_h * K
        pending_d += row * s_pdr + i_hv * V
        pending_g += row * s_pgr + i_hv * (K if DECAY == 2 else 1)

    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V if V % BV else tl.full([BV], True, tl.int1)
    m_s = m_k & m_v[:, None, None]
    p_s = state + o_v[:, None, None] * K + o_k
    S0 = tl.load(p_s, m_s, other=0.0)
    if HAS_PENDING and TOUCH:
        t_k, t_d = touch_nodes(ahead, path, pending_k, pending_d, s_pkm, s_pdm, o_v, K, KC * KI, V)

    # while the state is on its way
    for i_n in range(0, size if row >= 0 else 0, BN):
        r_n = i_n + tl.arange(0, BN)
        if PREPARED:
            touch_prepared(query, factor_k, scalars, r_n, nodes, H * K, s_fkm, K, KC, KI, BN)
        else:  # all programs of a head write the same
            prepare_nodes(
                q + i_b * s_qb + i_h * s_qh, k + i_b * s_kb + i_h * s_kh, g + i_b * s_gb + i_hv * s_gh,
                beta + i_b * s_bb + i_hv, A_log + i_hv, dt_bias + i_hv * (K if DECAY == 2 else 1), scalars,
                factor_k, factor_g, query, r_n, nodes, size, scale, beta_scale,
                s_qn, s_kn, s_gn, s_bn, s_fkm, s_fgm, H * K, True,
                K, KC, KI, BN, DECAY, GATE, NORM, HAS_BETA, HAS_BIAS, True,
            )  # fmt: skip
    tl.debug_barrier()  # other threads read them than wrote them

    # outputs take the place of the values, which are in the nearest cache from here on
    outputs = tl.load(v + o_n * s_vn + o_v[:, None], (o_n < nodes) & m_v[:, None], other=0.0).to(tl.float32)

    if HAS_PENDING:
        if TOUCH:
            keep_touched(ahead, t_k, t_d, scalars, KC * KI, BV)
        S0 = pending_state(
            S0, ahead, path, pending_k, pending_d, pending_g, s_pkm, s_pdm, s_pgm, o_k, m_k, o_v, m_v, DECAY
        )
        if ahead > 0:
            if WORKERS == 1:
                tl.store(p_s, S0, m_s)
            elif i_w < WORKERS - 1:
                tl.debug_barrier()
                tl.atomic_add(p_arrived, 1)

    deltas = tl.zeros([BV, NP], tl.float32)
    stored = (o_n >= tl.where(i_w == 0, nodes, size)).to(tl.int32)  # padding reads as zero
    S = S0
    n_step = first_step
    p_n = scalars + (n_step & 255) * FIELDS
    n_overlap, n_beta, n_decay = tl.load(p_n + OVERLAP), tl.load(p_n + BETA), tl.load(p_n + DECAY_FACTOR)
    for t in range(total):
        step, n_step = n_step, tl.load(steps + t + 1, t + 1 < total, other=0)
        node, flags = step & 255, step >> 8
        b_k = tl.load(factor_k + node * s_fkm + o_k, m_k, other=0.0)
        b_q = tl.load(query + node * H * K + o_k, m_k, other=0.0)
        b_v = tl.load(v + node * s_vn + o_v, m_v, other=0.0).to(tl.float32)
        overlap, b_beta, decay = n_overlap, n_beta, n_decay
        # asked for a step ahead: a wait for them would hold back all else
        p_n = scalars + (n_step & 255) * FIELDS
        n_overlap, n_beta, n_decay = tl.load(p_n + OVERLAP), tl.load(p_n + BETA), tl.load(p_n + DECAY_FACTOR)
        if DECAY == 2:
            decay = tl.exp(tl.load(factor_g + node * s_fgm + o_k, m_k, other=0.0))

        if flags & RESET:
            tl.debug_barrier()  # keeps this a branch: selecting every element would cost all other steps
            S = S0 if WORKERS > 1 else tl.load(p_s, m_s, other=0.0)
        b_d = tl.zeros([BV], tl.float32)
        if flags & READ:
            # contractions are spelled out: which products are fused must not depend on the compiler
            if DECAY == 2:
                b_d = b_beta * (b_v - contract(S, b_k * decay)) if DELTA else b_beta * b_v
                b_o = tl.fma(b_d, overlap, contract(S, b_q * decay))
            else:
                b_d = b_beta * tl.fma(contract(S, b_k), -decay, b_v) if DELTA else b_beta * b_v
                b_o = tl.fma(b_d, overlap, contract(S, b_q) * decay)
            if flags & STORE:
                here = o_n == node
                outputs = tl.where(here, b_o[:, None], outputs)
                deltas = tl.where(here, b_d[:, None], deltas)
                if WORKERS > 1:
                    stored = tl.where(here, 1, stored)
        else:
            b_d = tl.sum(tl.where(o_n == node, deltas, 0.0), 1)
        if flags & UPDATE:
            S = advance(S, b_d, b_k, decay)

    m_o = (o_n < size) & m_v[:, None]
    if WORKERS > 1:
        m_o &= stored > 0
    tl.store(o + o_n * HV * V + o_v[:, None], outputs.to(o.dtype.element_ty), m_o)
    if row >= 0:
        tl.store(factor_d + o_n * s_fdm + o_v[:, None], deltas, m_o)

    if HAS_PENDING and WORKERS > 1:
        # The slot is written in place after all workers have read it. The last one waits for the others: programs start
        # in the order of their ids, workers being the slowest axis, so all it waits for have started.
        if (ahead > 0) & (i_w == WORKERS - 1):
            while tl.atomic_add(p_arrived, 0) < WORKERS - 1:
                pass
            tl.store(p_arrived, 0)
            tl.store(p_s, S0, m_s)
