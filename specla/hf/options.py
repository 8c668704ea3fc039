"""Which options of `generate` are honoured; every other must be as if it were not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# honoured by what `generate` makes of them: criteria, processors, and rows
HONOURED = (
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample temperature top_k top_p min_p "
    "top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty no_repeat_ngram_size bad_words_ids "
    "renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias num_return_sequences "
    "return_dict_in_generate pad_token_id bos_token_id eos_token_id"
).split()
# refused, but for None and these values, with which they change nothing
REFUSED: dict[str, tuple[Any, ...]] = {
    # beams and other searches
    "num_beams": (1,), "early_stopping": (False,), "length_penalty": (1.0,), "num_beam_groups": (1,),
    "diversity_penalty": (0.0,), "constraints": (), "force_words_ids": (), "penalty_alpha": (0.0,), "dola_layers": (),
    "low_memory": (False,),
    # other ways to speculate
    "use_mtp": (False,), "is_assistant": (False,), "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant", "heuristic"), "assistant_confidence_threshold": (0.4,),
    "prompt_lookup_num_tokens": (), "max_matching_ngram_size": (), "assistant_early_exit": (),
    "assistant_lookbehind": (10,), "target_lookbehind": (10,), "assistant_ensemble_weight": (), "speculation_type": (),
    # how to run the model
    "use_cache": (True,), "cache_implementation": (), "cache_config": (), "max_cache_len": (), "prefill_chunk_size": (),
    "compile_config": (), "disable_compile": (True, False), "continuous_batching_config": (),
    # distributions that need more than a row's own tokens and scores
    "guidance_scale": (1.0,), "watermarking_config": (), "token_healing": (False,),
    # what is not there to be returned
    "output_attentions": (False,), "output_hidden_states": (False,), "output_scores": (False,),
    "output_logits": (False,),
    # encoders
    "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,), "decoder_start_token_id": (),
}  # fmt: skip
NOTES = ("transformers_version",)  # of where a configuration comes from

# arguments of `generate` itself
ARGUMENTS = {
    "prefix_allowed_tokens_fn": (), "assistant_model": (), "synced_gpus": (False,), "negative_prompt_ids": (),
    "negative_prompt_attention_mask": (),
}  # fmt: skip
# of the model, by whoever calls `generate`
CACHES = ("cache", "past_key_values", "cache_params", "state")
GIVEN = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "mm_token_type_ids",
    "token_type_ids",
    "logits_to_keep",
)
# and as `generate` prepares them; those that are not listed must be as if they were not there
MADE = (*GIVEN, *CACHES, "use_cache", "return_dict")


def check_config(config: Any) -> None:
    """ValueError that names the first option of a GenerationConfig that is not honoured."""
    for name, value in vars(config).items():
        if name.startswith("_") or name in HONOURED or name in NOTES or value is None:
            continue
        allowed = REFUSED.get(name, ())
        if not any(type(value) in (type(a), int) and value == a for a in allowed):
            only = f", only {' or '.join(map(repr, allowed))}" if allowed else ""
            raise ValueError(f"{name}={value!r} is not supported by specla{only}")


def check_arguments(arguments: Mapping[str, Any], config: Any) -> None:
    """The same for what `generate` was called with: its own arguments, and in `kwargs` those for the model."""
    for name, allowed in ARGUMENTS.items():
        value = arguments.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{name} is not supported by specla")
    for name, value in arguments.get("kwargs", {}).items():
        if value is None or hasattr(config, name):
            continue
        if name in CACHES:
            raise ValueError(
                f"{name}: a cache in use is not supported by specla, which reads prompts from their start"
            )
        if name not in GIVEN:
            raise ValueError(f"{name} is not supported by specla, which reads token ids alone")


def check_model_kwargs(kwargs: Mapping[str, Any], input_ids: Tensor) -> list[int]:
    """Where each row's prompt begins behind its padding, from what `generate` prepares for the model.

    Raises:
        ValueError: for what is not supported, named.
    """
    for name, value in kwargs.items():
        is_there = value is not None and value is not False and value != {}
        if is_there and name not in MADE:
            raise ValueError(f"{name} is not supported by specla, which reads token ids alone")
    for name in ("mm_token_type_ids", "token_type_ids"):
        if kwargs.get(name) is not None and bool(kwargs[name].any()):
            raise ValueError(f"{name} other than 0 are not supported by specla, which reads token ids alone")
    starts = _starts(kwargs.get("attention_mask"), input_ids)
    _check_positions(kwargs.get("position_ids"), starts, input_ids.shape[1])
    return starts


def _starts(mask: Tensor | None, input_ids: Tensor) -> list[int]:
    batch, length = input_ids.shape
    if mask is None:
        return [0] * batch
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be {list(input_ids.shape)} as input_ids, got {list(mask.shape)}"
        )
    kept = mask != 0
    starts = length - kept.sum(1)
    if not bool((kept == (torch.arange(length, device=mask.device) >= starts[:, None])).all()):
        raise ValueError("attention_mask must be zeros, then ones: pad on the left (padding_side='left')")
    if not bool(kept.any(1).all()):
        raise ValueError("attention_mask leaves nothing of a prompt: every row needs a token")
    return starts.tolist()


def _check_positions(positions: Tensor | None, starts: list[int], length: int) -> None:
    if positions is None:
        return
    rows = positions.reshape(-1, *positions.shape[-2:]).cpu()  # several for models with images
    for b, start in enumerate(starts):
        own = rows[:, b if rows.shape[1] > 1 else 0, start:]
        if positions.shape[-1] != length or not bool((own == torch.arange(length - start)).all()):
            raise ValueError(
                "position_ids are not supported by specla: positions count from each prompt's start"
            )
