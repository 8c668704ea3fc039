"""Whole rounds on a GPU, one CUDA graph each: propose, verify, accept, and the commit of the round before.

A graph is captured for each batch bucket, envelope and bank to fill, when it is first wanted. Nothing in it waits for
the host, and all that it leaves for the host is one small tensor, copied to pinned memory as its last act.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specla.models.gated_deltanet import GatedDeltaNet
from specla.ops.factors import Pending
from specla.ops.triton.schedule import schedule_of
from specla.resident.capture import Captures
from specla.resident.detail import Detail, new_detail, tell
from specla.resident.drafts import Drafts, new_drafts
from specla.resident.draw import draw
from specla.resident.forward import Layers, Round, head, read_trees
from specla.resident.narrow import draw_narrow, new_narrow, remember
from specla.resident.proposers import Proposer
from specla.resident.slots import new_slots
from specla.resident.walk import Outcome, new_outcome, walk
from specla.resident.writes import Writes
from specla.sampling import Plan
from specla.state import StatePool
from specla.tree import Tree

STOPS = 16  # stop ids of a sequence that are looked for on the device
HISTORY = 1 << 15  # tokens of a sequence that are kept for lookup
BANKS = 4  # that take turns where states are written every third round only
MANY = 16  # rows from which that pays: fewer states are written in no time
PATIENCE = 32  # rounds in a graph of too many rows before a smaller one is captured


class Shape(NamedTuple):
    """What a graph is captured for."""

    batch: int  # rows, a bucket
    size: int  # nodes of a tree at most, the root included
    plan: Plan  # what the draws of some row need
    turn: int  # the bank that it fills
    read: int = 0  # as `Proposer.reading` has it
    telling: bool = False  # whether it leaves a `Detail`


class Flight(NamedTuple):
    """A round that was launched. Its outcome is overwritten by the next but one."""

    outcome: Outcome
    landed: torch.cuda.Event | None
    detail: Detail | None = None

    def wait(self) -> Outcome:
        """The outcome on the host, once it is there."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.outcome


class _Prepared(NamedTuple):
    run: Callable[[], None]
    flight: Flight
    written: tuple[Drafts, Outcome, Detail | None]  # by the graph, which does not keep them itself


def num_banks(num_slots: int) -> int:
    """How many banks take turns in rounds of so many slots."""
    return BANKS if num_slots >= MANY else 2


class Rounds:
    """The device's part of an engine: slots, graphs, and which bank is whose.

    Args:
        target: one that `forward.supports`.
        pool: its states; `pool.count` stays 0, since what is pending is known to the device alone.
        proposer: drafts inside the rounds.
        max_nodes: of a tree, the root included.
        mode: of verification.
        captures: makes the graphs, which share their memory with all others of it; None makes its own.
    """

    def __init__(
        self, target: GatedDeltaNet, pool: StatePool, proposer: Proposer, max_nodes: int, mode: str = "auto",
        captures: Captures | None = None,
    ):  # fmt: skip
        (group,) = pool.groups.values()
        self._captures = captures or Captures(pool.device)
        self.target, self.proposer, self.mode = target, proposer, mode
        self.num_slots, self.device = len(pool.length), pool.device
        self.banks = num_banks(self.num_slots)
        self.layers = Layers.of(group, max_nodes, self.banks)
        self.slots = new_slots(self.num_slots, max_nodes, HISTORY, STOPS, pool.device)
        self.narrow = new_narrow(self.num_slots, target.config.vocab_size, pool.device)
        self.rows = torch.full((self.num_slots,), -1, dtype=torch.int32, device=pool.device)
        self.most = torch.zeros_like(self.rows)  # drafts that each slot may have
        self.limit = torch.zeros_like(self.rows)  # and has in a round at most
        self.turn = 0  # the bank that the next round fills
        self._prepared: dict[Shape, _Prepared] = {}
        self._rooted: dict[int, Tree] = {}
        self.size = 1  # of the trees of the last round
        self._limit, self._oversized = -1, 0  # what `limit` holds; rounds in a row in too large a graph

    def launch(self, batch: int, size: int, limit: int, plan: Plan, telling: bool = False) -> Flight:
        """One round for the slots below `batch`, with at most `limit` drafts a row in trees of up to `size` nodes."""
        if limit != self._limit:
            torch.clamp(self.most, max=limit, out=self.limit)
            self._limit = limit
        shape = self._shape(batch, size, plan, telling)
        self.prepare(shape)
        run, flight, _ = self._prepared[shape]
        run()
        if flight.landed is not None:
            flight.landed.record(torch.cuda.current_stream(self.device))
        self.turn, self.size = (self.turn + 1) % self.banks, size
        return flight

    def prepare(self, shape: Shape) -> None:
        """Compile and capture what a round of this shape needs, for all banks."""
        if shape not in self._prepared:
            for turn in range(self.banks):
                self._prepared[shape._replace(turn=turn)] = self._prepare(shape._replace(turn=turn))

    def begin(self, writes: Writes, slot: int, most: int) -> None:
        """Let a slot take part in the rounds after these writes, with at most so many drafts."""
        writes.put(self.most, slot, most)
        writes.put(self.rows, slot, slot)
        self._limit = -1

    def stop(self, slot: int) -> None:
        """Leave a slot out of the rounds to come."""
        self.rows[slot : slot + 1] = -1

    def flush(self, slot: int, kept: int) -> None:
        """Commit what is pending in a slot, of its last round, which was the last of all, no more than `kept` nodes."""
        assert self.layers.recurrence.defers, "nothing is pending"
        slots, one = self.slots, slice(slot, slot + 1)
        slots.num_pending[one] += kept - slots.count[one]
        slots.count[one] = kept
        pending = Pending(self.layers.factors, slots.pending_path[one], slots.num_pending[one])
        index = torch.full((1,), slot, device=self.device)
        self.layers.commit(pending, (self.turn - 1) % self.banks, slots.path[one], slots.count[one], index)
        slots.count[one] = 0
        slots.num_pending[one] = 0

    def _roots(self, batch: int) -> Tree:
        """Trees of one node, always the same: their schedule is no graph's business, and made in a warm-up."""
        if batch not in self._rooted:
            drafts = new_drafts(batch, 1, self.device)
            self._rooted[batch] = Tree.resident(drafts.parent, drafts.num_nodes)
        return self._rooted[batch]

    def _defers(self, shape: Shape) -> bool:
        """Whether a round leaves states unwritten that are not due."""
        chains = shape.size == 1 or self.proposer.chains(shape.batch)
        many = self.banks > 2 and shape.batch >= MANY
        return many and chains and self.mode != "parallel" and self.layers.recurrence.defers

    def bucket(self, batch: int) -> int:
        """Rows of the smallest graph that holds `batch` rows."""
        return min(1 << (batch - 1).bit_length(), self.num_slots)

    def _shape(self, batch: int, size: int, plan: Plan, telling: bool) -> Shape:
        """The bucket of a batch, or a larger one that is there: a batch that shrinks is not worth a capture at once."""
        read = self.proposer.reading(self.size, size)
        shape = Shape(self.bucket(batch), size, plan, self.turn, read, telling)
        if shape in self._prepared:
            self._oversized = 0
            return shape
        larger = sorted(s for s in self._prepared if s[1:] == shape[1:] and s.batch > shape.batch)
        self._oversized += 1
        return larger[0] if larger and self._oversized <= PATIENCE else shape

    def _prepare(self, shape: Shape) -> _Prepared:
        drafts = new_drafts(shape.batch, shape.size, self.device)
        outcome = new_outcome(shape.batch, shape.size, self.device)
        vocab, rows = self.target.config.vocab_size, self.rows[: shape.batch]
        detail = new_detail(shape.batch, shape.size, vocab, self.device) if shape.telling else None
        landed, host, told = None, outcome, detail
        if self.device.type == "cuda":
            landed, told = torch.cuda.Event(), None if detail is None else detail.host()
            host = Outcome(torch.zeros_like(outcome.packed, device="cpu").pin_memory())

        def work() -> None:
            self._round(shape, rows, drafts, outcome, detail)
            if landed is not None:
                host.packed.copy_(outcome.packed, non_blocking=True)
                for there, here in zip(told or (), detail or (), strict=True):
                    there.copy_(here, non_blocking=True)

        padding = torch.full_like(rows, -1)
        run = self._captures.capture(work, partial(self._warm_up, shape, padding, drafts, outcome, detail))
        return _Prepared(run, Flight(host, landed, told), (drafts, outcome, detail))

    def _warm_up(
        self, shape: Shape, rows: Tensor, drafts: Drafts, outcome: Outcome, detail: Detail | None
    ) -> None:
        """A round of padding rows alone: it compiles what a capture wants compiled, and touches no slot."""
        kept = [x.clone() for x in self.proposer.kept]
        try:
            self._round(shape, rows, drafts, outcome, detail)
        finally:
            for tensor, before in zip(self.proposer.kept, kept, strict=True):
                tensor.copy_(before)

    def _round(
        self, shape: Shape, rows: Tensor, drafts: Drafts, outcome: Outcome, detail: Detail | None
    ) -> None:
        self.proposer.propose(rows, self.slots, self.limit, drafts, shape.plan.noise, shape.read)
        tree = self._roots(shape.batch) if shape.size == 1 else Tree.resident(drafts.parent, drafts.num_nodes)
        logits = self.verify(shape, rows, drafts, tree)
        self.accept(shape, rows, drafts, tree, logits, outcome)
        if detail is not None:
            tell(logits, drafts, self.slots, outcome, detail)

    def verify(self, shape: Shape, rows: Tensor, drafts: Drafts, tree: Tree) -> Tensor:
        """Logits fp32 `[B, N, vocab]` at every node of the drafts; commits what the round before has left."""
        batch, size = shape.batch, shape.size
        slots = self.slots
        now = Round(
            tree, rows, slots.path[:batch], slots.count[:batch], slots.pending_path[:batch], slots.num_pending[:batch],
            shape.turn, self.mode, slots.due[:batch] if self._defers(shape) else None,
        )  # fmt: skip
        taps = self.proposer.taps(batch, size)
        hidden = read_trees(self.target, self.layers, drafts.tokens, now, taps)
        return head(self.target, hidden).unflatten(0, (batch, size))

    def accept(
        self, shape: Shape, rows: Tensor, drafts: Drafts, tree: Tree, logits: Tensor, outcome: Outcome
    ) -> None:
        """Draw, walk, and move the slots on."""
        (tokens, parent, num_nodes), slots, plan = drafts, self.slots, shape.plan
        draws, schedule = torch.empty_like(tokens), schedule_of(tree, 1)
        if plan.penalty or plan.ranks or plan.min_p:
            draw_narrow(logits, tokens, tree, schedule, slots, self.narrow, plan, draws)
        else:
            draw(logits, schedule.depth, num_nodes, rows, slots, noisy=plan.noise, out=draws)
        walk(
            draws, tokens, parent, num_nodes, rows, slots, outcome, shape.turn, self.banks, self._defers(shape)
        )  # fmt: skip
        self.layers.recurrence.accepted(self.layers, rows, slots)
        if plan.penalty:
            remember(outcome, self.narrow)
        self.proposer.keep(slots, outcome)
