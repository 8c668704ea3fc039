"""What drafts inside a round: the drafters whose proposals need nothing from the host."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specla.drafters import Drafter, EagleDrafter, LookupFirst, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.drafters.base import Exported
from specla.drafters.network import Eagle
from specla.ops.triton import MAX_NODES
from specla.resident import eagle
from specla.resident.capture import Captures
from specla.resident.drafts import Drafts
from specla.resident.eagle import EagleProposer
from specla.resident.lookup import lookup
from specla.resident.slots import Slots
from specla.resident.synthetic import synthetic
from specla.resident.walk import Outcome
from specla.resident.writes import Writes, send


class Proposer(Protocol):
    """Fills trees by launches that a graph can hold. Batch rows are slots.

    layer_ids: residual streams of the target that it reads. kept: tensors that it carries from round to round.
    """

    layer_ids: tuple[int, ...]
    kept: list[Tensor]

    def chains(self, batch: int) -> bool:
        """Whether trees of so many rows never branch."""

    def prepare(self) -> None:
        """Do beforehand what would delay the first prompt."""

    def clear(self, slot: int) -> None:
        """A sequence is to begin in a slot."""

    def read(self, slot: int, features: Tensor, following: list[int]) -> None:
        """The target has read a stretch of its prompt: features `[T, F]` and the token after each."""

    def export(self, slot: int) -> Exported | None:
        """Copies of what it remembers of a prompt that is being read, as a `Drafter` does."""

    def restore(self, slot: int, exported: Exported, following: int) -> None:
        """Let a slot hold what was exported."""

    def admit(self, writes: Writes, slot: int, key: int, size: int) -> None:
        """The sequence of this key joins the rounds after these writes; the last one had trees of `size` nodes."""

    def reading(self, last: int, size: int) -> int:
        """Accepted nodes to read in a round of trees of `size` nodes, after one of `last`: few different numbers, since
        each has graphs of its own. 0 where none are.
        """

    def propose(
        self, rows: Tensor, slots: Slots, limit: Tensor, out: Drafts, noisy: bool, reading: int
    ) -> None:
        """One tree a row, of at most `limit` int32 `[S]` drafts of its slot that can still be of use."""

    def taps(self, batch: int, size: int) -> dict[int, Tensor]:
        """Where the streams of this round go, as `forward.read_trees` takes them."""

    def keep(self, slots: Slots, outcome: Outcome) -> None:
        """The walk is done."""


class TokenProposer:
    """Base of those that look at tokens alone."""

    layer_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def chains(self, batch: int) -> bool:
        return True

    def prepare(self) -> None:
        pass

    def clear(self, slot: int) -> None:
        pass

    def read(self, slot: int, features: Tensor, following: list[int]) -> None:
        raise AssertionError("a proposer without layer_ids is shown no features")

    def export(self, slot: int) -> Exported | None:
        return None

    def restore(self, slot: int, exported: Exported, following: int) -> None:
        raise AssertionError("a proposer without layer_ids remembers no prompts")

    def admit(self, writes: Writes, slot: int, key: int, size: int) -> None:
        pass

    def reading(self, last: int, size: int) -> int:
        return 0

    def taps(self, batch: int, size: int) -> dict[int, Tensor]:
        return {}

    def keep(self, slots: Slots, outcome: Outcome) -> None:
        pass


class Lookup(TokenProposer):
    """Prompt lookup: a chain after the latest of the longest matches. In trees of one node, plain decoding.

    Args:
        max_ngram, min_ngram, num_steps: as `NgramDrafter` has them, whose `topk` is 1 here.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1, num_steps: int = MAX_NODES):
        super().__init__()
        self.max_ngram, self.min_ngram, self.num_steps = max_ngram, min_ngram, num_steps

    def propose(
        self, rows: Tensor, slots: Slots, limit: Tensor, out: Drafts, noisy: bool, reading: int
    ) -> None:
        lookup(
            rows,
            slots,
            limit,
            out,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            num_steps=self.num_steps,
        )


class Synthetic(TokenProposer):
    """The trees of a `SyntheticDrafter` from its references, which it must have when a sequence begins."""

    def __init__(self, drafter: SyntheticDrafter, num_slots: int, max_length: int, device: torch.device):
        super().__init__()
        self.drafter = drafter
        self.reference = torch.zeros(num_slots, max_length, dtype=torch.int32, device=device)
        self.num_reference = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.keys = torch.zeros(num_slots, dtype=torch.int64, device=device)
        rates = drafter.acceptance[: drafter.num_steps]
        self.acceptance = torch.tensor(rates, dtype=torch.float64, device=device)

    def chains(self, batch: int) -> bool:
        return self.drafter.topk == 1

    def admit(self, writes: Writes, slot: int, key: int, size: int) -> None:
        references = self.drafter.references
        if key not in references:
            raise ValueError(f"no reference for key {key!r}; known are {list(references)}")
        reference = references[key][: self.reference.shape[1]]
        send(torch.tensor(reference, dtype=torch.int32), self.reference[slot, : len(reference)])
        writes.put(self.num_reference, slot, len(reference))
        writes.put(self.keys, slot, key)

    def propose(
        self, rows: Tensor, slots: Slots, limit: Tensor, out: Drafts, noisy: bool, reading: int
    ) -> None:
        drafter = self.drafter
        synthetic(
            rows, slots, self.reference, self.num_reference, self.keys, self.acceptance, limit, out, topk=drafter.topk,
            num_steps=drafter.num_steps, vocab_size=drafter.vocab_size, seed=drafter.seed,
        )  # fmt: skip


def has_twin(drafter: Drafter) -> bool:
    """Whether a drafter can draft on the device."""
    if isinstance(drafter, LookupFirst):
        return has_twin(drafter.other)
    if isinstance(drafter, EagleDrafter):
        network = drafter.network
        return isinstance(network, Eagle) and eagle.supports(network, drafter.num_steps, drafter.topk)
    return isinstance(drafter, (NoDrafter, NgramDrafter, SyntheticDrafter))


def twin_of(
    drafter: Drafter, num_slots: int, max_nodes: int, max_length: int, captures: Captures,
    most_beams: int | None = None, repeats: bool = False,
) -> Proposer:  # fmt: skip
    """What stands for a drafter on the device.

    A `LookupFirst` has either drafter's drafts in one tree, where the other one is trained; else that one stands for
    it alone. For a `NoDrafter` it is a lookup without room.

    Args:
        most_beams, repeats: as `EagleProposer` has them.
    """
    assert has_twin(drafter)
    if isinstance(drafter, LookupFirst):
        return twin_of(drafter.other, num_slots, max_nodes, max_length, captures, most_beams, repeats=True)
    if isinstance(drafter, EagleDrafter):
        assert isinstance(drafter.network, Eagle)
        return EagleProposer(
            drafter.network, num_slots, max_nodes, drafter.num_steps, drafter.topk, drafter.prune_threshold, captures,
            most_beams, repeats,
        )  # fmt: skip
    if isinstance(drafter, SyntheticDrafter):
        return Synthetic(drafter, num_slots, max_length, captures.device)
    if isinstance(drafter, NgramDrafter):
        return Lookup(drafter.max_ngram, drafter.min_ngram, drafter.num_steps)
    return Lookup()
