"""Trees that go on where a lookup does: what a text repeats is drafted further than a drafter looks ahead."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton.overlap import launch_options
from specla.resident.drafts import Drafts
from specla.resident.slots import Slots


def extend(
    drafts: Drafts, chain: Drafts, rows: Tensor, slots: Slots, limit: Tensor, *, branches: bool
) -> None:
    """Append to each tree what it lacks of a chain, below the last node that they share, as far as there is room.

    Args:
        drafts, chain: of the same `[B, N]`, with the same roots. Of equal siblings the first is shared.
        rows: int32 `[B]` slot of each row, -1 for padding, whose trees stay as they are.
        limit: int32 `[S]` most drafts of a slot; no more than can still be of use are there afterwards, either.
        branches: whether a chain may leave a tree elsewhere than at a leaf.
    """
    batch, size = drafts.tokens.shape
    assert chain.tokens.shape == (batch, size) and limit.shape == slots.remaining.shape
    assert all(x.is_contiguous() for x in (rows, *drafts, *chain))
    extend_kernel[(batch,)](
        *drafts, chain.tokens, chain.num_nodes, rows, slots.remaining, limit,
        N=size, P=triton.next_power_of_2(size), BRANCHES=branches, num_warps=1, **launch_options(rows.device),
    )  # fmt: skip


@triton.jit
def extend_kernel(
    tokens, parent, num_nodes, chain, num_chain, rows, remaining, limit,
    N: tl.constexpr, P: tl.constexpr, BRANCHES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_b = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + i_b).to(tl.int64)
    if slot < 0:
        return
    node = tl.arange(0, P)
    count, length = tl.load(num_nodes + i_b), tl.load(num_chain + i_b)
    real = node < count
    b_t = tl.load(tokens + i_b * N + node, real, other=0)
    above = tl.load(parent + i_b * N + node, real, other=-1)

    at, shared, same = 0, 1, length > 0  # the last shared node, how many are shared, and whether all were
    for n in range(1, N):
        token = tl.load(chain + i_b * N + n)
        child = tl.min(tl.where((above == at) & (b_t == token), node, P), 0)
        same = same & (n < length) & (child < P)
        at = tl.where(same, child, at)
        shared += same.to(tl.int32)

    most = tl.minimum(tl.minimum(tl.load(limit + slot), tl.load(remaining + slot) - 1), N - 1)
    added = tl.maximum(tl.minimum(length - shared, most + 1 - count), 0)
    if not BRANCHES:
        added = tl.where(tl.max((above == at).to(tl.int32), 0) > 0, 0, added)
    fresh = node < added
    more = tl.load(chain + i_b * N + shared + node, fresh, other=0)
    tl.debug_barrier()  # other threads may still read what these stores replace
    tl.store(tokens + i_b * N + count + node, more, fresh)
    tl.store(parent + i_b * N + count + node, tl.where(node == 0, at, count + node - 1), fresh)
    tl.store(num_nodes + i_b, count + added)
