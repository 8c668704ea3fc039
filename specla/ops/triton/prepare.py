"""What the recurrence needs of a node, made of its projections: scaled keys and queries, (k . q), decay and beta.

Either every verification program does it for its own head before its steps (one launch), or `prepare_kernel` does it
once for all of them. The arithmetic is the same, and so are the bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.elementwise import L2_EPS

EPS = tl.constexpr(L2_EPS)
# what `scalars` [B, HV, N, FIELDS] holds of a node; a power of two, so that a node does not cross a sector
KEY_SCALE, QUERY_SCALE, OVERLAP, BETA, LOG_DECAY, DECAY_FACTOR = (tl.constexpr(i) for i in range(6))
FIELDS = tl.constexpr(8)


@triton.jit
def contract(S, x):
    """Row sums over K of `S * x`, for tiles `[R, KC, KI]`: `[R]`."""
    return tl.sum(tl.sum(S * x, 1), 1)


@triton.jit
def log_decay(g, A_log, bias, GATE: tl.constexpr):
    """g, or of a raw projection `-exp(A_log) softplus(g + bias)` (the language has no log1p)."""
    if GATE:
        x = g + bias
        g = -tl.exp(A_log) * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    return g


@triton.jit
def prepare_nodes(
    q, k, g, beta, A_log, dt_bias, scalars, factor_k, factor_g, query, o_n, nodes, size, scale, beta_scale,
    s_qn, s_kn, s_gn, s_bn, s_fkm, s_fgm, s_query, writes_key,
    K: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr, BN: tl.constexpr, DECAY: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP_QUERY: tl.constexpr,
):  # fmt: skip
    """Nodes `o_n` `[BN]` of one row and value head. Keys and decays go into the factors, queries into `query`.

    Padding, from `nodes` to `size`, gets zero keys and decays.
    """
    o_c, o_i = tl.arange(0, KC)[None, :, None], tl.max_contiguous(tl.arange(0, KI), 4)[None, None, :]
    o_k = tl.broadcast_to(o_c * KI + o_i, [BN, KC, KI])
    r_n = o_n[:, None, None]
    # inputs are loaded before `nodes` is known; what they hold at padding goes nowhere
    m_n, m_k = o_n < size, (r_n < size) & (o_k < K)
    real, r_real = o_n < nodes, r_n < nodes
    b_k = tl.load(k + r_n * s_kn + o_k, m_k, other=0.0).to(tl.float32)
    b_q = tl.load(q + r_n * s_qn + o_k, m_k, other=0.0).to(tl.float32)
    a_log = tl.load(A_log).to(tl.float32) if GATE else 0.0
    b_g, b_beta = tl.zeros([BN], tl.float32), tl.full([BN], 1.0, tl.float32)
    if HAS_BETA:
        b_beta = tl.load(beta + o_n * s_bn, m_n, other=0.0).to(tl.float32)
        if GATE:
            b_beta = beta_scale * tl.sigmoid(b_beta)
    if DECAY == 2:
        bias = tl.load(dt_bias + o_k, m_k, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        c_g = log_decay(tl.load(g + r_n * s_gn + o_k, m_k, other=0.0).to(tl.float32), a_log, bias, GATE)
        tl.store(factor_g + r_n * s_fgm + o_k, tl.where(r_real, c_g, 0.0), m_k)
    else:
        if DECAY == 1:
            bias = tl.load(dt_bias).to(tl.float32) if HAS_BIAS else 0.0
            b_g = log_decay(tl.load(g + o_n * s_gn, m_n, other=0.0).to(tl.float32), a_log, bias, GATE)
        tl.store(factor_g + o_n * s_fgm, tl.where(real, b_g, 0.0), m_n)

    k_scale, q_scale = tl.full([BN], 1.0, tl.float32), tl.full([BN], 1.0, tl.float32) * scale
    if NORM:
        k_scale = 1.0 / tl.sqrt(contract(b_k, b_k) + EPS)
        q_scale = scale / tl.sqrt(contract(b_q, b_q) + EPS)
    b_k *= k_scale[:, None][:, None, :]
    b_q *= q_scale[:, None][:, None, :]
    if writes_key:
        tl.store(factor_k + r_n * s_fkm + o_k, tl.where(r_real, b_k, 0.0), m_k)
    if KEEP_QUERY:
        tl.store(query + r_n * s_query + o_k, b_q, r_real & (o_k < K))
    p_n = scalars + o_n * FIELDS
    tl.store(p_n + KEY_SCALE, k_scale, real)
    tl.store(p_n + QUERY_SCALE, q_scale, real)
    tl.store(p_n + OVERLAP, contract(b_k, b_q), real)
    tl.store(p_n + BETA, b_beta, real)
    tl.store(p_n + LOG_DECAY, b_g, real)
    tl.store(p_n + DECAY_FACTOR, tl.exp(b_g), real)


@triton.jit
def touch_prepared(
    q, k, scalars, o_n, nodes, s_qn, s_kn, K: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Reads prepared keys and queries once, so that the steps find them in the nearest cache.

    What becomes of them, (k . q), keeps the compiler from dropping the loads; `prepare_kernel` leaves it to this.
    """
    o_c, o_i = tl.arange(0, KC)[None, :, None], tl.max_contiguous(tl.arange(0, KI), 4)[None, None, :]
    o_k = tl.broadcast_to(o_c * KI + o_i, [BN, KC, KI])
    r_n = o_n[:, None, None]
    m_k = (r_n < nodes) & (o_k < K)
    b_k = tl.load(k + r_n * s_kn + o_k, m_k, other=0.0)
    b_q = tl.load(q + r_n * s_qn + o_k, m_k, other=0.0)
    tl.store(scalars + o_n * FIELDS + OVERLAP, contract(b_k, b_q), o_n < nodes)


@triton.jit
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, state_indices, num_nodes, factor_k, factor_g, query, scalars, scale, beta_scale,
    s_qb, s_qn, s_qh, s_kb, s_kn, s_kh, s_gb, s_gn, s_gh, s_bb, s_bn, s_fkr, s_fkm, s_fgr, s_fgm, size,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr, BN: tl.constexpr,
    DECAY: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, BY_SLOT: tl.constexpr, KEEP_QUERY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of nodes, value heads, rows)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_n, i_hv, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_h = i_hv // (HV // H)
    slot = i_b
    nodes = tl.minimum(tl.load(num_nodes + i_b), size)
    if HAS_SLOTS:
        slot = tl.load(state_indices + i_b).to(tl.int64)
    if slot < 0:
        nodes = 0
    row = slot if BY_SLOT else i_b
    if row >= 0:
        prepare_nodes(
            q + i_b * s_qb + i_h * s_qh, k + i_b * s_kb + i_h * s_kh, g + i_b * s_gb + i_hv * s_gh,
            beta + i_b * s_bb + i_hv, A_log + i_hv, dt_bias + i_hv * (K if DECAY == 2 else 1),
            scalars + (i_b * HV + i_hv) * size * FIELDS, factor_k + row * s_fkr + i_h * K,
            factor_g + row * s_fgr + i_hv * (K if DECAY == 2 else 1), query + (i_b * size * H + i_h) * K,
            i_n * BN + tl.arange(0, BN), nodes, size, scale, beta_scale,
            s_qn, s_kn, s_gn, s_bn, s_fkm, s_fgm, H * K, True, K, KC, KI, BN, DECAY, GATE, NORM, HAS_BETA, HAS_BIAS,
            KEEP_QUERY,
        )  # fmt: skip
