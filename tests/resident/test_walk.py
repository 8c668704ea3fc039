"""Laws of the walk: what `accept` and `Sequence.extend` make of the same draws, round after round."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.accept import accept
from specla.engine.params import SamplingParams
from specla.engine.sequence import Sequence
from specla.resident.slots import DEFERRED, Slots
from specla.resident.walk import LENGTH, NOT_FINITE, RUNNING, STOP, Outcome, walk
from specla.tree import Tree
from tests.ops.strategies import SHAPES, random_parent, same_bits
from tests.ops.triton import DEVICE, full_size
from tests.resident import GARBAGE, admit, copied, garbage_slots, ints, same_slots

VOCAB = 5
REASONS = {None: RUNNING, "stop": STOP, "length": LENGTH}


@dataclass
class Round:
    """What a walk is shown: garbage wherever nobody may look."""

    draws: Tensor
    tokens: Tensor
    parent: Tensor
    num_nodes: Tensor

    def walk(
        self,
        rows: Tensor,
        slots: Slots,
        order: Tensor | slice = slice(None),
        where: tuple[int, int, bool] = (0, 2, False),
    ) -> tuple[Outcome, Tensor]:
        """The outcome, and the rows as the walk leaves them."""
        batch, size = self.tokens[order].shape
        out = Outcome(torch.full((batch, size + 4), GARBAGE, dtype=torch.int32, device=DEVICE))
        rows = rows[order].clone()
        walk(
            self.draws[order], self.tokens[order], self.parent[order], self.num_nodes[order], rows, slots, out, *where
        )  # fmt: skip
        return out, rows


def make_round(batch: int, size: int, seed: int, lost: float = 0.1, follow: float = 0.8) -> Round:
    rng = torch.Generator().manual_seed(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=rng))

    parent, tokens, draws = (
        torch.randint(-(2**31), 2**31, (batch, size), generator=rng).int() for _ in range(3)
    )
    counts = []
    for b in range(batch):
        count = size if below(3) == 0 else 1 + below(size)
        above = random_parent(SHAPES[below(len(SHAPES))], count, rng)
        parent[b, :count] = torch.tensor(above)
        tokens[b, :count] = torch.randint(VOCAB, (count,), generator=rng)
        draws[b, :count] = torch.randint(VOCAB, (count,), generator=rng)
        for i in range(1, count):
            if torch.rand(1, generator=rng) < follow:  # as most drafts do, so that many siblings are equal
                tokens[b, i] = draws[b, above[i]]
        if torch.rand(1, generator=rng) < lost:
            draws[b, below(count)] = -1
        counts.append(count)
    return Round(draws.to(DEVICE), tokens.to(DEVICE), parent.to(DEVICE), ints(counts))


def twin(step: Round, b: int, sequence: Sequence) -> tuple[list[int], int, int, list[int]] | None:
    """Let the sequence grow as the engine does: tokens, accepted, drafted and path; None for a lost row."""
    count = int(step.num_nodes[b])
    draws, tokens = step.draws[b : b + 1, :count].cpu().long(), step.tokens[b : b + 1, :count].cpu().long()
    logits = torch.nn.functional.one_hot(draws.clamp(min=0), VOCAB).float()
    logits[draws < 0] = torch.nan
    path, num_accepted, bonus = accept(logits, tokens, Tree(step.parent[b, :count].cpu()), check=False)
    if num_accepted[0] < 0:
        return None
    accepted = tokens[0, path[0, 1 : 1 + num_accepted[0]].long()].tolist()
    taken = sequence.extend(accepted, int(bonus[0]), count - 1)
    metrics = sequence.metrics
    return (
        sequence.tokens[-taken:],
        max(metrics.accepted_per_round),
        metrics.num_draft_tokens,
        path[0, :taken].tolist(),
    )


def admitted(slots: Slots, slot: int, seed: int) -> tuple[Sequence, int]:
    """A sequence that begins in a slot, and how far it stands behind the position that its tokens tell."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (1 + seed % slots.history.shape[1],), generator=rng).tolist()
    most = [1, 2, 3, 30][seed // 8 % 4]
    stop_ids = frozenset([[], [0], [1, 4], [2]][seed // 32 % 4])
    far = [0, 0, 2**31 - 3, 2**33][seed // 128 % 4]
    admit(slots, slot, tokens, remaining=most, stop_ids=stop_ids)
    slots.position[slot] += far
    return Sequence(tokens, SamplingParams(max_tokens=most), 0, stop_ids, key=slot), far


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(rows, nodes, seed)"""
    nodes = draw(st.sampled_from([1, 2, 5, 9, 17, 33, 64]))
    return draw(st.integers(1, 5)), nodes, draw(st.integers(0, 2**31))


@given(sizes())
def test_rounds_are_those_of_the_engine(drawn: tuple[int, int, int]) -> None:
    batch, size, seed = drawn
    slots = garbage_slots(7, size, 24, 2)
    rows = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:batch].int().to(DEVICE)
    rows[torch.rand(batch, generator=torch.Generator().manual_seed(seed + 1)) < 0.2] = -1
    running = {slot: admitted(slots, slot, seed // 7 + 1237 * slot) for slot in rows.tolist() if slot >= 0}
    for turn in range(3):
        step = make_round(batch, size, seed + turn, follow=[0.5, 0.9, 0.97, 1.0][seed // 3 % 4])
        slots.count.fill_(GARBAGE)
        before = copied(slots)
        owners = rows.tolist()
        out, rows = step.walk(rows, slots)
        assert same_slots(slots, before, but=[slot for slot in owners if slot >= 0])
        for b, slot in enumerate(owners):
            if slot < 0:
                assert not out.packed[b].any() and rows[b] == -1
                continue
            sequence, far = running[slot]
            sequence.metrics = type(sequence.metrics)()
            length = len(sequence.tokens)
            made = twin(step, b, sequence)
            told = [int(x[b]) for x in (out.taken, out.accepted, out.drafted, out.reason)]
            assert (slots.temperature[slot], slots.seed[slot]) == (0, 0)
            if made is None:
                assert told == [0, 0, int(step.num_nodes[b]) - 1, NOT_FINITE]
                assert not out.tokens[b].any() and rows[b] == -1 and slots.count[slot] == 0
                before.count[slot] = before.num_pending[slot] = 0
                before.lag[slot] = before.due[slot] = 1
                assert same_slots(slots, before, but=[s for s in owners if s not in (-1, slot)])
                continue
            tokens, accepted, drafted, path = made
            taken, end = len(tokens), length + len(tokens)
            assert told == [taken, accepted, drafted, REASONS[sequence.finish_reason]]
            assert out.tokens[b].tolist() == tokens + [0] * (size - taken)
            assert rows[b] == (-1 if sequence.finish_reason else slot)
            assert slots.root[slot] == sequence.tokens[-1]
            assert slots.position[slot] == far + end
            assert slots.remaining[slot] == sequence.draft_limit + 1
            assert slots.count[slot] == taken
            assert slots.path[slot].tolist() == path + before.path[slot, taken:].tolist()
            kept = before.history[slot].tolist()
            if not far:
                kept[length:end] = tokens[: max(0, len(kept) - length)]
            assert slots.history[slot].tolist() == kept


@given(sizes(), st.randoms(use_true_random=False))
def test_a_row_does_not_notice_its_neighbours(drawn: tuple[int, int, int], random) -> None:
    batch, size, seed = drawn
    slots = garbage_slots(7, size, 24, 2)
    rows = ints(random.sample(range(7), batch))
    for slot in rows.tolist():
        admitted(slots, slot, seed // 7 + 1237 * slot)
    step, before = make_round(batch, size, seed), copied(slots)
    out, left = step.walk(rows, slots)
    order = random.sample(range(batch), random.randint(1, batch))
    again = copied(before)
    some, some_left = step.walk(rows, again, ints(order))
    assert same_bits(some.packed, out.packed[order]) and same_bits(some_left, left[order])
    absent = [slot for b, slot in enumerate(rows.tolist()) if b not in order]
    assert same_slots(again, slots, but=absent)
    assert same_slots(again, before, but=rows[order].tolist())


@given(sizes(), st.lists(st.booleans(), min_size=12, max_size=12), st.sampled_from([2, 4, 6]))
def test_what_is_not_written_stays_pending(
    drawn: tuple[int, int, int], deferred: list[bool], banks: int
) -> None:
    """A host that keeps count: nodes of earlier rounds go on waiting where a round defers and the slot is not due."""
    _, size, seed = drawn
    slots = garbage_slots(2, size, 24, 0)
    admit(slots, 1, [1], remaining=10**6)
    waiting: list[int] = []
    lag, due = 0, True
    for number, defers in enumerate(deferred):
        turn = number % banks
        step = make_round(1, size, seed + number, lost=0.0, follow=0.5)
        out, rows = step.walk(ints([1]), slots, where=(turn, banks, defers))
        if due or not defers:
            waiting, lag = [], 0
        waiting += [turn * size + node for node in slots.path[1, : out.taken[0]].tolist()]
        lag += 1
        due = lag == banks - 1 or len(waiting) > DEFERRED
        assert slots.pending_path[1, : len(waiting)].tolist() == waiting and rows.tolist() == [1]
        told = [int(x[1]) for x in (slots.num_pending, slots.lag, slots.due)]
        assert told == [len(waiting), lag, due]


def test_of_equal_siblings_the_first_counts() -> None:
    slots = garbage_slots(1, 5, 8, 0)
    admit(slots, 0, [1], remaining=9)
    step = Round(ints([[3, 0, 4, 2, 0]]), ints([[1, 3, 3, 0, 4]]), ints([[-1, 0, 0, 1, 2]]), ints([5]))
    out, _ = step.walk(ints([0]), slots)
    assert out.tokens.tolist() == [[3, 0, 2, 0, 0]] and out.taken.item() == 3
    assert slots.path[0, :3].tolist() == [0, 1, 3]
    assert slots.history[0, :4].tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("rejected", [1, 2, 30, 63])
def test_nothing_below_a_rejected_draft_is_taken(rejected: int) -> None:
    slots = garbage_slots(1, 64, 80, 0)
    admit(slots, 0, [1], remaining=99)
    draws, tokens = torch.full((1, 64), 3), torch.full((1, 64), 3)
    tokens[0, rejected] = 2
    step = Round(draws.int().to(DEVICE), tokens.int().to(DEVICE), ints([[*range(-1, 63)]]), ints([64]))
    out, rows = step.walk(ints([0]), slots)
    assert (out.taken.item(), out.accepted.item(), rows.item()) == (rejected, rejected - 1, 0)
    assert slots.path[0, :rejected].tolist() == list(range(rejected))


def test_a_stop_token_ends_before_the_length_does() -> None:
    for stop, most, reason, taken in ((2, 2, STOP, 2), (2, 9, STOP, 2), (4, 2, LENGTH, 2), (3, 1, STOP, 1)):
        slots = garbage_slots(1, 4, 8, 2)
        admit(slots, 0, [1], remaining=most, stop_ids=[stop])
        step = Round(ints([[3, 2, 0, 1]]), ints([[1, 3, 2, 0]]), ints([[-1, 0, 1, 2]]), ints([4]))
        out, rows = step.walk(ints([0]), slots)
        assert (out.reason.item(), out.taken.item(), rows.item()) == (reason, taken, -1)
        assert out.accepted.item() == taken and slots.count.item() == taken


@full_size
@pytest.mark.parametrize("size", [16, 64])
def test_a_graph_replays_rounds(size: int) -> None:
    """Rounds of a captured graph, whose inputs change between replays, are those of plain launches."""
    batch = 64
    slots = garbage_slots(batch, size, 2000, 2)
    for slot in range(batch):
        admitted(slots, slot, slot)
        slots.remaining[slot] = 40 + slot
    plain, rows = copied(slots), torch.arange(batch, dtype=torch.int32, device=DEVICE)
    step, mine = make_round(batch, size, 0), rows.clone()
    out = Outcome(torch.empty(batch, size + 4, dtype=torch.int32, device=DEVICE))

    def launch() -> None:
        walk(step.draws, step.tokens, step.parent, step.num_nodes, mine, slots, out)

    spare = copied(slots)
    step.walk(rows, spare)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for turn in range(20):
        other = make_round(batch, size, turn, lost=0.02)
        for into, new in zip(vars(step).values(), vars(other).values(), strict=True):
            into.copy_(new)
        graph.replay()
        want, rows = other.walk(rows, plain)
        assert same_bits(out.packed, want.packed) and same_bits(mine, rows) and same_slots(slots, plain)
    assert (mine < 0).any()
