"""Growth and pruning of draft trees where they grow: `specla.drafters.grow` without a look from the host.

A candidate is a token that may follow a live node. Each depth has W * W places for them, of which the first has need of
W: place (d * W + w) * W + n is the n-th token after live node w of depth d, or after the root.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton import MAX_NODES
from specla.ops.triton.overlap import launch_options
from specla.resident.drafts import Drafts
from specla.resident.slots import Slots
from specla.resident.top import LOWEST, MAX_WIDTH, rank_key

MAX_STEPS = 16
TABLE = 1 << 14  # comparisons at a time


class Growth(NamedTuple):
    """Trees while they grow; the last three tell of the live nodes of the depth that was grown last."""

    scores: Tensor  # fp32 [B, num_steps * W * W], log-probability of the path, -inf for none
    tokens: Tensor  # int32 [B, num_steps * W * W], in the target's ids
    live: Tensor  # int32 [B, num_steps, W], the candidates that live nodes are, best first
    leaf: Tensor  # fp32 [B], the best score of a candidate that is not live, and of any at the greatest depth
    draft_ids: Tensor  # int32 [B, W], in the drafter's vocabulary
    target_ids: Tensor  # int32 [B, W]
    follow: Tensor  # int32 [B, W], the live node of the depth before that each continues, 0 for the root


def begin(batch: int, width: int, num_steps: int, device: torch.device | str | None = None) -> Growth:
    """Room for trees of at most `width` live nodes a depth, at most the drafter's vocabulary.

    Rows that never grow keep the token 0 as their live nodes.
    """
    assert 1 <= width <= MAX_WIDTH and 1 <= num_steps <= MAX_STEPS
    places = num_steps * width * width

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(batch, *shape, dtype=dtype, device=device)

    return Growth(
        zeros(places, dtype=torch.float32), zeros(places), zeros(num_steps, width), zeros(dtype=torch.float32),
        zeros(width), zeros(width), zeros(width),
    )  # fmt: skip


class Levels(NamedTuple):
    """The live nodes of all depths as trees that the drafter verifies: the root, then W nodes for each depth."""

    num_read: Tensor  # int32 [B], 0 where nothing is read, and hence nothing can be drafted from the root
    rooted: Tensor  # int32 [B], becomes 1 where something is
    parent: Tensor  # int32 [B, 1 + (num_steps - 1) * W]
    num_nodes: Tensor  # int32 [num_steps, B], of all depths up to one; none where nothing is read


def begin_levels(num_read: Tensor, rooted: Tensor, width: int, num_steps: int) -> Levels:
    """Room for the levels of trees; `expand` writes them."""
    batch = len(num_read)
    parent, num_nodes = (
        num_read.new_empty(batch, 1 + (num_steps - 1) * width),
        num_read.new_empty(num_steps, batch),
    )
    return Levels(num_read, rooted, parent, num_nodes)


def expand(
    growth: Growth, levels: Levels, depth: int, values: Tensor, ids: Tensor, rows: Tensor, token_ids: Tensor
) -> None:  # fmt: skip
    """Take the candidates after the live nodes of this depth, and choose the live nodes of the next.

    Args:
        growth: what the depths before have written; depth 0, that of the root, needs nothing of it.
        levels: get the nodes of the next depth.
        values: fp32, log-probabilities after each live node, best first: `[B * W, W]`, at depth 0 `[B, W]`.
        ids: int32, their tokens in the drafter's vocabulary.
        rows: int32 `[B]`, -1 for a padding row, of which nothing is written.
        token_ids: int32 or int64, the target's id of each token of the drafter.
    """
    batch, num_steps, width = growth.live.shape
    grown = batch * width * (width if depth else 1)
    assert all(x.is_contiguous() for x in (values, ids, rows, token_ids))
    assert values.numel() == ids.numel() == grown and 0 <= depth < num_steps
    if batch:
        expand_kernel[(batch,)](
            *growth, values, ids, rows, token_ids, *levels, depth,
            ROOT=depth == 0, LAST=depth + 1 == num_steps, STEPS=num_steps, W=width,
            P=max(16, triton.next_power_of_2(width * width)), num_warps=1 if width <= 4 else 4,
            **launch_options(values.device),
        )  # fmt: skip


def finish(
    growth: Growth,
    limits: Tensor,
    rows: Tensor,
    slots: Slots,
    out: Drafts,
    scores: Tensor,
    prune_threshold: float | None = None,
) -> None:
    """Write the likeliest of all that grew to `out`, as `specla.drafters.grow` keeps them.

    Args:
        growth: after all its depths.
        limits: int32 `[B]`, the most nodes below the root; `out` may have room for fewer.
        rows: int32 `[B]` slot of each row, -1 for padding.
        scores: fp32 `[B, N]`, becomes the log-probability of each node's path, 0 for the root, -inf for padding.
        prune_threshold: at least 0, None for none; see `specla.drafters.grow`.
    """
    batch, num_steps, width = growth.live.shape
    size = out.tokens.shape[1]
    threshold = math.inf if prune_threshold is None else float(prune_threshold)
    assert threshold >= 0 and size <= MAX_NODES and scores.shape == out.tokens.shape
    assert all(x.is_contiguous() for x in (limits, rows, scores, *out))
    places = max(32, triton.next_power_of_2(num_steps * width * width))
    if batch:
        finish_kernel[(batch,)](
            *growth[:4], limits, rows, slots.root, *out, scores, threshold,
            STEPS=num_steps, W=width, P=places, J=min(places, TABLE // places), N=size,
            NP=triton.next_power_of_2(size), num_warps=min(16, places // 32),
            **launch_options(scores.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["depth"])
def expand_kernel(
    scores, tokens, live, leaf, draft_ids, target_ids, follow, values, ids, rows, token_ids, num_read, rooted, parent,
    num_nodes, depth,
    ROOT: tl.constexpr, LAST: tl.constexpr, STEPS: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    M: tl.constexpr = W if ROOT else W * W
    i_b = tl.program_id(0).to(tl.int64)
    first = 1 + depth * W
    reads = tl.load(num_read + i_b) > 0
    if ROOT:
        tl.store(rooted + i_b, reads.to(tl.int32))
    if not LAST:
        tl.store(num_nodes + (depth + 1) * tl.num_programs(0) + i_b, tl.where(reads, first + W, 0))
    if tl.load(rows + i_b) < 0:
        return
    node, place = tl.arange(0, P), i_b * STEPS * W * W + depth * W * W
    real, taken = node < M, node < W * W
    p_live = live + i_b * STEPS * W + depth * W
    score = tl.load(values + i_b * M + node, real, other=-float("inf"))
    leaves = -float("inf")
    if not ROOT:
        above = tl.load(p_live - W + node // W, real, other=0)
        score += tl.load(scores + i_b * STEPS * W * W + above, real, other=0.0)
        leaves = tl.load(leaf + i_b)
    draft = tl.load(ids + i_b * M + node, real, other=0)
    target = tl.load(token_ids + draft, real, other=0).to(tl.int32)
    tl.store(scores + place + node, score, taken)
    tl.store(tokens + place + node, target, taken)

    key = tl.where(real, rank_key(score, node), LOWEST)
    rank = tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)
    chosen = rank < W
    tl.store(p_live + rank, depth * W * W + node, chosen)
    p_next = i_b * W + rank
    tl.store(draft_ids + p_next, draft, chosen)
    tl.store(target_ids + p_next, target, chosen)
    tl.store(follow + p_next, node // W, chosen)
    if not LAST:
        p_parent = parent + i_b * (1 + (STEPS - 1) * W)
        tl.store(p_parent + first + rank, tl.where(depth > 0, first - W + node // W, 0), chosen)
        tl.store(p_parent, -1)
    left = score if LAST else tl.where(chosen, -float("inf"), score)
    tl.store(leaf + i_b, tl.maximum(leaves, tl.max(left, 0)))


@triton.jit
def finish_kernel(
    scores, tokens, live, leaf, limits, rows, root, o_tokens, o_parent, o_num_nodes, o_scores, threshold,
    STEPS: tl.constexpr, W: tl.constexpr, P: tl.constexpr, J: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    C: tl.constexpr = STEPS * W * W
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + i_b)
    node, o_n = tl.arange(0, P), tl.arange(0, NP)
    p_out = i_b * N
    first, count = 0, 1
    if slot >= 0:
        first = tl.load(root + slot).to(tl.int32)
        most = tl.minimum(tl.load(limits + i_b), N - 1)
        # finite, so that no -inf stays
        floor = tl.maximum(tl.load(leaf + i_b) - threshold, -3.4028234663852886e38)
        score = tl.load(scores + i_b * C + node, node < C, other=-float("inf"))
        key = rank_key(score, node)
        rank = tl.zeros([P], tl.int32)
        for j in range(0, P, J):
            other = j + tl.arange(0, J)
            b_s = tl.load(scores + i_b * C + other, other < C, other=-float("inf"))
            rank += tl.sum((rank_key(b_s, other)[:, None] > key[None, :]).to(tl.int32), 0)
        kept = (score >= floor) & (rank < most)
        place = tl.cumsum(kept.to(tl.int32), 0)
        count += tl.sum(kept.to(tl.int32), 0)
        below = kept & (node >= W * W)
        above = tl.load(live + i_b * STEPS * W + node // W - W, below, other=0)
        parent = tl.where(below, tl.gather(place, above, 0), 0)
        tl.store(o_tokens + p_out + place, tl.load(tokens + i_b * C + node, kept, other=0), kept)
        tl.store(o_parent + p_out + place, parent, kept)
        tl.store(o_scores + p_out + place, score, kept)
    tl.store(o_num_nodes + i_b, count)
    rest = (o_n < N) & ((o_n == 0) | (o_n >= count))
    tl.store(o_tokens + p_out + o_n, tl.where(o_n == 0, first, 0), rest)
    tl.store(o_parent + p_out + o_n, -1, rest)
    tl.store(o_scores + p_out + o_n, tl.where(o_n == 0, 0.0, -float("inf")), rest)
