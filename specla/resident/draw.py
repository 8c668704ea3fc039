"""The token that each node draws: `specla.sampling` with a temperature and nothing else, to the bit.

Programs find the best score in their blocks of the vocabulary, and whoever comes last at a node compares the blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton.counters import counters
from specla.ops.triton.overlap import launch_options
from specla.resident.slots import Slots

BV = 1024  # tokens that a program scores


def draw(
    logits: Tensor, depth: Tensor, num_nodes: Tensor, rows: Tensor, slots: Slots, *, noisy: bool, out: Tensor
) -> None:
    """Write the argmax of `scores` at every node, the lowest id among equals, to `out` int32 `[B, N]`.

    Args:
        logits: fp32 `[B, N, V]`, any strides but the last, which is 1. Those of padding are never looked at.
        depth: int32 `[B, N]` edges from the root; num_nodes: int32 `[B]`.
        rows: int32 `[B]` slot of each row, -1 for padding.
        noisy: False leaves the noise out, for when all temperatures are 0.
        out: 0 at padding nodes and in padding rows, -1 where a node's logits hold NaN or +inf, or nothing but -inf.
    """
    batch, size, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(2) == 1
    assert all(x.is_contiguous() for x in (depth, num_nodes, rows, out))
    blocks = triton.cdiv(vocab, BV)
    best = logits.new_empty(batch, size, blocks, dtype=torch.float64 if noisy else torch.float32)
    token = logits.new_empty(batch, size, blocks, dtype=torch.int32)
    draw_kernel[(blocks, size, batch)](
        logits, depth, num_nodes, rows, slots.temperature, slots.seed, slots.position,
        best, token, counters(batch * size, logits.device), out,
        size, vocab, logits.stride(0), logits.stride(1),
        BLOCKS=blocks, BP=triton.next_power_of_2(blocks), BV=BV, NOISY=noisy,
        num_warps=4, **launch_options(rows.device), enable_fp_fusion=False,  # torch rounds the product before the sum
    )  # fmt: skip


@triton.jit
def mix64(x):
    """The finaliser of splitmix64, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def gumbel_noise(seed, position, token):
    """fp64 noise for int32 tokens, with one seed and position, both int64."""
    key = mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = mix64(key ^ (position.to(tl.uint64) * 0x9E3779B97F4A7C15))
    x = (token + 1).to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 15)) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) ^ (key >> 32).to(tl.uint32)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = ((x ^ 0x80000000).to(tl.float64) + 0.5) * 2.0**-32
    return -tl.log(-tl.log(uniform))


@triton.jit
def draw_kernel(
    logits, depth, num_nodes, rows, temperature, seed, position, best, token, arrived, out,
    size, vocab, s_b, s_n,
    BLOCKS: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, NOISY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_v, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_r = i_b.to(tl.int64) * size + i_n
    slot = tl.load(rows + i_b).to(tl.int64)
    if (slot < 0) | (i_n >= tl.load(num_nodes + i_b)):
        if i_v == 0:
            tl.store(out + i_r, 0)
        return

    o_v = i_v * BV + tl.arange(0, BV)
    p_x = logits + i_b.to(tl.int64) * s_b + i_n.to(tl.int64) * s_n
    b_x = tl.load(p_x + o_v, o_v < vocab, other=float("-inf")).to(best.dtype.element_ty)
    if NOISY:
        heat = tl.load(temperature + slot).to(tl.float64)
        if heat > 0:
            at = tl.load(position + slot) + tl.load(depth + i_r)
            b_x += gumbel_noise(tl.load(seed + slot), at, o_v) * heat
    # NaN and +inf win every argmax, and -inf only among its likes, so the best one tells for all.
    b_x = tl.where(b_x == b_x, b_x, float("inf"))
    top = tl.max(b_x, 0)
    first = tl.min(tl.where(b_x == top, o_v, vocab), 0)
    last = True
    if BLOCKS > 1:
        tl.store(best + i_r * BLOCKS + i_v, top)
        tl.store(token + i_r * BLOCKS + i_v, first)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + i_r, 1) == BLOCKS - 1
        if last:
            tl.store(arrived + i_r, 0)
            o_p = tl.arange(0, BP)
            b_top = tl.load(best + i_r * BLOCKS + o_p, o_p < BLOCKS, other=float("-inf"))
            b_first = tl.load(token + i_r * BLOCKS + o_p, o_p < BLOCKS, other=vocab)
            top = tl.max(b_top, 0)
            first = tl.min(tl.where(b_top == top, b_first, vocab), 0)
    if last:
        tl.store(out + i_r, tl.where(tl.abs(top) < float("inf"), first, -1))
