"""Trees grown where the round runs are those that `specla.drafters.grow` grows on a CPU from the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.drafters.grow import grow
from specla.resident.drafts import Drafts, new_drafts
from specla.resident.grow import Growth, Levels, begin, begin_levels, expand, finish
from specla.resident.slots import Slots, new_slots
from specla.resident.top import top
from tests.drafters.test_grow import Script, Table, nodes
from tests.ops.triton import DEVICE, full_size

SLOTS = 6
Nodes = list[tuple[int, int, float]]  # token, parent, score

seeds, vocabs, topks, steps = st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 8), st.integers(1, 5)
sizes = st.integers(1, 64) | st.integers(1, 12)
thresholds = st.sampled_from([None, None, 0.0, 0.25, 0.5, 1.0, 2.0, math.inf])
rows_limits = st.lists(
    st.tuples(st.integers(-1, SLOTS - 1), st.integers(0, 70) | st.integers(0, 4)), min_size=1, max_size=4
)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def some_slots() -> Slots:
    slots = new_slots(SLOTS, 1, 1, 1, DEVICE)
    slots.root.copy_(1000 + torch.arange(SLOTS))
    return slots


def target_ids(vocab: int) -> Tensor:
    return 100 + 3 * torch.arange(vocab, device=DEVICE).flip(0)


def poisoned(batch: int, width: int, num_steps: int) -> Growth:
    growth = begin(batch, width, num_steps, DEVICE)
    return Growth(*(x.fill_(-77 if x.dtype == torch.int32 else math.nan) for x in growth))


def some_levels(batch: int, width: int, num_steps: int) -> Levels:
    """Of rows of which every other one has read nothing."""
    num_read = ints(*[(b + 1) % 2 * (b + 1) for b in range(batch)])
    return begin_levels(num_read, torch.full_like(num_read, -77), width, num_steps)


def grown(table: Table, rows: list[int], num_steps: int, width: int) -> Growth:
    """Grow on the device from a table that knows batch row b by the name b."""
    growth, ids = poisoned(len(rows), width, num_steps), target_ids(table.vocab)
    levels, reads = some_levels(len(rows), width, num_steps), [1 - b % 2 for b in range(len(rows))]
    log_p = table.first()
    for depth in range(num_steps):
        best = log_p.sort(dim=-1, descending=True, stable=True)
        values, tokens = best.values[..., :width], best.indices[..., :width].int()
        padding = torch.tensor(rows) < 0
        values[padding], tokens[padding] = math.nan, -77
        flat = (x.reshape(-1, width).contiguous().to(DEVICE) for x in (values, tokens))
        expand(growth, levels, depth, *flat, ints(*rows), ids)
        assert levels.rooted.tolist() == reads
        if depth + 1 < num_steps:
            first = 1 + depth * width
            assert levels.num_nodes[depth + 1].tolist() == [read * (first + width) for read in reads]
            want = growth.follow + (first - width if depth else 0)
            assert torch.equal(levels.parent[:, first : first + width][~padding], want[~padding])
            assert (levels.parent[~padding, 0] == -1).all()
        real = growth.draft_ids[~padding]
        assert torch.equal(ids[real.long()], growth.target_ids[~padding].long())
        assert (growth.follow[~padding] < (width if depth else 1)).all()
        if depth + 1 < num_steps:
            follow, chosen = (x.cpu().long().clone() for x in (growth.follow, growth.draft_ids))
            follow[padding], chosen[padding] = 0, 0
            log_p = table.advance(chosen, follow)
    for x in growth:
        assert ((x == -77) | x.isnan())[padding.to(DEVICE)].all()
    return growth


def finished(
    growth: Growth, limits: list[int], rows: list[int], size: int, threshold: float | None
) -> list[Nodes]:
    """Nodes of every row, after a look at what lies beyond them."""
    batch = len(rows)
    tokens, parent = torch.full((2, batch, size), -77, dtype=torch.int32, device=DEVICE)
    out = Drafts(tokens, parent, ints(*[-77] * batch))
    scores = torch.full((batch, size), math.nan, device=DEVICE)
    finish(growth, ints(*limits), ints(*rows), some_slots(), out, scores, threshold)
    padding = torch.arange(size, device=DEVICE) >= out.num_nodes[:, None]
    assert (
        (tokens[padding] == 0).all()
        and (parent[padding] == -1).all()
        and (scores[padding] == -math.inf).all()
    )
    found = []
    for b, count in enumerate(out.num_nodes.tolist()):
        assert 1 <= count <= size
        found.append(list(zip(*(x[b, :count].tolist() for x in (tokens, parent, scores)), strict=True)))
    return found


def wanted(
    table: Table,
    limits: list[int],
    rows: list[int],
    size: int,
    num_steps: int,
    width: int,
    threshold: float | None,
) -> list[Nodes]:
    bounded = [min(limit, size - 1) for limit in limits]
    growth = table.grow(bounded, num_steps=num_steps, topk=width, prune_threshold=threshold)
    ids = target_ids(table.vocab).tolist()
    trees = []
    for b, row in enumerate(rows):
        (_, *first), *others = nodes(growth, b) if row >= 0 else [(0, -1, 0.0)]
        trees.append([(1000 + row if row >= 0 else 0, *first), *((ids[t], *rest) for t, *rest in others)])
    return trees


@given(seeds, vocabs, topks, steps, rows_limits, sizes, thresholds)
def test_grows_what_grow_grows(
    seed: int,
    vocab: int,
    topk: int,
    num_steps: int,
    drawn: list[tuple[int, int]],
    size: int,
    threshold: float | None,
) -> None:
    rows, limits = ([pair[i] for pair in drawn] for i in (0, 1))
    table, width = Table(seed, list(range(len(rows))), vocab), min(topk, vocab)
    growth = grown(table, rows, num_steps, width)
    for most in (limits, limits[::-1], [0] * len(rows)):  # limits may change without growing again
        found = finished(growth, most, rows, size, threshold)
        assert found == wanted(table, most, rows, size, num_steps, width, threshold)


@pytest.mark.parametrize(
    ("width", "num_steps", "size"), [(8, 16, 64), (1, 16, 17), (7, 3, 64), (8, 2, 1), (5, 1, 9)]
)
def test_the_largest_and_the_narrowest(width: int, num_steps: int, size: int) -> None:
    table, rows = Table(1, [0, 1], 9), [3, 0]
    growth = grown(table, rows, num_steps, width)
    for limits, threshold in (([99, 40], None), ([2, 99], 0.5), ([-3, 0], None)):
        found = finished(growth, limits, rows, size, threshold)
        assert found == wanted(table, [max(0, n) for n in limits], rows, size, num_steps, width, threshold)


def test_what_cannot_follow_is_never_a_node() -> None:
    sure, never = [0.0, -math.inf, -math.inf], [-math.inf] * 3
    table = Script(0, [0, 1], 3, chances=[sure, sure, never, sure])
    growth = grown(table, [0, 1], 4, 3)
    assert [len(row) for row in finished(growth, [99, 1], [0, 1], 32, None)] == [3, 2]
    assert [len(row) for row in finished(growth, [99, 1], [0, 1], 32, 1.0)] == [3, 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_live_nodes_are_tokens_whatever_the_numbers_are() -> None:
    growth, ids, levels = poisoned(1, 4, 2), target_ids(9), some_levels(1, 4, 2)
    for depth, rows in enumerate((1, 4)):
        values = torch.full((rows, 4), math.nan, device=DEVICE)
        expand(growth, levels, depth, values, ints(*[7, 2, 5, 3] * rows), ints(0), ids)
        assert growth.draft_ids.tolist() == [[7, 2, 5, 3]] and growth.follow.tolist() == [[0] * 4]
    assert finished(growth, [9], [0], 9, None) == [[(1000, -1, 0.0)]]


def test_grows_from_logits() -> None:
    """The ranks of `top` are handed on as they are."""
    vocab, width, num_steps, rows = 50, 3, 4, [4, -1, 2]
    rng, ids, slots = torch.Generator().manual_seed(0), target_ids(vocab), some_slots()
    growth, given = begin(3, width, num_steps, DEVICE), ints(*rows)
    levels = some_levels(3, width, num_steps)
    made: list[Tensor] = []
    for depth in range(num_steps):
        beams = width if depth else 1
        logits = torch.randn(3 * beams, vocab, generator=rng).to(DEVICE)
        values, tokens = top(logits, given, slots, ids, depth, width=width, noisy=False)
        expand(growth, levels, depth, values, tokens, given, ids)
        log_p = torch.full_like(logits, -math.inf).scatter_(1, tokens.long() % vocab, values)
        log_p.view(3, -1)[1] = -1.0
        made.append(log_p.view(3, beams, vocab).cpu())
    later = iter(made[1:])
    limits = [9, 9, 30]
    law = grow(
        made[0][:, 0],
        lambda tokens, beams: next(later),
        limits=torch.tensor(limits),
        num_steps=num_steps,
        topk=width,
    )
    found = finished(growth, limits, rows, 32, None)
    assert found[1] == [(0, -1, 0.0)]
    for b in (0, 2):
        assert found[b][1:] == [(int(ids[token]), *rest) for token, *rest in nodes(law, b)[1:]]


@full_size
def test_a_graph_grows_anew_with_every_replay() -> None:
    batch, width, num_steps, size, vocab = 5, 4, 5, 17, 8192
    rows, limits, slots = ints(3, 0, -1, 5, 1), ints(16, 3, 16, 0, 40), some_slots()
    slots.temperature.copy_(torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 0.7]))
    ids, logits = target_ids(vocab), torch.randn(num_steps, batch * width, vocab, device=DEVICE)
    growth, out = begin(batch, width, num_steps, DEVICE), new_drafts(batch, size, DEVICE)
    levels = some_levels(batch, width, num_steps)
    scores = torch.zeros(batch, size, device=DEVICE)

    def round_of_growth() -> None:
        for depth in range(num_steps):
            some = logits[depth] if depth else logits[depth, :batch]
            best = top(some, rows, slots, ids, depth, width=width, noisy=True)
            expand(growth, levels, depth, *best, rows, ids)
        finish(growth, limits, rows, slots, out, scores, 4.0)

    round_of_growth()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_of_growth()
    for _ in range(3):
        logits.normal_()
        limits.copy_(torch.randint(0, 20, (batch,)))
        slots.position.add_(1)
        graph.replay()
        replayed = [x.clone() for x in (*out, scores)]
        round_of_growth()
        assert all(map(torch.equal, replayed, (*out, scores)))
        assert out.num_nodes[2] == 1 and (out.num_nodes <= 1 + limits).all()
