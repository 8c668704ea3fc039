"""What a round needs to know of each running sequence, where the round runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.ops.checks import require
from specla.resident.writes import Writes, send

DEFERRED = 4  # nodes at most that may stay pending over a round


@dataclass(frozen=True)
class Slots:
    """Device tensors with one entry for each of S slots; `new_slots` makes them.

    Paths run from the root down. Entries of `path` beyond `count`, but for the root's, of `pending_path` beyond
    `num_pending` and of `history` from `position` on may hold anything.
    """

    root: Tensor  # int32 [S] the token to be read next
    position: (
        Tensor  # int64 [S] tokens so far, prompt included; the root's logits draw the token of this place
    )
    remaining: Tensor  # int32 [S] tokens that may still be made
    count: Tensor  # int32 [S] nodes of the last tree that were accepted
    path: Tensor  # int32 [S, max_nodes] those nodes
    num_pending: (
        Tensor  # int32 [S] accepted nodes that the state lacks, of the last tree and of trees before it
    )
    pending_path: Tensor  # int32 [S, max_nodes + DEFERRED] those nodes, by their numbers among all banks
    lag: Tensor  # int32 [S] rounds whose nodes are pending
    due: Tensor  # int32 [S] whether the next round must write the state
    temperature: Tensor  # fp32 [S]
    seed: Tensor  # int64 [S]
    stop_ids: Tensor  # int32 [S, E], -1 for none
    history: Tensor  # int32 [S, L] all tokens; the root is the last one

    def admit(
        self,
        writes: Writes,
        slot: int,
        tokens: Sequence[int],
        *,
        remaining: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop_ids: Collection[int] = (),
    ) -> None:
        """Let a sequence of these tokens begin in a slot, with nothing pending, once the writes are made.

        Raises:
            ValueError: without tokens, or with more stop ids than a slot can hold.
        """
        stops = self.stop_ids.shape[1]
        require(len(tokens) >= 1, "a sequence begins with at least one token")
        require(len(stop_ids) <= stops, f"a slot holds at most {stops} stop ids, got {len(stop_ids)}")
        kept = tokens[: self.history.shape[1]]
        send(torch.tensor(kept, dtype=torch.int32), self.history[slot, : len(kept)])
        writes.put(self.stop_ids, slot * stops, *stop_ids, *[-1] * (stops - len(stop_ids)))
        writes.put(self.root, slot, tokens[-1])
        writes.put(self.position, slot, len(tokens))
        writes.put(self.remaining, slot, remaining)
        for nothing in (self.count, self.num_pending, self.lag):
            writes.put(nothing, slot, 0)
        # where a drafter finds what it holds of the prompt
        writes.put(self.path, slot * self.path.shape[1], 0)
        writes.put(self.due, slot, 1)
        writes.put(self.temperature, slot, temperature)
        writes.put(self.seed, slot, seed)


def new_slots(
    num_slots: int, max_nodes: int, max_length: int, num_stop_ids: int, device: torch.device | str
) -> Slots:
    """Slots without sequences.

    Args:
        max_nodes: envelope of a draft tree, the root included.
        max_length: L, how much of a history is kept. Tokens beyond it are counted, and not kept.
        num_stop_ids: E, for each slot.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

    return Slots(
        root=zeros(),
        position=zeros(dtype=torch.int64),
        remaining=zeros(),
        count=zeros(),
        path=zeros(max_nodes),
        num_pending=zeros(),
        pending_path=zeros(max_nodes + DEFERRED),
        lag=zeros(),
        due=zeros() + 1,
        temperature=zeros(dtype=torch.float32),
        seed=zeros(dtype=torch.int64),
        stop_ids=zeros(num_stop_ids).fill_(-1),
        history=zeros(max_length),
    )
