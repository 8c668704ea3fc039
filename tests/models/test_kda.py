"""KDA in flash-linear-attention's layout: an independent forward pass, and every defect named in one line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from specla.models.kda_config import KDAConfig
from specla.models.loader import load_target
from specla.show import describe
from tests.checkpoints import write_random
from tests.models.naive_forward import logits
from tests.models.naive_kda import kda
from tests.models.test_loader import TEXT, check_logits, edit_config, refuses

naive_logits = partial(logits, mixer=kda)

SHAPE: dict[str, Any] = {
    "model_type": "kda", "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 4,
    "num_v_heads": None, "expand_v": 1.0, "intermediate_size": 12, "use_short_conv": True, "conv_size": 4,
    "allow_neg_eigval": False, "norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 6},
    "expand": {"expand_v": 1.5, "num_v_heads": 4},
    "narrow": {"expand_v": 0.5},
    "no conv": {"use_short_conv": False},
    "conv 3": {"conv_size": 3},
    "lower bound": {"safe_gate": True, "lower_bound": -5.0},
    "lower bound without a safe gate": {"lower_bound": -0.7},
    "negative eigenvalues": {"allow_neg_eigval": True},
    "tied": {"tie_word_embeddings": True},
    "attention": {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_an_independent_forward_pass(name: str, tmp_path: Path):
    raw = SHAPE | VARIANTS[name]
    check_logits(naive_logits(raw, write_random(tmp_path, raw), TEXT), tmp_path)


def test_defaults_are_the_librarys():
    config = KDAConfig.from_dict({"model_type": "kda"})
    assert (config.hidden_size, config.num_hidden_layers, config.num_heads, config.head_dim) == (
        2048,
        24,
        16,
        128,
    )
    assert (config.expand_v, config.norm_eps, config.lower_bound, config.mlp_dim) == (1.0, 1e-6, None, 5632)
    assert config.output_gate == "sigmoid"


def test_fields_of_gated_deltanet_are_none_of_kdas(tmp_path: Path):
    raw = SHAPE | {
        "use_gate": False,
        "conv_bias": True,
        "output_gate_activation": "swish",
        "gate_bias": False,
    }
    check_logits(naive_logits(raw, write_random(tmp_path, raw), TEXT), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"safe_gate": True}, ["safe_gate", "lower_bound"]),
        ({"safe_gate": "yes"}, ["safe_gate", "true or false"]),
        ({"lower_bound": 0.5}, ["lower_bound", "-0.5"]),
        ({"lower_bound": True}, ["lower_bound", "True"]),
        ({"num_v_heads": 3}, ["num_v_heads 3", "num_heads 2"]),
        ({"head_dim": 0}, ["head_dim"]),
        ({"expand_v": 0.3}, ["head_dim * expand_v"]),
        ({"attnres_block_size": 2}, ["attnres_block_size", "attention residuals"]),
        ({"architectures": ["KimiForCausalLM"]}, ["KimiForCausalLM", "KDAForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"conv_size": 3}, ["k_conv1d.weight", "[8, 1, 4]", "[8, 1, 3]"]),
        ({"use_short_conv": False}, ["unexpected", "k_conv1d.weight"]),
        ({"num_v_heads": 4}, ["has shape", "config.json asks for"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path):
    write_random(tmp_path, SHAPE)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


@pytest.mark.parametrize("name", ["attn.f_proj.0.weight", "attn.g_proj.1.bias", "attn.dt_bias"])
def test_missing_and_unexpected_weights_are_named(name: str, tmp_path: Path):
    weights = write_random(tmp_path, SHAPE)
    weights[f"model.layers.0.{name}x"] = weights.pop(f"model.layers.0.{name}")
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, f"1 missing (model.layers.0.{name})", f"1 unexpected (model.layers.0.{name}x)")


def test_memory_of_a_sequence_and_of_a_draft_node(tmp_path: Path):
    """As docs/models.md has it: a draft node keeps a decay for each key channel of a value head."""
    write_random(tmp_path, SHAPE | {"num_v_heads": 6, "expand_v": 1.5})
    pool = load_target(tmp_path, dtype="float32").new_pool(1, 5)
    channels = 2 * 2 * 4 + 6 * 6
    assert pool.bytes_per_sequence() == 2 * 4 * (6 * 6 * 4 + 3 * channels)
    assert pool.bytes_per_node() == 2 * 4 * (2 * 4 + 6 * 6 + 6 * 4 + channels)


def test_facts_for_people(tmp_path: Path):
    write_random(tmp_path, SHAPE)
    facts = describe(tmp_path, "cpu", "float32")
    assert facts["heads"] == "2 key x 4, 2 value x 4"
    assert (facts["convolution"], facts["output_gate"]) == ("width 4", "sigmoid")
