"""Prompts that wait are read together, to the same texts; what spoils a bucket ends those on it alone."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import pytest
import torch
from torch import Tensor

import specla.resident.rounds as rounds
from specla.engine.params import SamplingParams
from specla.engine.reading import GRID_GPU
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import Sequence
from specla.resident.prompt import LENGTHS
from tests.engine.residents import Request, going_on, head, make, read_trees
from tests.ops.triton import DEVICE
from tests.targets import prompt

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="reads buckets by a target that hashes")

ASKED = [prompt(n, n) for n in (4, 1, 7, 11, 15, 2, 3)]
POISON = next(token for token in ASKED[2] if all(token not in ids for n, ids in enumerate(ASKED) if n != 2))
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=5, ignore_eos=True)


class Buckets:
    """As `Prompts` with buckets of 16 tokens, in rows of 8 or one of 16: stretches are read one after another.

    poison: a bucket with this token fails. groups: how many stretches shared each bucket.
    """

    def __init__(self, engine: ResidentEngine, poison: int = -1):
        self.engine, self.poison = engine, poison
        self.groups: list[int] = []

    def room(self, length: int) -> int:
        return 2 if length <= 8 else 1

    def read(
        self, stretches: Tokens[tuple[int, Tokens[int]]], layer_ids: tuple[int, ...] = ()
    ) -> list[Tensor]:
        if any(self.poison in ids for _, ids in stretches):
            raise ValueError("spoilt")
        assert len(stretches) <= self.room(max(len(ids) for _, ids in stretches))
        self.groups.append(len(stretches))
        pool = self.engine.pool
        for slot, ids in stretches:
            length = pool.length[slot]
            self.engine.target.prefill(torch.tensor(ids), slot, pool)
            pool.length[slot] = length  # which is the engine's to count
        return [torch.zeros(len(ids), 0) for _, ids in stretches]


def made(poison: int = -1, **options: Any) -> tuple[ResidentEngine, Buckets]:
    engine = make("none", slots=5)
    if options:
        engine = ResidentEngine(engine.target, engine.drafter, engine.config, 5, **options)
    engine.prompts = buckets = Buckets(engine, poison)
    return engine, buckets


def decoded(engine: ResidentEngine) -> list[Sequence]:
    sequences = [engine.add(ids, PARAMS) for ids in ASKED]
    while engine.has_work:
        engine.step()
    assert engine.pool.num_free == 5 and engine.failure is None
    return sequences


def check(sequences: list[Sequence], failed: list[int]) -> None:
    """All have the text that they have alone, but for those that failed."""
    assert [n for n, sequence in enumerate(sequences) if sequence.finish_reason == "error"] == failed
    for n, sequence in enumerate(sequences):
        if n not in failed:
            assert sequence.output == going_on(ASKED[n], Request(n, PARAMS))[0], n


@pytest.fixture(autouse=True)
def hash_nets_have_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "read_trees", read_trees)
    monkeypatch.setattr(rounds, "head", head)


def test_the_longest_bucket_holds_the_longest_stretch() -> None:
    assert LENGTHS[-1] == GRID_GPU


def test_texts_are_those_of_prompts_read_alone() -> None:
    """Prompts of 4 and 7 tokens share a bucket, beside one of 1, which has nothing to read; those of 11 and 15 need one
    each, and of the last two each takes the first slot that is free.
    """
    engine, buckets = made()
    check(decoded(engine), [])
    assert buckets.groups[:3] == [2, 1, 1] and sum(buckets.groups) == len(ASKED) - 1


def test_a_prefix_cache_does_not_keep_different_prompts_apart() -> None:
    engine, buckets = made(prefix_cache_bytes=1 << 20)
    check(decoded(engine), [])
    assert buckets.groups[:3] == [2, 1, 1]


def test_of_prompts_that_are_alike_the_second_goes_on_from_a_copy_of_the_first() -> None:
    engine, buckets = made(prefix_cache_bytes=1 << 20)
    sequences = [engine.add(ids, PARAMS) for ids in (ASKED[0], ASKED[0], ASKED[2], ASKED[2])]
    while engine.has_work:
        engine.step()
    assert [sequence.num_cached for sequence in sequences] == [0, 3, 0, 6] and buckets.groups == [1, 1]
    assert sequences[0].output == sequences[1].output and sequences[2].output == sequences[3].output


def test_long_prompts_that_may_begin_alike_are_read_one_after_another() -> None:
    engine, buckets = made(prefix_cache_bytes=1 << 20)
    buckets.room = lambda length: 9  # type: ignore[method-assign]
    unit = engine.pauses.unit
    sequences = [engine.add([*range(1, 20)] * 8 + [n], PARAMS) for n in (1, 2)]
    assert len(sequences[0].tokens) > unit
    while engine.has_work:
        engine.step()
    assert set(buckets.groups) == {1} and sequences[1].num_cached > 0


def test_what_spoils_a_bucket_ends_those_on_it_and_nobody_else() -> None:
    engine, _ = made(POISON)
    check(decoded(engine), [0, 1, 2])


def test_one_that_cannot_begin_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, buckets = made()
    clear = engine._clear

    def clear_but_one(sequence: Sequence) -> None:
        if sequence.tokens == ASKED[2]:
            raise ValueError("cannot begin")
        clear(sequence)

    monkeypatch.setattr(engine, "_clear", clear_but_one)
    check(decoded(engine), [2])
    assert buckets.groups[:2] == [1, 1]


def test_one_that_cannot_start_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, buckets = made()
    start = engine._start

    def start_but_one(sequence: Sequence) -> None:
        if sequence.tokens == ASKED[0]:
            raise ValueError("cannot start")
        start(sequence)

    monkeypatch.setattr(engine, "_start", start_but_one)
    check(decoded(engine), [0])
    assert buckets.groups[0] == 2


def test_an_interruption_ends_those_on_the_bucket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, buckets = made()
    read = buckets.read

    def interrupted(*args: Any) -> list[Tensor]:
        monkeypatch.setattr(buckets, "read", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(buckets, "read", interrupted)
    sequences = [engine.add(ids, PARAMS) for ids in ASKED]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_work:
        engine.step()
    check(sequences, [0, 1, 2])
    assert engine.pool.num_free == 5


def test_a_bucket_takes_no_more_than_a_step_may_read() -> None:
    engine, buckets = made()
    for n in (0, 2, 6):
        engine.add(ASKED[n], PARAMS)
    with torch.inference_mode():
        engine._read_prompts(3 + 2)
    assert buckets.groups == [1] and len(engine.running) == 1 and len(engine.reading) == 1
