"""Every option of `generate` is honoured or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from specla.hf import Speculative, options, speculative
from tests.hf.loaded import prompts, qwen, transformers

ASKED = {"max_new_tokens": 4, "pad_token_id": 0}
FIELDS = [name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")]
# of those that are refused, a value that asks for something
WANTED: dict[str, Any] = {
    "num_beams": 2, "early_stopping": True, "length_penalty": 0.5, "num_beam_groups": 2, "diversity_penalty": 0.5,
    "constraints": [1], "force_words_ids": [[3]], "penalty_alpha": 0.6, "dola_layers": "low", "low_memory": True,
    "use_mtp": True, "is_assistant": True, "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic_transient",
    "assistant_confidence_threshold": 0.1, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2,
    "assistant_early_exit": 1, "assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash", "use_cache": False, "cache_implementation": "static", "cache_config": {"a": 1},
    "max_cache_len": 99, "prefill_chunk_size": 8, "compile_config": transformers.CompileConfig(),
    "continuous_batching_config": object(), "guidance_scale": 1.5, "watermarking_config": object(),
    "token_healing": True, "output_attentions": True, "output_hidden_states": True, "output_scores": True,
    "output_logits": True, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


def test_every_field_of_this_version_is_known():
    """A field that a later version of transformers brings has to be put into one of these lists."""
    unknown = set(FIELDS) - {*options.HONOURED, *options.REFUSED, *options.NOTES}
    assert not unknown
    assert not set(options.HONOURED) & options.REFUSED.keys()


@pytest.mark.parametrize("name", sorted(options.REFUSED))
def test_a_field_is_refused_by_name(name: str):
    config = transformers.GenerationConfig()
    for value in options.REFUSED[name]:
        setattr(config, name, value)
        options.check_config(config)
    if name == "disable_compile":  # nothing is compiled in either case
        return
    setattr(config, name, WANTED[name])
    with pytest.raises(ValueError, match=f"^{name}="):
        options.check_config(config)


def test_defaults_of_generate_are_honoured():
    defaults = getattr(transformers.GenerationConfig, "_get_default_generation_params", dict)()
    for name, value in defaults.items():
        assert name in options.HONOURED or value is None or value in options.REFUSED[name]


def test_a_field_of_a_later_version_is_refused():
    config = transformers.GenerationConfig()
    config.brand_new = None
    options.check_config(config)
    config.brand_new = 0.5
    with pytest.raises(ValueError, match=r"brand_new=0\.5 is not supported"):
        options.check_config(config)


@pytest.mark.parametrize(
    "name, value",
    [("num_beams", 2), ("use_cache", False), ("output_logits", True), ("cache_implementation", "static"),
     ("guidance_scale", 1.5), ("low_memory", True), ("output_hidden_states", True)],
)  # fmt: skip
def test_generate_says_so(name: str, value: Any):
    asked = ASKED | prompts(2) | {name: value}
    with pytest.raises(ValueError, match=name):
        qwen().generate(**asked, return_dict_in_generate=True, custom_generate=speculative)


def test_every_argument_of_generate_is_known():
    named = set(inspect.signature(inspect.unwrap(transformers.GenerationMixin.generate)).parameters)
    free = "self inputs generation_config logits_processor stopping_criteria streamer custom_generate kwargs".split()
    assert named == {*free, *options.ARGUMENTS}


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("prefix_allowed_tokens_fn", lambda row, ids: [3], "^prefix_allowed_tokens_fn is not"),
        ("assistant_model", qwen, "assisted generation is not"),  # as transformers says of such models
        ("synced_gpus", True, "^synced_gpus is not"),
        ("negative_prompt_ids", torch.tensor([[1]]), "^negative_prompt_ids is not"),
        ("negative_prompt_attention_mask", torch.tensor([[1]]), "^negative_prompt_attention_mask is not"),
        ("inputs_embeds", torch.zeros(2, 12, 24), "^inputs_embeds is not"),
        ("past_key_values", lambda: transformers.DynamicCache(config=qwen().config), "a cache in use is not"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_an_argument_is_refused_by_name(name: str, value: Any, told: str):
    value = value() if callable(value) and name != "prefix_allowed_tokens_fn" else value
    with pytest.raises(ValueError, match=told):
        qwen().generate(**ASKED, **prompts(2), **{name: value}, custom_generate=speculative)


def test_a_model_to_assist_is_refused_where_transformers_does_not():
    with pytest.raises(ValueError, match=r"^assistant_model is not"):
        options.check_arguments({"assistant_model": qwen()}, transformers.GenerationConfig())


def test_images_are_refused():
    model, asked = qwen("images"), ASKED | prompts(1, 6)
    pixels = torch.zeros(4, 12), torch.tensor([[1, 2, 2]])
    with pytest.raises(ValueError, match="pixel_values is not supported"):
        options.check_arguments({"kwargs": {"pixel_values": pixels[0]}}, transformers.GenerationConfig())
    with pytest.raises(ValueError, match="mm_encoder_outputs is not supported"):
        options.check_model_kwargs({"mm_encoder_outputs": {"image": pixels[0]}}, asked["input_ids"])
    kinds = torch.zeros_like(asked["input_ids"])
    expected = model.generate(**asked, mm_token_type_ids=kinds)
    got = model.generate(**asked, mm_token_type_ids=kinds, custom_generate=speculative)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="mm_token_type_ids other than 0"):
        model.generate(**asked, mm_token_type_ids=kinds + 1, custom_generate=speculative)


@pytest.mark.parametrize(
    "mask, told",
    [
        ([[1, 1, 0], [1, 1, 1]], "pad on the left"),
        ([[1, 0, 1], [1, 1, 1]], "pad on the left"),
        ([[0, 0, 0], [1, 1, 1]], "every row needs a token"),
        ([[1, 1], [1, 1]], r"must be \[2, 3\]"),
    ],
)
def test_masks_that_are_no_padding_on_the_left(mask: list[list[int]], told: str):
    with pytest.raises(ValueError, match=told):
        options.check_model_kwargs({"attention_mask": torch.tensor(mask)}, torch.ones(2, 3, dtype=torch.long))


def test_positions_that_do_not_count_from_the_start():
    asked = ASKED | prompts(2, 6)
    counted = (asked["attention_mask"].cumsum(1) - 1).clamp(min=0)
    text = qwen().generate(**asked, position_ids=counted, custom_generate=speculative)
    assert torch.equal(text, qwen().generate(**asked))
    for positions in (counted + 1, counted * 2):
        with pytest.raises(ValueError, match="position_ids are not supported"):
            qwen().generate(**asked, position_ids=positions, custom_generate=speculative)


def test_processors_of_unknown_kinds():
    class Mine(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores

    with pytest.raises(ValueError, match="logits_processor: Mine is not supported, only"):
        qwen().generate(**ASKED, **prompts(2), logits_processor=[Mine()], custom_generate=speculative)


def test_stop_strings_need_their_criterion():
    """`generate` keeps the tokenizer from callables; once it does not, docs/huggingface.md may say so."""
    with pytest.raises(ValueError, match="tokenizer"):
        qwen().generate(
            **ASKED, **prompts(2), stop_strings="a", tokenizer=object(), custom_generate=speculative
        )


def test_watermarks():
    with pytest.raises(ValueError, match="watermarking_config"):
        qwen().generate(
            **ASKED, **prompts(2), custom_generate=speculative,
            watermarking_config=transformers.WatermarkingConfig(greenlist_ratio=0.5),
        )  # fmt: skip


def test_sampling_parameters_out_of_our_range():
    with pytest.raises(ValueError, match="temperature must be a number"):
        qwen().generate(**ASKED, **prompts(2), do_sample=True, temperature=1e3, custom_generate=speculative)


@pytest.mark.parametrize(
    "asked, told",
    [
        ({"num_tokens": 3}, "unknown speculative_config keys"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be"),
        ({"drafter": "synthetic"}, "synthetic"),
        ({"drafter": 3}, "drafter must be a name or a directory, got 3"),
        ({"synthetic_acceptance_rate": 0.5}, "synthetic"),
    ],
)
def test_settings_that_are_refused_at_once(asked: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        Speculative(**asked)


@pytest.mark.parametrize("drafter, told", [("mtp", "mtp"), ("no/such/place", "drafter must be one of")])
def test_drafters_that_are_not_there(drafter: str, told: str):
    with pytest.raises(ValueError, match=told):
        qwen("dense").generate(**ASKED, **prompts(2), custom_generate=Speculative(drafter))


def test_it_is_no_function_to_be_called():
    with pytest.raises(ValueError, match=r"model\.generate\(\.\.\., custom_generate=speculative\)"):
        speculative(qwen(), torch.tensor([[3]]))
