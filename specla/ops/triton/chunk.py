"""The rule over a prompt in two launches, without gradients: all blocks at once, then the walk along them.

A block of C tokens reads the state S before it with the 2C rows of its `side`, first its keys and then its queries,
as unit vectors. With G the decay in logarithms since the start of the block and n a key's length, a key is the unit
key whose beta is `beta n^2` and whose value is v / n, and the values that the block adds solve

    (I + A) Y = beta n^2 (V / n - exp(G) S K),    A_ij = beta_i n_i^2 (k_i . k_j) exp(G_i - G_j) for j before i

The inverse, times beta n^2, and what queries make of it are the block's `mix`: one product turns
`V / n - exp(G) S K` and `exp(G) S Q` into the Y and the outputs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.checks import require
from specla.ops.gate import Gate
from specla.ops.triton import DTYPES, MAX_ROWS
from specla.ops.triton.chunk_scan import scan_kernel
from specla.ops.triton.chunk_walk import walk_kernel
from specla.ops.triton.prepare import EPS, log_decay

BLOCK = 32  # tokens
MAX_CHUNK_DIM = 256  # of K and V: one tile of the state with all of K stays in registers
LARGE_SHARED = 160 << 10  # bytes of shared memory that the walk has to have for it


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    normalise: bool = True,
    gate: Gate | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`chunk_gated_delta` from the states of slots to their states after the last token; its bits may differ.

    A row's results do not depend on the other rows. Scratch: `4 H K + HV (288 + V / 8)` bytes a token
    with K a power of two, for fp32 inputs almost twice that.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`: bf16, fp16 or fp32, K and V up to 256, any strides but the last,
            which is 1.
        g: log-decay `[B, T, HV]`, at most 0, or None for no decay; beta: `[B, T, HV]`. With a gate, the raw
            projections that it makes them of.
        state: fp32 `[slots, HV, V, K]`, any strides but the last; read, and overwritten with the final states.
        state_indices: int32 or int64 `[B]`, distinct slots, -1 for a padding row, which has none; by default row b
            is slot b.
        lengths: int32 or int64 `[B]`: tokens of a row from there on are padding.
        scale: of queries, `K^-0.5` by default.
        normalise: keys and queries to unit length first.
        out: where to write `[B, T, HV, V]`, any strides but the last; v's dtype and a new tensor by default.

    Returns:
        o `[B, T, HV, V]`, zero at padding.

    Raises:
        ValueError: on shapes, dtypes or strides that it does not support. Slots and lengths are trusted.
    """
    _check(q, k, v, g, beta, state, state_indices, lengths, gate, out)
    batch, size, heads, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    if batch == 0 or size == 0:
        return o
    full = v.dtype == torch.float32
    blocks, KP = triton.cdiv(size, BLOCK), max(16, triton.next_power_of_2(dim_k))

    def new(heads: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, heads, blocks, *shape, dtype=dtype, device=v.device)

    half = torch.float32 if full else torch.float16
    sides, mixes = new(heads, 2 * BLOCK, KP, dtype=half), new(value_heads, 2 * BLOCK, 2 * BLOCK, dtype=half)
    scalars, peaks = new(value_heads, 4, 2 * BLOCK), new(value_heads, dim_v)
    A_log, dt_bias, beta_scale = (q, None, 1.0) if gate is None else gate
    unread = q  # stands for a pointer that a kernel does not follow
    slots, ends = (unread if x is None else x for x in (state_indices, lengths))
    rule = {
        "H": heads, "HV": value_heads, "K": dim_k, "KP": KP, "V": dim_v, "NORM": normalise,
        "HAS_SLOTS": state_indices is not None, "HAS_LENGTHS": lengths is not None,
    }  # fmt: skip
    decays = beta if g is None else g
    chunk_kernel[(blocks, value_heads, batch)](
        q, k, v, decays, beta, A_log, unread if dt_bias is None else dt_bias, slots, ends, sides, mixes, scalars, peaks,
        beta_scale, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *decays.stride(), *beta.stride(), size,
        LOG_C=BLOCK.bit_length() - 1, BD=min(KP, 32) if full else KP,
        DECAY=g is not None, GATE=gate is not None, HAS_BIAS=dt_bias is not None, **rule,
        num_warps=4, num_stages=1, maxnreg=None if full else 168,  # three programs to a multiprocessor
    )  # fmt: skip
    BV, warps, stages = tile(dim_v, full)
    walk = scan_kernel if full else walk_kernel
    walk[(triton.cdiv(dim_v, BV), value_heads, batch)](
        v, state, slots, ends, sides, mixes, scalars, peaks, o, dim_k**-0.5 if scale is None else scale,
        *v.stride()[:3], *state.stride()[:3], *o.stride()[:3], size,
        C=BLOCK, BV=BV, PEAKS=32, **rule, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o


@functools.cache
def largest_head(device: torch.device) -> int:
    """K and V that the walk has shared memory for on a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return MAX_CHUNK_DIM if shared >= LARGE_SHARED else 128


def tile(dim_v: int, full: bool) -> tuple[int, int, int]:
    """V of a program of the walk, its warps, and its stages: a matter of a row's shape and dtype alone."""
    return (16, 8, 1) if full else (min(32, max(16, triton.next_power_of_2(dim_v))), 4, 3)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    lengths: Tensor | None,
    gate: Gate | None,
    out: Tensor | None,
) -> None:
    require(
        q.dim() == 4 and k.shape == q.shape and v.dim() == 4 and v.shape[:2] == q.shape[:2],
        f"q and k must be [B, T, H, K] and v [B, T, HV, V], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}",
    )
    batch, _, heads, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    require(
        heads > 0 and value_heads > 0 and value_heads % heads == 0,
        f"the {value_heads} heads of v must be a multiple of the {heads} heads of k",
    )
    require(
        1 <= dim_k <= MAX_CHUNK_DIM and 1 <= dim_v <= MAX_CHUNK_DIM,
        f"K and V must be 1..{MAX_CHUNK_DIM}, got {dim_k}, {dim_v}",
    )
    require(batch <= MAX_ROWS, f"B must be at most {MAX_ROWS}, got {batch}")
    require(
        v.dtype in DTYPES and q.dtype == k.dtype == v.dtype,
        f"q, k and v must all be one of {', '.join(map(str, DTYPES))}, got {q.dtype}, {k.dtype}, {v.dtype}",
    )
    for name, x in (("g", g), ("beta", beta)):
        require(
            x is None or (x.shape == v.shape[:3] and x.dtype in DTYPES),
            f"{name} must be {list(v.shape[:3])} of one of {', '.join(map(str, DTYPES))}, "
            f"got {x if x is None else [*x.shape, x.dtype]}",
        )
    require(
        state.dim() == 4 and state.shape[1:] == (value_heads, dim_v, dim_k) and state.dtype == torch.float32,
        f"state must be float32 [slots, {value_heads}, {dim_v}, {dim_k}], got {list(state.shape)} {state.dtype}",
    )
    require(
        state_indices is not None or state.shape[0] >= batch,
        f"state has {state.shape[0]} slots for {batch} rows",
    )
    for name, x in (("state_indices", state_indices), ("lengths", lengths)):
        require(
            x is None
            or (x.shape == (batch,) and x.dtype in (torch.int32, torch.int64) and x.is_contiguous()),
            f"{name} must be contiguous int32 or int64 [B={batch}]",
        )
    require(out is None or (out.shape == v.shape and out.dtype in DTYPES), f"out must be {list(v.shape)}")
    require(gate is None or g is not None, "a gate computes the decay from g, got None")
    if gate is not None:
        for name, x in (("A_log", gate.A_log), ("dt_bias", gate.dt_bias)):
            require(
                x is None or (x.shape == (value_heads,) and x.is_contiguous()),
                f"{name} must be contiguous [{value_heads}]",
            )
    named = {"q": q, "k": k, "v": v, "state": state} | ({} if out is None else {"out": out})
    for name, x in named.items():
        require(x.stride(-1) == 1 or x.shape[-1] == 1, f"the last dimension of {name} must be contiguous")
    rest = {"g": g, "beta": beta, "state_indices": state_indices, "lengths": lengths}
    for name, x in (named | rest | ({} if gate is None else gate._asdict())).items():
        require(
            not isinstance(x, Tensor) or x.device == v.device,
            f"{name} is on {getattr(x, 'device', None)}, v on {v.device}",
        )


@triton.jit
def precise_dot(a, b):
    """`a @ b` of fp32, to some 22 bits of the largest entries, which must be far below 65504."""
    a_high, b_high = a.to(tl.float16), b.to(tl.float16)
    a_low, b_low = (a - a_high.to(tl.float32)).to(tl.float16), (b - b_high.to(tl.float32)).to(tl.float16)
    return tl.dot(a_low, b_high, tl.dot(a_high, b_low, tl.dot(a_high, b_high)))


@triton.jit
def unit_lower_inverse(A, LOG_C: tl.constexpr):
    """`(I + A)^-1` for strictly lower triangular A `[C, C]` in fp32.

    Blocks of doubling size become `[[X, 0], [-Z A X, Z]]`, which is as stable as forward substitution.
    """
    row, col = tl.arange(0, 2**LOG_C)[:, None], tl.arange(0, 2**LOG_C)[None, :]
    X = tl.where(row == col, 1.0, tl.where((row ^ col) == 1, -A, 0.0))
    for log in tl.static_range(1, LOG_C):
        below = tl.where(((row >> log) ^ (col >> log)) == 1, A, 0.0)
        X -= precise_dot(X, precise_dot(below, X))
    return X


# a prompt of another length, or rows at another address, is no reason to compile again
@triton.jit(
    do_not_specialize=["s_gb", "s_bb", "size"],
    do_not_specialize_on_alignment=["g", "beta", "state_indices", "lengths"],
)
def chunk_kernel(
    q, k, v, g, beta, A_log, dt_bias, state_indices, lengths, sides, mixes, scalars, peaks, beta_scale,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_gb, s_gt, s_gh, s_bb, s_bt, s_bh, size,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    LOG_C: tl.constexpr, DECAY: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """What a block knows without the state. Grid: (blocks, value heads, rows)."""
    C: tl.constexpr = 2**LOG_C
    R: tl.constexpr = 2 * C
    half = sides.dtype.element_ty
    i_c, i_hv, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_h = i_hv // (HV // H)
    length = size
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths + i_b).to(tl.int32), size)
    if HAS_SLOTS:
        length = tl.where(tl.load(state_indices + i_b) < 0, 0, length)
    if i_c * C >= length:
        return

    o_t, o_d = tl.arange(0, C), tl.arange(0, BD)
    r_t = (i_c * C + o_t)[:, None]
    m_t = i_c * C + o_t < length
    p_k = k + i_b * s_kb + i_h * s_kh + r_t * s_kt + o_d[None, :]
    p_q = q + i_b * s_qb + i_h * s_qh + r_t * s_qt + o_d[None, :]
    k_scale, q_scale = tl.full([C], EPS, tl.float32), tl.full([C], EPS, tl.float32)
    for i_d in range(0, KP, BD):
        m_d = m_t[:, None] & (i_d + o_d < K)[None, :]
        t_k = tl.load(p_k + i_d, m_d, other=0.0).to(tl.float32)
        t_q = tl.load(p_q + i_d, m_d, other=0.0).to(tl.float32)
        k_scale += tl.sum(t_k * t_k, 1)
        q_scale += tl.sum(t_q * t_q, 1)
    k_scale, q_scale = 1.0 / tl.sqrt(k_scale), 1.0 / tl.sqrt(q_scale)
    p_side = sides + ((i_b * H + i_h) * tl.num_programs(0) + i_c) * R * KP + o_t[:, None] * KP + o_d[None, :]
    kk, qk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for i_d in range(0, KP, BD):
        m_d = m_t[:, None] & (i_d + o_d < K)[None, :]
        t_k = tl.load(p_k + i_d, m_d, other=0.0).to(tl.float32)
        t_q = tl.load(p_q + i_d, m_d, other=0.0).to(tl.float32)
        t_k, t_q = (t_k * k_scale[:, None]).to(half), (t_q * q_scale[:, None]).to(half)
        if i_hv % (HV // H) == 0:
            tl.store(p_side + i_d, t_k)
            tl.store(p_side + i_d + C * KP, t_q)
        kk = tl.dot(t_k, tl.trans(t_k), kk, input_precision="tf32x3")
        qk = tl.dot(t_q, tl.trans(t_k), qk, input_precision="tf32x3")

    b_beta = tl.load(beta + i_b * s_bb + i_hv * s_bh + (i_c * C + o_t) * s_bt, m_t, other=0.0).to(tl.float32)
    a_log, bias = 0.0, 0.0
    if GATE:
        a_log = tl.load(A_log + i_hv).to(tl.float32)
        b_beta = beta_scale * tl.sigmoid(b_beta)
    if HAS_BIAS:
        bias = tl.load(dt_bias + i_hv).to(tl.float32)
    at = (i_b * HV + i_hv) * tl.num_programs(0) + i_c
    p_scalars = scalars + at * 4 * R + o_t
    if not NORM:
        b_beta /= k_scale * k_scale
        tl.store(p_scalars + 3 * R, k_scale)
        tl.store(p_scalars + 3 * R + C, 1.0 / q_scale)

    o_i, o_j = o_t[:, None], o_t[None, :]
    rise, fall, whole = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32), 1.0
    between = tl.where(o_i >= o_j, 1.0, 0.0)
    if DECAY:
        b_g = tl.load(g + i_b * s_gb + i_hv * s_gh + (i_c * C + o_t) * s_gt, m_t, other=0.0).to(tl.float32)
        b_g = tl.where(m_t, log_decay(b_g, a_log, bias, GATE), 0.0)
        # sums from j to i, since a difference of sums from the start would lose small decays beside large ones
        later = tl.where(o_i > o_j, b_g[:, None], 0.0)
        between *= tl.exp(tl.cumsum(later, 0))
        rise, fall, whole = tl.exp(tl.cumsum(b_g, 0)), tl.exp(tl.sum(later, 0)), tl.exp(tl.sum(b_g, 0))
    tl.store(p_scalars, rise)
    tl.store(p_scalars + C, -rise)  # what queries read is added where what keys read is taken away
    tl.store(p_scalars + R, fall)
    tl.store(p_scalars + R + C, tl.zeros([C], tl.float32))  # queries write nothing
    tl.store(scalars + (at * 4 + 2) * R + tl.arange(0, R), tl.full([R], 1.0, tl.float32) * whole)

    read = (qk * between).to(half)
    A = tl.where(o_i > o_j, kk * between * b_beta[:, None], 0.0)
    solve = (unit_lower_inverse(A, LOG_C) * b_beta[None, :]).to(half)
    p_mix = mixes + at * R * R + o_i * R + o_j
    tl.store(p_mix, solve)
    tl.store(p_mix + C, tl.zeros([C, C], half))
    tl.store(p_mix + C * R, tl.dot(read, solve, input_precision="tf32x3").to(half))
    tl.store(p_mix + C * R + C, tl.where(o_i == o_j, 1.0, 0.0).to(half))

    p_v = v + i_b * s_vb + i_hv * s_vh + r_t * s_vt + o_d[None, :]
    for i_d in range(0, V, BD):
        m_d = i_d + o_d < V
        t_v = tl.abs(tl.load(p_v + i_d, m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32))
        if not NORM:
            t_v *= k_scale[:, None]
        tl.store(peaks + at * V + i_d + o_d, tl.max(t_v, 0), m_d)
