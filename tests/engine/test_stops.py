"""Ends inside an accepted block: exactly the right tokens, and a state from which generation goes on."""

from __future__ import annotations

import pytest
import torch

from specla.drafters import NgramDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.sequence import Sequence
from tests.targets import ScriptedDrafter, build_target, make_config, make_target, prompt, reach, run

PROMPT = prompt(8, 4)


def reference(variant: str = "plain", length: int = 60, **params) -> list[int]:
    """What plain decoding says after PROMPT."""
    limit = SamplingParams(max_tokens=length, **params)
    return run(make_target(variant), None, [PROMPT], limit, drafts=0).outputs[0]


class Session:
    """One engine whose drafter is always right, so that blocks are as long as they can be."""

    def __init__(
        self, variant: str = "plain", right: float = 1.0, drafts: int = 7, truth: list[int] | None = None
    ):
        self.drafter = ScriptedDrafter(right=right, idle=0.0 if right == 1.0 else 0.2)
        config = SpeculativeConfig(num_speculative_tokens=drafts)
        self.engine = Engine(make_target(variant), self.drafter, config, max_num_seqs=2)
        self.truth = truth

    def start(self, params: SamplingParams, should_stop=None, keep_slot: bool = False) -> Sequence:
        sequence = self.engine.add(PROMPT, params, should_stop, keep_slot)
        if self.truth is not None:
            self.drafter.references[sequence.key] = [*PROMPT, *self.truth]
        return self.finish(sequence)

    def finish(self, sequence: Sequence) -> Sequence:
        while self.engine.has_work:
            self.engine.step()
        return sequence


@pytest.mark.parametrize("place", range(12))
def test_a_stop_token_ends_the_text_at_its_first_place(place: int) -> None:
    truth = reference()
    token = truth[place]
    want = truth[: truth.index(token) + 1]
    session = Session(truth=truth)
    sequence = session.start(SamplingParams(max_tokens=60, stop_token_ids=[token]))
    assert sequence.output == want and sequence.finish_reason == "stop"
    assert len(sequence.from_draft) == len(want)
    assert session.engine.pool.num_free == 2


def test_stops_fall_inside_accepted_blocks() -> None:
    """Guards the tests around it: the drafter is right, so a stop cuts drafts off that were accepted."""
    truth = reference()
    token = next(t for i, t in enumerate(truth) if truth.index(t) == i and i > 8)
    sequence = Session(truth=truth).start(SamplingParams(max_tokens=60, stop_token_ids=[token]))
    assert sequence.metrics.acceptance_length > 2
    assert sequence.from_draft[-1] is True


def test_the_end_of_sequence_token_ends_a_text_unless_ignored() -> None:
    truth = reference()
    never = next(token for token in range(48) if token not in truth)
    for eos in (truth[5], (never, truth[5])):
        target = build_target(make_config("plain", eos_token_id=eos if isinstance(eos, int) else list(eos)))
        ends = run(target, NgramDrafter(6, 4, 2), [PROMPT], SamplingParams(max_tokens=20)).sequences[0]
        assert ends.output == truth[: truth.index(truth[5]) + 1] and ends.finish_reason == "stop"
        goes_on = run(
            target, None, [PROMPT], SamplingParams(max_tokens=20, ignore_eos=True), drafts=0
        ).sequences[0]
        assert goes_on.output == truth[:20] and goes_on.finish_reason == "length"


@pytest.mark.parametrize("right", [1.0, 0.6])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 20])
def test_max_tokens_is_never_exceeded(limit: int, right: float) -> None:
    truth = reference()
    sequence = Session(right=right, truth=truth).start(SamplingParams(max_tokens=limit))
    assert sequence.output == truth[:limit] and sequence.finish_reason == "length"
    metrics = sequence.metrics
    assert metrics.num_tokens == limit
    assert metrics.num_accepted_draft_tokens == sum(sequence.from_draft) <= metrics.num_draft_tokens
    assert sum(metrics.acceptance_histogram) == metrics.num_spec_steps


@pytest.mark.parametrize("length", range(1, 14))
def test_should_stop_sees_each_token_once_and_none_beyond(length: int) -> None:
    truth, seen = reference(), []

    def should_stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == length

    sequence = Session(truth=truth).start(SamplingParams(max_tokens=60), should_stop)
    assert sequence.output == seen == truth[:length] and sequence.finish_reason == "stop"


@pytest.mark.parametrize("variant", ["plain", "conv_2", "no_conv", "hybrid_global", "hybrid_narrow"])
@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_goes_on_as_if_it_had_not_stopped(variant: str, cut: int, temperature: float) -> None:
    """Stopped by the caller inside a block, then by length, then by length again."""
    truth = reference(variant, temperature=temperature, seed=3)
    session, seen = Session(variant, 0.9, truth=truth), []

    def should_stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == cut

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=3, max_tokens=count)

    sequence = session.start(params(60), should_stop, keep_slot=True)
    assert sequence.output == truth[:cut]
    assert session.engine.pool.num_free == 1
    session.engine.resume(sequence, [], params(20))
    assert session.finish(sequence).output == truth[cut : cut + 20]
    session.engine.resume(sequence, [], params(20))
    assert session.finish(sequence).output == truth[cut + 20 : cut + 40]
    assert sequence.tokens == [*PROMPT, *truth[: cut + 40]]
    session.engine.release(sequence)
    assert session.engine.pool.num_free == 2


@pytest.mark.parametrize("variant", ["plain", "conv_3", "hybrid_window"])
@pytest.mark.parametrize("extra", [1, 2, 40])
def test_a_resumed_text_with_more_tokens_equals_a_fresh_one(variant: str, extra: int) -> None:
    """A conversation's next turn; float64, as a prefill sums in another order than decoding."""
    target = make_target(variant, torch.float64)
    session = Session(variant, 0.8)
    session.engine = Engine(
        target, session.drafter, SpeculativeConfig(num_speculative_tokens=7), max_num_seqs=2
    )
    sequence = session.start(SamplingParams(max_tokens=20), keep_slot=True)
    more = prompt(extra, 9)
    session.engine.resume(sequence, more, SamplingParams(max_tokens=20))
    session.finish(sequence)
    text = sequence.tokens[: sequence.prompt_length]
    assert text[-extra:] == more and len(text) == 8 + 20 + extra
    fresh = run(target, None, [text], SamplingParams(max_tokens=20), drafts=0)
    assert sequence.output == fresh.outputs[0]


def test_only_a_finished_sequence_with_its_slot_can_be_resumed() -> None:
    session = Session()
    sequence = session.start(SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="kept its slot"):
        session.engine.resume(sequence, [], SamplingParams())
    running = session.engine.add(PROMPT, SamplingParams(max_tokens=40), keep_slot=True)
    session.engine.step()
    with pytest.raises(ValueError, match="finished"):
        session.engine.resume(running, [], SamplingParams())
    session.engine.release(running)
    kept = session.start(SamplingParams(max_tokens=4), keep_slot=True)
    with pytest.raises(ValueError, match="token ids"):
        session.engine.resume(kept, [48], SamplingParams())
    assert kept.finish_reason == "length"  # still as it was


def test_a_resumed_sequence_runs_beside_new_ones() -> None:
    truth = reference()
    session = Session(right=0.8, truth=truth)
    kept = session.start(SamplingParams(max_tokens=10), keep_slot=True)
    session.engine.resume(kept, [], SamplingParams(max_tokens=25))
    other = session.start(SamplingParams(max_tokens=15))
    assert kept.output == truth[10:35] and other.output == truth[:15]


def test_the_state_of_a_cut_block_holds_what_was_emitted_and_no_more() -> None:
    """Control: were the whole accepted block committed, the continuation would be another text."""
    truth = reference()
    session, seen = Session(truth=truth), []
    sequence = session.engine.add(
        PROMPT, SamplingParams(max_tokens=60), lambda t: seen.append(t) or len(seen) == 3, True
    )
    session.drafter.references[sequence.key] = [*PROMPT, *truth]
    while session.engine.has_work:
        session.engine.step()
    assert sequence.slot is not None
    assert reach(session.engine.pool, sequence.slot) == len(sequence.tokens) - 1
    session.engine.pool.count[sequence.slot] += 1  # as if one token more had been kept
    session.engine.resume(sequence, [], SamplingParams(max_tokens=20))
    assert session.finish(sequence).output != truth[3:23]
