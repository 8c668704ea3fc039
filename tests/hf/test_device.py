"""On a GPU: the texts of models whose weights lie there, by eager rounds and by those that never leave it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specla.engine.resident import ResidentEngine
from specla.hf import Speculative, speculative
from specla.hf.adoption import adopt
from tests.hf.loaded import DATA, FlaModel, load_qwen, prompts
from tests.hf.test_stops import Keeper
from tests.ops.triton import DEVICE, full_size

ASKED = {"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": [46, 16]}


def moved(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) for name, value in asked.items()}


@full_size
def test_text_and_stream_of_a_qwen_on_a_gpu():
    model = load_qwen("dense").to(DEVICE)
    for asked in (moved(prompts(seed=1)), prompts(seed=1)):  # ids on the CPU are fine, too
        streams = Keeper(), Keeper()
        expected = model.generate(**ASKED, **moved(asked), streamer=streams[0])
        got = model.generate(**ASKED, **asked, streamer=streams[1], custom_generate=speculative)
        assert got.device == asked["input_ids"].device
        assert torch.equal(got.cpu(), expected.cpu()) and streams[0].given == streams[1].given
    options = {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "repetition_penalty": 1.3}
    expected = model.generate(**ASKED, **moved(prompts()), **options)
    got = model.generate(**ASKED, **moved(prompts()), **options, custom_generate=speculative)
    assert torch.equal(got, expected)


@full_size
def test_text_by_rounds_that_never_leave_the_gpu():
    model = FlaModel("plain")
    asked = prompts(2, 6, vocab=model.config.vocab_size)
    expected = model.generate(**ASKED, **asked)
    model.to(DEVICE)
    setting = Speculative("ngram", num_speculative_tokens=7)
    got = model.generate(**ASKED, **moved(asked), custom_generate=setting)
    assert isinstance(adopt(model).engine((setting.drafter, setting.config), False, 2), ResidentEngine)
    assert torch.equal(got.cpu(), expected)
    drawn = [
        model.generate(**ASKED, **moved(asked), do_sample=True, custom_generate=way, top_p=0.9)
        for way in (setting, Speculative("none"))
        if torch.manual_seed(4)
    ]
    assert torch.equal(*drawn)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)  # shared, and read by graphs that were captured before
        model.model.norm.weight.mul_(1.25)
    got = model.generate(**ASKED, **moved(asked), custom_generate=setting)
    assert torch.equal(got.cpu(), model.cpu().generate(**ASKED, **asked))


@full_size
@pytest.mark.parametrize("variant", ["plain", "tied"])
def test_text_of_models_of_flash_linear_attention(variant: str):
    library = pytest.importorskip("fla.models")
    model = library.GatedDeltaNetForCausalLM.from_pretrained(DATA / "fla" / variant, dtype=torch.float32)
    asked = moved(prompts(2, 6, vocab=model.config.vocab_size))
    expected = model.to(DEVICE).generate(**ASKED, **asked)
    assert torch.equal(model.generate(**ASKED, **asked, custom_generate=speculative), expected)
