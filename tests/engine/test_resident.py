"""Laws of the resident engine: tokens, ends and slots are those of the engine that waits for every round."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import specla.engine.resident as resident
import specla.resident.rounds as rounds
from specla.drafters import Drafter, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.engine.choice import make_engine
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine, check_memory
from specla.engine.sequence import Sequence
from specla.ops import triton as kernels
from tests.engine.residents import (
    KINDS,
    MIX,
    WARM,
    Request,
    check_counts,
    check_end,
    finish,
    going_on,
    head,
    held,
    make,
    read_trees,
    step,
    target,
)  # fmt: skip
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE
from tests.targets import (
    VARIANTS,
    VOCAB,
    ScriptedDrafter,
    build_target,
    committed,
    distance,
    make_config,
    make_target,
    prompt,
)  # fmt: skip


@pytest.fixture(autouse=True)
def hash_nets_have_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "read_trees", read_trees)
    monkeypatch.setattr(rounds, "head", head)


def test_every_request_gets_what_it_gets_alone() -> None:
    """Of all kinds, and more of them than slots."""
    engine = make("synthetic")
    sequences = [request.add(engine) for request in MIX]
    finish(engine)
    for request, sequence in zip(MIX, sequences, strict=True):
        assert (sequence.output, sequence.finish_reason) == request.alone(), request
        check_counts(sequence)
    check_end(engine)
    assert sum(s.metrics.num_accepted_draft_tokens for s in sequences) > 20


def test_the_same_drafts_have_the_same_counts() -> None:
    """Rounds, drafts and how many of them were accepted are those of the engine that waits."""
    counts = []
    for kind in (Engine, ResidentEngine):
        engine = make("synthetic", 6, kind=kind)
        sequences = [request.add(engine) for request in MIX]
        finish(engine)
        counts.append([sequence.metrics for sequence in sequences])
    assert counts[0] == counts[1]


def test_ends_fall_among_accepted_drafts() -> None:
    """By a stop id, by a call back and by length, at every place of a block."""
    whole = Request(40, SamplingParams(max_tokens=16))
    text = whole.alone()[0]
    cases = [replace(whole, stop_after=n) for n in range(1, 6)]
    cases += [replace(whole, params=SamplingParams(max_tokens=n)) for n in range(1, 6)]
    cases += [replace(whole, params=SamplingParams(stop_token_ids=(t,))) for t in text[:5]]
    engine = make("synthetic", 7, slots=4)
    engine.drafter.acceptance = [1.0] * 3
    engine.rounds.proposer.acceptance.fill_(1)
    sequences = [case.add(engine) for case in cases]
    finish(engine)
    assert [(s.output, s.finish_reason) for s in sequences] == [case.alone() for case in cases]
    assert {s.metrics.num_spec_steps for s in sequences} == {1, 2}
    check_end(engine)


actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "add", "keep", "resume"]), st.integers(0, 99)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("release"), st.integers(0, 5)),
    ),
    min_size=4,
    max_size=16,
)


@given(st.sampled_from(["none", "ngram", "synthetic"]), actions)
def test_requests_may_join_leave_and_go_on_at_any_moment(drafter: str, script: list[tuple[str, int]]) -> None:
    engine, rng = make(drafter, 6), random.Random(len(script))
    engine.budget.choose = lambda sequences: rng.choice([0, 1, 3, 6])
    running: list[tuple[Sequence, tuple[list[int], str | None]]] = []  # and what becomes of them

    def check(sequence: Sequence, want: tuple[list[int], str | None]) -> None:
        if sequence.finish_reason == "abort":
            assert sequence.output == want[0][: len(sequence.output)]
        else:
            assert (sequence.output, sequence.finish_reason) == want
        if not sequence.keep_slot:
            check_counts(sequence)

    for number, (action, what) in enumerate(script):
        request = Request(number, KINDS[what % len(KINDS)], [None, None, None, 1, 2, 4][what % 6])
        if action in ("add", "keep"):
            running.append((request.add(engine, keep_slot=action == "keep"), request.alone()))
        elif action == "release" and running:
            engine.release(running[-1 - what % len(running)][0])
        elif action == "step":
            for _ in range(what):
                step(engine)
        elif action == "resume":
            idle = [n for n, (s, _) in enumerate(running) if s.finish_reason and s.slot is not None]
            for n in idle[:1]:
                sequence, want = running[n]
                check(sequence, want)
                want = going_on([*sequence.tokens, *request.prompt[2:]], request)
                if drafter == "synthetic":
                    engine.drafter.references[sequence.key] = [
                        *sequence.tokens,
                        *request.prompt[2:],
                        *want[0],
                    ]
                engine.resume(sequence, request.prompt[2:], request.params, request.should_stop())
                running[n] = sequence, want
    while engine.has_work:
        if not step(engine):
            engine.release(next(s for s, _ in running if s.finish_reason and s.slot is not None))
    for sequence, want in running:
        check(sequence, want)
        if sequence.slot is not None:
            engine.release(sequence)
    check_end(engine)


TURNS = [
    ([], Request(20, SamplingParams(max_tokens=9), 4)),
    ([], Request(0, replace(WARM, max_tokens=7))),
    ([5, 6, 7], Request(0, SamplingParams(max_tokens=9), 3)),
    ([], Request(0, replace(KINDS[6], max_tokens=6), 1)),
    ([9], Request(0, SamplingParams(max_tokens=30, stop_token_ids=tuple(range(20))))),
    ([8], Request(0, SamplingParams(max_tokens=1))),
    ([], Request(0, SamplingParams(max_tokens=5), 5)),
]


@pytest.mark.parametrize("drafter", ["none", "synthetic"])
def test_a_kept_slot_holds_what_was_taken_and_goes_on_from_there(drafter: str) -> None:
    """However its rounds ended, and whatever ran beside it."""
    engine = make(drafter, 6)
    others = [request.add(engine) for request in MIX[:4]]
    kept: Sequence | None = None
    for more, request in TURNS:
        tokens = [*(request.prompt if kept is None else kept.tokens), *more]
        want, reason = going_on(tokens, request)
        if kept is None:
            kept = request.add(engine, keep_slot=True)
        else:
            if drafter == "synthetic":
                engine.drafter.references[kept.key] = tokens + want
            engine.resume(kept, more, request.params, request.should_stop())
        while not kept.finish_reason:
            step(engine)
        assert (kept.output, kept.finish_reason) == (want, reason), request
        assert kept.slot is not None and not (engine.rounds.rows == kept.slot).any()
        before = held(engine, [kept.slot])
        engine.step()
        assert all(same_bits(a, b) for a, b in zip(held(engine, [kept.slot]), before, strict=True))
        fresh = target().new_pool(1, 1)
        target().prefill(torch.tensor(kept.tokens[:-1], device=DEVICE), fresh.alloc(), fresh)
        assert distance(committed(engine.pool, kept.slot), committed(fresh, 0)) < 1e-4
    finish(engine)
    engine.release(kept)
    assert [(s.output, s.finish_reason) for s in others] == [request.alone() for request in MIX[:4]]
    check_end(engine)


def test_a_slots_next_owner_does_not_notice_who_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled before a round, between launch and landing, and with a round in the air that it still takes part in."""
    for rounds_before in range(4):
        engine = make("synthetic", slots=1)
        first, second = MIX[0].add(engine), MIX[2].add(engine)
        for _ in range(rounds_before):
            step(engine)
        engine.release(first)
        assert first.finish_reason == "abort" and first.slot is None
        assert first.output == MIX[0].alone()[0][: len(first.output)]
        finish(engine)
        assert second.output == MIX[2].alone()[0]
        check_end(engine)


@pytest.mark.parametrize(("victims", "keep_slot"), [((0,), False), ((1, 3), False), ((0, 2), True)])
def test_logits_that_are_not_finite_end_those_alone_that_have_them(
    victims: tuple[int, ...], keep_slot: bool
) -> None:
    requests = [Request(n, SamplingParams(max_tokens=8)) for n in range(50, 55)]
    said = {token for request in requests for token in request.prompt + request.alone()[0]}
    poison = next(token for token in range(VOCAB) if token not in said)
    engine = make(poison=poison)
    sequences = [
        engine.add([*request.prompt, poison], request.params, keep_slot=keep_slot)
        if n in victims
        else request.add(engine)
        for n, request in enumerate(requests)
    ]
    ended = []
    while engine.has_work:
        ended += [sequence for sequence in step(engine) if sequence.finish_reason == "error"]
    assert sorted(sequences.index(sequence) for sequence in ended) == list(victims)
    assert isinstance(engine.failure, FloatingPointError)
    for n, (request, sequence) in enumerate(zip(requests, sequences, strict=True)):
        if n in victims:
            assert (sequence.output, sequence.finish_reason, sequence.slot) == ([], "error", None)
        else:
            assert (sequence.output, sequence.finish_reason) == request.alone()
    check_end(engine)


@pytest.mark.parametrize("where", ["call back", "wait", "launch"])
def test_after_an_interrupted_step_nobody_goes_on_with_a_gap(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the engine that waits: who was in the round has either all of its tokens or ended with an error."""
    engine, calls = make("synthetic"), 0

    def interrupt(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return False if where == "call back" else original(*args)

    original = {"wait": rounds.Flight.wait, "launch": rounds.Rounds.launch, "call back": None}[where]
    sequences = [request.add(engine) for request in MIX[:2]]
    if where == "call back":
        sequences[0].should_stop = interrupt
    else:
        monkeypatch.setattr(rounds.Flight if where == "wait" else rounds.Rounds, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    monkeypatch.undo()
    monkeypatch.setattr(rounds, "read_trees", read_trees)
    monkeypatch.setattr(rounds, "head", head)
    sequences.append(MIX[2].add(engine))
    finish(engine)
    for request, sequence in zip(MIX, sequences, strict=False):
        output, reason = request.alone()
        if sequence.finish_reason == "error":
            assert sequence.output == output[: len(sequence.output)]
        else:
            assert (sequence.output, sequence.finish_reason) == (output, reason)
    check_end(engine)


def test_a_device_that_fails_ends_everything_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a round, and again at every further call."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = make("synthetic", slots=2)
    sequences = [request.add(engine) for request in MIX[:4]]
    step(engine)
    monkeypatch.setattr(rounds.Flight, "wait", broken)
    monkeypatch.setattr(rounds.Rounds, "stop", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        finish(engine)
    assert "illegal" in str(engine.failure) and not engine.has_work and engine.pool.num_free == 2
    for request, sequence in zip(MIX, sequences, strict=False):
        assert sequence.output == request.alone()[0][: len(sequence.output)]
        assert sequence.finish_reason in ("error", request.alone()[1])
    assert [s.error is not None and "illegal" in s.error for s in sequences[2:]] == [True, True]
    assert engine.step() == []
    with pytest.raises(RuntimeError, match="takes no more requests: CUDA error"):
        MIX[0].add(engine)


@pytest.mark.parametrize("drafter", ["ngram", "synthetic"])
def test_a_text_longer_than_the_history_is_decoded_plainly(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rounds, resident):
        monkeypatch.setattr(module, "HISTORY", 8)
    engine = make(drafter)
    requests = [Request(6, replace(KINDS[6], max_tokens=6)), Request(2, SamplingParams(max_tokens=12))]
    assert [len(request.prompt) for request in requests] == [7, 3]
    requests += [Request(13, SamplingParams(max_tokens=6))]
    assert len(requests[2].prompt) == 14
    sequences = [request.add(engine) for request in requests]
    finish(engine)
    assert [(s.output, s.finish_reason) for s in sequences] == [request.alone() for request in requests]
    assert sequences[2].metrics.num_draft_tokens == 0
    check_end(engine)


def test_a_request_may_ask_for_more_tokens_than_a_slot_can_count() -> None:
    engine = make()
    asked = Request(3, SamplingParams(max_tokens=2**40), 4)
    sequence = asked.add(engine)
    finish(engine)
    assert (sequence.output, sequence.finish_reason) == asked.alone()


def test_what_a_round_has_cost_leaves_out_idle_time_prompts_and_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or one of them would spoil the choice of how much to draft. The device runs behind the host, a second a round."""
    clock, busy, ends, told = 0.0, 0.0, deque[float](), list[float]()

    def after(owner: Any, name: str, then: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then()
            return result

        monkeypatch.setattr(owner, name, call)

    def queue(seconds: float) -> None:
        nonlocal busy
        busy = max(busy, clock) + seconds

    def launched() -> None:
        queue(1)
        ends.append(busy)

    def waited() -> None:
        nonlocal clock
        clock = max(clock, ends.popleft())

    def captured() -> None:
        nonlocal clock
        clock = max(clock, busy) + 10**3

    after(rounds.Rounds, "launch", launched)
    after(rounds.Rounds, "_prepare", captured)
    after(rounds.Flight, "wait", waited)
    after(type(target()), "prefill", lambda: queue(10**4))
    monkeypatch.setattr(resident.time, "perf_counter", lambda: clock)
    engine = make("ngram", "auto", slots=4)
    monkeypatch.setattr(
        engine.budget, "observe", lambda choice, tokens, seconds, sequences: told.append(seconds)
    )
    for number in range(1, 6):
        Request(number, replace(WARM, max_tokens=7)).add(engine)
        for _ in range(4):
            step(engine)
    finish(engine)
    clock += 10**5
    Request(9, WARM).add(engine)
    finish(engine)
    assert len(told) > 10 and max(told) <= 2, told


def test_the_engine_is_the_resident_one_where_all_of_a_round_has_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SpeculativeConfig()
    assert type(make_engine(make_target("plain"), NoDrafter(), config)) is Engine, "not on a CPU"
    monkeypatch.setattr(kernels, "use_kernels", lambda state: state.dtype != torch.float64)

    def kind(
        variant: str, drafter: Drafter | None = None, drafts: int | str = "auto", **how: Any
    ) -> type[Engine]:
        speculative = SpeculativeConfig(num_speculative_tokens=drafts)
        return type(make_engine(make_target(variant, **how), drafter or NoDrafter(), speculative, 2))

    synthetic = SyntheticDrafter(0.5, 3, 3, 1, VOCAB)
    for drafter in (NoDrafter(), NgramDrafter(), synthetic):
        assert kind("plain", drafter) is ResidentEngine
    assert kind("plain", drafts=63) is ResidentEngine
    with pytest.raises(ValueError, match="at most 63 drafts"):
        kind("plain", drafts=64)
    assert kind("plain", ScriptedDrafter()) is Engine
    assert (
        kind("plain", dtype=torch.float64) is Engine and kind("plain", dtype=torch.bfloat16) is ResidentEngine
    )
    for variant in VARIANTS:
        fits = not variant.startswith("hybrid") and variant not in ("no_conv", "conv_1")
        assert (kind(variant) is ResidentEngine) == fits, variant


def test_a_network_says_the_same_in_both_engines() -> None:
    """Three requests in two slots, with the layers' own kernels."""
    config = make_config(hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    asked = [replace(KINDS[n], max_tokens=4 + n) for n in (0, 1, 6)]
    texts: list[list[list[int]]] = []
    for kind, drafter in ((Engine, NoDrafter()), (ResidentEngine, SyntheticDrafter(0.8, 3, 2, 2, VOCAB))):
        engine = kind(
            build_target(config).to(DEVICE), drafter, SpeculativeConfig(num_speculative_tokens=3), 2
        )
        sequences = [engine.add(prompt(3 + n, n), params) for n, params in enumerate(asked)]
        if isinstance(drafter, SyntheticDrafter):
            drafter.references = {s.key: s.tokens + text for s, text in zip(sequences, texts[0], strict=True)}
        finish(engine)
        texts.append([sequence.output for sequence in sequences])
    assert texts[0] == texts[1] and list(map(len, texts[0])) == [4, 5, 10]


def test_what_was_prepared_is_not_captured_again_and_preparing_touches_no_slot() -> None:
    engine, brief = make("ngram", "auto", slots=4), replace(WARM, max_tokens=5)
    kept = Request(1, brief).add(engine)
    step(engine)
    before = held(engine, [0, 1, 2, 3])
    engine.prepare(brief)
    assert all(same_bits(a, b) for a, b in zip(held(engine, [0, 1, 2, 3]), before, strict=True))
    prepared = engine.captures.count
    others = [Request(number, brief).add(engine) for number in range(2, 5)]
    finish(engine)
    assert engine.captures.count == prepared
    for number, sequence in enumerate([kept, *others], 1):
        assert sequence.output == Request(number, brief).alone()[0]


def test_states_that_do_not_fit_are_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_target("plain")
    one = net.new_pool(1, 9)
    needed = 5 * (one.bytes_per_sequence() + 18 * one.bytes_per_node())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed, 2 * needed))
    gpu = torch.device("cuda")
    check_memory(net, 9, 5, gpu)
    with pytest.raises(ValueError, match="6 sequences with up to 8 drafts need") as error:
        check_memory(net, 9, 6, gpu)
    assert f"and {needed:,} are free" in str(error.value)
