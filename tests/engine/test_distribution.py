"""Speculative sampling draws from the target's distribution: chi-square of the engine's tokens, with a control."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence as Tokens
from functools import cache

import torch

from specla.drafters import Drafter, DraftRow, NoDrafter, Proposal
from specla.drafters.base import Draft, TokenDrafter, pack
from specla.engine import loop
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.tree import Tree
from tests.targets import build_target, make_config, take

VOCAB, STEPS, TEXTS = 3, 3, 3000
PROMPT = [1]


@cache
def target() -> GatedDeltaNet:
    return build_target(make_config("plain", vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.25))


class AlwaysOne(TokenDrafter):
    """Drafts 1, 1 and beside it 2: right by chance only, and far from the target's own distribution."""

    name = "one"

    def propose(self, rows: Tokens[DraftRow]) -> Proposal:
        drafts = []
        for row in rows:
            size = 1 + min(row.limit, 2)
            drafts.append(Draft([row.tokens[-1], 1, 1, 2][: size + 1], [-1, 0, 1, 0][: size + 1]))
        return pack(drafts)

    def forget(self, key: int) -> None:
        pass


@cache
def expected() -> dict[tuple[int, ...], float]:
    """Probability of every text of STEPS tokens, from the target's own logits."""
    texts = list(itertools.product(range(VOCAB), repeat=STEPS))
    pool = target().new_pool(1, 8)
    chances = {}
    for text in texts:
        row = torch.tensor([[*PROMPT, *text[:-1]]])
        logits = target().verify(row, Tree.chain(STEPS), [0], pool)[0].double().log_softmax(-1)
        take(pool, [0], [[]])
        chances[text] = math.exp(sum(float(logits[i, token]) for i, token in enumerate(text)))
    assert abs(sum(chances.values()) - 1) < 1e-9
    return chances


def sample(drafter: Drafter, temperature: float = 1.0) -> list[tuple[int, ...]]:
    engine = Engine(target(), drafter, SpeculativeConfig(num_speculative_tokens=3), max_num_seqs=60)
    sequences = [
        engine.add(PROMPT, SamplingParams(temperature=temperature, seed=seed, max_tokens=STEPS))
        for seed in range(TEXTS)
    ]
    while engine.has_work:
        engine.step()
    return [tuple(s.output) for s in sequences]


def chi_square(texts: list[tuple[int, ...]]) -> float:
    """In standard deviations above its mean, rare texts pooled."""
    counts, total = Counter(texts), len(texts)
    rare = [text for text, p in expected().items() if p * total < 5]
    cells = [(counts[text], p * total) for text, p in expected().items() if p * total >= 5]
    if rare:
        cells.append((sum(counts[t] for t in rare), sum(expected()[t] for t in rare) * total))
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    freedom = len(cells) - 1
    assert freedom >= 15
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_speculative_sampling_draws_from_the_targets_distribution() -> None:
    drafted = sample(AlwaysOne())
    assert chi_square(drafted) < 4
    assert drafted == sample(NoDrafter())  # seed for seed, it even draws the same


def test_chi_square_tells_a_wrong_temperature() -> None:
    assert chi_square(sample(AlwaysOne(), temperature=0.8)) > 8


def test_chi_square_tells_a_draft_taken_without_asking_the_target(monkeypatch) -> None:
    """Control: a sampler that takes every fifth first draft on trust is far off."""
    right, seen = loop.accept, itertools.count()

    def gullible(logits, tokens, tree, sampling=None, **rest):
        logits = logits.clone()
        if tokens.shape[1] > 1:
            for row in range(len(tokens)):
                if next(seen) % 5 == 0:
                    logits[row, 0, 1] += 100
        return right(logits, tokens, tree, sampling, **rest)

    monkeypatch.setattr(loop, "accept", gullible)
    assert chi_square(sample(AlwaysOne())) > 8
