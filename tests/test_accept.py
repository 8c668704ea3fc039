"""accept(): the path is the obvious walk, and sampling through trees changes neither law nor tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.accept import Sampling, accept
from specla.tree import Tree


def obvious_walk(draws: list[int], tokens: list[int], parent: list[int], count: int) -> tuple[list[int], int]:
    path = [0]
    while True:
        below = [i for i in range(1, count) if parent[i] == path[-1] and tokens[i] == draws[path[-1]]]
        if not below:
            return path, draws[path[-1]]
        path.append(min(below))


@st.composite
def batches(draw, max_rows: int = 4, max_nodes: int = 12, vocab: int = 4):
    """(logits with ties, tokens with duplicate siblings, ragged tree), NaN and foreign tokens on padding."""
    rows, size = draw(st.integers(1, max_rows)), draw(st.integers(1, max_nodes))
    rng = random.Random(draw(st.integers(0, 2**32)))
    logits, tokens = torch.empty(rows, size, vocab), torch.empty(rows, size, dtype=torch.int64)
    parents, counts = [], []
    for row in range(rows):
        count = rng.randint(1, size)
        reach = rng.choice([1, 2, size])
        parent = [-1] + [rng.randint(max(0, i - reach), i - 1) for i in range(1, count)]
        levels = rng.choice([2, 1000])
        logits[row] = torch.tensor(
            [[float(rng.randrange(levels)) for _ in range(vocab)] for _ in range(size)]
        )
        tokens[row] = torch.tensor([rng.randrange(vocab) for _ in range(size)])
        for i in range(1, count):
            if rng.random() < 0.7:  # most drafts are what the target wants
                tokens[row, i] = int(logits[row, parent[i]].argmax())
        logits[row, count:] = float("nan")
        tokens[row, count:] = rng.choice([-1, 10**9, 0])
        parents.append(parent + [-1] * (size - count))
        counts.append(count)
    return logits, tokens, Tree(torch.tensor(parents), torch.tensor(counts))


@given(batches())
def test_greedy_equals_the_obvious_walk(batch) -> None:
    logits, tokens, tree = batch
    path, num_accepted, bonus = accept(logits, tokens, tree)
    assert (path.dtype, num_accepted.dtype, bonus.dtype) == (torch.int32, torch.int32, torch.int64)
    assert path.shape == tokens.shape
    for row in range(tree.batch):
        values = logits[row].tolist()
        draws = [max(range(len(v)), key=lambda j, v=v: (v[j], -j)) for v in values]
        parent, count = tree.parent[row].tolist(), int(tree.num_nodes[row])
        want, want_bonus = obvious_walk(draws, tokens[row].tolist(), parent, count)
        assert path[row].tolist() == want + [-1] * (tree.size - len(want))
        assert int(num_accepted[row]) == len(want) - 1
        assert int(bonus[row]) == want_bonus


@given(batches(), st.integers(0, 2**62), st.sampled_from([0.0, 0.3, 5.0]))
def test_the_path_is_an_ascending_ancestor_chain(batch, seed, temperature) -> None:
    logits, tokens, tree = batch
    sampling = Sampling.of(tree.batch, temperature=temperature, seed=seed, top_p=0.9)
    path, num_accepted, bonus = accept(logits, tokens, tree, sampling)
    for row in range(tree.batch):
        ids = path[row].tolist()
        length = int(num_accepted[row]) + 1
        assert length >= 1
        assert ids[0] == 0
        assert ids[length:] == [-1] * (tree.size - length)
        assert ids[:length] == sorted(set(ids[:length]))
        assert all(int(tree.parent[row, b]) == a for a, b in pairwise(ids[:length]))
        assert ids[length - 1] < int(tree.num_nodes[row])
        assert 0 <= int(bonus[row]) < logits.shape[2]


@given(batches(), st.integers(0, 2**62))
def test_padding_nodes_never_matter(batch, seed) -> None:
    logits, tokens, tree = batch
    other, foreign = logits.clone(), tokens.clone()
    padding = ~tree.valid
    other[padding] = torch.randn(int(padding.sum()), logits.shape[2])
    foreign[padding] = 1
    seen = torch.zeros(tree.batch, logits.shape[2], dtype=torch.bool)
    params = {"temperature": 1.0, "top_p": 0.8, "min_p": 0.1, "seed": seed}
    hot = [Sampling.of(tree.batch, **params, top_k=k) for k in (-1, 1, 2, 3)]
    wary = Sampling.of(tree.batch, temperature=0.7, repetition_penalty=1.5, seed=seed, seen=seen)
    for sampling in (None, *hot, wary):
        got, want = accept(logits, tokens, tree, sampling), accept(other, foreign, tree, sampling)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_bad_logits_on_real_nodes_raise(poison, temperature) -> None:
    tree = Tree([[-1, 0, 1], [-1, 0, -1]])
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    params = {"top_k": 2, "top_p": 0.5, "min_p": 0.1}
    sampling = None if temperature is None else Sampling.of(2, temperature=temperature, **params)
    logits = torch.zeros(2, 3, 5)
    logits[1, 2] = poison
    accept(logits, tokens, tree, sampling)
    logits[1, 1, slice(None) if poison == -float("inf") else 3] = poison
    with pytest.raises(FloatingPointError, match="row 1, node 1"):
        accept(logits, tokens, tree, sampling)
    path, num_accepted, bonus = accept(logits, tokens, tree, sampling, check=False)
    assert num_accepted.tolist()[1] == bonus.tolist()[1] == -1
    assert path[1].tolist() == [-1] * 3
    assert num_accepted[0] >= 0 and path[0, 0] == 0


def test_some_tokens_may_be_forbidden() -> None:
    logits = torch.full((1, 1, 5), -float("inf"))
    logits[0, 0, 3] = -2.0
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    hot, narrow = Sampling.of(1, temperature=1.0), Sampling.of(1, temperature=2.0, top_k=4, top_p=0.5)
    for sampling in (None, hot, narrow):
        assert accept(logits, tokens, Tree.chain(1), sampling)[2].tolist() == [3]


def test_misfits_are_named() -> None:
    tree = Tree.chain(3, 2)
    logits, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="must fit the tree"):
        accept(logits[:, :2], tokens, tree)
    with pytest.raises(ValueError, match="must fit the tree"):
        accept(logits, tokens[:1], tree)
    with pytest.raises(ValueError, match="2 rows"):
        accept(logits, tokens, tree, Sampling.of(3))
    with pytest.raises(ValueError, match="needs `seen`"):
        accept(logits, tokens, tree, Sampling.of(2, repetition_penalty=1.1))


# The same seed, the same tokens: speculation against one token at a time.

VOCAB = 12


def target(prefix: list[int]) -> list[float]:
    """A target without a model: logits that depend on the whole prefix."""
    rng = random.Random(str(prefix))
    return [rng.gauss(0, 1.5) for _ in range(VOCAB)]


def settings_for(rng: random.Random, rows: int) -> dict:
    return {
        "temperature": [rng.choice([0.0, 0.4, 1.0, 3.0]) for _ in range(rows)],
        "top_k": [rng.choice([-1, 1, 4]) for _ in range(rows)],
        "top_p": [rng.choice([1.0, 0.6, 0.95]) for _ in range(rows)],
        "min_p": [rng.choice([0.0, 0.2]) for _ in range(rows)],
        "repetition_penalty": [rng.choice([1.0, 1.3, 0.8]) for _ in range(rows)],
        "seed": [rng.randrange(-(2**63), 2**63) for _ in range(rows)],
    }


def seen_in(prefixes: list[list[int]]) -> Tensor:
    seen = torch.zeros(len(prefixes), VOCAB, dtype=torch.bool)
    for row, prefix in enumerate(prefixes):
        seen[row, prefix] = True
    return seen


def plain(prefix: list[int], params: dict, length: int) -> list[int]:
    """One row, one token at a time."""
    prefix, start = list(prefix), len(prefix)
    while len(prefix) < start + length:
        logits = torch.tensor([[target(prefix)]])
        sampling = Sampling.of(1, **params, position=len(prefix), seen=seen_in([prefix]))
        prefix += accept(logits, torch.tensor([[prefix[-1]]]), Tree.chain(1), sampling)[2].tolist()
    return prefix[start:]


@given(st.integers(0, 2**32))
def test_speculation_gives_the_tokens_of_plain_sampling(salt) -> None:
    rng = random.Random(salt)
    rows, size, length = rng.randint(1, 4), rng.randint(1, 9), 10
    params = settings_for(rng, rows)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(rows)]
    starts = [len(prefix) for prefix in prefixes]
    alone = [{name: value[row] for name, value in params.items()} for row in range(rows)]
    want = [plain(prefixes[row], alone[row], length) for row in range(rows)]
    rounds = 0
    while any(len(prefix) < start + length for prefix, start in zip(prefixes, starts, strict=True)):
        parents: list[list[int]] = []
        tokens, logits = torch.zeros(rows, size, dtype=torch.int64), torch.zeros(rows, size, VOCAB)
        for row, prefix in enumerate(prefixes):
            count = rng.randint(1, size)
            inner = [rng.randint(max(0, i - 3), i - 1) for i in range(1, count)]
            parents.append([-1, *inner, *[-1] * (size - count)])
            paths = [list(prefix)]
            for i in range(1, count):
                above = paths[parents[-1][i]]
                depth = len(above) - starts[row]
                good = above[starts[row] :] == want[row][:depth] and depth < length and rng.random() < 0.6
                paths.append([*above, want[row][depth] if good else rng.randrange(VOCAB)])
            for i, prefix_of_node in enumerate(paths):
                tokens[row, i] = prefix_of_node[-1]
                logits[row, i] = torch.tensor(target(prefix_of_node))
        position = [len(prefix) for prefix in prefixes]
        sampling = Sampling.of(rows, **params, position=position, seen=seen_in(prefixes))
        path, num_accepted, bonus = accept(logits, tokens, Tree(torch.tensor(parents)), sampling)
        for row, prefix in enumerate(prefixes):
            accepted = path[row, 1 : 1 + int(num_accepted[row])].long()
            prefix += [*tokens[row, accepted].tolist(), int(bonus[row])]
        rounds += 1
        assert rounds <= length
    for row, prefix in enumerate(prefixes):
        assert prefix[starts[row] : starts[row] + length] == want[row]


# The law of what comes out: chi-square against the exact distribution.

STATES = 5
# logits after each token
TABLE = torch.randn(STATES, STATES, generator=torch.Generator().manual_seed(3)) * 1.5
PARENT = [-1, 0, 0, 1, 1, 2, 3, 3]
ROWS, LENGTH = 6000, 3

Accepted = tuple[Tensor, Tensor, Tensor]
Acceptance = Callable[[Tensor, Tensor, Tree, Sampling], Accepted]


def exact(temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Transition probabilities [STATES, STATES] by the definition of each filter."""
    out = torch.zeros(STATES, STATES, dtype=torch.float64)
    for state in range(STATES):
        probs = (TABLE[state].double() / temperature).softmax(-1)
        order = probs.argsort(descending=True).tolist()
        kept = order[:top_k] if top_k > 0 else order
        mass, inside = float(probs[kept].sum()), []
        for token in kept:
            if sum(float(probs[t]) for t in inside) / mass < top_p or top_p >= 1:
                inside.append(token)
        inside = [t for t in inside if probs[t] >= min_p * probs[inside[0]]]
        out[state, inside] = probs[inside] / probs[inside].sum()
    return out


def drafts(last: Tensor, generator: torch.Generator) -> Tensor:
    """Likely and random tokens along PARENT for each row, drawn without the sampler's noise."""
    tokens = torch.zeros(len(last), len(PARENT), dtype=torch.int64)
    tokens[:, 0] = last
    for i in range(1, len(PARENT)):
        above = TABLE[tokens[:, PARENT[i]]]
        guess = above.topk(2).indices[:, i % 2]
        wild = torch.randint(0, STATES, (len(last),), generator=generator)
        tokens[:, i] = torch.where(torch.rand(len(last), generator=generator) < 0.7, guess, wild)
    return tokens


def emitted(acceptance: Acceptance, params: dict) -> Tensor:
    """The first LENGTH tokens after token 0, [ROWS, LENGTH], by rounds of speculation."""
    generator = torch.Generator().manual_seed(11)
    tree = Tree(torch.tensor(PARENT).expand(ROWS, len(PARENT)))
    out = torch.zeros(ROWS, LENGTH + len(PARENT), dtype=torch.int64)
    length = torch.zeros(ROWS, dtype=torch.int64)
    rows = torch.arange(ROWS)
    sampling = Sampling.of(ROWS, **params, seed=list(range(ROWS)))
    while int(length.min()) < LENGTH:
        last = torch.where(length > 0, out[rows, (length - 1).clamp(min=0)], 0)
        tokens = drafts(last, generator)
        path, num_accepted, bonus = acceptance(TABLE[tokens], tokens, tree, sampling.at(length + 1))
        for step in range(1, 5):
            live = (num_accepted >= step) & (length + step <= LENGTH)
            out[rows[live], length[live] + step - 1] = tokens[rows[live], path[live, step].long()]
        end = (length + num_accepted).clamp(max=LENGTH)
        out[rows, end] = torch.where(length + num_accepted < LENGTH, bonus, out[rows, end])
        length = (end + 1).clamp(max=LENGTH)
    return out[:, :LENGTH]


def chi_square_p(sample: Tensor, step: Tensor) -> float:
    """p-value of the joint law of the sampled sequences; rare cells pooled, an impossible one gives 0."""
    expected = step[0][:, None, None] * step[:, :, None] * step[None]
    expected = (expected * len(sample)).reshape(-1)
    cell = (sample[:, 0] * STATES + sample[:, 1]) * STATES + sample[:, 2]
    seen = torch.bincount(cell, minlength=STATES**3).double()
    if bool((seen[expected == 0] > 0).any()):
        return 0.0
    rare = expected < 8
    pairs = [(seen[~rare], expected[~rare]), (seen[rare].sum()[None], expected[rare].sum()[None])]
    got, want = (torch.cat(column) for column in zip(*pairs, strict=True))
    got, want = got[want > 0], want[want > 0]
    statistic = ((got - want) ** 2 / want).sum()
    half_freedom = torch.tensor((len(got) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def agreeable(logits: Tensor, tokens: Tensor, tree: Tree, sampling: Sampling) -> Accepted:
    """WRONG: drafts are checked against the argmax, only the bonus is sampled."""
    path, num_accepted, _ = accept(logits, tokens, tree)
    rows = torch.arange(tree.batch)
    end = path[rows, num_accepted.long()].long()
    at_end = sampling.at(sampling.position + num_accepted)
    bonus = accept(logits[rows, end][:, None], tokens[:, :1], Tree.chain(1, tree.batch), at_end)[2]
    return path, num_accepted, bonus


def stuck(logits: Tensor, tokens: Tensor, tree: Tree, sampling: Sampling) -> Accepted:
    """WRONG: the noise of one position for all."""
    return accept(logits, tokens, tree, sampling.at(torch.zeros_like(sampling.position)))


def stubborn(logits: Tensor, tokens: Tensor, tree: Tree, sampling: Sampling) -> Accepted:
    """WRONG: the bonus is drawn afresh from the full distribution after the children were rejected."""
    path, num_accepted, _ = accept(logits, tokens, tree, sampling)
    rows = torch.arange(tree.batch)
    end = path[rows, num_accepted.long()].long()
    fresh = sampling.at(sampling.position + num_accepted + 1000)
    bonus = accept(logits[rows, end][:, None], tokens[:, :1], Tree.chain(1, tree.batch), fresh)[2]
    return path, num_accepted, bonus


LAWS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.25},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("params", LAWS, ids=str)
def test_speculation_keeps_the_target_distribution(params) -> None:
    assert chi_square_p(emitted(accept, params), exact(**params)) > 1e-3


@pytest.mark.parametrize("params", LAWS, ids=str)
@pytest.mark.parametrize("wrong", [agreeable, stuck, stubborn])
def test_wrong_acceptance_fails_the_same_chi_square(wrong, params) -> None:
    assert chi_square_p(emitted(wrong, params), exact(**params)) < 1e-9


def test_another_temperature_fails_the_same_chi_square() -> None:
    assert chi_square_p(emitted(accept, {"temperature": 1.2}), exact(temperature=1.0)) < 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_agrees_and_never_looks_at_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 5, 6], [-1, 0, 1, 2, 3, -1, -1, -1]])
    logits, tokens = torch.randn(2, 8, 1000, generator=generator), torch.zeros(2, 8, dtype=torch.int64)
    params = {"temperature": [0.0, 1.0], "top_k": [-1, 20], "top_p": 0.9, "min_p": 0.01}
    params["repetition_penalty"] = 1.1
    seen = torch.rand(2, 1000, generator=generator) < 0.3
    tree = Tree(parents.cuda())
    for prop in ("parent", "depth", "valid", "ancestors"):
        getattr(tree, prop)
    device = [x.cuda() for x in (logits, tokens, seen)]
    sampling = Sampling.of(2, **params, seen=device[2], device="cuda")
    accept(*device[:2], tree, sampling, check=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = accept(*device[:2], tree, sampling, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = accept(logits, tokens, Tree(parents), Sampling.of(2, **params, seen=seen))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
