"""grow: equal to its definition in plain lists, whatever the table of log-probabilities."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings, strategies as st

import specla.drafters.grow as module
from specla.drafters.grow import Growth, grow
from specla.tree import Tree

PALETTES = [[-0.5, -1.0, -1.5], [-0.5, -1.0], [0.0, -0.5, -4.0], [0.0, -1.0, -math.inf], [-1.0]]
SMALL = settings(deadline=None, max_examples=300)


@dataclass
class Table:
    """Log-probabilities that depend on nothing but row and path; all sums of them are exact."""

    seed: int
    rows: list[int]
    vocab: int
    distinct: bool = False  # no two tokens alike after the same path
    dtype: torch.dtype = torch.float32
    calls: int = 0
    paths: list[list[tuple[int, ...]]] = field(default_factory=list)

    def follow(self, row: int, path: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{self.seed} {row} {path}")
        if self.distinct:
            return rng.sample([0.0, -math.inf, *(-n / 4 for n in range(1, 2 * self.vocab))], self.vocab)
        palette = rng.choice(PALETTES) if rng.random() > 0.05 else [-math.inf]
        return rng.choices(palette, k=self.vocab)

    def first(self) -> torch.Tensor:
        self.calls, self.paths = 0, [[()] for _ in self.rows]
        return torch.tensor([self.follow(row, ()) for row in self.rows], dtype=self.dtype)

    def advance(self, tokens: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
        assert tokens.dtype == beams.dtype == torch.int64
        assert tokens.shape == beams.shape
        self.calls += 1
        self.paths = [
            [paths[beam] + (token,) for token, beam in zip(*pair, strict=True)]
            for paths, *pair in zip(self.paths, tokens.tolist(), beams.tolist(), strict=True)
        ]
        rows = zip(self.rows, self.paths, strict=True)
        return torch.tensor([[self.follow(b, path) for path in paths] for b, paths in rows], dtype=self.dtype)

    def grow(self, limits: list[int], **options) -> Growth:
        return grow(self.first(), self.advance, limits=torch.tensor(limits), **options)


def by_definition(table: Table, row: int, limit: int, num_steps: int, topk: int, threshold: float | None):
    """Nodes (token, parent, score) of one row, the root first."""
    grown: list[tuple[float, int, int]] = []  # score, index of the parent, token
    leaves: list[float] = []
    live: list[tuple[int, float, tuple[int, ...]]] = [(-1, 0.0, ())]
    topk = min(topk, table.vocab)
    for depth in range(num_steps):
        new = []
        for parent, q, path in live:
            chances = table.follow(row, path)
            for token in sorted(range(table.vocab), key=lambda t: -chances[t])[:topk]:
                new.append((len(grown), q + chances[token], (*path, token)))
                grown.append((new[-1][1], parent, token))
        new.sort(key=lambda node: -node[1])
        live = new[:topk]
        leaves += [q for _, q, _ in (new if depth + 1 == num_steps else new[topk:])]
    floor = -math.inf if threshold is None else max(leaves) - threshold
    good = [i for i, (q, *_) in enumerate(grown) if q >= floor and q > -math.inf]
    kept = sorted(sorted(good, key=lambda i: -grown[i][0])[:limit])
    place = {-1: 0} | {i: n for n, i in enumerate(kept, 1)}
    return [(0, -1, 0.0)] + [(grown[i][2], place[grown[i][1]], grown[i][0]) for i in kept]


def nodes(growth: Growth, row: int) -> list[tuple[int, int, float]]:
    columns = (x[row, : growth.num_nodes[row]].tolist() for x in growth[:3])
    return list(zip(*columns, strict=True))


def paths(growth: Growth, row: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent, _ in nodes(growth, row):
        found.append(() if parent < 0 else (*found[parent], token))
    assert len(set(found)) == len(found)
    return set(found)


seeds, vocabs, topks, steps = st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 7), st.integers(1, 5)
thresholds = st.sampled_from([None, 0.0, 0.25, 0.5, 1.0, 2.0, math.inf])
rows_limits = st.lists(st.integers(0, 40) | st.integers(0, 4), min_size=1, max_size=4)


@SMALL
@given(seeds, vocabs, topks, steps, rows_limits, thresholds, st.booleans())
def test_equals_the_definition(seed, vocab, topk, num_steps, limits, threshold, on_host) -> None:
    # Off the host equal tokens rank as torch likes, and no growth stops early.
    table = Table(seed, list(range(len(limits))), vocab, distinct=not on_host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_on_host", lambda x: on_host)
        growth = table.grow(limits, num_steps=num_steps, topk=topk, prune_threshold=threshold)
    assert table.calls <= num_steps - 1 if on_host else table.calls == num_steps - 1
    for row, limit in enumerate(limits):
        assert nodes(growth, row) == by_definition(table, row, limit, num_steps, topk, threshold)

    size = int(growth.num_nodes.max())
    padding = torch.arange(size) >= growth.num_nodes[:, None]
    assert all(x.shape == (len(limits), size) for x in growth[:3])
    assert [x.dtype for x in growth] == [torch.int64, torch.int64, torch.float32, torch.int64]
    assert (growth.tokens[padding] == 0).all()
    assert (growth.parent[padding] == -1).all()
    assert (growth.scores[padding] == -math.inf).all()
    tree = Tree(growth.parent, growth.num_nodes)
    assert torch.equal(tree.parent.long(), growth.parent)
    assert int(tree.depth.max()) <= num_steps


@SMALL
@given(seeds, vocabs, topks, steps, rows_limits, thresholds)
def test_rows_do_not_see_each_other(seed, vocab, topk, num_steps, limits, threshold) -> None:
    options = {"num_steps": num_steps, "topk": topk, "prune_threshold": threshold}
    growth = Table(seed, list(range(len(limits))), vocab).grow(limits, **options)
    for row, limit in enumerate(limits):
        alone = Table(seed, [row], vocab).grow([limit], **options)
        assert nodes(growth, row) == nodes(alone, 0)


@SMALL
@given(seeds, vocabs, topks, steps, st.integers(0, 30), st.integers(0, 9), thresholds)
def test_more_room_never_drops_a_node(seed, vocab, topk, num_steps, limit, more, threshold) -> None:
    table = Table(seed, [0], vocab)
    small, large = (
        table.grow([n], num_steps=num_steps, topk=topk, prune_threshold=threshold)
        for n in (limit, limit + more)
    )
    assert paths(small, 0) <= paths(large, 0)
    assert int(small.num_nodes[0]) <= 1 + limit


@SMALL
@given(seeds, vocabs, topks, steps, st.integers(0, 30))
def test_a_threshold_keeps_what_is_near_the_best_leaf(seed, vocab, topk, num_steps, limit) -> None:
    table = Table(seed, [0], vocab)
    tight, loose, endless, without = (
        table.grow([limit], num_steps=num_steps, topk=topk, prune_threshold=threshold)
        for threshold in (0.0, 0.5, math.inf, None)
    )
    assert paths(tight, 0) <= paths(loose, 0) <= paths(without, 0)
    assert all(map(torch.equal, endless, without))


@SMALL
@given(seeds, st.integers(1, 40), steps, st.integers(0, 8))
def test_one_sibling_makes_a_chain(seed, vocab, num_steps, limit) -> None:
    table = Table(seed, [0], vocab)
    growth = table.grow([limit], num_steps=num_steps, topk=1)
    assert growth.parent.tolist() == [list(range(-1, int(growth.num_nodes[0]) - 1))]
    path: tuple[int, ...] = ()
    for token in growth.tokens[0, 1:].tolist():
        chances = table.follow(0, path)
        assert token == chances.index(max(chances))
        path += (token,)
    assert len(path) == min(limit, num_steps) or max(table.follow(0, path)) == -math.inf
    assert table.calls <= max(0, limit - 1)


@dataclass
class Script(Table):
    """Log-probabilities that depend on the depth alone."""

    chances: list[list[float]] = field(default_factory=list)

    def follow(self, row: int, path: tuple[int, ...]) -> list[float]:
        return self.chances[len(path)]


sure, flat, never = [0.0, -9.0, -9.0], [-1.0, -1.0, -1.0], [-math.inf] * 3


@pytest.mark.parametrize(
    ("chances", "limits", "options", "calls"),
    [
        ([flat] * 6, [0, 0], {"topk": 3}, 0),
        ([flat] * 6, [3, 1], {"topk": 3}, 0),  # ties go to what came first
        ([flat] * 6, [3, 4], {"topk": 3}, 1),  # one row that is not done is enough
        ([sure] * 6, [3], {"topk": 3}, 2),
        ([sure] * 6, [3], {"topk": 1}, 2),
        ([sure] * 6, [99], {"topk": 2}, 5),
        ([sure, never, sure, sure], [99], {"topk": 2}, 1),
        ([sure, never, sure, sure], [99], {"topk": 2, "prune_threshold": 1.0}, 1),
        ([flat, flat, [-3.0] * 3, flat], [99], {"topk": 2, "prune_threshold": 2.0}, 2),  # below the best leaf
        ([flat, flat, [-3.0] * 3, flat], [99], {"topk": 2, "prune_threshold": 3.0}, 3),  # not that far
    ],
)
def test_growth_stops_when_nothing_can_change(chances, limits, options, calls) -> None:
    table = Script(0, list(range(len(limits))), 3, chances=chances)
    growth = table.grow(limits, num_steps=len(chances), **options)
    assert table.calls == calls
    for row, limit in enumerate(limits):
        threshold = options.get("prune_threshold")
        assert nodes(growth, row) == by_definition(
            table, row, limit, len(chances), options["topk"], threshold
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype) -> None:
    options = {"num_steps": 3, "topk": 3, "prune_threshold": 2.0}
    wanted = Table(3, [0, 1], 6).grow([9, 5], **options)
    growth = Table(3, [0, 1], 6, dtype=dtype).grow([9, 5], **options)
    assert growth.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(wanted, growth, strict=True))


@pytest.mark.parametrize("topk", [1, 3])
def test_what_is_handed_in_stays_as_it_was(topk) -> None:
    first, after, limits = torch.randn(1, 8), torch.randn(1, topk, 8), torch.tensor([9])
    first, after = first.log_softmax(-1), after.log_softmax(-1).requires_grad_()
    copies = [x.detach().clone() for x in (first, after, limits)]
    grow(first, lambda tokens, beams: after, limits=limits, num_steps=3, topk=topk)
    assert all(map(torch.equal, (first, after, limits), copies))


@pytest.mark.parametrize(
    "wrong", [{"num_steps": 0}, {"topk": 0}, {"prune_threshold": -0.5}, {"prune_threshold": math.nan}]
)
def test_wrong_options(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Table(0, [0], 3).grow([4], **({"num_steps": 2, "topk": 2} | wrong))
