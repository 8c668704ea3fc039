"""What a trained drafter reads: the target's features of the nodes that were accepted, and pairs of norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton.overlap import launch_options
from specla.resident.slots import Slots
from specla.resident.walk import Outcome


class Backlog(NamedTuple):
    """What the target has read of each slot and its drafter has not: the accepted nodes of the last tree."""

    features: Tensor  # [S * M, F], those of row b and node n at b * size + n
    following: Tensor  # int32 [S, M], the token that followed each accepted node
    num_tokens: Tensor  # int32 [S]
    size: Tensor  # int32 [1], nodes of a tree in the last round


class Reading(NamedTuple):
    """The backlog as chains of R tokens a row, at most."""

    features: Tensor  # [B * R, F], zero beyond `num_tokens`
    tokens: Tensor  # int32 [B * R]
    num_tokens: Tensor  # int32 [B]
    before_last: Tensor  # int32 [B], one less, or 0
    limits: Tensor  # int32 [B], drafts that may follow: none where nothing is read


def gather(rows: Tensor, slots: Slots, backlog: Backlog, limit: Tensor, length: int) -> Reading:
    """Fetch the backlog of each row, `length` tokens at most.

    Args:
        rows: int32 `[B]` slot of each row, which is b or, for padding, -1.
        limit: int32 `[S]` most drafts of a slot.
    """
    batch, width = len(rows), backlog.features.shape[1]
    made = Reading(
        backlog.features.new_empty(batch * length, width),
        rows.new_empty(batch * length), *(torch.empty_like(rows) for _ in range(3)),
    )  # fmt: skip
    gather_kernel[(length, batch)](
        rows, slots.path, slots.remaining, *backlog, *made, limit, slots.path.stride(0), backlog.following.stride(0),
        length, F=width, BF=1024, num_warps=4,
        **launch_options(rows.device),
    )  # fmt: skip
    return made


def grow_chain(reading: Reading, follow: Tensor, parent: Tensor, first: int) -> Tensor:
    """Write the parents of a level's nodes, of which the first is node `first`, and count the nodes of each row.

    Args:
        follow: int32 `[B, W]`, the node of the level above that each follows.
        parent: int32 `[B, N]`.

    Returns:
        int32 `[B]`, none where nothing is read.
    """
    batch, width = follow.shape
    num_nodes = torch.empty_like(reading.num_tokens)
    level_kernel[(batch,)](
        reading.num_tokens, follow, parent, num_nodes, first, max(0, first - width), width, parent.stride(0),
        W=triton.next_power_of_2(width), num_warps=1, **launch_options(follow.device),
    )  # fmt: skip
    return num_nodes


def keep(outcome: Outcome, backlog: Backlog) -> None:
    """What was taken is to be read in the next round."""
    batch, size = outcome.tokens.shape
    keep_kernel[(batch,)](
        outcome.packed, backlog.following, backlog.num_tokens, backlog.size, backlog.following.stride(0), size,
        N=triton.next_power_of_2(size), num_warps=1, **launch_options(outcome.packed.device),
    )  # fmt: skip


def take_last(source: Tensor, count: Tensor, out: Tensor) -> None:
    """`out[b] = source[b, count[b] - 1]`, the first where there is none.

    Args:
        source: `[B, R, D]` contiguous; out: `[B, D]`, any row stride, of the same dtype.
    """
    batch, length, size = source.shape
    take_last_kernel[(triton.cdiv(size, 1024), batch)](
        source, count, out, length, size, out.stride(0), BD=1024, num_warps=4, **launch_options(source.device)
    )


def pair_norm(
    tokens: Tensor, table: Tensor, hidden: Tensor, follow: Tensor | None, norms: tuple[Tensor, Tensor], eps: float,
    batch: int, keep_norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The input of a drafter's layer: norms of a token's embedding and of the state that it follows, side by side.

    Args:
        tokens: int32 `[M]`, M / B of them for each row; table: embeddings `[vocab, D]`.
        hidden: fp32 `[M', D]`, M' / B states for each row.
        follow: int32 `[M]`, which state of its row each token follows; None: its own.
        norms: weights of both norms `[D]`.
        keep_norm: the residual is the normalised state.

    Returns:
        `[M, 2 D]` in the table's dtype, and the residual fp32 `[M, D]`.
    """
    rows, size = len(tokens), table.shape[1]
    out = table.new_empty(rows, 2 * size)
    residual = torch.empty(rows, size, dtype=torch.float32, device=table.device)
    block = triton.next_power_of_2(size)
    pair_norm_kernel[(rows,)](
        tokens, table, hidden, follow, *norms, out, residual, eps, rows // batch, len(hidden) // batch,
        D=size, BD=block, KEEP_NORM=keep_norm, num_warps=min(8, max(1, block // 256)), **launch_options(table.device),
    )  # fmt: skip
    return out, residual


@triton.jit
def gather_kernel(
    rows, path, remaining, features, following, waiting, size, out, tokens, count, before_last, limits, limit,
    s_path, s_following, length,
    F: tl.constexpr, BF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_n, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here = tl.load(rows + i_b) >= 0
    total = tl.minimum(tl.load(waiting + i_b, here, other=0), length)
    real = i_n < total
    node = tl.load(path + i_b * s_path + i_n, real, other=0)
    source = features + (i_b * tl.load(size) + node) * F
    for i_f in range(0, F, BF):
        o_f = i_f + tl.arange(0, BF)
        b_f = tl.load(source + o_f, o_f < tl.where(real, F, 0), other=0.0)
        tl.store(out + (i_b * length + i_n) * F + o_f, b_f, o_f < F)
    tl.store(tokens + i_b * length + i_n, tl.load(following + i_b * s_following + i_n, real, other=0))
    if i_n == 0:
        tl.store(count + i_b, total)
        tl.store(before_last + i_b, tl.maximum(total - 1, 0))
        most = tl.minimum(tl.load(limit + i_b), tl.load(remaining + i_b) - 1)
        tl.store(limits + i_b, tl.where(total > 0, most, 0))


@triton.jit
def level_kernel(
    count, follow, parent, num_nodes, first, above, width, s_p, W: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_b, o_w = tl.program_id(0), tl.arange(0, W)
    b_f = tl.load(follow + i_b * width + o_w, o_w < width, other=0)
    tl.store(parent + i_b * s_p + first + o_w, above + b_f, o_w < width)
    tl.store(num_nodes + i_b, tl.where(tl.load(count + i_b) > 0, first + width, 0))


@triton.jit
def keep_kernel(packed, following, count, size, s_following, nodes, N: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_b, o_n = tl.program_id(0), tl.arange(0, N)
    p_row = packed + i_b * (nodes + 4)
    tl.store(following + i_b * s_following + o_n, tl.load(p_row + o_n, o_n < nodes, other=0), o_n < nodes)
    tl.store(count + i_b, tl.load(p_row + nodes))
    if i_b == 0:
        tl.store(size, nodes)


@triton.jit
def take_last_kernel(source, count, out, length, size, s_o, BD: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_d, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_d = i_d * BD + tl.arange(0, BD)
    last = tl.maximum(tl.load(count + i_b) - 1, 0)
    b_x = tl.load(source + (i_b * length + last) * size + o_d, o_d < size)
    tl.store(out + i_b * s_o + o_d, b_x, o_d < size)


@triton.jit
def pair_norm_kernel(
    tokens, table, hidden, follow, weight_e, weight_h, out, residual, eps, each, before,
    D: tl.constexpr, BD: tl.constexpr, KEEP_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    source = row
    if follow is not None:
        source = row // each * before + tl.load(follow + row)
    b_e = tl.load(table + tl.load(tokens + row).to(tl.int64) * D + o_d, m_d, other=0.0).to(tl.float32)
    b_h = tl.load(hidden + source * D + o_d, m_d, other=0.0)
    n_e = b_e * (1.0 / tl.sqrt(tl.sum(b_e * b_e, 0) / D + eps)) * tl.load(weight_e + o_d, m_d, other=0.0)
    n_h = b_h * (1.0 / tl.sqrt(tl.sum(b_h * b_h, 0) / D + eps)) * tl.load(weight_h + o_d, m_d, other=0.0)
    tl.store(out + row * 2 * D + o_d, n_e.to(out.dtype.element_ty), m_d)
    tl.store(out + row * 2 * D + D + o_d, n_h.to(out.dtype.element_ty), m_d)
    tl.store(residual + row * D + o_d, n_h if KEEP_NORM else b_h, m_d)
