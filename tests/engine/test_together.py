"""Prompts that wait are read together, to the same texts; what spoils a bucket ends those on it alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence as Tokens
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import specla.engine.resident as resident
import specla.resident.eagle as eagle
import specla.resident.rounds as rounds
from specla.drafters import NoDrafter
from specla.drafters.network import Eagle, EagleConfig
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.reading import GRID_GPU, Pauses
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import Sequence
from specla.resident.eagle import EagleProposer
from specla.resident.prompt import LENGTHS
from tests.engine.residents import Request, check_end, going_on, head, make, read_trees
from tests.ops.triton import DEVICE
from tests.targets import VOCAB, build_target, make_config, prompt

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
        assert not layer_ids or len(stretches) == 1, "only logits of a prompt want streams here"
        width = len(layer_ids) * self.engine.target.config.hidden_size
        return [torch.zeros(len(ids), width) for _, ids in stretches]


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


@pytest.mark.parametrize("head_dim", [256, 512])
def test_heads_too_large_for_buckets_are_read_by_the_target(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds hold heads of 512, the kernels of prompts those of 256, and of 128 on a small GPU."""
    for module in (resident, eagle):
        monkeypatch.setattr(module, "takes_prompt", lambda state: max(state.shape[-2:]) <= 256)
    target = build_target(make_config(head_dim=8, expand_v=head_dim / 8, num_heads=1, num_hidden_layers=1))
    config = SpeculativeConfig(num_speculative_tokens=3)
    engine = ResidentEngine(target, NoDrafter(), config, 2)
    assert (engine.prompts is None) == (head_dim > 256)
    network = Eagle(
        EagleConfig(
            hidden_size=32,
            vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            layer_ids=(0, 1),
            num_heads=1,
            head_dim=head_dim,
            intermediate_size=24,
        )
    )
    drafter = EagleProposer(network.requires_grad_(False), 1, 4, 3, 1, None)
    drafter.prepare()
    assert bool(drafter._buckets._known) == (head_dim <= 256)


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


def failing(work: Callable[[Sequence], None], tokens: list[int]) -> Callable[[Sequence], None]:
    """`work` that fails on a sequence of these tokens."""

    def tried(sequence: Sequence) -> None:
        if sequence.tokens == tokens:
            raise ValueError("cannot be done")
        work(sequence)

    return tried


def test_one_that_cannot_begin_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, buckets = made()
    monkeypatch.setattr(engine, "_clear", failing(engine._clear, ASKED[2]))
    check(decoded(engine), [2])
    assert buckets.groups[:2] == [1, 1]


def test_one_that_cannot_start_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, buckets = made()
    monkeypatch.setattr(engine, "_start", failing(engine._start, ASKED[0]))
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


@cache
def whole(tokens: tuple[int, ...], params: SamplingParams) -> tuple[list[int], str | None]:
    return going_on(list(tokens), Request(0, params))


class Life:
    """Requests that come, go, and go on in the slot that they have kept, while what reads prompts fails at random."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        options = {"max_num_batched_tokens": rng.choice([16, 20, 50]), "prefix_cache_bytes": seed % 2 << 20}
        self.engine, self.buckets = made(**options)
        self.faults = rng.choice([0.0, 0.06])
        self.asked: dict[Sequence, tuple[list[int], SamplingParams]] = {}  # what each goes on from
        self.fresh: list[int] = []  # keys of those that started and were never resumed
        self.started: Counter[Sequence] = Counter()
        for place, name in ((self.engine, "_clear"), (self.engine, "_keep_prefix"), (self.buckets, "read")):
            setattr(place, name, self.faulty(getattr(place, name)))
        start = self.engine._start

        def counted(sequence: Sequence) -> None:
            start(sequence)
            self.started[sequence] += 1
            assert self.started[sequence] == 1 and sequence.is_read
            if not sequence.metrics.num_tokens:
                self.fresh.append(sequence.key)

        self.engine._start = self.faulty(counted)  # type: ignore[method-assign]

    def faulty(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*args: Any) -> Any:
            when, kind = self.rng.random(), self.rng.choice([ValueError, KeyboardInterrupt])
            if when < self.faults:
                raise kind("before")
            made = work(*args)
            if when < 2 * self.faults:
                raise kind("after")
            return made

        return tried

    def moment(self) -> None:
        rng, engine = self.rng, self.engine
        for _ in range(rng.choice([0, 0, 1, 3])):
            length = rng.choice([1, 2, 4, 4, 7, 9, 13, 17, 21, 40])
            self.ask(prompt(length, rng.randrange(2)), keep=rng.random() < 0.3)
        at_will = [
            sequence for sequence in self.asked if sequence.finish_reason is None or sequence.slot is not None
        ]
        if at_will and rng.random() < 0.3:
            sequence = rng.choice(at_will)
            if sequence.finish_reason is None or rng.random() < 0.4:
                engine.release(sequence)
            else:
                self.ask(prompt(rng.choice([0, 1, 3, 8, 20]), 1), sequence)
        self.step()

    def ask(self, tokens: list[int], old: Sequence | None = None, keep: bool = False) -> None:
        rng = self.rng
        params = SamplingParams(
            max_tokens=rng.choice([1, 3, 6]), temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(3),
            ignore_eos=True, prompt_logprobs=0 if old is None and rng.random() < 0.15 else None,
        )  # fmt: skip
        if old is None:
            sequence = self.engine.add(tokens, params, keep_slot=keep)
        else:
            sequence = old
            self.judge(old)
            try:
                self.engine.resume(old, tokens, params)
            except (ValueError, KeyboardInterrupt):
                assert old.finish_reason and old.slot is not None, "may be resumed later"
                return
        self.started[sequence] = 0
        self.asked[sequence] = list(sequence.tokens), params

    def step(self) -> None:
        engine = self.engine
        try:
            told = engine.step()
            assert len(told) == len(set(told))
        except KeyboardInterrupt:
            pass
        assert all(sequence.slot is not None for sequence in [*engine.reading, *engine.running])
        open_ = [*engine.waiting, *engine.reading, *engine.running]
        assert sorted(x.key for x in open_) == [x.key for x in self.asked if x.finish_reason is None], (
            "lost or twice"
        )
        kept = {x.slot for x in self.asked if x.slot is not None}
        assert len(kept) + engine.pool.num_free == 5 and not kept & engine.pool._free
        assert engine._found.keys() <= {sequence.key for sequence in engine.reading}

    def judge(self, sequence: Sequence) -> None:
        tokens, params = self.asked[sequence]
        want, reason = whole(tuple(tokens), params)
        if sequence.finish_reason in ("abort", "error"):
            assert sequence.output == want[: len(sequence.output)]
            assert self.faults or sequence.finish_reason == "abort"
        else:
            assert (sequence.output, sequence.finish_reason) == (want, reason)
            assert self.started[sequence] == 1
            if params.prompt_logprobs is not None:
                assert len(sequence.prompt_logprobs) == sequence.prompt_length

    def end(self) -> None:
        while self.engine.has_work or any(sequence.slot is not None for sequence in self.asked):
            for sequence in self.asked:
                if sequence.finish_reason and sequence.slot is not None:
                    self.engine.release(sequence)
            self.step()
        for sequence in self.asked:
            self.judge(sequence)
        assert self.engine.failure is None and self.fresh == sorted(self.fresh), "out of turn"
        check_end(self.engine)


@pytest.mark.parametrize("seed", [2, 4, 7, 8])  # the third with a prefix cache, two with faults
def test_whatever_comes_between_all_get_their_own(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are those of a GPU, every 16 tokens rather than 512."""
    monkeypatch.setattr(Pauses, "of", lambda pool: Pauses(16, True))
    life = Life(seed)
    for _ in range(16):
        life.moment()
    life.end()
    assert max(life.buckets.groups) == 2 and any(s.num_cached for s in life.asked) == seed % 2


def test_nobody_starts_before_a_prompt_that_is_read_in_parts() -> None:
    engine, _ = made(max_num_batched_tokens=64)
    long, short = engine.add(prompt(100), PARAMS), engine.add(prompt(1), PARAMS)
    engine.step()
    assert not short.output and long.num_prefilled == 64
    while engine.has_work:
        engine.step()
    assert long.output and short.output
