"""Compiles the kernels of the baselines that run whole rounds for a GPU that need not be there."""

from __future__ import annotations

import torch
from triton.runtime.jit import JITFunction

from specla.bench import round_kernels
from specla.bench.round_kernels import lay_out, restore, verify_dense
from specla.ops.gate import Gate
from specla.ops.triton import overlap
from specla.ops.triton.tuning import Config
from specla.resident.forward import Inputs, Round
from specla.resident.slots import new_slots
from specla.tree import Tree
from tests.ops.triton import compiled


def main() -> None:
    JITFunction.run = compiled.compile_instead
    overlap.overlaps = lambda device: True
    rows, slots = torch.zeros(2, dtype=torch.int32), new_slots(3, 9, 99, 2, "cpu")
    tree = Tree.resident(torch.zeros(2, 9, dtype=torch.int32), rows + 9)
    now = Round(tree, rows, slots.path, rows, slots.pending_path, rows, 0)
    for (heads, dim), config in (((8, 256), Config("serial", 16)), ((8, 256), Config("serial", 64, prepared=True)),
                                 ((2, 40), Config("serial", 16, registers=128))):  # fmt: skip
        qkv, ab = torch.zeros(2, 9, 3 * heads * dim).bfloat16(), torch.zeros(2, 9, 2 * heads).bfloat16()
        q, k, v = (x.unflatten(-1, (heads, dim)) for x in qkv.chunk(3, -1))
        inputs = Inputs(q, k, v, *ab.chunk(2, -1), Gate(torch.zeros(heads), torch.zeros(heads)))
        state, kept = torch.zeros(3, heads, dim, dim), torch.zeros(3, 9, heads, dim, dim)
        round_kernels.choose = lambda *_, config=config, **__: config  # type: ignore[assignment]
        verify_dense(inputs, now, state, kept)
        restore(kept[None], state[None], rows, slots)
        wide = torch.zeros(18, heads * dim).bfloat16()
        lay_out(inputs[:5], (wide, wide, wide, wide[:, :heads], wide[:, :heads]))
    print("all compiled")


if __name__ == "__main__":
    main()
