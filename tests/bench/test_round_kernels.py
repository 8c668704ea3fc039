"""Laws of the dense snapshots: outputs and states have the bits of the engine's exact modes, on any tree."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specla.bench import round_kernels
from specla.bench.round_kernels import restore, verify_dense
from specla.ops.factors import Factors
from specla.ops.gate import Gate
from specla.ops.triton.tuning import Config
from specla.ops.verify import launch, launch_commit
from specla.resident.forward import Inputs, Round
from specla.resident.slots import new_slots
from specla.tree import Tree
from tests.ops.strategies import SHAPES, path_to, random_parent, same_bits
from tests.ops.triton import DEVICE
from tests.resident import GARBAGE, ints

SIZE, SLOTS, HEADS, GROUPS, DIM_K, DIM_V = 7, 3, 1, 2, 40, 12


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_has_the_state_of_its_path(
    shape: str, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a padding row; padding nodes give zeros."""
    rng = torch.Generator().manual_seed(len(shape) + prepared)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng).to(DEVICE)

    config = Config("serial", 16, prepared=prepared)
    monkeypatch.setattr(round_kernels, "choose", lambda *_, **__: config)
    values = HEADS * GROUPS
    mine, rows = random_parent(shape, SIZE - 1, rng), ints([-1, 1])
    parent = torch.full((2, SIZE), GARBAGE, dtype=torch.int32, device=DEVICE)
    parent[1, : len(mine)] = ints(mine)
    tree = Tree.resident(parent, ints([1, len(mine)]))
    wide = draw(2, SIZE, 2 * HEADS * DIM_K + values * DIM_V + 2 * values)
    q, k, v, a, b = wide.split([HEADS * DIM_K, HEADS * DIM_K, values * DIM_V, values, values], -1)
    q, k, v = (
        q.unflatten(-1, (HEADS, DIM_K)),
        k.unflatten(-1, (HEADS, DIM_K)),
        v.unflatten(-1, (values, DIM_V)),
    )
    gate, state = Gate(draw(values), draw(values), 2.0), draw(SLOTS, values, DIM_V, DIM_K)
    factors = Factors(
        draw(SLOTS, SIZE, HEADS, DIM_K), draw(SLOTS, SIZE, values, DIM_V), draw(SLOTS, SIZE, values)
    )
    want, _ = launch(
        q, k, v, a, b, tree, state, None, "serial", True, gate=gate, state_indices=rows, factors=factors, by_slot=True
    )  # fmt: skip
    slots = new_slots(SLOTS, SIZE, 9, 1, DEVICE)
    none = ints([0, 0])
    now = Round(tree, rows, slots.path[:2], none, slots.pending_path[:2], none, 0)
    kept = torch.full((SLOTS, SIZE, values, DIM_V, DIM_K), math.nan, device=DEVICE)
    before = state.clone()
    o = verify_dense(Inputs(q, k, v, a, b, gate), now, state, kept)
    assert same_bits(o[1], want[1]) and not o[1, len(mine) :].any() and not o[0].any()
    assert same_bits(state, before)
    assert kept[0].isnan().all() and kept[2].isnan().all() and kept[1, len(mine) :].isnan().all()
    for node in range(len(mine)):
        path, moved, copied = path_to(mine, node), state.clone(), state.clone()
        launch_commit(moved, factors, ints([path, path]), ints([0, len(path)]), rows, by_slot=True)
        slots.path[1, : len(path)], slots.count[:2] = ints(path), ints([3, len(path)])
        restore(kept[None], copied[None], rows, slots)
        assert same_bits(kept[1, node], moved[1]) and same_bits(copied, moved)
