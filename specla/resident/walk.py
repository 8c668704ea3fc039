"""From the tokens that a target draws to what each sequence makes of them: accepted, ended, and where it stands now."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton import MAX_NODES
from specla.ops.triton.overlap import launch_options
from specla.resident.slots import DEFERRED, Slots

RUNNING, STOP, LENGTH, NOT_FINITE = range(4)


@dataclass(frozen=True)
class Outcome:
    """What a round did in each row: views of one tensor, so that one copy brings all of it to the host."""

    packed: Tensor  # int32 [B, N + 4]

    @property
    def tokens(self) -> Tensor:
        """`[B, N]`: the tokens taken, then zeros."""
        return self.packed[:, :-4]

    @property
    def taken(self) -> Tensor:
        """`[B]`: how many tokens were taken."""
        return self.packed[:, -4]

    @property
    def accepted(self) -> Tensor:
        """`[B]`: drafts among them."""
        return self.packed[:, -3]

    @property
    def drafted(self) -> Tensor:
        """`[B]`: drafts that were verified."""
        return self.packed[:, -2]

    @property
    def counts(self) -> Tensor:
        """`[B, 4]`: taken, accepted, drafted and reason."""
        return self.packed[:, -4:]

    @property
    def reason(self) -> Tensor:
        """`[B]`: RUNNING, or why the sequence ended: STOP, LENGTH or NOT_FINITE."""
        return self.packed[:, -1]


def new_outcome(batch: int, size: int, device: torch.device | str) -> Outcome:
    """Room for the outcome of rounds of `batch` rows and trees of up to `size` nodes."""
    return Outcome(torch.zeros(batch, size + 4, dtype=torch.int32, device=device))


def walk(
    draws: Tensor, tokens: Tensor, parent: Tensor, num_nodes: Tensor, rows: Tensor, slots: Slots, out: Outcome,
    turn: int = 0, banks: int = 2, deferred: bool = False,
) -> None:  # fmt: skip
    """Take accepted drafts and the bonus token up to the first that ends a sequence, and move its slot on.

    The walk is that of `specla.accept`: from the root to the child that carries the draw, the first one among equals,
    for as long as there is one. The slot's path then names the nodes to commit, one for each token taken. They join
    what is pending, and a slot is due when the banks leave no room for a further round, or more than DEFERRED nodes
    wait.

    Args:
        draws: int32 `[B, N]` as `draw` writes them. A row with -1 at a real node takes nothing.
        tokens, parent: int32 `[B, N]`, N up to 64; anything beyond `num_nodes` int32 `[B]`.
        rows: int32 `[B]` slot of each row, -1 for padding, whose outcome is zero. Becomes -1 where a sequence ends.
        turn: the bank that the round has filled; banks: how many take turns.
        deferred: whether the round left states unwritten where they were not due; else it wrote all of them.
    """
    batch, size = tokens.shape
    assert size <= min(MAX_NODES, slots.path.shape[1])
    assert out.packed.shape == (batch, size + 4)
    assert all(x.is_contiguous() for x in (draws, tokens, parent, num_nodes, rows, out.packed))
    log_p = max(4, (size - 1).bit_length())
    walk_kernel[(batch,)](
        draws, tokens, parent, num_nodes, rows, out.packed,
        slots.root, slots.position, slots.remaining, slots.count, slots.path, slots.stop_ids, slots.history,
        slots.num_pending, slots.pending_path, slots.lag, slots.due,
        size, slots.path.shape[1], slots.stop_ids.shape[1], slots.history.shape[1], slots.pending_path.shape[1],
        turn * slots.path.shape[1], banks - 1,
        LOG_P=log_p, E=max(1, triton.next_power_of_2(slots.stop_ids.shape[1])), DEFERS=deferred, DEFERRED=DEFERRED,
        RUNNING=RUNNING, STOP=STOP, LENGTH=LENGTH, NOT_FINITE=NOT_FINITE,
        num_warps=4 if log_p == 6 else 1, **launch_options(rows.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def walk_kernel(
    draws, tokens, parent, num_nodes, rows, out,
    root, position, remaining, count, path, stop_ids, history, num_pending, pending_path, lag, due,
    size, max_nodes, num_stop_ids, max_length, max_pending, first, most_lag,
    LOG_P: tl.constexpr, E: tl.constexpr, DEFERS: tl.constexpr, DEFERRED: tl.constexpr,
    RUNNING: tl.constexpr, STOP: tl.constexpr, LENGTH: tl.constexpr, NOT_FINITE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, 2**LOG_P)
    p_out = out + i_b * (size + 4)
    slot = tl.load(rows + i_b).to(tl.int64)
    if slot < 0:
        tl.store(p_out + node, 0, node < size)
        tl.store(p_out + size + tl.arange(0, 4), 0)
        return

    nodes = tl.load(num_nodes + i_b)
    real = node < nodes
    below = real & (node > 0)
    above = tl.load(parent + i_b * size + node, below, other=0)
    draw = tl.load(draws + i_b * size + node, real, other=0)
    agrees = below & (tl.load(tokens + i_b * size + node, below, other=0) == tl.gather(draw, above, 0))
    elder = agrees[None, :] & (above[None, :] == above[:, None]) & (node[None, :] < node[:, None])
    agrees = agrees & (tl.max(elder.to(tl.int32), 1) == 0)
    on_path = (agrees | (node == 0)).to(tl.int32)
    jump = above
    for _ in tl.static_range(LOG_P):
        on_path &= tl.gather(on_path, jump, 0)
        jump = tl.gather(jump, jump, 0)
    depth = tl.cumsum(on_path, 0) - 1  # ids ascend along a path
    num_accepted = tl.sum(on_path, 0) - 1

    o_e = tl.arange(0, E)
    ids = tl.load(stop_ids + slot * num_stop_ids + o_e, o_e < num_stop_ids, other=-1)
    stops = tl.max((draw[:, None] == ids[None, :]).to(tl.int32), 1) > 0
    ends = tl.min(tl.where((on_path > 0) & stops, depth, size), 0)
    left = tl.load(remaining + slot)
    lost = tl.min(draw, 0) < 0
    taken = tl.minimum(tl.minimum(ends, num_accepted) + 1, tl.maximum(left, 1))
    taken = tl.where(lost, 0, taken)
    reason = tl.where(ends < taken, STOP, tl.where(taken >= left, LENGTH, RUNNING))
    reason = tl.where(lost, NOT_FINITE, reason)

    takes = (on_path > 0) & (depth < taken)
    at = tl.load(position + slot)
    newest = tl.max(tl.where(takes & (depth == taken - 1), draw, 0), 0)
    before, rounds = 0, 1
    if DEFERS:
        if tl.load(due + slot) == 0:
            before, rounds = tl.load(num_pending + slot), tl.load(lag + slot) + 1
    waiting = before + taken
    tl.debug_barrier()  # other threads may still read what these stores replace
    tl.store(p_out + depth, draw, takes)
    tl.store(p_out + node, 0, (node >= taken) & (node < size))
    tl.store(p_out + size, taken)
    tl.store(p_out + size + 1, tl.minimum(taken, num_accepted))
    tl.store(p_out + size + 2, nodes - 1)
    tl.store(p_out + size + 3, reason)
    tl.store(root + slot, newest, taken > 0)
    tl.store(position + slot, at + taken)
    tl.store(remaining + slot, left - taken)
    tl.store(count + slot, taken)
    tl.store(path + slot * max_nodes + depth, node, takes)
    tl.store(pending_path + slot * max_pending + before + depth, first + node, takes)
    tl.store(num_pending + slot, waiting)
    tl.store(lag + slot, rounds)
    tl.store(due + slot, ((rounds >= most_lag) | (waiting > DEFERRED)).to(tl.int32))
    tl.store(history + slot * max_length + at + depth, draw, takes & (at + depth < max_length))
    tl.store(rows + i_b, -1, reason != RUNNING)
