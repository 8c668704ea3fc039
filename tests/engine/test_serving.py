"""Requests that come, go and share a batch as they please: each gets what it gets alone, and every slot comes back."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import specla.resident.rounds as rounds
from specla import LLM
from specla.drafters import Drafter, EagleDrafter, LookupFirst, NgramDrafter, NoDrafter
from specla.engine.drafting import make_drafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import Sequence
from tests.drafters.eagles import make_eagle
from tests.engine.residents import KINDS, check_counts, check_end, head, make, read_trees, target as hash_net
from tests.ops.triton import DEVICE
from tests.targets import VOCAB, make_target, prompt


@pytest.fixture(autouse=True)
def hash_nets_have_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "read_trees", read_trees)
    monkeypatch.setattr(rounds, "head", head)


@cache
def mini() -> LLM:
    return LLM()


def new_engine(kind: str, rng: random.Random) -> Any:
    """An engine of few slots whose steps read few tokens."""
    how: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice([128, 200, 300] if DEVICE.type == "cpu" else [512, 700]),
        "prefix_cache_bytes": rng.choice([0, 1 << 15, 1 << 22]),
    }
    config = SpeculativeConfig(num_speculative_tokens=7)
    if kind == "resident":
        return ResidentEngine(hash_net(), NgramDrafter(min_ngram=1), config, 3, **how)
    if kind == "mini":
        llm = mini()
        drafter = copy.copy(llm.drafter)
        assert isinstance(drafter, LookupFirst) and isinstance(drafter.other, EagleDrafter)
        made = make_drafter(drafter.other.network, llm.config, llm.target.config.vocab_size, 0, 3)
        return Engine(llm.target, made, llm.config, 3, **how)
    target = make_target("plain" if kind == "eagle" else kind)
    drafter: Drafter = NgramDrafter(7, 4, 2)
    if kind == "eagle":
        drafter = EagleDrafter(make_eagle(target, "delta", draft_vocab_size=VOCAB), 7, 4, 2, max_num_seqs=3)
    return Engine(target, drafter, config, 3, **how)


@cache
def alone(kind: str, tokens: tuple[int, ...], params: SamplingParams) -> tuple[list[int], str | None]:
    target = {"resident": hash_net, "mini": lambda: mini().target}.get(
        kind, lambda: make_target("plain" if kind == "eagle" else kind)
    )()
    engine = Engine(target, NoDrafter(), max_num_seqs=1, max_num_batched_tokens=10**6)
    sequence = engine.add(tokens, replace(params, num_speculative_tokens=None))
    while engine.has_work:
        engine.step()
    return sequence.output, sequence.finish_reason


def asked(kind: str, rng: random.Random) -> tuple[list[int], SamplingParams]:
    """One of few prompts, so that some begin alike, with parameters of every kind."""
    vocab = mini().target.config.vocab_size if kind == "mini" else VOCAB
    shared = prompt(rng.choice([130, 260]), 0, vocab) if rng.random() < 0.4 else []
    tokens = shared + prompt(rng.choice([1, 2, 9, 70]), rng.randrange(2), vocab)
    params = replace(rng.choice(KINDS), num_speculative_tokens=rng.choice([None, None, 0, 2, 7]))
    return tokens, replace(params, max_tokens=min(params.max_tokens, 4 if kind == "mini" else 12))


def live(kind: str, seed: int, events: int) -> list[Sequence]:
    """A life of an engine: arrivals and cancellations at random moments, then all that is left to its end."""
    rng = random.Random(seed)
    engine = new_engine(kind, rng)
    asks: list[tuple[Sequence, list[int], SamplingParams]] = []
    open_: list[Sequence] = []
    told: dict[Sequence, int] = {}
    while events or engine.has_work:
        if events and rng.random() < 0.5:
            events -= 1
            tokens, params = asked(kind, rng)
            sequence = engine.add(tokens, params, trace=rng.random() < 0.3)
            asks.append((sequence, tokens, params))
            open_.append(sequence)
        if open_ and rng.random() < 0.12:
            engine.release(open_.pop(rng.randrange(len(open_))))
        for sequence in engine.step():
            assert len(sequence.tokens) > told.get(sequence, 0) or sequence.finish_reason
            told[sequence] = len(sequence.tokens)
            if sequence.finish_reason:
                open_.remove(sequence)
        stats = engine.stats()
        assert stats.num_running + len(engine.reading) + stats.num_free_slots == stats.num_slots == 3
    assert not open_ and engine.failure is None and not engine._found
    for sequence, tokens, params in asks:
        want, reason = alone(kind, tuple(tokens), params)
        if sequence.finish_reason == "abort":
            assert sequence.output == want[: len(sequence.output)]
        else:
            assert (sequence.output, sequence.finish_reason) == (want, reason), params
        check_counts(sequence)
        most = params.num_speculative_tokens
        if most is not None:
            assert sequence.metrics.num_draft_tokens <= most * sequence.metrics.num_spec_steps
        if sequence.trace and sequence.output and sequence.finish_reason != "abort":
            check_trace(sequence, most)
    assert engine.pool.num_free == 3 and engine.stats()[:2] == (0, 0)
    for drafter in (engine.drafter, getattr(engine.drafter, "other", None)):
        for kept in ("_readers", "_records", "_indexes"):
            assert not getattr(drafter, kept, None), "the drafter remembers who is gone"
    if isinstance(engine, ResidentEngine):
        check_end(engine)
    return [sequence for sequence, _, _ in asks]


def check_trace(sequence: Sequence, most: int | None) -> None:
    """The last round's tree holds what was taken in it, below the token that was its root."""
    trace = sequence.last_round
    assert trace is not None and len(trace.tokens) == len(trace.parent)
    assert trace.parent[0] == -1 and all(0 <= p < n for n, p in enumerate(trace.parent) if n)
    assert most is None or len(trace.tokens) <= 1 + most
    assert trace.path[0] == 0
    assert [trace.parent[node] for node in trace.path[1:]] == trace.path[:-1]
    taken = [trace.tokens[node] for node in trace.path]
    end = len(sequence.tokens) if sequence.from_draft[-1] else len(sequence.tokens) - 1
    assert sequence.tokens[end - len(taken) : end] == taken
    if trace.scores is not None:
        assert trace.scores[0] == 0
        assert all(trace.scores[n] <= trace.scores[p] for n, p in enumerate(trace.parent) if n)


@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("kind", ["plain", "eagle", "hybrid_two_kinds"])
def test_every_request_gets_what_it_gets_alone(kind: str, seed: int) -> None:
    live(kind, seed, 12)


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_with_rounds_in_flight(seed: int) -> None:
    live("resident", seed, 9)


def test_so_it_is_with_the_bundled_model() -> None:
    ends = [sequence.finish_reason for seed in range(2) for sequence in live("mini", seed, 10)]
    assert ends.count("length") > 8 and "abort" in ends


def test_the_lives_above_are_as_wild_as_they_say() -> None:
    sequences = [sequence for seed in range(6) for sequence in live("plain", seed, 12)]
    assert {"abort", "length", "stop"} == {sequence.finish_reason for sequence in sequences}
    aborted = [sequence for sequence in sequences if sequence.finish_reason == "abort"]
    assert any(s.output for s in aborted) and any(not s.output for s in aborted)
    assert any(0 < s.num_prefilled < len(s.tokens) - 1 for s in aborted), "in the middle of a prompt"
    assert any(s.num_cached for s in sequences) and any(
        s.metrics.num_accepted_draft_tokens for s in sequences
    )


@pytest.mark.parametrize("kind", [Engine, ResidentEngine])
def test_a_request_has_drafts_of_its_own_number(kind: Any) -> None:
    """One that asks for none decodes plainly beside one that drafts."""
    engine = make("synthetic", 6, kind=kind)
    text = prompt(7) * 2
    whole = engine_alone(text)
    asked = [None, 0, 2, 6]
    made = []
    for most in asked:
        made.append(engine.add(text, SamplingParams(max_tokens=20, num_speculative_tokens=most)))
        engine.drafter.references[made[-1].key] = text + whole
    while engine.has_work:
        engine.step()
    assert all(sequence.output == whole for sequence in made)
    free, none, two, six = (sequence.metrics for sequence in made)
    assert none.num_draft_tokens == 0 and none.num_spec_steps == 20
    assert 0 < two.num_draft_tokens <= 2 * two.num_spec_steps
    assert all(m.num_draft_tokens > 2 * m.num_spec_steps for m in (free, six))
    with pytest.raises(ValueError, match=r"num_speculative_tokens of a request must be in 0\.\.6"):
        engine.add(text, SamplingParams(num_speculative_tokens=7))


def engine_alone(text: list[int]) -> list[int]:
    return alone("resident", tuple(text), SamplingParams(max_tokens=20))[0]


@pytest.mark.parametrize("value", [-1, 256, 1.5, True, "many"])
def test_a_number_of_drafts_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        SamplingParams(num_speculative_tokens=value)
