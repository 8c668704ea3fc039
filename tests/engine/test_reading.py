"""Where a prompt is cut changes no bit of the state, and a step neither reads too much nor forgets to run a round."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st

from specla import LLM
from specla.drafters import NoDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams
from specla.engine.reading import BLOCK, GRID, Pauses
from specla.models.gated_deltanet import GatedDeltaNet
from tests.targets import FAMILY, QWEN, VARIANTS, committed, equal, make_target, prompt

HYBRID = [name for name in VARIANTS if name.startswith("hybrid")]


@cache
def mini() -> GatedDeltaNet:
    return LLM(drafter="none").target


def stretches(pauses: Pauses, length: int, budgets: list[int]) -> list[int]:
    """How long a prompt of that length is read each time, by steps that have these budgets left."""
    done, made = 0, []
    while done < length:
        for most in budgets:
            count = pauses.stretch(done, length, most)
            assert 0 <= count <= most and done + count <= length
            made += [count] if count else []
            done += count
    return made


def left_by(target: GatedDeltaNet, text: list[int], lengths: list[int]) -> list[torch.Tensor]:
    pool, done = target.new_pool(1, 1), 0
    for length in lengths:
        target.prefill(torch.tensor(text[done : done + length]), 0, pool)
        done += length
    assert done == len(text)
    return committed(pool, 0)


@pytest.mark.parametrize(
    ("variant", "threads"),
    [*((name, 1) for name in [*VARIANTS, *QWEN, *FAMILY, "mini"]), ("plain", 2)],
)
def test_pauses_leave_every_bit_of_a_state_as_it_is(variant: str, threads: int) -> None:
    target = mini() if variant == "mini" else make_target(variant)
    pauses, rng = Pauses.of(target.new_pool(1, 1)), random.Random(variant)
    torch.set_num_threads(threads)
    cuts = 0
    try:
        for length in (70, 257) if variant == "mini" else (5, 70, 64, 257, 410):
            text = prompt(length, length, target.config.vocab_size)
            whole = left_by(target, text, stretches(pauses, length, [10**6]))
            for _ in range(2):
                budgets = [pauses.unit + rng.randrange(150) for _ in range(3)]
                made = stretches(pauses, length, budgets)
                assert equal(left_by(target, text, made), whole), made
                cuts += len(made) - 1
    finally:
        torch.set_num_threads(1)
    assert cuts > 2


@pytest.mark.parametrize("variant", ["plain", "conv_2", "hybrid_two_kinds", "gla_conv", "retnet"])
def test_nor_do_they_in_a_text_that_goes_on(variant: str) -> None:
    """A second turn begins anywhere."""
    left = []
    for most in (10**6, 128, 200):
        engine = Engine(make_target(variant), NoDrafter(), max_num_batched_tokens=most)
        sequence = engine.add(prompt(40), SamplingParams(max_tokens=5), keep_slot=True)
        while not sequence.finish_reason:
            engine.step()
        engine.resume(sequence, prompt(300, 1), SamplingParams(max_tokens=1))
        engine.admit()
        assert sequence.slot is not None and sequence.is_read
        left.append(committed(engine.pool, sequence.slot))
    assert equal(left[1], left[0]) and equal(left[2], left[0])


def test_the_law_above_can_be_broken() -> None:
    """A cut within a block is another sum."""
    text = prompt(200)
    target = make_target("plain")
    assert not equal(left_by(target, text, [100, 100]), left_by(target, text, [200]))


@given(st.booleans(), st.integers(1, 1500), st.lists(st.integers(0, 400), max_size=4), st.integers(GRID, 600))
def test_reading_pauses_where_it_may(must: bool, length: int, left: list[int], budget: int) -> None:
    pauses = Pauses(GRID if must else BLOCK, must)
    made = stretches(pauses, length, [*left, budget])
    ends = [sum(made[: n + 1]) for n in range(len(made))]
    assert sum(made) == length and all(end % pauses.unit == 0 for end in ends[:-1])
    if must:
        assert made == stretches(pauses, length, [10**9])
        assert ends[:-1] == list(range(pauses.unit, length, pauses.unit))


@pytest.mark.parametrize("variant", ["plain", "hybrid_window"])
def test_a_long_prompt_is_read_beside_rounds(variant: str) -> None:
    """Who runs grows in every step, and no step reads more than it may."""
    target, read = make_target(variant), []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(target, name)

        def prefill(self, ids: torch.Tensor, *rest: object) -> None:
            read.append(len(ids))
            target.prefill(ids, *rest)  # type: ignore[arg-type]

    engine = Engine(Counting(), NoDrafter(), max_num_seqs=3, max_num_batched_tokens=192)  # type: ignore[arg-type]
    short = engine.add(prompt(9), SamplingParams(max_tokens=40))
    engine.step()
    late = [engine.add(prompt(length, length), SamplingParams(max_tokens=4)) for length in (900, 5, 300)]
    steps = 0
    while not late[0].output:
        del read[:]
        before = len(short.output)
        assert short in engine.step()
        assert sum(read) <= 192 and len(short.output) == before + 1
        assert engine.stats().num_waiting == len(engine.waiting) + len(engine.reading)
        steps += 1
    assert steps == (5 if variant == "plain" else 7)
    assert late[1].output and not late[2].output, "first come, first served, within what a step may read"
    while engine.has_work:
        engine.step()
    for sequence in (short, *late):
        alone = Engine(target, NoDrafter(), max_num_seqs=1, max_num_batched_tokens=10**6)
        want = alone.add(sequence.tokens[: sequence.prompt_length], sequence.params)
        while alone.has_work:
            alone.step()
        assert sequence.output == want.output


def test_steps_without_a_round_may_come_first() -> None:
    engine = Engine(make_target("plain"), NoDrafter(), max_num_batched_tokens=64)
    sequence = engine.add(prompt(200), SamplingParams(max_tokens=2))
    assert [engine.step() for _ in range(3)] == [[], [], []] and engine.has_work
    assert engine.step() == [sequence] and engine.stats().num_running == 1


@pytest.mark.parametrize("variant", ["plain", *HYBRID[:1]])
@pytest.mark.parametrize("size", [0, 63, "64", 1.5])
def test_a_step_reads_at_least_a_block(variant: str, size: object) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Engine(make_target(variant), NoDrafter(), max_num_batched_tokens=size)  # type: ignore[arg-type]
