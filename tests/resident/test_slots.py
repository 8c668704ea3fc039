"""Slots: what admission leaves there, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from tests.resident import admit, copied, garbage_slots, same_slots


def test_admission_fills_one_slot() -> None:
    slots = garbage_slots(3, 4, 9, 2)
    before = copied(slots)
    admit(slots, 1, [5, 6, 7], remaining=8, temperature=0.7, seed=-(2**63), stop_ids={3})
    assert same_slots(slots, before, but=[1])
    assert (slots.root[1], slots.position[1], slots.remaining[1], slots.count[1]) == (7, 3, 8, 0)
    assert slots.path[1, 0] == 0
    assert slots.temperature[1] == torch.tensor(0.7) and slots.seed[1] == -(2**63)
    assert slots.stop_ids[1].tolist() == [3, -1] and slots.history[1, :3].tolist() == [5, 6, 7]
    admit(slots, 1, range(9), remaining=1)
    assert slots.temperature[1] == 0 and slots.stop_ids[1].tolist() == [-1, -1]
    assert slots.history[1].tolist() == list(range(9))


def test_what_does_not_fit_is_refused_or_left_out() -> None:
    slots = garbage_slots(1, 4, 9, 1)
    with pytest.raises(ValueError, match="at least one token"):
        admit(slots, 0, [], remaining=1)
    with pytest.raises(ValueError, match="at most 1 stop ids, got 2"):
        admit(slots, 0, [1], remaining=1, stop_ids=[1, 2])
    admit(slots, 0, range(12), remaining=1)
    assert slots.history[0].tolist() == list(range(9)) and slots.position[0] == 12 and slots.root[0] == 11
