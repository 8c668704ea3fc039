"""Laws of the resident round's kernels, on a GPU or in Triton's interpreter: equal to their twins on the host."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from specla.resident.drafts import Drafts
from specla.resident.slots import Slots, new_slots
from specla.resident.writes import Writes
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE

GARBAGE = -77


def garbage_slots(num_slots: int, max_nodes: int, max_length: int, num_stop_ids: int) -> Slots:
    """Slots that hold nothing that anybody could want."""
    slots = new_slots(num_slots, max_nodes, max_length, num_stop_ids, DEVICE)
    for field in fields(slots):
        getattr(slots, field.name).fill_(GARBAGE)
    return slots


def garbage_drafts(batch: int, size: int) -> Drafts:
    def garbage(*shape: int) -> Tensor:
        return torch.full(shape, GARBAGE, dtype=torch.int32, device=DEVICE)

    return Drafts(garbage(batch, size), garbage(batch, size), garbage(batch))


def admit(admitting: Any, slot: int, *args: Any, **options: Any) -> None:
    """Let a sequence begin in a slot of `Slots`, `Narrow` or a proposer."""
    writes = Writes(DEVICE)
    admitting.admit(writes, slot, *args, **options)
    writes.make()


def copied(slots: Slots) -> Slots:
    return replace(slots, **{field.name: getattr(slots, field.name).clone() for field in fields(slots)})


def same_slots(a: Slots, b: Slots, but: list[int] | None = None) -> bool:
    """Whether all slots are equal to the bit, apart from those in `but`."""
    kept = [slot for slot in range(len(a.root)) if slot not in (but or [])]
    return all(same_bits(getattr(a, f.name)[kept], getattr(b, f.name)[kept]) for f in fields(a))


def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)
