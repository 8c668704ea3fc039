"""Products of few rows with a weight that is read once, the same bits for a row whatever rows stand beside it.

The weight is the large operand of the matrix units and rows are its columns: an output is the sum of the same products
in the same order, however many rows there are. Where a weight has too few outputs to fill a device, its inputs are
split, and whoever comes last adds the parts in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.triton.counters import counters

BM, BK = 64, 128  # outputs and inputs that a program multiplies at a time
PROGRAMS = 264  # that fill a large device; a constant, since splits decide the order of a sum
MAX_SPLIT = 8
MAX_ROWS = 64  # side by side in a program


def splits(out_features: int, in_features: int) -> int:
    """Into how many parts the inputs of a weight are split: a matter of its shape alone."""
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(out_features, BM))
    return max(1, min(wanted, MAX_SPLIT, in_features // (2 * BK)))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for x `[M, in]` and weight `[out, in]` of one dtype, bf16, fp16 or fp32, rows contiguous.

    Sums are fp32 (fp32 inputs: three products of their parts in tf32), rounded once to x's dtype.
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    out = x.new_empty(rows, out_features)
    if rows == 0:
        return out
    split = splits(out_features, in_features)
    BR = min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(out_features, BM), triton.cdiv(rows, BR), split)
    parts = x.new_empty((grid[0] * grid[1] * split, BM, BR) if split > 1 else (1,), dtype=torch.float32)
    arrived = counters(grid[0] * grid[1], x.device) if split > 1 else parts
    linear_kernel[grid](
        x, weight, out, parts, arrived, rows, out_features, x.stride(0), weight.stride(0), out.stride(0),
        K=in_features, KS=triton.cdiv(triton.cdiv(in_features, split), BK) * BK,
        BM=BM, BR=BR, BK=BK, SPLIT=split, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def linear_kernel(
    x, weight, out, parts, arrived, rows, out_features, s_x, s_w, s_o,
    K: tl.constexpr, KS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    i_m, i_r, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m, o_r, o_k = i_m * BM + tl.arange(0, BM), i_r * BR + tl.arange(0, BR), i_s * KS + tl.arange(0, BK)
    p_w = weight + o_m.to(tl.int64)[:, None] * s_w + o_k[None, :]
    p_x = x + o_r.to(tl.int64)[None, :] * s_x + o_k[:, None]
    m_m, m_r = (o_m < out_features)[:, None], (o_r < rows)[None, :]
    b_o = tl.zeros([BM, BR], tl.float32)
    for i_k in range(0, KS, BK):
        m_k = o_k < K - i_k
        b_w = tl.load(p_w + i_k, m_m & m_k[None, :], other=0.0)
        b_x = tl.load(p_x + i_k, m_r & m_k[:, None], other=0.0)
        b_o = tl.dot(b_w, b_x, b_o, input_precision="tf32x3")
    last = True
    if SPLIT > 1:
        i_b = i_r * tl.num_programs(0) + i_m
        p_part = (
            parts
            + i_b.to(tl.int64) * SPLIT * BM * BR
            + tl.arange(0, BM)[:, None] * BR
            + tl.arange(0, BR)[None, :]
        )
        tl.store(p_part + i_s * BM * BR, b_o)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + i_b, 1) == SPLIT - 1
        if last:
            tl.store(arrived + i_b, 0)
            b_o = tl.load(p_part)
            for i in range(1, SPLIT):
                b_o += tl.load(p_part + i * BM * BR)
    if last:
        p_o = out + o_r.to(tl.int64)[None, :] * s_o + o_m[:, None]
        tl.store(p_o, b_o.to(out.dtype.element_ty), m_m & m_r)
