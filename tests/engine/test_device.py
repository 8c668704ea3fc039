"""Laws that it takes a GPU to look at: bits over a hundred thousand tokens, ten thousand rounds of coming and going."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from specla.bench.resident import random_network
from specla.drafters import Drafter, EagleDrafter, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.engine.choice import make_engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import Sequence
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import load_target
from tests.engine.residents import MIX, check_end, finish, step
from tests.models.test_fixtures import DATA, VARIANTS
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE, full_size
from tests.resident.test_forward import big
from tests.targets import make_target, prompt

VOCAB = 3000  # of `big`
SLOTS = 33  # so many that plain rounds leave states unwritten, and no power of two


def drafters() -> list[Drafter]:
    network = random_network(big().config, 1, DEVICE)
    return [
        NgramDrafter(), SyntheticDrafter(0.8, 8, 8, 1, VOCAB), SyntheticDrafter(0.7, 15, 5, 4, VOCAB),
        EagleDrafter(network, 7, 4, 2, max_num_seqs=SLOTS),
    ]  # fmt: skip


def decode(
    drafter: Drafter,
    drafts: int | str,
    params: list[SamplingParams],
    texts: list[list[int]] | None = None,
    slots: int = SLOTS,
) -> list[Sequence]:
    engine = ResidentEngine(big(), drafter, SpeculativeConfig(num_speculative_tokens=drafts), slots)
    sequences = [engine.add(prompt(3 + n % 40, n, VOCAB), each) for n, each in enumerate(params)]
    if isinstance(drafter, SyntheticDrafter):
        assert texts is not None
        drafter.references = {s.key: s.tokens + text for s, text in zip(sequences, texts, strict=True)}
    while engine.has_work:
        engine.step()
    return sequences


def step_beside_free_slots(engine: ResidentEngine) -> None:
    """A step, and slots that are free before and after it keep their bits."""
    (group,) = engine.pool.groups.values()
    free = sorted(engine.pool._free)
    states = [x[:, free].clone() for x in (group.state, group.conv_state)]
    engine.step()
    left = [i for i, slot in enumerate(free) if slot in engine.pool._free]
    slots = [free[i] for i in left]
    for x, old in zip((group.state, group.conv_state), states, strict=True):
        assert same_bits(x[:, slots], old[:, left])


@full_size
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hundred_thousand_tokens_and_what_the_target_thinks_of_them_have_the_bits_of_plain_decoding(
    temperature: float,
) -> None:
    """Log-probabilities are told of the token and of the five likeliest: they tell of the logits, to the bit."""
    params = [
        SamplingParams(max_tokens=500 + n % 40, temperature=temperature, seed=n, logprobs=5)
        for n in range(50)
    ]
    (alone,) = decode(NoDrafter(), 0, params[:1], slots=1)
    plain = decode(NoDrafter(), 0, params)
    assert (alone.output, alone.logprobs) == (plain[0].output, plain[0].logprobs)
    texts, compared = [sequence.output for sequence in plain], 0
    for drafter, drafts in zip(drafters(), (7, 8, 15, "auto"), strict=True):
        for sequence, twin in zip(decode(drafter, drafts, params, texts), plain, strict=True):
            assert sequence.output == twin.output and sequence.logprobs == twin.logprobs
            compared += len(sequence.output)
    assert compared > 100_000


@full_size
@pytest.mark.parametrize("number", range(5))
def test_ten_thousand_rounds_of_coming_and_going_leave_free_slots_alone_and_leak_nothing(number: int) -> None:
    """A fifth of them with each drafter; who is cancelled has said the beginning of what it says alone."""
    drafts = (0, 7, 8, 15, "auto")[number]
    kinds = [
        SamplingParams(), SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, num_speculative_tokens=2 if drafts else 0),
        SamplingParams(temperature=1.0, top_k=30, repetition_penalty=1.1, min_p=0.01),
    ]  # fmt: skip
    rng = random.Random(number)
    params = [
        replace(kinds[n % 4 if n % 20 == 3 else n % 3], max_tokens=rng.randint(1, 160), seed=n)
        for n in range(60)
    ]
    plain = [replace(each, num_speculative_tokens=0) for each in params]
    texts = [sequence.output for sequence in decode(NoDrafter(), 0, plain, slots=16)]
    drafter = [NoDrafter(), *drafters()][number]
    config = SpeculativeConfig(num_speculative_tokens=drafts)
    engine = ResidentEngine(big(), drafter, config, SLOTS)
    running: dict[int, tuple[Sequence, int]] = {}
    rounds, grown, before, held, compared = 0, 0, 0, -1, 0
    while rounds < 2000 or not compared:
        assert rounds < 8000, "new shapes again and again"
        if (
            rounds - before >= 400
        ):  # once nothing new is captured any more, nothing may be held any more either
            settled = engine.captures.count == grown
            if settled and held >= 0:
                assert torch.cuda.memory_allocated() == held
                compared += 1
            held = torch.cuda.memory_allocated() if settled else -1
            grown, before = engine.captures.count, rounds
        for _ in range(rng.choice([0] * 12 + [1, 2, 5])):
            n = rng.randrange(len(params))
            sequence = engine.add(prompt(3 + n % 40, n, VOCAB), params[n])
            if isinstance(drafter, SyntheticDrafter):
                drafter.references[sequence.key] = sequence.tokens + texts[n]
            running[sequence.key] = sequence, n
        if running and rng.random() < 0.02:
            engine.release(running[rng.choice(list(running))][0])
        if rounds % 50:
            engine.step()
        else:
            step_beside_free_slots(engine)
        rounds += 1
        for key, (sequence, n) in list(running.items()):
            if sequence.finish_reason:
                assert sequence.output == texts[n][: len(sequence.output)]
                assert sequence.finish_reason == "abort" or sequence.output == texts[n]
                del running[key]
    for sequence, _ in running.values():
        engine.release(sequence)
    while engine.has_work:
        engine.step()
    assert engine.pool.num_free == SLOTS and (engine.rounds.rows == -1).all()


@full_size
@pytest.mark.parametrize("variant", VARIANTS)
def test_fixtures_say_on_a_gpu_what_they_say_on_a_cpu(variant: str) -> None:
    """In fp32: greedy tokens and their log-probabilities, drafted for and not."""
    params = SamplingParams(max_tokens=40, logprobs=3, ignore_eos=True)
    said: list[Sequence] = []
    for device in ("cpu", "cuda"):
        target = load_target(DATA / variant, device, "float32")
        for drafts in (0, 5):
            engine = make_engine(target, NgramDrafter(), SpeculativeConfig(num_speculative_tokens=drafts), 1)
            resident = device == "cuda" and isinstance(target, GatedDeltaNet)
            assert isinstance(engine, ResidentEngine) == resident
            said.append(engine.add([5, 17, 3, 9, 5, 17], params))
            while engine.has_work:
                engine.step()
    for sequence in said[1:]:
        assert sequence.output == said[0].output
        for ours, theirs in zip(sequence.logprobs, said[0].logprobs, strict=True):
            assert abs(ours.logprob - theirs.logprob) < 2e-4


def script(
    engine: ResidentEngine, asked: list[tuple[list[int], SamplingParams]], texts: list[list[int]]
) -> int:
    """Let requests join, a few of them be cancelled, and all others say what they say alone; the number of rounds."""
    rng, waiting, sequences, steps = random.Random(0), list(range(len(asked))), {}, 0
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            if waiting:
                number = waiting.pop(0)
                sequences[number] = engine.add(*asked[number])
                if isinstance(engine.drafter, SyntheticDrafter):
                    engine.drafter.references[sequences[number].key] = asked[number][0] + texts[number]
        if sequences and rng.random() < 0.03:
            engine.release(sequences[rng.choice(list(sequences))])
        step(engine)
        steps += 1
    for number, sequence in sequences.items():
        if sequence.finish_reason != "abort":
            assert sequence.finish_reason == "length"
            assert sequence.output == texts[number]
        assert sequence.output == texts[number][: len(sequence.output)]
    check_end(engine)
    return steps


@full_size
def test_a_thousand_rounds_of_each_drafter_change_nothing_and_need_no_more_memory() -> None:
    net, rng = big(), random.Random(1)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=1.2, seed=6),
    ]
    kinds += [SamplingParams(temperature=1.0, seed=7, top_k=30, repetition_penalty=1.1, min_p=0.01)]
    asked = [
        (prompt(2 + n % 9, n, 3000) * (1 + n % 3), replace(kinds[n % 4], max_tokens=rng.randint(1, 120)))
        for n in range(60)
    ]
    plain = ResidentEngine(net, NoDrafter(), SpeculativeConfig(num_speculative_tokens=0), 8)
    alone = [plain.add(*request) for request in asked]
    finish(plain)
    texts = [sequence.output for sequence in alone]
    for drafter in (NgramDrafter(), SyntheticDrafter(0.7, 7, 5, 2, 3000)):
        engine = ResidentEngine(net, drafter, SpeculativeConfig(num_speculative_tokens=7), 8)
        steps, settled = 0, False
        while steps < 1000 or not settled:
            assert steps < 6000, "new shapes again and again"
            shapes, held_before = engine.captures.count, torch.cuda.memory_allocated()
            retries = torch.cuda.memory_stats()["num_alloc_retries"]
            steps += script(engine, asked, texts)
            settled = engine.captures.count == shapes
            if settled:
                assert torch.cuda.memory_allocated() == held_before
                assert torch.cuda.memory_stats()["num_alloc_retries"] == retries


@full_size
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_target_may_lie_on_another_gpu_than_the_current_one() -> None:
    texts = []
    for device in ("cuda:0", "cuda:1"):
        net = copy.deepcopy(make_target("plain")).to(device)
        engine = ResidentEngine(net, NgramDrafter(), SpeculativeConfig(num_speculative_tokens=3), 2)
        sequences = [engine.add(request.prompt, request.params) for request in MIX[:8]]
        while engine.has_work:
            engine.step()
        texts.append([sequence.output for sequence in sequences])
    assert texts[0] == texts[1]
