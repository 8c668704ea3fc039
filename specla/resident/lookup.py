"""Prompt lookup that proposes chains: what followed when the history last ended as it does now."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton import MAX_NODES
from specla.ops.triton.overlap import launch_options
from specla.resident.drafts import Drafts
from specla.resident.slots import Slots

BLOCK = 4096  # places that are compared at a time


def lookup(
    rows: Tensor,
    slots: Slots,
    limit: Tensor,
    out: Drafts,
    *,
    max_ngram: int = 4,
    min_ngram: int = 1,
    num_steps: int = MAX_NODES,
    periodic: bool = False,
    others: Tensor | None = None,
) -> None:
    """Draft the tokens that followed the latest earlier occurrence of the longest suffix that has one.

    A chain ends with the history unless it is `periodic`, and holds no more than `limit` drafts or what can still be of
    use; there is none for a sequence that has outgrown the history that is kept. `out` of one node a row is the tree of
    plain decoding.

    Args:
        rows: int32 `[B]` slot of each row, -1 for padding.
        limit: int32 `[S]` most drafts of a slot.
        max_ngram, min_ngram: lengths of the suffix, at least 1. num_steps: most drafts, at least 1.
        periodic: begin again where the history ends, as a text does that goes in circles.
        others: int32 `[B]` how many drafts of another kind a row may have, half of which remain where it finds some.
    """
    batch, size = out.tokens.shape
    assert 1 <= min_ngram <= max_ngram and num_steps >= 1 and limit.shape == slots.root.shape
    assert all(x.is_contiguous() for x in (rows, *out))
    max_length = slots.history.shape[1]
    lookup_kernel[(batch,)](
        rows, slots.root, slots.position, slots.remaining, slots.history, limit, *out, others,
        max_length,
        N=size, P=triton.next_power_of_2(size), BLOCK=min(BLOCK, triton.next_power_of_2(max_length)),
        MAX=max_ngram, MIN=min_ngram, STEPS=min(num_steps, size - 1), PERIODIC=periodic, num_warps=8,
        **launch_options(rows.device),
    )  # fmt: skip


@triton.jit
def lookup_kernel(
    rows, root, position, remaining, history, limit, tokens, parent, num_nodes, others,
    max_length,
    N: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, MAX: tl.constexpr, MIN: tl.constexpr,
    STEPS: tl.constexpr, PERIODIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + i_b).to(tl.int64)
    real = slot >= 0
    p_history = history + slot * max_length
    length = tl.load(position + slot, real, other=0)
    length = tl.where(length > max_length, 0, length).to(tl.int32)
    most = tl.minimum(tl.load(limit + slot, real, other=0), tl.load(remaining + slot, real, other=0) - 1)
    room = tl.minimum(STEPS, most)

    # A place is where the token after an occurrence stands; keys rank longer ones first, then later ones.
    best = tl.full([], 0, tl.int64)
    if N > 1:
        i_t = tl.where(room > 0, (length - 1) // BLOCK * BLOCK, -1)
        while (i_t >= 0) & (best >> 32 < MAX):
            place = i_t + tl.arange(0, BLOCK)
            same = place < length
            shared = tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(1, MAX + 1):
                inside = (place >= back) & (place < length)
                b_t = tl.load(p_history + place - back, inside, other=0)
                same = same & inside & (b_t == tl.load(p_history + length - back, length >= back, other=0))
                shared += same.to(tl.int32)
            key = tl.where(shared >= MIN, (shared.to(tl.int64) << 32) | place, 0)
            best = tl.maximum(best, tl.max(key, 0))
            i_t -= BLOCK
    place = best.to(tl.int32)
    distance = tl.maximum(length - place, 1)
    drafts = tl.where(best > 0, room if PERIODIC else tl.minimum(room, distance), 0)

    node = tl.arange(0, P)
    drafted = (node > 0) & (node <= drafts)
    after = (node - 1) % distance if PERIODIC else node - 1
    b_t = tl.load(p_history + place + after, drafted, other=0)
    b_t = tl.where(node == 0, tl.load(root + slot, real, other=0), b_t)
    tl.store(tokens + i_b * N + node, b_t, node < N)
    tl.store(parent + i_b * N + node, tl.where(drafted, node - 1, -1), node < N)
    tl.store(num_nodes + i_b, drafts + 1)
    if others is not None:
        theirs = tl.load(others + i_b)
        tl.store(others + i_b, tl.where(drafts > 0, (theirs + 1) // 2, theirs))
