"""The trees of `specla.drafters.SyntheticDrafter`, to the bit, from references that lie on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.resident.drafts import Drafts
from specla.resident.draw import mix64
from specla.resident.slots import Slots


def synthetic(
    rows: Tensor, slots: Slots, reference: Tensor, num_reference: Tensor, keys: Tensor, acceptance: Tensor,
    limit: Tensor, out: Drafts, *, topk: int, num_steps: int, vocab_size: int, seed: int,
) -> None:  # fmt: skip
    """Propose spines that are right as often as told, among wrong siblings.

    Args:
        rows: int32 `[B]` slot of each row, -1 for padding.
        reference: int32 `[S, L]` what plain decoding gives, prompt included; num_reference: int32 `[S]` its length.
        keys: int64 `[S]` the drafter's key of the sequence.
        acceptance: fp64 `[num_steps]`, probability at each depth. From fp32 it is what fp32 has left of it.
        limit: int32 `[S]` most drafts of a slot, beside the N - 1 that `out` has room for.
        topk, num_steps, vocab_size, seed: as the drafter has them.
    """
    batch, size = out.tokens.shape
    assert acceptance.shape == (num_steps,) and limit.shape == slots.root.shape and vocab_size > topk
    assert all(x.is_contiguous() for x in (rows, reference, num_reference, keys, acceptance, *out))
    synthetic_kernel[(batch,)](
        rows, slots.root, slots.position, slots.remaining, reference, num_reference, keys, acceptance, limit, *out,
        reference.shape[1],
        N=size, P=triton.next_power_of_2(size), TOPK=topk, STEPS=num_steps, V=vocab_size, SEED=seed, num_warps=1,
    )  # fmt: skip


@triton.jit
def step64(x):
    """One step of splitmix64, on uint64."""
    return mix64(x + 0x9E3779B97F4A7C15)


@triton.jit
def synthetic_kernel(
    rows, root, position, remaining, reference, num_reference, keys, acceptance, limit,
    tokens, parent, num_nodes, max_length,
    N: tl.constexpr, P: tl.constexpr, TOPK: tl.constexpr, STEPS: tl.constexpr, V: tl.constexpr, SEED: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + i_b).to(tl.int64)
    real = slot >= 0
    at = tl.load(position + slot, real, other=0)
    most = tl.load(limit + slot, real, other=0)
    room = tl.minimum(N - 1, tl.minimum(most, tl.load(remaining + slot, real, other=0) - 1))
    known = tl.load(num_reference + slot, real, other=0) - at
    steps = tl.maximum(tl.minimum(tl.minimum(room, STEPS), known), 0).to(tl.int32)
    spare = room - steps  # wrong siblings, as many as fit beside each node of the spine from the top

    # Level d starts at node 1 + d + min(spare, d (topk - 1)).
    node = tl.arange(0, P)
    level = tl.arange(0, P)
    after = 2 + level + tl.minimum(spare, (level + 1) * (TOPK - 1))
    depth = tl.sum((after[None, :] <= node[:, None]).to(tl.int32), 1)
    left = spare - depth * (TOPK - 1)
    sibling = node - (1 + depth + tl.minimum(spare, depth * (TOPK - 1)))
    drafts = tl.where(steps > 0, steps + tl.minimum(spare, steps * (TOPK - 1)), 0)
    drafted = (node > 0) & (node <= drafts)

    key = tl.load(keys + slot, real, other=0).to(tl.uint64)
    key = step64(step64(tl.full([], SEED, tl.int64).to(tl.uint64)) ^ key)
    noise = step64(key ^ (at + depth).to(tl.uint64))
    rate = tl.load(acceptance + depth, drafted, other=0.0).to(tl.float64)
    right = (noise >> 11).to(tl.float64) * 2.0**-53 < rate
    truth = tl.load(reference + slot * max_length + at + depth, drafted, other=0)
    shift = 1 + (noise % (V - 1) + sibling.to(tl.uint64)) % (V - 1)
    wrong = ((truth.to(tl.uint64) + shift) % V).to(tl.int32)
    width = 1 + tl.minimum(tl.maximum(left, 0), TOPK - 1)
    spine = right & (sibling.to(tl.uint64) == (noise >> 32) % width.to(tl.uint64))
    b_t = tl.where(drafted, tl.where(spine, truth, wrong), 0)
    b_t = tl.where(node == 0, tl.load(root + slot, real, other=0), b_t)

    # The spine stands at a place of its own in the level above.
    noise = step64(key ^ (at + depth - 1).to(tl.uint64))
    width = 1 + tl.minimum(tl.maximum(left + TOPK - 1, 0), TOPK - 1)
    place = ((noise >> 32) % width.to(tl.uint64)).to(tl.int32)
    above = tl.where(depth > 0, depth + tl.minimum(spare, (depth - 1) * (TOPK - 1)) + place, 0)
    tl.store(tokens + i_b * N + node, b_t, node < N)
    tl.store(parent + i_b * N + node, tl.where(drafted, above, -1), node < N)
    tl.store(num_nodes + i_b, drafts + 1)
