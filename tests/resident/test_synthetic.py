"""Laws of the synthetic trees: token for token and parent for parent those of the eager drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specla.drafters import DraftRow, SyntheticDrafter
from specla.resident.synthetic import synthetic
from tests.ops.triton import DEVICE
from tests.resident import admit, copied, garbage_drafts, garbage_slots, ints, same_slots

SLOTS, LENGTH = 5, 40


@st.composite
def drafters(draw: st.DrawFn) -> dict[str, Any]:
    topk, num_steps = draw(st.sampled_from([4, 3, 2, 1])), draw(st.sampled_from([4, 9, 3, 1]))
    rates = st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.9, 1.0])
    return {
        "topk": topk,
        "num_steps": num_steps,
        "vocab_size": draw(st.sampled_from([topk + 1, 50, 32000, 1 << 18])),
        "seed": draw(st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, -(2**63)])),
        "acceptance": draw(st.lists(rates, min_size=num_steps, max_size=num_steps)),
    }


@settings(max_examples=10)
@given(drafters(), st.integers(0, 2**31))
def test_trees_are_those_of_the_drafter(how: dict[str, Any], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)

    def any_of(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=rng))]

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(how["vocab_size"], shape, generator=rng)

    keys = torch.randint(-(2**63), 2**63 - 1, (SLOTS,), generator=rng)
    keys[:2] = torch.tensor([0, 1])
    reference, known = tokens(SLOTS, LENGTH), [any_of(LENGTH, LENGTH - 1, 20) for _ in range(SLOTS)]
    fixed = {name: value for name, value in how.items() if name != "acceptance"}
    rates = torch.tensor(how["acceptance"], dtype=torch.float64, device=DEVICE)
    for size in (1, any_of(2, 9, 17), 33):
        drafter = SyntheticDrafter(num_speculative_tokens=max(1, size - 1), **how)
        drafter.references = {
            k: r[:n].tolist() for k, r, n in zip(keys.tolist(), reference, known, strict=True)
        }
        limit, slots, held, left = (
            any_of(-1, 0, 1, 5, 12, 20, 40, 40),
            garbage_slots(SLOTS, size, LENGTH, 1),
            [],
            [],
        )
        for slot in range(SLOTS):
            held.append(tokens(any_of(1, 2, 7, 11, known[slot] - 3, known[slot], known[slot] + 1)).tolist())
            left.append(any_of(1, 2, 4, 99, 99, 99))
            admit(slots, slot, held[-1][-LENGTH:], remaining=left[-1])
            slots.position[slot] = len(held[-1])
        rows = torch.randperm(SLOTS, generator=rng)[: any_of(2, SLOTS)].tolist()
        rows[any_of(0, 1)] = -1
        out, before = garbage_drafts(len(rows), size), copied(slots)
        synthetic(
            ints(rows), slots, reference.int().to(DEVICE), ints(known), keys.to(DEVICE), rates,
            ints([limit] * SLOTS), out, **fixed,
        )  # fmt: skip
        assert same_slots(slots, before)
        for b, slot in enumerate(rows):
            want, parents = [0], [-1]
            if slot >= 0:
                useful = min(size - 1, limit, left[slot] - 1)
                proposal = drafter.propose([DraftRow(int(keys[slot]), held[slot], useful)])
                want, parents = proposal.tokens[0].tolist(), proposal.tree.parent[0].tolist()
            padding = size - len(want)
            assert out.num_nodes[b] == len(want)
            assert out.tokens[b].tolist() == want + [0] * padding
            assert out.parent[b].tolist() == parents + [-1] * padding


@pytest.mark.parametrize("far", [2**31 - 1, 2**33])
def test_beyond_its_reference_a_sequence_stands_alone(far: int) -> None:
    slots, out = garbage_slots(1, 9, LENGTH, 1), garbage_drafts(1, 9)
    admit(slots, 0, [7], remaining=99)
    slots.position[0] = far
    synthetic(
        ints([0]), slots, slots.history, ints([LENGTH]), slots.seed, torch.ones(2, dtype=torch.float64, device=DEVICE),
        ints([99]), out, topk=3, num_steps=2, vocab_size=9, seed=0,
    )  # fmt: skip
    assert out.tokens.tolist() == [[7] + [0] * 8] and out.parent.tolist() == [[-1] * 9] and out.num_nodes == 1
