"""What one round costs the target: a plain step beside verifications of several trees, the commit included."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from specla.accept import accept
from specla.drafters.base import Draft, pack
from specla.models.target import Target
from specla.state import StatePool
from specla.tree import Tree

STEPS_A_VISIT = 4  # timed rounds of one shape before the next takes its turn


@dataclass(frozen=True)
class Shape:
    """A draft tree to verify, the root included; each round commits its deepest path from the round before."""

    name: str
    parent: tuple[int, ...]


def chain(nodes: int) -> Shape:
    return Shape(f"chain of {nodes}", tuple(range(-1, nodes - 1)))


def spine(nodes: int, topk: int, depth: int) -> Shape:
    """A path of `depth` drafts whose nodes have up to `topk - 1` siblings, those near the root first."""
    parent, at, spare = [-1], 0, nodes - 1 - depth
    for _ in range(depth):
        width = 1 + min(topk - 1, spare)
        spare -= width - 1
        parent.extend([at] * width)
        at = len(parent) - width
    assert len(parent) == nodes and spare == 0, "the shape cannot hold so many nodes"
    return Shape(f"tree of {nodes}, top-k {topk}, depth {depth}", tuple(parent))


def fan(nodes: int, chains: int) -> Shape:
    """`chains` chains of equal length (the last may be shorter) that part at the root, in order of depth."""
    parent = [-1, *([0] * chains), *range(1, nodes - chains)]
    return Shape(f"tree of {nodes}, {chains} chains", tuple(parent))


PLAIN = Shape("plain step", (-1,))
SHAPES = (chain(9), chain(16), spine(16, 4, 4), spine(16, 4, 5), spine(16, 2, 8), fan(16, 4))


@torch.inference_mode()
def time_rounds(
    target: Target,
    prompt: Sequence[int],
    batch: int,
    repeats: int,
    mode: str = "auto",
    shapes: Sequence[Shape] = SHAPES,
) -> list[dict[str, Any]]:
    """Median time of the target's part of a round (verification, acceptance, and the commit of the last round).

    Shapes take turns, each from the same freshly prefilled slots, and every timed round commits the deepest path that
    the round before left pending.

    Returns:
        the plain step first, then `shapes`, each with milliseconds and cost in plain steps, JSON-ready.
    """
    everything = (PLAIN, *shapes)
    pool = target.new_pool(batch, max(len(shape.parent) for shape in everything))
    generator = torch.Generator().manual_seed(0)
    rounds: Mapping[str, list[tuple[float, float]]] = {shape.name: [] for shape in everything}
    for visit in range(-1, -(-repeats // STEPS_A_VISIT)):
        for shape in everything:
            size = (batch, len(shape.parent))
            tokens = torch.randint(target.config.vocab_size, size, generator=generator).to(pool.device)
            timed = _visit(target, shape, tokens, prompt, pool, mode)
            if visit >= 0:  # the one before warms up
                rounds[shape.name].extend(timed)
    plain = median(sum(pair) for pair in rounds[PLAIN.name])
    result = []
    for shape in everything:
        verify, walk = (median(part) for part in zip(*rounds[shape.name], strict=True))
        whole = median(sum(pair) for pair in rounds[shape.name])
        result.append({
            "name": shape.name, "nodes": len(shape.parent), "verify_ms": _ms(verify), "accept_ms": _ms(walk),
            "round_ms": _ms(whole), "plain_steps": round(whole / plain, 3), "repeats": len(rounds[shape.name]),
        })  # fmt: skip
    return result


def _visit(
    target: Target, shape: Shape, tokens: torch.Tensor, prompt: Sequence[int], pool: StatePool, mode: str
) -> list[tuple[float, float]]:
    """Seconds of verification and of acceptance of some rounds."""
    slots = [pool.alloc() for _ in range(tokens.shape[0])]
    for slot in slots:
        target.prefill(torch.tensor(prompt, device=pool.device), slot, pool)
    whole = Tree([list(shape.parent)] * len(slots))
    deepest = whole.paths(whole.depth.argmax(1))
    num_accepted = [int((path >= 0).sum()) - 1 for path in deepest]
    drafted = tokens.tolist()
    timed = []
    for number in range(1 + STEPS_A_VISIT):
        start = time.perf_counter()
        tree = pack([Draft(row, list(shape.parent)) for row in drafted]).tree
        logits = target.verify(tokens, tree, slots, pool, mode)
        verified = time.perf_counter()
        accept(logits, tokens, tree)
        pool.accept(slots, deepest.clamp(min=0), num_accepted)
        done = time.perf_counter()
        if number > 0:  # the first has nothing to commit
            timed.append((verified - start, done - verified))
    for slot in slots:
        pool.free(slot)
    return timed


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
