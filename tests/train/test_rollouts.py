"""Texts that the target writes itself: an engine's tokens, verification's features, one row at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specla.drafters import NoDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.past import Verification
from specla.models.target import Tap
from specla.train import rollouts
from specla.train.rollouts import Recorder, Rollouts
from specla.tree import Tree
from tests.targets import FAMILY, QWEN, VARIANTS, VOCAB, build_target, make_config, make_target

LENGTH = 13
STREAMS = (2, 0)
GIVEN = torch.tensor([1, 5, LENGTH + 1, 9, 2, LENGTH])
WARM = torch.tensor([0.0, 0.7, 1.3, 1.0, 2.5, 0.4])
SEED = torch.tensor([3, -9, 0, 2**62, 3, 11])


def texts(rows: int = len(GIVEN), length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(rows))


def recorder(target: GatedDeltaNet, rows: int = len(GIVEN), dtype: torch.dtype | None = None) -> Recorder:
    return Recorder(target, STREAMS, rows, LENGTH, dtype)


def record(target: GatedDeltaNet, dtype: torch.dtype | None = None) -> Rollouts:
    return recorder(target, dtype=dtype).record(texts(), GIVEN, WARM, SEED)


def same(a: Rollouts, b: Rollouts) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "features", "hidden"))


def copied(x: Rollouts) -> Rollouts:
    return Rollouts(x.tokens.clone(), x.features.clone(), x.hidden.clone())


def engine_tokens(target: GatedDeltaNet, prompt: list[int], temperature: float, seed: int) -> list[int]:
    engine = Engine(target, NoDrafter(), SpeculativeConfig(num_speculative_tokens=0))
    room = LENGTH + 1 - len(prompt)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=room, ignore_eos=True)
    sequence = engine.add(prompt, params)
    while engine.has_work:
        engine.step()
    return sequence.tokens


@torch.no_grad()
def verified(target: GatedDeltaNet, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Features and hidden states of texts `[R, L]` that verification reads in trees of one node."""
    rows, features, hidden = len(tokens), [], []
    pool = target.new_pool(rows, 1)
    slots = [pool.alloc() for _ in range(rows)]
    for column in tokens.split(1, 1):
        past = Verification(pool, slots, Tree.chain(1, rows), "serial")
        hidden.append(target(column, past, Tap(STREAMS, features.append)))
        pool.accept(slots, torch.zeros(rows, 1), [0] * rows)
    return torch.cat(features, 1), torch.cat(hidden, 1)


@pytest.mark.parametrize("variant", ["plain", "grouped_wide", "hybrid_narrow", "gla_conv", "retnet"])
@pytest.mark.parametrize("temperature", [torch.zeros(len(GIVEN)), WARM], ids=["greedy", "sampled"])
def test_the_tokens_are_an_engines(variant: str, temperature: Tensor) -> None:
    target = make_target(variant)
    tokens = texts()
    got = recorder(target).record(tokens, GIVEN, temperature, SEED).tokens
    for row, given in enumerate(GIVEN.tolist()):
        if given > LENGTH:
            assert torch.equal(got[row], tokens[row])
        else:
            prompt = tokens[row, :given].tolist()
            expected = engine_tokens(target, prompt, float(temperature[row]), int(SEED[row]))
            assert got[row].tolist() == expected


def test_it_goes_on_past_the_end_of_a_text() -> None:
    expected = record(make_target("plain"))
    ending = int(expected.tokens[0, 5])
    assert same(record(build_target(make_config("plain", eos_token_id=ending))), expected)


@pytest.mark.parametrize("variant", [*VARIANTS, *QWEN, *FAMILY])
def test_features_and_hidden_are_verifications_bit_for_bit(variant: str) -> None:
    target = make_target(variant)
    got = record(target)
    features, hidden = verified(target, got.tokens[:, :-1])
    assert torch.equal(got.features, features) and torch.equal(got.hidden, hidden)


def test_a_bfloat16_target_keeps_the_dtype_asked_for() -> None:
    target = make_target("plain", torch.bfloat16)
    got = record(target, torch.bfloat16)
    features, hidden = verified(target, got.tokens[:, :-1])
    assert got.features.dtype == got.hidden.dtype == torch.bfloat16
    assert torch.equal(got.features, features.bfloat16()) and torch.equal(got.hidden, hidden.bfloat16())


@pytest.mark.parametrize(
    "variant", ["plain", "grouped", "conv_2", "hybrid_window", "hybrid_two_kinds", *FAMILY]
)
def test_features_and_hidden_are_those_of_a_whole_text(variant: str) -> None:
    target = make_target(variant, torch.float64)
    got = record(target, torch.float64)
    features: list[Tensor] = []
    hidden = target(got.tokens[:, :-1], tap=Tap(STREAMS, features.append))
    assert torch.allclose(got.features, features[0], rtol=1e-10, atol=1e-10)
    assert torch.allclose(got.hidden, hidden, rtol=1e-10, atol=1e-10)


def test_hidden_states_draw_the_next_token() -> None:
    target = make_target("plain")
    got = recorder(target).record(texts(), GIVEN, torch.zeros(len(GIVEN)), SEED)
    drawn = target.logits(got.hidden).argmax(-1)
    written = torch.arange(1, LENGTH + 1) >= GIVEN[:, None]
    assert torch.equal(drawn[written], got.tokens[:, 1:][written])


@pytest.mark.parametrize("variant", ["plain", "grouped_wide", "hybrid_window"])
def test_a_row_does_not_depend_on_the_others(variant: str) -> None:
    target = make_target(variant)
    together, alone = record(target), recorder(target, 1)
    for row in range(len(GIVEN)):
        part = slice(row, row + 1)
        single = alone.record(texts()[part], GIVEN[part], WARM[part], SEED[part])
        assert same(single, Rollouts(together.tokens[part], together.features[part], together.hidden[part]))


@pytest.mark.parametrize("variant", ["plain", "hybrid_global"])
def test_nothing_is_left_from_the_call_before(variant: str) -> None:
    target = make_target(variant)
    used = recorder(target)
    first = copied(used.record(texts(), GIVEN, WARM, SEED))
    used.record(texts().flip(1), GIVEN.flip(0), WARM.flip(0), SEED)
    assert same(first, used.record(texts(), GIVEN, WARM, SEED))


def test_what_follows_the_given_tokens_is_not_read() -> None:
    target = make_target("plain")
    tokens = texts()
    tokens[torch.arange(LENGTH + 1) >= GIVEN[:, None]] = -1
    assert same(record(target), recorder(target).record(tokens, GIVEN, WARM, SEED))


def test_noise_in_blocks_of_rows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("plain")
    whole = record(target)
    for rows in (4, 1):
        monkeypatch.setattr(rollouts, "NOISE_BLOCK", rows * VOCAB + 1)
        assert same(whole, record(target))
    monkeypatch.setattr(rollouts, "NOISE_BLOCK", 1)
    assert same(whole, record(target))


@pytest.mark.parametrize("variant", ["grouped", "no_conv"])
def test_no_step_of_a_recurrent_target_waits_for_the_device(variant: str) -> None:
    """The host cannot read a tensor on "meta", nor while a graph is captured."""
    target = GatedDeltaNet(make_config(variant)).requires_grad_(False).to("meta")
    got = Recorder(target, STREAMS, 2, 2).record(texts(2, 2), GIVEN[:2].clamp(max=3), WARM[:2], SEED[:2])
    assert got.features.is_meta and got.features.shape == (2, 2, 2 * target.config.hidden_size)


def test_the_result_serves_as_a_constant_in_training() -> None:
    got = record(make_target("plain"))
    for constant in (got.features, got.hidden):
        weight = torch.ones(constant.shape[-1], requires_grad=True)
        (constant * weight).sum().backward()
        assert torch.allclose(weight.grad, constant.sum((0, 1)), atol=1e-3)
        assert not constant.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows must be in"),
        ({"length": 0}, "length must be at least 1"),
        ({"layer_ids": (0, 3)}, "layer_ids must name streams in 0..2"),
        ({"layer_ids": ()}, "layer_ids must name streams in 0..2"),
    ],
)
def test_a_recorder_that_cannot_be(change: dict, message: str) -> None:
    arguments = {"layer_ids": STREAMS, "rows": 2, "length": 3, **change}
    with pytest.raises(ValueError, match=message) as caught:
        Recorder(make_target("plain"), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": texts()[:, :-1]}, "tokens must be int64"),
        ({"tokens": texts().int()}, "tokens must be int64"),
        ({"tokens": texts().fill_(VOCAB)}, "given tokens must be in"),
        ({"given": GIVEN[:-1]}, "given must be int64"),
        ({"given": GIVEN - 1}, "given must be in"),
        ({"given": GIVEN + 1}, "given must be in"),
        ({"temperature": WARM[None]}, "temperature must be floating point"),
        ({"temperature": SEED}, "temperature must be floating point"),
        ({"temperature": -WARM}, "temperature must be finite and >= 0"),
        ({"temperature": WARM / 0}, "temperature must be finite and >= 0"),
        ({"seed": WARM}, "seed must be int64"),
    ],
)
def test_arguments_that_do_not_fit(change: dict, message: str) -> None:
    arguments = {"tokens": texts(), "given": GIVEN, "temperature": WARM, "seed": SEED, **change}
    with pytest.raises(ValueError, match=message) as caught:
        recorder(make_target("plain")).record(**arguments)
    assert "\n" not in str(caught.value)
