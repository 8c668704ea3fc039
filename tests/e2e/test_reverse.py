"""A trained target whose answer needs its memory: it reverses a string of digits, and one broken rollback spoils it.

`tests/data/train_reverse.py` made it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specla.drafters import DraftRow, NgramDrafter, Proposal
from specla.drafters.base import Draft, TokenDrafter, pack
from specla.engine.params import SamplingParams
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import load_target
from specla.state import StatePool
from tests.targets import Run, ScriptedDrafter, run

DIRECTORY = Path(__file__).parents[1] / "data" / "reverse"
SEPARATOR, END, VOCAB = 10, 11, 12
PARAMS = SamplingParams(max_tokens=12)


def digits(count: int, seed: int) -> list[list[int]]:
    """Strings of 5 to 9 digits of two to four kinds, so that what came just before does not name the place."""
    rng = random.Random(seed)
    kinds = [rng.sample(range(10), rng.randint(2, 4)) for _ in range(count)]
    return [[rng.choice(some) for _ in range(rng.randint(5, 9))] for some in kinds]


@cache
def target(dtype: str = "float32") -> GatedDeltaNet:
    return load_target(DIRECTORY, dtype=dtype)


def answers(texts: list[list[int]]) -> list[list[int]]:
    return [[*text[::-1], END] for text in texts]


def ask(
    drafter, texts: list[list[int]], dtype: str = "float32", mode: str = "hybrid", slots: int = 20
) -> Run:
    references = [[*text, SEPARATOR, *answer] for text, answer in zip(texts, answers(texts), strict=True)]
    prompts = [[*text, SEPARATOR] for text in texts]
    knows = hasattr(drafter, "references")
    return run(
        target(dtype),
        drafter,
        prompts,
        PARAMS,
        mode=mode,
        slots=slots,
        references=references if knows else None,
    )


@cache
def solved(count: int) -> list[list[int]]:
    """Strings that plain decoding reverses right."""
    texts = digits(count, seed=1)
    outputs = ask(None, texts).outputs
    return [text for text, output, want in zip(texts, outputs, answers(texts), strict=True) if output == want]


def test_plain_decoding_reverses_nearly_all() -> None:
    assert len(solved(200)) >= 190


class WrongDrafter(TokenDrafter):
    """Chains whose every token is wrong."""

    name = "wrong"

    def __init__(self, length: int):
        self.length, self.random = length, random.Random(5)
        self.references: dict[int, list[int]] = {}

    def propose(self, rows: Tokens[DraftRow]) -> Proposal:
        return pack([self._draft(row) for row in rows])

    def forget(self, key: int) -> None:
        pass

    def _draft(self, row: DraftRow) -> Draft:
        ahead = self.references[row.key][len(row.tokens) :]
        length = min(self.length, row.limit)
        wrong = [
            self.random.choice([t for t in range(10) if i >= len(ahead) or t != ahead[i]])
            for i in range(length)
        ]
        return Draft([row.tokens[-1], *wrong], list(range(-1, length)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("mode", ["serial", "hybrid", "parallel"])
def test_it_reverses_under_any_drafts(dtype: str, mode: str) -> None:
    texts = solved(200)[:40]
    want = answers(texts) if dtype != "bfloat16" else ask(None, texts, dtype).outputs
    for drafter in (WrongDrafter(4), ScriptedDrafter(1, 0.5, 0.1, VOCAB), NgramDrafter(6, 4, 2)):
        assert ask(drafter, texts, dtype, mode).outputs == want


@pytest.mark.parametrize("slots", [1, 3])
def test_it_reverses_in_few_slots(slots: int) -> None:
    texts = solved(200)[:15]
    assert ask(ScriptedDrafter(2, 0.6, 0.1, VOCAB), texts, slots=slots).outputs == answers(texts)


def spoiled(monkeypatch: pytest.MonkeyPatch, kind: str, only: int | None, drafter) -> float:
    """Share of wrong answers when a rollback is broken: in every round, or in round `only` of each text."""
    right, rounds = StatePool.accept, [0]

    def accept(self: StatePool, slots: list[int], path: Tensor, num_accepted: list[int]) -> None:
        count = torch.as_tensor(num_accepted)
        if only is None or rounds[0] == only:
            if kind == "rejected kept":
                path = torch.arange(path.shape[1]).expand_as(path)
                count = torch.full_like(count, path.shape[1] - 1)
            elif kind == "one too few":
                count = count - 1
            elif kind == "one too many":
                path = torch.where(path > 0, path, (path.amax(1, keepdim=True) + 1) % path.shape[1])
                path[:, 0], count = 0, (count + 1).clamp(max=path.shape[1] - 1)
        rounds[0] += 1
        right(self, slots, path, count.tolist())

    texts = solved(200)[:40]
    wrong = 0
    with monkeypatch.context() as patch:
        patch.setattr(StatePool, "accept", accept)
        if only is None:
            outputs = ask(drafter(), texts).outputs
            return sum(a != b for a, b in zip(outputs, answers(texts), strict=True)) / len(texts)
        for text in texts:
            rounds[0] = 0
            wrong += ask(drafter(), [text], slots=1).outputs != answers([text])
    return wrong / len(texts)


@pytest.mark.parametrize("kind", ["rejected kept", "one too few", "one too many"])
def test_a_rollback_that_is_always_broken_spoils_the_answers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spoiled(monkeypatch, kind, None, lambda: WrongDrafter(3)) > 0.95
    assert spoiled(monkeypatch, kind, None, lambda: ScriptedDrafter(1, 0.5, 0.1, VOCAB)) > 0.95


@pytest.mark.parametrize("kind", ["rejected kept", "one too few", "one too many"])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_single_broken_rollback_spoils_the_answer(
    kind: str, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spoiled(monkeypatch, kind, turn, lambda: WrongDrafter(3)) > 0.85


def test_the_control_without_a_fault_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spoiled(monkeypatch, "none", 1, lambda: WrongDrafter(3)) == 0
