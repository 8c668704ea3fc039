"""Greedy text is that of `generate` itself, whatever the options that are honoured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specla.drafters import NoDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams
from specla.hf import Speculative, speculative
from specla.models.loader import load_target
from tests.hf.loaded import (
    DATA,
    OTHERS,
    QWEN,
    FlaModel,
    load,
    load_qwen,
    prompts,
    qwen,
    told,
    transformers,
)

SETTINGS = [
    speculative,
    Speculative("none"),
    Speculative(num_speculative_tokens=12, num_steps=4, topk=3),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "end": {"eos_token_id": 46},
    "ends": {"eos_token_id": [43, 2, 5]},
    "no_end": {"eos_token_id": -1},
    "max_length": {"max_length": 20, "max_new_tokens": None},
    "min_new_tokens": {"eos_token_id": [46, 16, 26], "min_new_tokens": 9},
    "min_length": {"eos_token_id": [46, 16, 26], "min_length": 21},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[59], [43, 46], [50, 54, 54]], "eos_token_id": 19},
    "suppress_tokens": {"suppress_tokens": list(range(10, 30)), "begin_suppress_tokens": list(range(30, 50))},
    "sequence_bias": {"sequence_bias": {(3,): 4.0, (3, 9): -2.0, (9, 3, 4): 6.0}},
    "forced_bos_token_id": {"forced_bos_token_id": 5, "input_ids": torch.tensor([[3], [4]]),
                            "attention_mask": None},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 7},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "eos_token_id": [46, 16], "min_new_tokens": 9,
            "sequence_bias": {(3,): 2.0}, "bad_words_ids": [[4]]},
}  # fmt: skip


ASKED = {"max_new_tokens": 32, "pad_token_id": 0}


def check(model: Any, *settings: Speculative, use_cache: bool = True, **asked: Any) -> Any:
    """The text of `generate` itself, which ours is too, by drafts that are mostly right as by all other ways."""
    asked = ASKED | asked
    expected = model.generate(**asked, use_cache=use_cache)
    for setting in settings:
        assert torch.equal(model.generate(**asked, custom_generate=setting), expected)
    with told(model, expected, asked.get("attention_mask")) as setting:
        output = model.generate(**asked, custom_generate=setting, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    length = asked["input_ids"].shape[1] if "input_ids" in asked else 1
    if expected.shape[1] > length + 3:
        assert any(m.num_accepted_draft_tokens for m in output.metrics)
    return expected


@pytest.mark.parametrize("variant", QWEN)
def test_text_of_every_model(variant: str):
    check(qwen(variant), *SETTINGS, **prompts(), eos_token_id=[7, 19])


@pytest.mark.parametrize("variant", ["gva", "nogate", "tied"])
def test_text_of_models_by_the_names_of_fla(variant: str):
    model = FlaModel(variant)
    asked = prompts(2, 6, vocab=model.config.vocab_size)
    check(model, speculative, **asked, max_new_tokens=12, eos_token_id=3)


@pytest.mark.parametrize("variant", OTHERS)
def test_text_of_mamba2_and_kimi_linear(variant: str):
    """Kimi-Linear's tensors have other names in memory than in files. Cached steps of transformers' Mamba-2 forget the
    limits of the time step."""
    model = load(DATA / "transformers" / variant)
    check(model, *SETTINGS, **prompts(), eos_token_id=[7, 19], use_cache=variant != "mamba2_limits")


@pytest.mark.parametrize("name", OPTIONS)
def test_text_under_options(name: str):
    """Each is seen to change the text, but for one that cannot."""
    asked = prompts(seed=1)
    text = check(qwen(), **asked | OPTIONS[name])
    few = {
        k: v
        for k, v in OPTIONS[name].items()
        if k in ("eos_token_id", "input_ids") and not name.startswith("end")
    }
    without = qwen().generate(
        **ASKED | asked | ({"attention_mask": None} if "input_ids" in few else {}) | few
    )
    assert torch.equal(text, without) == (name in ("nothing", "no_end", "renormalize_logits"))


def test_prompts_without_a_mask_and_of_one_token():
    asked = prompts(4, 1)
    check(qwen(), input_ids=asked["input_ids"] + 1)


def test_padding_that_is_inferred():
    asked = prompts()
    expected = qwen().generate(**ASKED, input_ids=asked["input_ids"])
    assert torch.equal(expected, qwen().generate(**ASKED, **asked))
    assert torch.equal(
        expected, qwen().generate(**ASKED, input_ids=asked["input_ids"], custom_generate=speculative)
    )


def test_many_rows_and_fewer_again():
    for rows in (3, 2, 4):
        asked = ASKED | prompts(rows) | {"max_new_tokens": 8}
        expected = qwen("experts").generate(**asked)
        assert torch.equal(expected, qwen("experts").generate(**asked, custom_generate=speculative))


def test_no_prompt_begins_with_the_token_that_begins_texts():
    check(qwen(), bos_token_id=5)


def test_processors_that_are_handed_over():
    library = transformers.generation.logits_process
    for custom in (
        [library.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=8)],
        [library.RepetitionPenaltyLogitsProcessor(1.5)],
        [library.TemperatureLogitsWarper(0.5), library.NoRepeatNGramLogitsProcessor(1)],
    ):
        check(qwen(), **prompts(), logits_processor=custom)


def test_a_dictionary_is_returned_when_asked_for():
    asked = ASKED | prompts() | {"max_new_tokens": 9, "return_dict_in_generate": True}
    expected, got = qwen().generate(**asked), qwen().generate(**asked, custom_generate=speculative)
    assert isinstance(got, transformers.generation.GenerateDecoderOnlyOutput)
    assert torch.equal(got.sequences, expected.sequences) and torch.equal(got["sequences"], got[0])
    assert got.scores is None and got.logits is None and got.hidden_states is None


def test_a_generation_config_of_its_own_and_that_of_the_model():
    config = transformers.GenerationConfig(max_new_tokens=11, eos_token_id=[7, 19], pad_token_id=0)
    expected, got = (
        qwen().generate(**prompts(), generation_config=config, **more)
        for more in ({}, {"custom_generate": speculative})
    )
    assert torch.equal(got, expected)
    model = load_qwen("dense")
    model.generation_config = config
    assert torch.equal(model.generate(**prompts(), custom_generate=speculative), expected)


def test_other_dtypes_are_read_as_they_are():
    """In bfloat16 sums are rounded, and texts may part; ours is that of the target loaded from the same files."""
    model, asked = load_qwen("dense", torch.bfloat16), prompts(1)
    got = model.generate(**asked, max_new_tokens=16, custom_generate=Speculative("none"))
    engine = Engine(load_target(model.name_or_path, dtype="bfloat16"), NoDrafter(), max_num_seqs=1)
    sequence = engine.add(asked["input_ids"][0].tolist(), SamplingParams(max_tokens=16))
    while not sequence.finish_reason:
        engine.step()
    assert got[0].tolist() == sequence.tokens
