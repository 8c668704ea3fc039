"""Verification in the order of one-token decoding: the modes `serial` and `hybrid`.

A program keeps a tile of the state, all of K and some rows of V, in registers and runs the steps of its worker's list
(`schedule`) through it. Serial has one worker for a tree; hybrid has several, each with its own chains, which derive
the states at light edges again rather than exchange them. Whatever the size of a tile, its warps or the tree, a node
is read from its parent's state by the same operations in the same order: every schedule gives the bits of every other,
and those of a tree of one node.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
def fetch(
    step, k, q, v, g, scalars, s_kn, s_qn, s_vn, s_gn, o_k, m_k, o_v, m_v, DECAY: tl.constexpr
):  # fmt: skip
    """What a step needs of its node: key, query, value, (k . q), beta and decay."""
    node = step & 255
    b_k = tl.load(k + node * s_kn + o_k, m_k, other=0.0)
    b_q = tl.load(q + node * s_qn + o_k, m_k, other=0.0)
    b_v = tl.load(v + node * s_vn + o_v, m_v, other=0.0).to(tl.float32)
    p_n = scalars + node * FIELDS
    overlap, b_beta, decay = tl.load(p_n + OVERLAP), tl.load(p_n + BETA), tl.load(p_n + DECAY_FACTOR)
    if DECAY == 2:
        decay = tl.exp(tl.load(g + node * s_gn + o_k, m_k, other=0.0))
    return b_k, b_q, b_v, overlap, b_beta, decay


@triton.jit
def read(S, b_k, b_q, b_v, overlap, b_beta, decay, DECAY: tl.constexpr, DELTA: tl.constexpr):
    """Corrected value and output of a node from its parent's state."""
    # contractions are spelled out: which products are fused must not depend on the compiler
    if DECAY == 2:
        b_d = b_beta * (b_v - contract(S, b_k * decay)) if DELTA else b_beta * b_v
        b_o = tl.fma(b_d, overlap, contract(S, b_q * decay))
    else:
        b_d = b_beta * tl.fma(contract(S, b_k), -decay, b_v) if DELTA else b_beta * b_v
        b_o = tl.fma(b_d, overlap, contract(S, b_q) * decay)
    return b_d, b_o


@triton.jit
def store_rows(p, x, o_v, m_v, KI: tl.constexpr):
    """x `[BV]` to p + o_v, from the threads that hold it.

    As a tile of so many columns as threads hold the same row, of which the first counts: it is laid out like the state.
    A store of `[BV]` would move x through shared memory, and so would one whose rows are known to be contiguous.
    """
    SPAN: tl.constexpr = KI // 4 if KI > 4 else 1
    o_r, o_l = tl.maximum(o_v, 0)[:, None], tl.arange(0, SPAN)[None, :]
    x = tl.broadcast_to(x.to(p.dtype.element_ty)[:, None], [x.shape[0], SPAN])
    tl.store(p + o_r + o_l, x, m_v[:, None] & (o_l == 0))


@triton.jit
def visit(
    step, S, S0, p_s, m_s, b_k, b_q, b_v, overlap, b_beta, decay, o, factor_d, s_on, s_fdm,
    o_v, m_v, KI: tl.constexpr, WORKERS: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The state after a step."""
    node, flags = step & 255, step >> 8
    if (flags & (READ | UPDATE)) == (
        READ | UPDATE
    ):  # most steps: a single block, for the compiler to arrange
        if WORKERS > 1:
            if flags & RESET:
                tl.debug_barrier()  # keeps this a branch
                S = S0
        b_d, b_o = read(S, b_k, b_q, b_v, overlap, b_beta, decay, DECAY, DELTA)
        S = advance(S, b_d, b_k, decay)
        if WORKERS == 1 or flags & STORE:
            store_rows(o + node * s_on, b_o, o_v, m_v, KI)
            store_rows(factor_d + node * s_fdm, b_d, o_v, m_v, KI)
    elif flags & READ:
        b_d, b_o = read(S, b_k, b_q, b_v, overlap, b_beta, decay, DECAY, DELTA)
        store_rows(o + node * s_on, b_o, o_v, m_v, KI)
        store_rows(factor_d + node * s_fdm, b_d, o_v, m_v, KI)
    elif flags & UPDATE:  # again, by the only worker
        if flags & RESET:
            tl.debug_barrier()  # what is replayed was stored by other threads
            S = tl.load(p_s, m_s, other=0.0)
        b_d = tl.load(factor_d + node * s_fdm + o_v, m_v, other=0.0)
        S = advance(S, b_d, b_k, decay)
    return S


@triton.jit
def exact_kernel(
    q, k, v, g, beta, A_log, dt_bias, o,
    state, state_indices, num_nodes, steps, num_steps,
    pending_k, pending_d, pending_g, path, count, due,
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
    BY_SLOT: tl.constexpr, PREPARED: tl.constexpr, TOUCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of V x value heads, rows, workers)."""
    NV: tl.constexpr = tl.cdiv(V, BV)
    i_v, i_hv = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_b, i_w = tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_h = i_hv // (HV // H)
    if PDL:
        gdc_wait()
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
        writes = ahead > 0
        if due is not None:
            writes = writes & (tl.load(due + i_b) != 0)
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
    factor_k += tl.maximum(row, 0) * s_fkr + i_h * K
    factor_d += row * s_fdr + i_hv * V
    factor_g += tl.maximum(row, 0) * s_fgr + i_hv * (K if DECAY == 2 else 1)
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

    # keys and queries, just written, come nearer when a word of each sector is asked for
    if TOUCH and NP > 1 and not PREPARED:
        SECTORS: tl.constexpr = KC * KI // 8 if KC * KI > 8 else 1
        r_e, o_e = tl.arange(0, NP)[:, None], tl.arange(0, SECTORS)[None, :] * 8
        m_e = (r_e < nodes) & (o_e < K)
        e_k = tl.load(factor_k + r_e * s_fkm + o_e, m_e, other=0.0)
        e_q = tl.load(query + r_e * (H * K) + o_e, m_e, other=0.0)

    # padding reads as zero; the values are in the nearest cache from here on
    blank = tl.load(v + o_n * s_vn + o_v[:, None], (o_n < nodes) & m_v[:, None], other=0.0).to(tl.float32)

    # stores nothing, since nodes is never negative; the compiler cannot know that
    if TOUCH and NP > 1 and not PREPARED:
        tl.store(scalars + r_e + o_e, e_k + e_q, r_e < -nodes)
    if HAS_PENDING:
        if TOUCH:
            keep_touched(ahead, t_k, t_d, scalars, KC * KI, BV)
        S0 = pending_state(
            S0, ahead, path, pending_k, pending_d, pending_g, s_pkm, s_pdm, s_pgm, o_k, m_k, o_v, m_v, DECAY
        )
        if (ahead > 0) & writes:
            if WORKERS == 1:
                tl.store(p_s, S0, m_s)
            elif i_w < WORKERS - 1:
                tl.debug_barrier()
                tl.atomic_add(p_arrived, 1)

    m_o = (o_n >= tl.where(i_w == 0, nodes, size)) & (o_n < size) & m_v[:, None]
    tl.store(o + o_n * HV * V + o_v[:, None], blank.to(o.dtype.element_ty), m_o)
    if row >= 0:
        tl.store(factor_d + o_n * s_fdm + o_v[:, None], blank, m_o)

    S = S0
    if TOUCH and NP > 1 and BV <= 16 and DECAY < 2:
        # words of steps are asked for two steps ahead, all else one; two steps a turn, so that nothing is moved
        step, n_step = first_step, tl.load(steps + 1, total > 1, other=0)
        b_k, b_q, b_v, overlap, b_beta, decay = fetch(
            step, factor_k, query, v, factor_g, scalars, s_fkm, H * K, s_vn, s_fgm, o_k, m_k, o_v, m_v, DECAY
        )
        for t in range(0, total, 2):
            a_step = tl.load(steps + t + 2, t + 2 < total, other=0)
            n_k, n_q, n_v, n_overlap, n_beta, n_decay = fetch(
                n_step, factor_k, query, v, factor_g, scalars, s_fkm, H * K, s_vn, s_fgm, o_k, m_k, o_v, m_v, DECAY,
            )  # fmt: skip
            S = visit(
                step, S, S0, p_s, m_s, b_k, b_q, b_v, overlap, b_beta, decay, o, factor_d, HV * V, s_fdm,
                o_v, m_v, KI, WORKERS, DECAY, DELTA,
            )  # fmt: skip
            b_step = tl.load(steps + t + 3, t + 3 < total, other=0)
            b_k, b_q, b_v, overlap, b_beta, decay = fetch(
                a_step, factor_k, query, v, factor_g, scalars, s_fkm, H * K, s_vn, s_fgm, o_k, m_k, o_v, m_v, DECAY,
            )  # fmt: skip
            S = visit(
                n_step, S, S0, p_s, m_s, n_k, n_q, n_v, n_overlap, n_beta, n_decay, o, factor_d, HV * V, s_fdm,
                o_v, m_v, KI, WORKERS, DECAY, DELTA,
            )  # fmt: skip
            step, n_step = a_step, b_step
    else:
        step, n_step = first_step, tl.load(steps + 1, total > 1, other=0)
        for t in range(total):
            a_step = tl.load(steps + t + 2, t + 2 < total, other=0)
            b_k, b_q, b_v, overlap, b_beta, decay = fetch(
                step, factor_k, query, v, factor_g, scalars, s_fkm, H * K, s_vn, s_fgm, o_k, m_k, o_v, m_v, DECAY,
            )  # fmt: skip
            S = visit(
                step, S, S0, p_s, m_s, b_k, b_q, b_v, overlap, b_beta, decay, o, factor_d, HV * V, s_fdm,
                o_v, m_v, KI, WORKERS, DECAY, DELTA,
            )  # fmt: skip
            step, n_step = n_step, a_step

    if PDL:
        gdc_launch_dependents()

    if HAS_PENDING and WORKERS > 1:
        # The slot is written in place after all workers have read it. The last one waits for the others: programs start
        # in the order of their ids, workers being the slowest axis, so all it waits for have started.
        if (ahead > 0) & (i_w == WORKERS - 1):
            while tl.atomic_add(p_arrived, 0) < WORKERS - 1:
                pass
            tl.store(p_arrived, 0)
            tl.store(p_s, S0, m_s)
