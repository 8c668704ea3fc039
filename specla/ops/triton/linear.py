"""Products of few rows with a weight that is read once, the same bits for a row whatever rows stand beside it.

The weight is the large operand of the matrix units and rows are its columns: an output is the sum of the same products
in the same order, however many rows there are. Where a weight has too few outputs to fill a device, its inputs are
split: whoever comes last adds the parts in their order, or whoever reads them does.

What a product of few rows waits for is its weight. One of seven bits is read in half the time, by drafters, whose bits
nobody compares. Seven, since bfloat16 has the integers from 128 to 255: a byte becomes one by being put into place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton.counters import counters
from specla.ops.triton.overlap import launch_options

TILE = 64  # outputs of a program for up to 16 rows, twice as many beyond; splits are counted by it alone
FEW = 32  # rows up to which a weight of seven bits is faster than one of bf16
PROGRAMS = 264  # that fill a large device; a constant, since splits decide the order of a sum
MAX_SPLIT = 8
STEP = 64  # inputs: what a split is a multiple of


class Int7Weight(NamedTuple):
    """`(values - 64) * scale[:, None]` is nearly the weight."""

    values: Tensor  # uint8 [out, in], 1 to 127
    scale: Tensor  # fp32 [out]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def quantize(weight: Tensor) -> Int7Weight:
    """The weight `[out, in]` in seven bits, with a scale for each row."""
    scale = (weight.abs().amax(1).float() / 63).clamp(min=1e-12)
    values = (weight.float() / scale[:, None]).round().clamp(-63, 63) + 64
    return Int7Weight(values.to(torch.uint8).contiguous(), scale)


def splits(out_features: int, in_features: int) -> int:
    """Into how many parts the inputs of a weight are split: a matter of its shape alone."""
    wanted = PROGRAMS // triton.cdiv(out_features, TILE)
    return max(1, min(wanted, MAX_SPLIT, in_features // 256))


class Tiles(NamedTuple):
    """What a program takes on, and how. Bits do not depend on it."""

    outputs: int
    rows: int
    inputs: int  # at a time
    warps: int
    stages: int


def tiles(rows: int, wide: bool, narrow: bool) -> Tiles:
    """For so many rows, fp32 if they are wide, and a weight of seven bits if it is narrow."""
    tile = min(128, max(16, triton.next_power_of_2(rows)))
    if narrow and tile <= FEW:
        return Tiles(32, tile, 256, 4, 4 if tile == 16 else 3)
    outputs, warps = (TILE, 4) if tile == 16 else (2 * TILE, 8)
    if wide:
        return Tiles(outputs, tile, 64, warps, 3)
    return Tiles(outputs, tile, 64 if tile > 32 else 128, warps, 3 if tile == 32 else 4)


def linear(x: Tensor, weight: Tensor | Int7Weight, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T` for x `[M, in]` and weight `[out, in]` of one dtype, bf16, fp16 or fp32, rows contiguous.

    A weight of seven bits takes x in any of them.

    Sums are fp32 (fp32 inputs: three products of their parts in tf32), rounded once to the dtype of `out`, which is x's
    by default.

    Args:
        out: `[M, out]`, or `[G, M / G, out]`, any strides but the last.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    _launch(x, weight, out)
    return out


def swiglu(x: Tensor, weight: Tensor | Int7Weight) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`: `[M, width]`, for a weight `[2 width, in]` that holds gate above up."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, out, swiglu=True)
    return out


def linear_parts(x: Tensor, weight: Tensor | Int7Weight) -> Tensor:
    """Parts fp32 `[P, M, out]` whose sum in their order is `x @ weight.T`, for a reader that adds them up."""
    out = x.new_empty(splits(*weight.shape), x.shape[0], weight.shape[0], dtype=torch.float32)
    _launch(x, weight, out, parts=True)
    return out


def _launch(
    x: Tensor, weight: Tensor | Int7Weight, out: Tensor, swiglu: bool = False, parts: bool = False
) -> None:
    rows, in_features = x.shape
    values, scale = weight if isinstance(weight, Int7Weight) else (weight, None)
    outputs = weight.shape[0]
    if rows == 0:
        return
    split = splits(outputs, in_features)
    BM, BR, BK, warps, stages = tiles(rows, x.dtype == torch.float32, scale is not None)
    # rows go by first, so that a weight that several of their tiles read comes from memory once
    grid = (triton.cdiv(rows, BR), triton.cdiv(outputs, BM), split)
    gathers = split > 1 and not parts
    held = x.new_empty((grid[0] * grid[1] * split, BM, BR) if gathers else (1,), dtype=torch.float32)
    arrived = counters(grid[0] * grid[1], x.device) if gathers else held
    linear_kernel[grid](
        x, values, scale, out, held, arrived, rows, outputs, x.stride(0), values.stride(0),
        out.stride(-2), max(1, out.shape[-2]), 0 if parts else out.stride(0),
        K=in_features, KS=triton.cdiv(triton.cdiv(in_features, split), STEP) * STEP,
        BM=BM, BR=BR, BK=BK, SPLIT=split, SWIGLU=swiglu, PARTS=parts, ASM=not triton.knobs.runtime.interpret,
        num_warps=warps, num_stages=stages, **launch_options(x.device),
    )  # fmt: skip


@triton.jit
def widen(b, ASM: tl.constexpr):
    """bf16 `b - 64` for bytes of seven bits: each becomes the low half of 128 + b, from which 192 is taken."""
    if ASM:
        b = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, one, shift;
            mov.b32 one, 0x3f803f80;
            mov.b32 shift, 0xc340c340;
            prmt.b32 low, $2, 0x43434343, 0x4140;
            prmt.b32 high, $2, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, low, one, shift;
            fma.rn.bf16x2 $1, high, one, shift;
            }
            """,
            "=r,=r,r",
            [b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        b = b.to(tl.float32) - 64.0
    return b


@triton.jit
def linear_kernel(
    x, weight, scale, out, held, arrived, rows, outputs, s_x, s_w, s_o, each, s_g,
    K: tl.constexpr, KS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWIGLU: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, tiles of outputs, splits). A tile of SwiGLU holds gates and the values they belong to."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_r, i_m, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t_m = tl.arange(0, BM)
    o_m = i_m * BM + t_m
    m_m = o_m < outputs
    if SWIGLU:
        width = outputs // 2
        o_m = i_m * (BM // 2) + t_m % (BM // 2)
        m_m = o_m < width
        o_m += tl.where(t_m < BM // 2, 0, width)
    o_r, o_k = i_r * BR + tl.arange(0, BR), tl.arange(0, BK)
    m_r = o_r < rows
    end = tl.minimum(KS, K - i_s * KS)
    p_w = weight + i_s * KS + o_m.to(tl.int64)[:, None] * s_w + o_k[None, :]
    p_x = x + i_s * KS + o_r.to(tl.int64)[None, :] * s_x + o_k[:, None]
    b_o = tl.zeros([BM, BR], tl.float32)
    for i_k in range(0, KS, BK):
        m_k = o_k < end - i_k
        b_w = tl.load(p_w + i_k, m_m[:, None] & m_k[None, :], other=0)
        b_x = tl.load(p_x + i_k, m_r[None, :] & m_k[:, None], other=0.0)
        if scale is not None:
            b_w = widen(b_w, ASM).to(b_x.dtype)
        b_o = tl.dot(b_w, b_x, b_o, input_precision="tf32x3")
    if scale is not None:
        b_o *= tl.load(scale + o_m, m_m, other=0.0)[:, None]
    if PARTS:
        p_o = out + (i_s * rows + o_r).to(tl.int64)[None, :] * s_o + o_m[:, None]
        tl.store(p_o, b_o, m_m[:, None] & m_r[None, :])
    else:
        last = True
        if SPLIT > 1:
            i_b = i_m * tl.num_programs(0) + i_r
            p_part = held + i_b.to(tl.int64) * SPLIT * BM * BR + t_m[:, None] * BR + tl.arange(0, BR)[None, :]
            tl.store(p_part + i_s * BM * BR, b_o)
            tl.debug_barrier()
            last = tl.atomic_add(arrived + i_b, 1) == SPLIT - 1
            if last:
                tl.store(arrived + i_b, 0)
                b_o = tl.load(p_part)
                for i in range(1, SPLIT):
                    b_o += tl.load(p_part + i * BM * BR)
        if last:
            p_o = out + ((o_r // each).to(tl.int64) * s_g + (o_r % each).to(tl.int64) * s_o)[None, :]
            if SWIGLU:
                gate, up = tl.split(tl.permute(tl.reshape(b_o, [2, BM // 2, BR]), 1, 2, 0))
                o_h = i_m * (BM // 2) + tl.arange(0, BM // 2)
                b_h = gate * tl.sigmoid(gate) * up
                tl.store(
                    p_o + o_h[:, None],
                    b_h.to(out.dtype.element_ty),
                    (o_h < outputs // 2)[:, None] & m_r[None, :],
                )
            else:
                tl.store(p_o + o_m[:, None], b_o.to(out.dtype.element_ty), m_m[:, None] & m_r[None, :])
