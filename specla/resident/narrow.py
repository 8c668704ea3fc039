"""Draws under top-k, top-p, min-p and repetition penalties: torch's ops, captured like everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.ops.triton.schedule import Schedule
from specla.resident.slots import Slots
from specla.resident.walk import Outcome
from specla.resident.writes import Writes, send
from specla.sampling import Plan, Sampling, first_argmax, scores
from specla.tree import Tree


@dataclass(frozen=True)
class Narrow:
    """What narrows the draws of each slot; `new_narrow` makes it."""

    top_k: Tensor  # int64 [S]
    top_p: Tensor  # fp32 [S]
    min_p: Tensor  # fp32 [S]
    repetition_penalty: Tensor  # fp32 [S]
    seen: Tensor  # bool [S, V], tokens of prompt and output

    def admit(
        self,
        writes: Writes,
        slot: int,
        tokens: Sequence[int],
        *,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
    ) -> None:
        """The parameters of a sequence that begins in a slot with these tokens, once the writes are made."""
        writes.put(self.top_k, slot, top_k)
        writes.put(self.top_p, slot, top_p)
        writes.put(self.min_p, slot, min_p)
        writes.put(self.repetition_penalty, slot, repetition_penalty)
        if repetition_penalty != 1:
            ids = torch.tensor(sorted(set(tokens)))
            seen = torch.empty_like(ids, device=self.seen.device)
            send(ids, seen)
            self.seen[slot].fill_(False).index_fill_(0, seen, True)


def new_narrow(num_slots: int, vocab_size: int, device: torch.device) -> Narrow:
    """Slots whose draws nothing narrows."""

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(num_slots, *shape, dtype=dtype, device=device)

    return Narrow(-ones(dtype=torch.int64), ones(), 0 * ones(), ones(), ~ones(vocab_size, dtype=torch.bool))


def draw_narrow(
    logits: Tensor,
    tokens: Tensor,
    tree: Tree,
    schedule: Schedule,
    slots: Slots,
    narrow: Narrow,
    plan: Plan,
    out: Tensor,
) -> None:
    """As `specla.resident.draw.draw` for rows that are slots, with all that `Sampling` knows."""
    batch, size = tokens.shape
    ids = torch.arange(size, device=tokens.device)
    above = ((schedule.lineage[..., None] >> ids) & 1).bool() & (ids != ids[:, None])
    known = Tree.resident(tree.parent, tree.num_nodes, depth=schedule.depth, ancestors=above)
    sampling = Sampling(
        temperature=slots.temperature[:batch], top_k=narrow.top_k[:batch], top_p=narrow.top_p[:batch],
        min_p=narrow.min_p[:batch], repetition_penalty=narrow.repetition_penalty[:batch], seed=slots.seed[:batch],
        position=slots.position[:batch], seen=narrow.seen[:batch], plan=plan,
    )  # fmt: skip
    draws = first_argmax(scores(logits, tokens.long(), known, sampling))
    finite = logits.gather(2, draws[..., None]).squeeze(2).abs() < torch.inf
    out.copy_(torch.where(known.valid, torch.where(finite, draws, -1), 0))


def remember(outcome: Outcome, narrow: Narrow) -> None:
    """Add what rows have taken to what their slots have seen."""
    tokens, seen = outcome.tokens.long(), narrow.seen[: outcome.tokens.shape[0]]
    taken = torch.arange(tokens.shape[1], device=tokens.device) < outcome.taken[:, None]
    where = torch.where(taken, tokens, tokens[:, :1])  # a row that has taken nothing is left as it is
    seen.scatter_(1, where, seen.gather(1, where) | taken[:, :1])
