"""Log-probabilities are those of the target's own distribution, whatever is drafted, drawn or cut into pieces."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specla.resident.rounds as rounds
from specla import LLM
from specla.drafters import EagleDrafter, NoDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import Sequence, TokenLogprobs
from tests.checkpoints import save_checkpoint
from tests.drafters.eagles import make_eagle
from tests.engine.residents import KINDS, head, make, read_trees
from tests.targets import VOCAB, ScriptedDrafter, make_target, prompt


@pytest.fixture(autouse=True)
def hash_nets_have_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "read_trees", read_trees)
    monkeypatch.setattr(rounds, "head", head)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def naive(variant: str, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities `[T, V]` after each token of a text."""
    target = make_target(variant)
    with torch.inference_mode():
        return target.logits(target(torch.tensor([tokens])))[0].float().log_softmax(-1)


def check(told: TokenLogprobs, token: int, want: torch.Tensor, count: int) -> None:
    assert told.token == token and told.logprob == pytest.approx(float(want[token]), abs=2e-4)
    assert len(told.top) == count
    best = want.topk(count).values.tolist()
    assert [value for _, value in told.top] == pytest.approx(best, abs=2e-4)
    assert all(value == pytest.approx(float(want[t]), abs=2e-4) for t, value in told.top)
    assert dict(told.top).get(token, told.logprob) == told.logprob


@pytest.mark.parametrize("variant", ["plain", "hybrid_window", "tied"])
@pytest.mark.parametrize(("count", "prompt_count"), [(0, 3), (20, None), (None, 20), (5, 0)])
def test_they_are_those_of_the_whole_text(variant: str, count: int | None, prompt_count: int | None) -> None:
    """Under every kind of sampling; what others ask for makes no difference."""
    engine = Engine(make_target(variant), ScriptedDrafter(), max_num_seqs=3, max_num_batched_tokens=128)
    made = []
    for n, params in enumerate(KINDS[:8]):
        asks = {"logprobs": count, "prompt_logprobs": prompt_count} if n % 2 else {}
        made.append(engine.add(prompt((3, 190, 1)[n % 3], n), replace(params, **asks)))
    finish(engine)
    for n, sequence in enumerate(made):
        if n % 2 == 0:
            assert sequence.logprobs == [] and sequence.prompt_logprobs == []
            continue
        want = naive(variant, sequence.tokens)
        assert len(sequence.logprobs) == (0 if count is None else len(sequence.output))
        for place, told in enumerate(sequence.logprobs, sequence.prompt_length):
            assert count is not None
            check(told, sequence.tokens[place], want[place - 1], count)
        if prompt_count is None:
            assert sequence.prompt_logprobs == []
            continue
        assert sequence.prompt_logprobs[0] is None
        assert len(sequence.prompt_logprobs) == sequence.prompt_length
        for place, told in enumerate(sequence.prompt_logprobs[1:], 1):
            assert told is not None
            check(told, sequence.tokens[place], want[place - 1], prompt_count)


def test_drafts_and_pauses_change_no_bit_of_them() -> None:
    target, params = make_target("plain"), SamplingParams(max_tokens=20, logprobs=4, prompt_logprobs=2)
    network = make_eagle(target, "delta", dtype=torch.float32, draft_vocab_size=VOCAB)
    runs = []
    for drafter, size in ((NoDrafter(), 10**6), (EagleDrafter(network, 7, 4, 2), 64)):
        engine = Engine(target, drafter, max_num_batched_tokens=size)
        sequence = engine.add(prompt(200), params)
        finish(engine)
        runs.append(sequence)
    assert runs[0].logprobs == runs[1].logprobs and runs[0].prompt_logprobs == runs[1].prompt_logprobs
    assert runs[1].metrics.num_draft_tokens > 0


def test_rounds_on_a_gpu_tell_the_same() -> None:
    asks = [
        replace(params, logprobs=None if n % 4 == 3 else 3 * (n % 3)) for n, params in enumerate(KINDS[:8])
    ]
    runs: list[list[Sequence]] = []
    for kind, drafter in ((Engine, "none"), (ResidentEngine, "synthetic")):
        engine = make(drafter, 6, kind=kind)
        runs.append([engine.add(prompt(8, n), params) for n, params in enumerate(asks)])
        if drafter == "synthetic":
            engine.drafter.references = {s.key: one.tokens for s, one in zip(runs[1], runs[0], strict=True)}
        finish(engine)
    for one, other in zip(*runs, strict=True):
        assert one.output == other.output and len(one.logprobs) == len(other.logprobs)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a.token, [t for t, _ in a.top]) == (b.token, [t for t, _ in b.top])
            values = ([x.logprob, *(value for _, value in x.top)] for x in (a, b))
            assert next(values) == pytest.approx(next(values), abs=1e-5)
    told = [sequence for sequence in runs[1] if sequence.params.logprobs is not None]
    assert all(len(sequence.logprobs) == len(sequence.output) for sequence in told)
    assert any(sequence.metrics.num_accepted_draft_tokens for sequence in told)


def test_a_resumed_sequence_tells_of_its_new_tokens_alone() -> None:
    engine = Engine(make_target("plain"), NoDrafter())
    sequence = engine.add(prompt(5), SamplingParams(max_tokens=3, logprobs=1), keep_slot=True)
    finish(engine)
    engine.resume(sequence, [1, 2], SamplingParams(max_tokens=4, logprobs=0))
    finish(engine)
    assert [told.token for told in sequence.logprobs] == sequence.output
    with pytest.raises(ValueError, match="prompt_logprobs"):
        engine.resume(sequence, [1], SamplingParams(prompt_logprobs=1))


def test_the_front_door_hands_them_out(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    llm = LLM(tmp_path, drafter="none", dtype="float32")
    (plain,) = llm.generate("the cat", SamplingParams(max_tokens=5))
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None
    (output,) = llm.generate("the cat", SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1))
    told, prompted = output.outputs[0].logprobs, output.prompt_logprobs
    assert told is not None and prompted is not None
    assert [t.token for t in told] == output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert all(t.top[0] == (t.token, t.logprob) and math.exp(t.logprob) <= 1 for t in told), "greedy"
    assert [t and t.token for t in prompted] == [None, *output.prompt_token_ids[1:]]
    streamed = list(llm.stream("the cat", SamplingParams(max_tokens=5, logprobs=2)))
    assert [len(o.outputs[0].logprobs or []) for o in streamed] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "5"])
def test_numbers_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be an integer in 0\.\.20 or None"):
        SamplingParams(**{name: value})
