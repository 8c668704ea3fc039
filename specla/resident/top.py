"""The likeliest tokens after each live node, with the noise that the target will add, where the logits lie.

A row of logits is shared among programs, chunk by chunk. Each ranks its own; whoever comes last ranks what they found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.drafters.eagle import DOUBT, GREEDY_DOUBT
from specla.ops.triton.counters import counters
from specla.ops.triton.linear import PROGRAMS
from specla.ops.triton.overlap import launch_options
from specla.resident.draw import gumbel_noise
from specla.resident.slots import Slots

CHUNK = 1024  # logits that a program ranks, more only where a row has more than MAX_CHUNKS of them
MAX_CHUNKS = 128
MAX_WIDTH = 8
LOWEST = tl.constexpr(-(2**63))  # below every key


def top(
    logits: Tensor,
    rows: Tensor,
    slots: Slots,
    token_ids: Tensor,
    depth: int,
    *,
    width: int,
    noisy: bool,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The `width` likeliest tokens of each row of logits and their log-probabilities, best first.

    Those of `logits / GREEDY_DOUBT`; with noise, at a temperature above 0, of `(logits + temperature * noise) /
    (temperature * DOUBT)`. Equal ones rank by their token, lowest first.

    Args:
        logits: fp32 `[R, V]`, any stride but the last, which is 1; as many rows for each tree, one after another.
        rows: int32 `[B]` slot of each tree, -1 for padding, for which nothing is written.
        token_ids: int32 or int64 `[V]`, the target's id of each token.
        depth: of the nodes that these logits follow, 0 for the root.
        width: 1..8, at most V.
        noisy: False leaves the noise out, for when all temperatures are 0. True adds it as `EagleDrafter` does.
        out: where to write what is returned; new tensors by default.

    Returns:
        fp32 and int32 `[R, width]`.
    """
    (total, vocab), batch = logits.shape, len(rows)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and token_ids.shape == (vocab,)
    assert 1 <= width <= min(MAX_WIDTH, vocab) and rows.is_contiguous() and token_ids.is_contiguous()
    if out is None:
        out = logits.new_empty(total, width), logits.new_empty(total, width, dtype=torch.int32)
    values, ids = out
    assert values.is_contiguous() and ids.is_contiguous() and values.shape == ids.shape == (total, width)
    if total == 0:
        return out
    beams = total // batch
    assert beams * batch == total
    chunk = max(CHUNK, triton.next_power_of_2(triton.cdiv(vocab, MAX_CHUNKS)))
    chunks, padded = triton.cdiv(vocab, chunk), triton.next_power_of_2(width)
    # The rows of a tree share their noise. Where trees alone fill the device, one program makes it for all of them.
    held = beams if noisy and batch * chunks >= PROGRAMS else 1
    top_kernel[(total // held, chunks)](
        logits, rows, slots.temperature, slots.seed, slots.position, token_ids, depth,
        logits.new_empty(total, chunks, padded, dtype=torch.int64), logits.new_empty(total, 2, chunks),
        counters(total, logits.device), values, ids, logits.stride(0),
        V=vocab, W=width, WP=padded, BEAMS=beams, HELD=held, C=chunk, CHUNKS=chunks,
        CP=triton.next_power_of_2(chunks), NOISY=noisy, DOUBT=DOUBT, GREEDY_DOUBT=GREEDY_DOUBT,
        num_warps=min(16, max(1, chunk // 256)), **launch_options(logits.device),
        enable_fp_fusion=False,  # torch rounds the product before the sum
    )  # fmt: skip
    return out


@triton.jit
def rank_key(x, index):
    """int64 that orders as (x, then the lower index) does, for any fp32; -0 and 0 are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_value(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def best_keys(key, W: tl.constexpr, WP: tl.constexpr):
    """The W largest of distinct keys, largest first, then LOWEST: `[WP]`."""
    o_w = tl.arange(0, WP)
    best = tl.full([WP], LOWEST, tl.int64)
    for w in tl.static_range(W):
        largest = tl.max(key, 0)
        best = tl.where(o_w == w, largest, best)
        key = tl.where(key == largest, LOWEST, key)
    return best


@triton.jit(do_not_specialize=["depth"])
def top_kernel(
    logits, rows, temperature, seed, position, token_ids, depth, keys, stats, arrived, values, ids, s_r,
    V: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, BEAMS: tl.constexpr, HELD: tl.constexpr, C: tl.constexpr,
    CHUNKS: tl.constexpr, CP: tl.constexpr, NOISY: tl.constexpr, DOUBT: tl.constexpr, GREEDY_DOUBT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_first, i_c = tl.program_id(0).to(tl.int64) * HELD, tl.program_id(1)
    slot = tl.load(rows + i_first // BEAMS)
    if slot < 0:
        return
    o_v, o_w = i_c * C + tl.arange(0, C), tl.arange(0, WP)
    real = o_v < V
    noise, scale = tl.zeros([C], tl.float32), GREEDY_DOUBT
    if NOISY:
        heat = tl.load(temperature + slot)
        if heat > 0:
            token = tl.load(token_ids + o_v, real, other=0).to(tl.int32)
            b_g = gumbel_noise(tl.load(seed + slot), tl.load(position + slot) + depth, token)
            noise, scale = heat * b_g.to(tl.float32), heat * DOUBT
    for i in range(HELD):
        i_r = i_first + i
        x = tl.load(logits + i_r * s_r + o_v, real, other=-float("inf"))
        x = tl.div_rn(x + noise, scale)
        most = tl.max(x, 0)
        mass = tl.sum(tl.exp(x - tl.where(most == -float("inf"), 0.0, most)), 0)
        best = best_keys(tl.where(real, rank_key(x, o_v), LOWEST), W, WP)
        p_key, p_stat = keys + i_r * CHUNKS * WP, stats + i_r * 2 * CHUNKS
        tl.store(p_key + i_c * WP + o_w, best)
        tl.store(p_stat + i_c, most)
        tl.store(p_stat + CHUNKS + i_c, mass)
        tl.debug_barrier()
        if tl.atomic_add(arrived + i_r, 1) == CHUNKS - 1:
            tl.store(arrived + i_r, 0)
            o_c, o_k = tl.arange(0, CP), tl.arange(0, CP * WP)
            b_most = tl.load(p_stat + o_c, o_c < CHUNKS, other=-float("inf"))
            b_mass = tl.load(p_stat + CHUNKS + o_c, o_c < CHUNKS, other=0.0)
            most = tl.max(b_most, 0)
            mass = tl.sum(b_mass * tl.exp(b_most - most), 0)
            best = best_keys(tl.load(p_key + o_k, o_k < CHUNKS * WP, other=LOWEST), W, WP)
            value = (key_value(best) - most) - tl.log(mass.to(tl.float64)).to(tl.float32)
            tl.store(values + i_r * W + o_w, value, o_w < W)
            tl.store(ids + i_r * W + o_w, key_index(best), o_w < W)
