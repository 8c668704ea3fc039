"""Compiles the resident round's kernels for a GPU that need not be there, as their launchers would launch them.

A program of its own, since the other tests have Triton interpret the kernels.
"""

from __future__ import annotations

import torch
from triton.runtime.jit import JITFunction

from specla.drafters.network import Eagle, EagleConfig
from specla.ops.triton import overlap
from specla.resident.drafts import new_drafts
from specla.resident.draw import draw
from specla.resident.eagle import EagleProposer
from specla.resident.extend import extend
from specla.resident.features import Backlog, gather, keep, pair_norm, take_last
from specla.resident.forward import Layers
from specla.resident.grow import begin, begin_levels, expand, finish
from specla.resident.lookup import lookup
from specla.resident.prompt import Bucket, read_prompts
from specla.resident.slots import new_slots
from specla.resident.synthetic import synthetic
from specla.resident.top import top
from specla.resident.walk import new_outcome, walk
from specla.resident.writes import Writes
from tests.ops.triton import compiled
from tests.targets import VOCAB, build_target, make_config

compiled.TYPES[torch.float64] = "*fp64"
compiled.OPTIONS += ("enable_fp_fusion",)
overlap.overlaps = lambda device: True


def main() -> None:
    JITFunction.run = compiled.compile_instead
    rows, limit = torch.zeros(2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    for size in (1, 16, 17, 64):
        slots, drafts = new_slots(3, size, 5000, 2, "cpu"), new_drafts(2, size, "cpu")
        lookup(rows, slots, limit, drafts)
        lookup(rows, slots, limit, drafts, max_ngram=5, min_ngram=5, periodic=True, others=rows)
        for branches in (False, True):
            extend(drafts, new_drafts(2, size, "cpu"), rows, slots, limit, branches=branches)
        for topk, rates in ((1, torch.float32), (3, torch.float64)):
            synthetic(
                rows, slots, slots.history, slots.root, slots.seed, torch.ones(4, dtype=rates), limit, drafts,
                topk=topk, num_steps=4, vocab_size=99, seed=-1,
            )  # fmt: skip
        draws = torch.zeros(2, size, dtype=torch.int32)
        walk(draws, *drafts, rows, slots, new_outcome(2, size, "cpu"))
    for vocab in (1000, 1 << 18):
        for noisy in (False, True):
            logits = torch.zeros(1, 1, vocab).expand(2, size, vocab)
            draw(logits, drafts.parent, drafts.num_nodes, rows, slots, noisy=noisy, out=draws)
    writes = Writes(torch.device("cpu"))
    slots.admit(writes, 0, [1, 2, 3], remaining=9)
    writes.make()
    grow(rows, 4, 5)
    grow(rows, 8, 2)
    read(rows)
    prompts()
    print("all compiled")


@torch.inference_mode()
def prompts() -> None:
    """Buckets of one row and of several, with and without streams, and the pairs that a drafter reads."""
    sizes = {
        "hidden_size": 256,
        "num_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
    }
    for dtype in (torch.bfloat16, torch.float32):
        target = build_target(make_config(**sizes), dtype)
        (group,) = target.new_pool(9, 1).groups.values()
        layers = Layers.of(group, 4)
        for length, n in ((512, 1), (64, 8)):
            stretch = Bucket(n, length, torch.device("cpu")).stretch
            streams = torch.zeros(n * length, 2 * 256)
            read_prompts(target, layers, stretch, {})
            read_prompts(target, layers, stretch, {0: streams[:, :256], 2: streams[:, 256:]})
        shape = EagleConfig(
            hidden_size=256, vocab_size=VOCAB, draft_vocab_size=VOCAB, layer_ids=(0, 2), num_heads=2, head_dim=128,
            intermediate_size=256,
        )  # fmt: skip
        network = Eagle(shape).requires_grad_(False)
        for name, weight in network.named_parameters():
            if weight.dim() == 2 and not name.endswith("conv_weight"):
                weight.data = weight.data.to(dtype)
        eagle = EagleProposer(network, 3, 5, 4, 2, None)
        eagle.absorb_pairs(1, torch.zeros(70, 512, dtype=dtype), [1] * 70)


def grow(rows: torch.Tensor, width: int, num_steps: int) -> None:
    slots, ids, drafts = new_slots(3, 17, 99, 2, "cpu"), torch.arange(3000), new_drafts(2, 17, "cpu")
    grown, levels = begin(2, width, num_steps), begin_levels(rows, rows, width, num_steps)
    for depth in (0, 1, num_steps - 1):
        logits = torch.zeros(2 * (width if depth else 1), 3000)
        best = top(logits, rows, slots, ids, depth, width=width, noisy=depth > 0)
        expand(grown, levels, depth, *best, rows, ids)
    finish(grown, rows, rows, slots, drafts, torch.zeros(2, 17))


def read(rows: torch.Tensor) -> None:
    half, whole = torch.zeros(12, 96).bfloat16(), torch.zeros(4, 32)
    path = torch.zeros(2, 3, dtype=torch.int32)
    backlog = Backlog(half, path, rows, rows)
    slots = new_slots(2, 3, 9, 2, "cpu")
    reading = gather(rows, slots, backlog, rows[:1], 3)
    keep(new_outcome(2, 3, "cpu"), backlog)
    take_last(whole.view(2, 2, 32), rows, whole[:2])
    norms = whole[0], whole[0]
    for follow in (None, reading.tokens[:4]):
        pair_norm(
            reading.tokens[:4], half[:, :32].contiguous(), whole, follow, norms, 1e-6, 2, keep_norm=False
        )


if __name__ == "__main__":
    main()
