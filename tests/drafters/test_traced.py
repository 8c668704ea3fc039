"""Recorded steps: the same results as the step itself, without its Python."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specla.drafters import DraftRow, EagleDrafter, LookupFirst
from specla.drafters.memory import beams_of, new_memory
from specla.drafters.network import Eagle
from specla.drafters.traced import MOST_PROGRAMS, MOST_ROWS, Traced
from specla.engine.params import SamplingParams
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.layers import quantize_linears
from tests.drafters.eagles import KINDS, make_eagle
from tests.drafters.test_eagle import features_of, trees
from tests.targets import VOCAB, make_target, prompt, run, same_bits

BOTH = ["delta", "delta_bare", "attention", "window"]
assert set(BOTH) == set(KINDS)
SIZES = {"num_heads": 2, "head_dim": 16, "intermediate_size": 32}  # whole vectors, as eight bits need them


def target() -> GatedDeltaNet:
    return make_target()


def make_network(kind: str, **changes) -> Eagle:
    network = make_eagle(target(), kind, dtype=torch.float32, **SIZES | changes)
    quantize_linears(network)
    if network.lm_head.int8 is None:
        pytest.skip("this torch multiplies by no weights of eight bits")
    return network


class Counted:
    """A step that counts the calls of its Python."""

    def __init__(self, step: Callable[..., tuple[Tensor, ...]]):
        self.step, self.calls = step, 0

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        return self.step(*tensors)


def beam_step(network: Eagle) -> Counted:
    return Counted(EagleDrafter(network, max_num_seqs=1)._beam_step)


def beam_inputs(network: Eagle, batch: int, width: int, depth: int, seed: int) -> tuple[Tensor, ...]:
    """What a step gets after `depth` steps from random histories of random lengths."""
    config, generator = network.config, torch.Generator().manual_seed(seed)
    memory = new_memory(config, batch, torch.float32, torch.device("cpu"))
    lengths = torch.randint(1, 12, (batch,), generator=generator).tolist()
    longest = max(lengths)

    def ids(*shape: int) -> Tensor:
        return torch.randint(config.vocab_size, shape, generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, config.hidden_size, generator=generator)

    network(ids(batch, longest), noise(batch, longest), memory.reading(list(range(batch)), lengths))
    beams = memory.beams(list(range(batch)))
    for n in range(depth + 1):
        follow = torch.randint(width if n else 1, (batch, width), generator=generator)
        beams.follow(follow)
        if n < depth:
            network(ids(batch, width), noise(batch, width), beams)
    return ids(batch, width), noise(batch, width), *beams.tensors


@pytest.mark.parametrize("kind", BOTH)
@torch.inference_mode()
def test_a_recorded_step_gives_what_the_step_gives_whatever_the_data(kind: str) -> None:
    network = make_network(kind)
    step = beam_step(network)
    traced = Traced(step.run)
    shapes = [(1, 1, 0), (1, 1, 3), (1, 4, 1), (2, 3, 2), (3, 1, 6), (1, 4, 7)]  # batch, width, depth
    for shape in shapes * 4:
        tensors = beam_inputs(network, *shape, seed=step.calls)
        copies = [x.clone() for x in tensors]
        got, want = traced(*tensors), step.step(*tensors)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, tensors, copies)), "inputs are left alone"
        beams_of(network.config, got[2:]).follow(torch.zeros(shape[:2], dtype=torch.long))


@pytest.mark.parametrize("kind", BOTH)
@torch.inference_mode()
def test_from_the_third_call_with_the_same_shapes_no_python_runs(kind: str) -> None:
    network = make_network(kind)
    step = beam_step(network)
    traced = Traced(step.run)
    shapes = [(1, 1, 0), (1, 4, 2), (2, 4, 2), (3, 2, 1)]
    kept: set[tuple[torch.Size, ...]] = set()
    for seed in range(4):
        for shape in shapes:
            tensors = beam_inputs(network, *shape, seed=0)
            kept.add(tuple(x.shape for x in tensors))
            traced(*(x.clone() for x in tensors))
        if seed == 1:
            calls = step.calls
    assert step.calls == calls == 2 * len(kept)


def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x + 1, y.sum(0) * 2


def test_more_shapes_than_programs_are_fine() -> None:
    step = Counted(sums)
    traced = Traced(step.run)
    for turn in range(3):
        for size in range(1, MOST_PROGRAMS + 9):
            x, y = torch.full((2,), turn), torch.randn(size, 3)
            got = traced(x, y)
            assert all(map(torch.equal, got, sums(x, y)))
            assert len(traced._programs) <= MOST_PROGRAMS


def test_a_step_that_cannot_be_recorded_still_runs() -> None:
    def moody(x: Tensor) -> tuple[Tensor, ...]:
        if torch.jit.is_tracing():
            raise RuntimeError("not like this")
        return (x * 2,)

    step = Counted(moody)
    traced = Traced(step.run)
    for n in range(5):
        assert torch.equal(traced(torch.full((3,), n))[0], torch.full((3,), 2 * n))
    assert step.calls == 5 + 1, "it is tried once"


def test_large_batches_run_as_they_are() -> None:
    step = Counted(sums)
    traced = Traced(step.run)
    for n in range(1, 5):
        traced(torch.zeros(MOST_ROWS + 1), torch.zeros(2, 2))
        assert step.calls == n and not traced._programs
    traced(torch.zeros(MOST_ROWS), torch.zeros(2, 2))
    assert traced._programs


def test_only_a_network_all_of_whose_products_are_in_eight_bits_is_recorded() -> None:
    recorded = EagleDrafter(make_network("delta"))
    mixed = EagleDrafter(make_network("delta", intermediate_size=24))
    exact = EagleDrafter(make_eagle(target(), "delta", dtype=torch.float32))
    assert [isinstance(each._step, Traced) for each in (recorded, mixed, exact)] == [True, False, False]


def histories(kind: str) -> tuple[list[list[set[tuple[int, ...]]]], EagleDrafter]:
    """The trees of one drafter in many rounds with changing batches, limits and temperatures."""
    chance = random.Random(1)
    texts = [prompt(length, seed) for seed, length in enumerate((60, 80, 45))]
    streams = [features_of(text).float() for text in texts]
    drafter = EagleDrafter(make_network(kind), 12, 4, 3, max_num_seqs=3)
    at, done, rounds = [30, 1, 9], [0, 0, 0], []
    while live := [key for key in range(3) if at[key] < len(texts[key])]:
        rows = []
        for key in live:
            drafter.observe(key, streams[key][done[key] : at[key]], texts[key][done[key] + 1 : at[key] + 1])
            done[key] = at[key]
            limit, temperature = chance.choice([0, 3, 12]), chance.choice([0.0, 0.0, 1.0])
            rows.append(DraftRow(key, texts[key][: at[key] + 1], limit, 12, temperature, key))
            at[key] += chance.randint(1, 4)
        rounds.append(trees(drafter.propose(rows)))
    return rounds, drafter


@pytest.mark.parametrize("kind", ["delta", "window"])
def test_a_drafter_proposes_the_same_trees_recorded_or_not(kind: str, monkeypatch) -> None:
    recorded, drafter = histories(kind)
    assert isinstance(drafter._step, Traced) and any(drafter._step._programs.values())
    monkeypatch.setattr("specla.drafters.eagle.Traced", lambda step: step)
    plain, drafter = histories(kind)
    assert not isinstance(drafter._step, Traced)
    assert recorded == plain
    assert sum(len(tree) > 1 for trees in plain for tree in trees) > 20


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "after lookup"])
@pytest.mark.parametrize("kind", ["delta", "window"])
def test_recorded_drafts_change_nothing_and_are_accepted(kind: str, wrapped: bool) -> None:
    """In a hot draw the noise decides, which the drafter knows: its drafts are mostly right, whatever its weights."""
    network = make_network(kind, draft_vocab_size=VOCAB)
    trained = EagleDrafter(network, 9, 6, 3)
    prompts = [prompt(n, n) for n in (3, 20, 70)]
    hot = [SamplingParams(max_tokens=40, temperature=t, seed=n) for n, t in enumerate((60.0, 80.0, 100.0))]
    for params, least in ((hot, 2.0), ([SamplingParams(max_tokens=30)] * 3, 1.0)):
        plain = run(target(), None, prompts, params)
        drafted = run(target(), LookupFirst(trained, 9) if wrapped else trained, prompts, params)
        assert drafted.outputs == plain.outputs and all(map(same_bits, drafted.logits, plain.logits))
        rounds = sum(s.metrics.num_spec_steps for s in drafted.sequences)
        assert sum(map(len, drafted.outputs)) / rounds >= least
