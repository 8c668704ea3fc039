"""Laws of the draw: the tokens are those of `specla.sampling`, whatever lies beside them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.accept import Sampling, accept
from specla.ops.triton.counters import counters
from specla.resident.draw import BV, draw
from specla.resident.slots import Slots
from specla.sampling import first_argmax, scores
from specla.tree import Tree
from tests.ops.strategies import SHAPES, random_parent, same_bits, tree_of
from tests.ops.triton import DEVICE, full_size
from tests.resident import GARBAGE, garbage_slots, ints

SLOTS = 6


@dataclass
class Case:
    """Rows of trees with the slots they belong to, and logits with NaN wherever nobody may look."""

    logits: Tensor
    tree: Tree
    rows: Tensor
    slots: Slots
    sampling: Sampling  # of the rows, for the twin; padding rows as if they were cold

    @property
    def real(self) -> Tensor:
        return self.tree.valid & (self.rows >= 0)[:, None]

    def drawn(self, noisy: bool, order: Tensor | slice = slice(None)) -> Tensor:
        depth, num_nodes, rows = self.tree.depth[order], self.tree.num_nodes[order], self.rows[order]
        out = torch.full_like(depth, GARBAGE)
        draw(self.logits[order], depth, num_nodes, rows, self.slots, noisy=noisy, out=out)
        return out


def make_case(batch: int, size: int, vocab: int, seed: int, heats: list[float], levels: int) -> Case:
    rng = torch.Generator().manual_seed(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=rng))

    parents = [random_parent(SHAPES[below(len(SHAPES))], 1 + below(size), rng) for _ in range(batch)]
    tree = tree_of(parents, size).to(DEVICE)
    rows = torch.randperm(SLOTS, generator=rng)[:batch].int()
    rows[torch.rand(batch, generator=rng) < 0.2] = -1
    heat = torch.tensor([heats[below(len(heats))] for _ in range(SLOTS)])
    place = torch.tensor([[0, 2**31 - 2, 2**33, 2**62][below(4)] + below(100) for _ in range(SLOTS)])
    seeds = torch.randint(-(2**63), 2**63 - 1, (SLOTS,), generator=rng)
    slots = garbage_slots(SLOTS, size, 8, 1)
    for field, value in ((slots.temperature, heat), (slots.position, place), (slots.seed, seeds)):
        field.copy_(value)

    wide = torch.randn(batch, size + 1, vocab + 3, generator=rng)
    if levels:
        wide = (wide * levels).round()  # many equals
    wide[torch.rand(wide.shape, generator=rng) < 0.1] = -torch.inf
    logits = wide.to(DEVICE)[:, 1:, 2 : 2 + vocab]
    logits[..., vocab // 2] = 0.0
    rows = rows.to(DEVICE)
    logits[~(tree.valid & (rows >= 0)[:, None])] = torch.nan
    own = rows.tolist()
    sampling = Sampling.of(
        batch,
        temperature=[float(heat[slot]) if slot >= 0 else 0.0 for slot in own],
        seed=seeds[own].tolist(),
        position=place[own].tolist(),
        device=DEVICE,
    )
    return Case(logits, tree, rows, slots, sampling)


@st.composite
def cases(draw: st.DrawFn, heats: tuple[float, ...] = (0.0, 0.3, 1.0, 1e-30, 50.0)) -> Case:
    return make_case(
        draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 100, BV, BV + 1, 3 * BV - 5])),
        draw(st.integers(0, 2**31)), list(heats), draw(st.sampled_from([0, 0, 1, 3])),
    )  # fmt: skip


def wanted(case: Case) -> Tensor:
    """What the twin draws; 0 where there is nothing to draw."""
    tokens = torch.zeros(case.tree.batch, case.tree.size, dtype=torch.int64, device=DEVICE)
    draws = first_argmax(scores(case.logits, tokens, case.tree, case.sampling))
    return torch.where(case.real, draws, 0).int()


@given(cases())
def test_draws_are_the_argmax_of_the_scores(case: Case) -> None:
    assert same_bits(case.drawn(noisy=True), wanted(case))


@given(cases(heats=(0.0,)))
def test_cold_rows_need_no_noise(case: Case) -> None:
    got = case.drawn(noisy=False)
    assert same_bits(got, wanted(case)) and same_bits(got, case.drawn(noisy=True))


@given(cases(), st.randoms(use_true_random=False))
def test_a_row_does_not_notice_its_neighbours(case: Case, random) -> None:
    whole = case.drawn(noisy=True)
    order = random.sample(range(case.tree.batch), random.randint(1, case.tree.batch))
    assert same_bits(case.drawn(noisy=True, order=ints(order)), whole[order])
    assert not counters(1, case.logits.device).any()


@given(cases(), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.booleans(), st.integers(0, 2**31))
def test_logits_that_are_not_finite_are_told_apart(case: Case, poison: float, noisy: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    hit = (torch.rand(case.real.shape, generator=rng) < 0.3).to(DEVICE) & case.real
    at = torch.randint(case.logits.shape[2], (1,), generator=rng).item()
    for b, n in hit.nonzero().tolist():
        case.logits[b, n, at if poison != -torch.inf else slice(None)] = poison
    if not noisy:
        case.sampling.temperature.zero_()
    got = case.drawn(noisy=noisy)
    assert torch.equal(got == -1, hit)
    want = wanted(case)
    assert torch.equal(got[~hit], want[~hit])
    tokens = torch.zeros_like(want, dtype=torch.int64)
    _, num_accepted, _ = accept(case.logits, tokens, case.tree, case.sampling, check=False)
    owned = case.rows >= 0
    assert torch.equal((num_accepted == -1)[owned], hit.any(1)[owned])


def test_of_equals_the_first_wins_across_blocks() -> None:
    case = make_case(1, 1, 3 * BV, 0, [0.0], 0)
    case.rows.fill_(0)
    for places in ([BV - 1, BV], [3 * BV - 1, 2 * BV], [2 * BV, BV + 7, BV + 8]):
        case.logits.zero_()
        case.logits[0, 0, places] = 1.0
        for noisy in (False, True):
            assert case.drawn(noisy).item() == min(places)
    case.logits[0, 0] = -0.0
    case.logits[0, 0, BV] = 0.0
    assert case.drawn(noisy=False).item() == 0


@full_size
@pytest.mark.parametrize("vocab", [32000, 1 << 18])
@pytest.mark.parametrize("heats", [[0.0], [0.0, 0.7, 1.0]])
def test_at_the_size_of_models(vocab: int, heats: list[float]) -> None:
    for seed in range(8):
        case = make_case(SLOTS, 64 if vocab == 32000 else 16, vocab, seed, heats, 2 * (seed % 2))
        assert same_bits(case.drawn(noisy=len(heats) > 1), wanted(case))
