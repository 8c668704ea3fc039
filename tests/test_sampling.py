"""Noise and logits processors: reproducible bits, the right law, and the definitions of every filter."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.sampling import Plan, Sampling, first_argmax, gumbel_noise, scores
from specla.tree import Tree


def noise(seed: int, position: int, vocab: int) -> Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab)[0]


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 31, 1000, 8192, 32001])
def test_noise_has_the_same_bits_in_any_batch(vocab) -> None:
    seeds = torch.tensor([3, -5, 2**62, 0, 3, 9, 1])
    positions = torch.tensor([0, 1, 2, 10**6, 0, 77, 5])
    whole = gumbel_noise(seeds, positions, vocab)
    assert whole.dtype == torch.float64 and whole.shape == (7, vocab)
    assert torch.equal(whole[0], whole[4])
    for rows in (1, 2, 3, 5):
        assert torch.equal(gumbel_noise(seeds[:rows], positions[:rows], vocab), whole[:rows])
    for row in range(7):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], vocab)[0], whole[row])
    shorter = gumbel_noise(seeds, positions, max(1, vocab - 3))
    assert torch.equal(shorter, whole[:, : shorter.shape[1]])


def test_noise_bits_do_not_depend_on_the_number_of_threads() -> None:
    seeds = torch.arange(16)
    whole, threads = gumbel_noise(seeds, seeds, 8191), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(gumbel_noise(seeds, seeds, 8191), whole)
    finally:
        torch.set_num_threads(threads)


def test_noise_is_pinned() -> None:
    """Another generator would change every seeded output of users: these numbers stay."""
    want = [-0.387209466445263, 0.1308534297671189, -0.8806336934791709, 0.3234050884941013]
    assert noise(1234, 56, 4).tolist() == pytest.approx(want, rel=1e-13)
    assert noise(-(2**63), 2**63 - 1, 100).isfinite().all()


def uniform_p(sample: Tensor) -> float:
    """Kolmogorov-Smirnov p-value of a sample of uniforms (asymptotic law)."""
    x, n = sample.flatten().sort().values, sample.numel()
    grid = torch.arange(n, dtype=torch.float64)
    distance = float(torch.maximum((grid + 1) / n - x, x - grid / n).max())
    t = (n**0.5 + 0.12 + 0.11 / n**0.5) * distance
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * t) ** 2) for k in range(1, 50))


def uniforms(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    return (-(-gumbel_noise(seeds, positions, vocab)).exp()).exp()


def test_noise_is_uniform_over_tokens_seeds_and_positions() -> None:
    zeros, count = torch.zeros(4000, dtype=torch.int64), torch.arange(4000)
    for sample in (
        uniforms(torch.tensor([0]), torch.tensor([0]), 20000),
        uniforms(count, zeros, 5),
        uniforms(zeros, count, 5),
        uniforms(count * 2**32, zeros, 5),
        uniforms(zeros, count * 1024, 5),
        uniforms(-count, count, 5),
    ):
        assert uniform_p(sample) > 1e-3
    assert uniform_p(uniforms(zeros, count, 5) ** 1.05) < 1e-3


def test_noise_of_neighbours_is_independent() -> None:
    """Sums of two neighbours modulo 1 are uniform if they are independent."""
    count, zeros = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    for grid in (uniforms(count, zeros, 512), uniforms(zeros, count, 512), uniforms(count, -count, 512)):
        for lag in (1, 2, 3, 8, 32):
            assert uniform_p((grid[lag:] + grid[:-lag]).frac()) > 1e-3
            assert uniform_p((grid[lag:] - grid[:-lag]).remainder(1)) > 1e-3
            assert uniform_p((grid[:, lag:] - grid[:, :-lag]).remainder(1)) > 1e-3
        correlation = torch.corrcoef(grid)
        assert (correlation - torch.eye(64)).abs().max() < 5.5 / 512**0.5
        assert len(grid.unique()) > grid.numel() - 8  # rows are not permutations of each other
    swapped = uniforms(torch.tensor([3, 4]), torch.tensor([4, 3]), 100)
    assert not torch.equal(swapped[0], swapped[1])


# Filters


def kept_by_definition(
    logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    weight = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    kept = order[:top_k] if top_k > 0 else order
    total, mass, inside = sum(weight[t] for t in kept), 0.0, []
    for token in kept:
        if top_p >= 1 or mass < top_p * total * (1 - 1e-12):
            inside.append(token)
        mass += weight[token]
    return {t for t in inside if weight[t] >= min_p * (1 - 1e-12)}


params_of_a_row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.1, 1.0, 4.0]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 7, 500]),
        "top_p": st.sampled_from([1.0, 0.999, 0.7, 0.3, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.05, 0.6, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "position": st.integers(0, 2**40),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.7, 0.5]),
    }
)


def batch_of(rows: list[dict], seen: Tensor | None = None) -> Sampling:
    return Sampling.of(len(rows), **{name: [row[name] for row in rows] for name in rows[0]}, seen=seen)


@given(st.lists(params_of_a_row, min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([2, 9, 40]))
def test_filters_keep_what_their_definitions_keep(rows, salt, vocab) -> None:
    rng = random.Random(salt)
    levels = rng.choice([2, 5, 10**6])
    values = [rng.randrange(levels) * 4.0 / levels for _ in range(len(rows) * 3 * vocab)]
    logits = torch.tensor(values).view(len(rows), 3, vocab)
    tree, tokens = Tree.chain(3, len(rows)), torch.zeros(len(rows), 3, dtype=torch.int64)
    for row in rows:
        row["repetition_penalty"] = 1.0
    got = scores(logits, tokens, tree, batch_of(rows))
    for row, params in enumerate(rows):
        for node in range(3):
            values = logits[row, node].tolist()
            if params["temperature"] == 0:
                assert int(got[row, node].argmax()) == values.index(max(values))
                continue
            asked = {name: float(torch.tensor(params[name])) for name in ("temperature", "top_p", "min_p")}
            want = kept_by_definition(values, top_k=params["top_k"], **asked)
            assert set(got[row, node].isfinite().nonzero().flatten().tolist()) == want
            gumbel = noise(params["seed"], params["position"] + node, vocab)
            temperature = torch.tensor(params["temperature"]).double()
            expected = logits[row, node].double() + temperature * gumbel
            kept = sorted(want)
            assert torch.equal(got[row, node, kept], expected[kept])


@given(st.lists(params_of_a_row, min_size=2, max_size=5), st.integers(0, 2**32), st.sampled_from([5, 37, 99]))
def test_scores_of_a_row_do_not_depend_on_its_batch(rows, salt, vocab) -> None:
    generator = torch.Generator().manual_seed(salt)
    size = 6
    rng = random.Random(salt)
    parents = [[-1] + [rng.randrange(i) for i in range(1, size)] for _ in rows]
    logits = (torch.randn(len(rows), size, vocab, generator=generator) * 3).half().float()  # half: some ties
    tokens = torch.randint(0, vocab, (len(rows), size), generator=generator)
    seen = torch.rand(len(rows), vocab, generator=generator) < 0.3
    together = first_argmax(scores(logits, tokens, Tree(torch.tensor(parents)), batch_of(rows, seen)))
    for row, params in enumerate(rows):
        one = slice(row, row + 1)
        tree, sampling = Tree(torch.tensor(parents[one])), batch_of([params], seen[one])
        alone = first_argmax(scores(logits[one], tokens[one], tree, sampling))
        assert torch.equal(alone[0], together[row])
        if params["temperature"] == 0 and params["repetition_penalty"] == 1:
            assert torch.equal(alone[0], first_argmax(logits[row]))


def test_ties_go_to_the_lowest_token() -> None:
    logits, tokens = torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.int64)
    for top_k, top_p, count in ((3, 1.0, 3), (-1, 0.5, 4), (-1, 0.51, 5), (4, 0.5, 2)):
        sampling = Sampling.of(1, temperature=1.0, top_k=top_k, top_p=top_p)
        got = scores(logits, tokens, Tree.chain(1), sampling)
        assert got[0, 0].isfinite().tolist() == [True] * count + [False] * (8 - count)


def test_what_is_off_drops_nothing_however_unlikely() -> None:
    """Token 2 is too rare for the fixed-point weights; only a filter that is on may drop it."""
    logits, tokens = torch.tensor([[[0.0, 50.0, -50.0, 49.0]]]), torch.zeros(2, 1, dtype=torch.int64)
    rows = [{"top_k": 3, "top_p": 1.0}, {"top_k": -1, "top_p": 1.0}, {"top_k": 3, "top_p": 0.999}]
    for row, want in zip(rows, ([1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]), strict=True):
        sampling = Sampling.of(2, temperature=1.0, **{name: [value, 1] for name, value in row.items()})
        got = scores(logits.expand(2, 1, 4), tokens, Tree.chain(1, 2), sampling)
        assert got[0, 0].isfinite().tolist() == [bool(x) for x in want]


@given(st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_repetition_penalty_sees_each_nodes_own_path(salt, temperature) -> None:
    rng = random.Random(salt)
    vocab, size, rows = 9, rng.choice([1, 4, 7]), 2
    parents, counts = [], []
    for _ in range(rows):
        counts.append(rng.randint(1, size))
        parents.append([-1] + [rng.randrange(i) if i < counts[-1] else -1 for i in range(1, size)])
    tokens = torch.tensor([[rng.randrange(vocab) for _ in range(size)] for _ in range(rows)])
    for b in range(rows):
        tokens[b, counts[b] :] = 10**6
    logits = torch.tensor([rng.gauss(0, 2) for _ in range(rows * size * vocab)]).view(rows, size, vocab)
    history = [{rng.randrange(vocab) for _ in range(2)} for b in range(rows)]  # the root may be missing
    seen = torch.tensor([[t in history[b] for t in range(vocab)] for b in range(rows)])
    before = seen.clone()
    penalty = [1.3, 0.6]
    sampling = Sampling.of(rows, temperature=temperature, repetition_penalty=penalty, seed=salt, seen=seen)
    got = scores(logits, tokens, Tree(torch.tensor(parents), counts), sampling)
    assert torch.equal(seen, before)
    for b in range(rows):
        for i in range(counts[b]):
            own, at, depth = set(history[b]), i, 0
            while at >= 0:
                own.add(int(tokens[b, at]))
                at, depth = parents[b][at], depth + (at > 0)
            factor = torch.tensor(penalty[b])
            row = logits[b, i]
            want = [(x / factor if x > 0 else x * factor) if t in own else x for t, x in enumerate(row)]
            expected = torch.stack(want).double() + temperature * noise(salt, depth, vocab)
            assert torch.equal(got[b, i].double(), expected)


def test_plan_says_which_steps_run() -> None:
    assert Sampling.of(2).plan == Plan(noise=False, penalty=False, ranks=0, min_p=False)
    cold = Sampling.of(2, top_k=5, top_p=0.4, min_p=0.1)
    assert cold.plan == Plan(noise=False, penalty=False, ranks=0, min_p=False)
    assert Sampling.of(2, temperature=[0, 1], top_k=[-1, 5]).plan.ranks == 5
    assert Sampling.of(2, temperature=1.0, top_k=[3, 5], top_p=0.5).plan.ranks == 5
    assert Sampling.of(2, temperature=1.0, top_k=[-1, 5], top_p=0.5).plan.ranks == -1
    assert Sampling.of(2, temperature=1.0, min_p=[0, 0.1]).plan.min_p
    assert Sampling.of(2, repetition_penalty=1.1).plan == Plan(False, True, 0, False)


def test_noise_is_computed_once_a_depth_and_not_for_greedy_rows(monkeypatch) -> None:
    import specla.sampling as module

    rows: list[int] = []
    monkeypatch.setattr(module, "gumbel_noise", lambda s, p, v: rows.append(len(s)) or gumbel_noise(s, p, v))
    tree, tokens = Tree([-1, 0, 0, 0, 1, 1, 2]), torch.zeros(1, 7, dtype=torch.int64)
    scores(torch.zeros(1, 7, 5), tokens, tree, Sampling.of(1, temperature=1.0))
    assert rows == [3]
    scores(torch.zeros(1, 7, 5), tokens, tree, Sampling.of(1, temperature=0.0))
    assert rows == [3]


def test_at_moves_on_and_keeps_the_rest() -> None:
    first = Sampling.of(2, temperature=1.0, seed=[4, 5], position=7)
    later = first.at(first.position + 3)
    assert later.position.tolist() == [10, 10]
    assert later.seed is first.seed and later.plan is first.plan


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
    ],
)
def test_parameters_out_of_range_are_named(bad) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} of row 0 .* allowed"):
        Sampling.of(2, **bad)


def test_one_value_or_one_for_each_row() -> None:
    with pytest.raises(ValueError, match="top_p needs one value or 3"):
        Sampling.of(3, top_p=[0.5, 0.5])
    assert Sampling.of(0).plan.ranks == 0
