"""Speculation changes nothing: tokens, and where arithmetic is exact the logits' bits, equal plain decoding's."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from specla.drafters import Drafter, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.drafters.eagle import EagleDrafter
from specla.engine.params import SamplingParams
from tests.drafters.eagles import make_eagle
from tests.targets import (
    FAMILY,
    FURTHER,
    QWEN,
    RECURRENT,
    VARIANTS,
    VOCAB,
    Run,
    ScriptedDrafter,
    make_target,
    pairs,
    prompt,
    run,
    same_bits,
)

GREEDY = SamplingParams(max_tokens=24)
WARM = SamplingParams(temperature=1.0, seed=11, max_tokens=24)
# Prompts that repeat themselves give prompt lookup something to find.
MODES = ["serial", "hybrid", "parallel"]
DRAFTERS = "none|ngram|eagle delta|eagle window|synthetic 0|synthetic 0.5|synthetic 0.9|synthetic 1|scripted 0.8".split(
    "|"
)
PROMPTS = [prompt(7) * 2, prompt(1), prompt(12, 1), prompt(4, 2) * 3, prompt(65, 3)]


def told(value: object) -> str | None:
    """How a test's name says it."""
    return {GREEDY: "greedy", WARM: "sampled"}.get(value)


def drafter(name: str, variant: str = "plain") -> Drafter:
    kind, _, rate = name.partition(" ")
    if kind == "eagle":
        target = make_target(variant)
        return EagleDrafter(make_eagle(target, rate, dtype=torch.float32, draft_vocab_size=VOCAB), 9, 5, 3)
    if kind == "ngram":
        return NgramDrafter(9, 5, 3)
    if kind == "synthetic":
        return SyntheticDrafter(float(rate), 9, 5, 2, VOCAB, seed=3)
    return ScriptedDrafter(seed=4, right=float(rate)) if kind == "scripted" else NoDrafter()


@cache
def plain(variant: str, dtype: torch.dtype, batch: int, params: SamplingParams) -> Run:
    return run(make_target(variant, dtype), None, PROMPTS[:batch], params, drafts=0)


def accepted(made: Run) -> int:
    return sum(s.metrics.num_accepted_draft_tokens for s in made.sequences)


@pytest.mark.parametrize(
    ("name", "mode", "params", "batch"), pairs(DRAFTERS, MODES, [GREEDY, WARM], [1, 5]), ids=told
)
def test_tokens_equal_those_of_plain_decoding(
    name: str, mode: str, params: SamplingParams, batch: int
) -> None:
    dtype = torch.float64 if mode == "parallel" else torch.float32  # parallel sums in another order
    want = plain("plain", dtype, batch, params)
    references = want.tokens if name.startswith(("synthetic", "scripted")) else None
    target = make_target("plain", dtype)
    got = run(target, drafter(name), PROMPTS[:batch], params, mode=mode, references=references)
    assert got.outputs == want.outputs
    if mode != "parallel":
        assert all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    drafted = sum(s.metrics.num_draft_tokens for s in got.sequences)
    assert (drafted == 0) == (name == "none")
    assert (accepted(got) > 0) == (name not in ("none", "synthetic 0")) or name == "ngram"


def test_texts_of_the_targets_are_not_trivial() -> None:
    for variant in [*VARIANTS, *QWEN, *FAMILY, *FURTHER]:
        greedy, warm = (plain(variant, torch.float32, 5, params).outputs for params in (GREEDY, WARM))
        assert len({token for output in greedy for token in output}) > 15, variant
        assert all(len(set(output)) > 8 for output in warm), variant
    assert plain("plain", torch.float32, 5, GREEDY).outputs != plain("plain", torch.float32, 5, WARM).outputs


@pytest.mark.parametrize(
    ("variant", "dtype", "mode"),
    pairs([*VARIANTS, *QWEN, *FAMILY, *FURTHER], [torch.float32, torch.bfloat16], ["serial", "hybrid"]),
)
def test_logits_are_those_of_plain_decoding_bit_by_bit(variant: str, dtype: torch.dtype, mode: str) -> None:
    params = GREEDY if mode == "serial" else WARM
    want = plain(variant, dtype, 5, params)
    scripted = ScriptedDrafter(seed=1, right=0.85, idle=0.1)
    got = run(make_target(variant, dtype), scripted, PROMPTS, params, mode=mode, references=want.tokens)
    assert got.outputs == want.outputs
    assert all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert accepted(got) > 20
    assert sum(s.metrics.num_draft_tokens for s in got.sequences) > accepted(got)  # some were rejected


@pytest.mark.parametrize(
    ("variant", "name", "mode", "params", "batch"),
    pairs(
        ["qwen_dense", "qwen_next", "delta_net", "gla", "retnet", "mamba2", "kda", "kimi"],
        ["ngram", "synthetic 0.7", "eagle delta"],
        MODES,
        [GREEDY, WARM],
        [1, 4],
    ),
    ids=told,
)
def test_tokens_of_other_targets_equal_those_of_plain_decoding(
    variant: str, name: str, mode: str, params: SamplingParams, batch: int
) -> None:
    dtype = torch.float64 if mode == "parallel" else torch.float32
    want = plain(variant, dtype, batch, params)
    references = want.tokens if name.startswith("synthetic") else None
    target = make_target(variant, dtype)
    got = run(target, drafter(name, variant), PROMPTS[:batch], params, mode=mode, references=references)
    assert got.outputs == want.outputs
    assert sum(s.metrics.num_draft_tokens for s in got.sequences) > 0
    assert accepted(got) > 0 or not name.startswith("synthetic")
    if mode != "parallel":
        assert all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))


@pytest.mark.parametrize("variant", ["grouped_wide", "hybrid_two_kinds"])
def test_parallel_mode_gives_the_tokens_of_plain_decoding_in_float64(variant: str) -> None:
    want = plain(variant, torch.float64, 5, WARM)
    scripted = ScriptedDrafter(seed=2, right=0.85)
    target = make_target(variant, torch.float64)
    got = run(target, scripted, PROMPTS, WARM, mode="parallel", references=want.tokens)
    assert got.outputs == want.outputs
    worst = max(
        float((a[p] - b[p]).abs().max()) for a, b in zip(got.logits, want.logits, strict=True) for p in b
    )
    assert worst < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_long_greedy_text_stays_equal(dtype: torch.dtype) -> None:
    params = SamplingParams(max_tokens=320)
    target = make_target("grouped", dtype)
    want = run(target, None, [prompt(9)], params, drafts=0)
    assert len(set(want.outputs[0][-100:])) > 4
    got = run(
        target, ScriptedDrafter(seed=5, right=0.9), [prompt(9)], params, drafts=12, references=want.tokens
    )
    assert got.outputs == want.outputs
    assert same_bits(got.logits[0], want.logits[0])


def test_rows_with_parameters_of_their_own_get_what_they_get_alone() -> None:
    params = [
        SamplingParams(max_tokens=21),
        SamplingParams(temperature=0.7, seed=5, top_k=7, max_tokens=3),
        SamplingParams(temperature=1.5, seed=6, top_p=0.8, repetition_penalty=1.4, max_tokens=30),
        SamplingParams(repetition_penalty=1.9, max_tokens=14),
        SamplingParams(temperature=1.0, seed=-9, min_p=0.1, max_tokens=1),
        SamplingParams(temperature=1.0, seed=5, top_k=3, top_p=0.9, repetition_penalty=0.8, max_tokens=17),
    ]
    target, prompts = make_target("grouped"), [*PROMPTS, prompt(33, 9)]
    alone = [run(target, None, [p], s, drafts=0) for p, s in zip(prompts, params, strict=True)]
    want = [one.outputs[0] for one in alone]
    references = [one.tokens[0] for one in alone]
    for seed in range(4):
        scripted = ScriptedDrafter(seed=seed, right=0.8)
        got = run(target, scripted, prompts, params, slots=6, references=references)
        assert got.outputs == want
        assert all(same_bits(a, one.logits[0]) for a, one in zip(got.logits, alone, strict=True))
    assert [len(output) for output in want] == [21, 3, 30, 14, 1, 17]


def test_repetition_penalty_sees_the_tokens_on_each_nodes_own_path() -> None:
    """Without the path's tokens an accepted draft would be punished one round late."""
    params = SamplingParams(repetition_penalty=3.0, max_tokens=30)
    target = make_target("plain")
    free = run(target, None, [prompt(5)], SamplingParams(max_tokens=30), drafts=0)
    want = run(target, None, [prompt(5)], params, drafts=0)
    assert want.outputs != free.outputs
    got = run(target, ScriptedDrafter(right=1.0, idle=0), [prompt(5)], params, references=want.tokens)
    assert got.outputs == want.outputs
    assert accepted(got) > 15


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    target = make_target("plain")
    outputs = [
        run(
            target, None, [prompt(6)] * 3, SamplingParams(temperature=1.0, seed=s, max_tokens=20), drafts=0
        ).outputs
        for s in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[0][0] == outputs[0][1] == outputs[0][2]


def test_requests_without_a_seed_differ_and_depend_on_the_engines_seed() -> None:
    target, params = make_target("plain"), SamplingParams(temperature=1.0, max_tokens=20)
    first = run(target, None, [prompt(6)] * 3, params, drafts=0, seed=1).outputs
    again = run(target, NgramDrafter(9, 5, 3), [prompt(6)] * 3, params, seed=1).outputs
    other = run(target, None, [prompt(6)] * 3, params, drafts=0, seed=2).outputs
    assert first == again != other
    assert len({tuple(output) for output in first}) == 3


def test_recurrent_variants_are_all_listed() -> None:
    assert len(RECURRENT) == 12 and len(VARIANTS) == 16
