"""Kernels of the baselines that run whole rounds: a snapshot of every node, the copy of one, inputs laid side by side.

A snapshot is computed from its parent's by the operations of the engine's exact modes, in their order: same bits.
"""

from __future__ import annotations

# the bodies of kernels are Triton's language, not Python
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.factors import Factors
from specla.ops.triton.common import CHUNK, advance
from specla.ops.triton.exact import fetch, read, store_rows
from specla.ops.triton.overlap import launch_options
from specla.ops.triton.prepare import FIELDS, prepare_kernel, prepare_nodes, touch_prepared
from specla.ops.triton.tuning import choose
from specla.resident.forward import Inputs, Round
from specla.resident.slots import Slots


def verify_dense(inputs: Inputs, now: Round, state: Tensor, snapshots: Tensor) -> Tensor:
    """Outputs `[B, N, HV, V]` at every node; its state goes into `snapshots` `[S, M, HV, V, K]`, fp32.

    Tiles are those that the engine's serial mode is launched with for one row: with the larger ones that it takes for
    many, this kernel has no registers left (6.8 KB a thread spilled for 64 rows of 256, compiled for Hopper).
    """
    q, k, v, a, b, (A_log, dt_bias, beta_scale) = inputs
    (batch, size, heads, dim_k), (value_heads, dim_v) = q.shape, v.shape[2:]
    config = choose(
        "serial", device=state.device, batch=1, nodes=size, value_heads=value_heads, dim_k=dim_k, dim_v=dim_v
    )  # fmt: skip

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    o = torch.empty(batch, size, value_heads, dim_v, dtype=v.dtype, device=v.device)
    made = Factors(new(batch, size, heads, dim_k), o, new(batch, size, value_heads))
    query, scalars = new(batch, size, heads, dim_k), new(batch, value_heads, size, FIELDS.value)
    KI = min(CHUNK, triton.next_power_of_2(dim_k))
    KC = triton.next_power_of_2(triton.cdiv(dim_k, KI))
    sizes = {"H": heads, "HV": value_heads, "K": dim_k, "KC": KC, "KI": KI}
    bias, has_bias = (A_log, False) if dt_bias is None else (dt_bias, True)
    s_gates = [*a.stride()[:2], a.stride(2), *b.stride()[:2]]
    num_nodes, options = now.tree.num_nodes, launch_options(q.device)
    if config.prepared:
        prepare_kernel[(triton.cdiv(size, 16), value_heads, batch)](
            q, k, a, b, A_log, bias, now.rows, num_nodes, made.k, made.g, query, scalars, dim_k**-0.5, beta_scale,
            *q.stride()[:3], *k.stride()[:3], *s_gates, *made.k.stride()[:2], *made.g.stride()[:2], size, BN=16,
            KEEP_QUERY=True, DECAY=1, GATE=True, NORM=True, HAS_BETA=True, HAS_BIAS=has_bias, HAS_SLOTS=False,
            BY_SLOT=False, **sizes, num_warps=4, **options,
        )  # fmt: skip
    dense_kernel[(triton.cdiv(dim_v, config.block_v) * value_heads, batch)](
        q, k, v, a, b, A_log, bias, o, state, now.rows, num_nodes, now.tree.parent, snapshots, made.k, made.g, query,
        scalars, dim_k**-0.5, beta_scale, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s_gates,
        now.tree.parent.stride(0), snapshots.stride(0), size,
        V=dim_v, BV=config.block_v, BN=16, HAS_BIAS=has_bias, PREPARED=config.prepared, **sizes,
        num_warps=config.num_warps, maxnreg=config.registers, **options,
    )  # fmt: skip
    return o


@triton.jit
def dense_kernel(
    q, k, v, a, b, A_log, dt_bias, o, state, rows, num_nodes, parent, snapshots, keys, log_decays, query, scalars,
    scale, beta_scale, s_qb, s_qn, s_qh, s_kb, s_kn, s_kh, s_vb, s_vn, s_vh, s_gb, s_gn, s_gh, s_bb, s_bn,
    s_parent, s_slot, size,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KC: tl.constexpr, KI: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, PREPARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of V x value heads, rows)."""
    NV: tl.constexpr = tl.cdiv(V, BV)
    i_v, i_hv = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_b = tl.program_id(1).to(tl.int64)
    i_h = i_hv // (HV // H)
    if PDL:
        gdc_wait()
    slot = tl.load(rows + i_b).to(tl.int64)
    nodes = tl.minimum(tl.load(num_nodes + i_b), size)
    if slot < 0:
        nodes = 0
    at = tl.maximum(slot, 0)
    o_c, o_i = tl.arange(0, KC)[None, :, None], tl.max_contiguous(tl.arange(0, KI), 4)[None, None, :]
    o_k = tl.broadcast_to(o_c * KI + o_i, [BV, KC, KI])
    m_k = o_k < K if K < KC * KI else tl.full([BV, KC, KI], True, tl.int1)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V if V % BV else tl.full([BV], True, tl.int1)
    m_s = m_k & m_v[:, None, None]
    o_s = i_hv * V * K + o_v[:, None, None] * K + o_k
    S = tl.load(state + at * HV * V * K + o_s, m_s, other=0.0)
    snapshots += at * s_slot
    parent += i_b * s_parent
    v += i_b * s_vb + i_hv * s_vh
    o += (i_b * size * HV + i_hv) * V
    keys += (i_b * size * H + i_h) * K
    query += (i_b * size * H + i_h) * K
    log_decays += i_b * size * HV + i_hv
    scalars += (i_b * HV + i_hv) * size * FIELDS
    for i_n in range(0, size, BN):
        r_n = i_n + tl.arange(0, BN)
        if PREPARED:
            touch_prepared(query, keys, scalars, r_n, nodes, H * K, H * K, K, KC, KI, BN)
        else:
            prepare_nodes(
                q + i_b * s_qb + i_h * s_qh, k + i_b * s_kb + i_h * s_kh, a + i_b * s_gb + i_hv * s_gh,
                b + i_b * s_bb + i_hv, A_log + i_hv, dt_bias + i_hv, scalars, keys, log_decays, query, r_n, nodes,
                size, scale, beta_scale, s_qn, s_kn, s_gn, s_bn, H * K, HV, H * K, True,
                K, KC, KI, BN, 1, True, True, True, HAS_BIAS, True,
            )  # fmt: skip
    tl.debug_barrier()  # other threads read them than wrote them
    for n in range(nodes, size):
        store_rows(o + n * HV * V, tl.zeros([BV], tl.float32), o_v, m_v, KI)
    n_k, n_q, n_v, n_overlap, n_beta, n_decay = fetch(
        0, keys, query, v, log_decays, scalars, H * K, H * K, s_vn, HV, o_k, m_k, o_v, m_v, 1
    )
    for n in range(nodes):
        b_k, b_q, b_v, overlap, b_beta, decay = n_k, n_q, n_v, n_overlap, n_beta, n_decay
        n_k, n_q, n_v, n_overlap, n_beta, n_decay = fetch(
            tl.minimum(n + 1, size - 1), keys, query, v, log_decays, scalars, H * K, H * K, s_vn, HV,
            o_k, m_k, o_v, m_v, 1,
        )  # fmt: skip
        above = tl.load(parent + n)
        if (n > 0) & (above != n - 1):
            tl.debug_barrier()  # other threads may read it than wrote it
            S = tl.load(snapshots + above * HV * V * K + o_s, m_s, other=0.0)
        b_d, b_o = read(S, b_k, b_q, b_v, overlap, b_beta, decay, 1, True)
        S = advance(S, b_d, b_k, decay)
        store_rows(o + n * HV * V, b_o, o_v, m_v, KI)
        tl.store(snapshots + n * HV * V * K + o_s, S, m_s)
    if PDL:
        gdc_launch_dependents()


def restore(snapshots: Tensor, state: Tensor, rows: Tensor, slots: Slots) -> None:
    """The last accepted node's snapshot `[L, S, M, HV, V, K]` of each row into its slot's state, of all layers."""
    size, block = state[0, 0].numel(), 4096
    restore_kernel[(triton.cdiv(size, block), len(rows), len(state))](
        snapshots, state, rows, slots.count, slots.path, *snapshots.stride()[:2], *state.stride()[:2],
        slots.path.stride(0), SIZE=size, BLOCK=block, num_warps=8,
    )  # fmt: skip


@triton.jit
def restore_kernel(
    snapshots, state, rows, count, path, s_nl, s_ns, s_sl, s_ss, s_path, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    slot = tl.load(rows + tl.program_id(1)).to(tl.int64)
    if slot < 0:
        return
    taken = tl.load(count + slot)
    if taken <= 0:
        return
    node = tl.load(path + slot * s_path + taken - 1).to(tl.int64)
    i_l = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(snapshots + i_l * s_nl + slot * s_ns + node * SIZE + at, at < SIZE)
    tl.store(state + i_l * s_sl + slot * s_ss + at, kept, at < SIZE)


def lay_out(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    """Five tensors `[B, N, ..]`, dense beyond N, into contiguous ones `[B * N, D]`, in one launch."""
    batch, size = sources[0].shape[:2]
    widths = [x.shape[-1] for x in targets]
    lay_out_kernel[(batch * size,)](
        *sources, *targets, *(stride for x in sources for stride in x.stride()[:2]), size,
        **{f"D{n}": width for n, width in enumerate(widths)}, BLOCK=triton.next_power_of_2(max(widths)), num_warps=4,
    )  # fmt: skip


@triton.jit
def lay_out_kernel(
    q, k, v, a, b, out_q, out_k, out_v, out_a, out_b,
    s_qb, s_qn, s_kb, s_kn, s_vb, s_vn, s_ab, s_an, s_bb, s_bn, size,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, D4: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    i_b, i_n = i // size, i % size
    at = tl.arange(0, BLOCK)
    tl.store(out_q + i * D0 + at, tl.load(q + i_b * s_qb + i_n * s_qn + at, at < D0), at < D0)
    tl.store(out_k + i * D1 + at, tl.load(k + i_b * s_kb + i_n * s_kn + at, at < D1), at < D1)
    tl.store(out_v + i * D2 + at, tl.load(v + i_b * s_vb + i_n * s_vn + at, at < D2), at < D2)
    tl.store(out_a + i * D3 + at, tl.load(a + i_b * s_ab + i_n * s_an + at, at < D3), at < D3)
    tl.store(out_b + i * D4 + at, tl.load(b + i_b * s_bb + i_n * s_bn + at, at < D4), at < D4)
