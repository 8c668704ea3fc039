"""Mamba-2 checkpoints of both libraries: an independent forward pass, what tells them apart, every defect named."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla.models.loader import load_target
from specla.models.mamba2_config import Mamba2Config
from specla.show import describe
from tests.checkpoints import write_random
from tests.models.naive_mamba2 import logits as naive_logits
from tests.models.test_kimi import check_fresh
from tests.models.test_loader import TEXT, check_logits, edit_config, refuses

DATA = Path(__file__).parent.parent / "data" / "transformers"
SHAPE: dict[str, Any] = {
    "model_type": "mamba2", "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
    "state_size": 6, "n_groups": 2, "conv_kernel": 4, "norm_eps": 1e-4, "dt_limit": [0.0, math.inf], "rmsnorm": True,
    "norm_before_gate": False, "D_has_hdim": False, "tie_word_embeddings": False,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group": {"n_groups": 1},
    "a group a head": {"n_groups": 4},
    "biases": {"use_bias": True},
    "no bias of the convolution": {"use_conv_bias": False, "conv_kernel": 2},
    "no convolution": {"conv_kernel": 1},
    "limits": {"dt_limit": [0.3, 0.6]},
    "no norm": {"rmsnorm": False},
    "norm before gate": {"norm_before_gate": True},
    "D by channel": {"D_has_hdim": True},
    "tied": {"tie_word_embeddings": True},
    "expand": {"expand": 3, "num_heads": 6},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_an_independent_forward_pass(name: str, tmp_path: Path):
    raw = SHAPE | VARIANTS[name]
    check_logits(naive_logits(raw, write_random(tmp_path, raw), TEXT), tmp_path)


@pytest.mark.parametrize("variant", ["mamba2", "mamba2_limits"])
def test_a_fresh_checkpoint_gives_the_logits_and_tokens_of_its_own_library(variant: str, tmp_path: Path):
    check_fresh(variant, tmp_path)


def as_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    """The same in its names, with what only flash-linear-attention has left out."""
    names = {"norm_eps": "layer_norm_epsilon", "dt_limit": "time_step_limit"}
    only_fla = ("rmsnorm", "norm_before_gate", "D_has_hdim")
    return {names.get(name, name): value for name, value in raw.items() if name not in only_fla}


def logits(directory: Path) -> Tensor:
    target = load_target(directory, dtype="float32")
    with torch.no_grad():
        return target.logits(target(torch.tensor([TEXT])))


def test_both_layouts_of_the_same_weights_give_the_same_logits(tmp_path: Path):
    raw = SHAPE | VARIANTS["limits"]
    write_random(tmp_path, raw)
    before = logits(tmp_path)
    theirs = as_transformers(raw)
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    assert torch.equal(logits(tmp_path), before)
    # fields that older versions of transformers wrote and did not heed
    edit_config(tmp_path, norm_before_gate=True, rms_norm=True, time_step_rank=256, num_attention_heads=3)
    assert torch.equal(logits(tmp_path), before)
    # flash-linear-attention heeds its own
    (tmp_path / "config.json").write_text(json.dumps(raw | {"norm_before_gate": True}))
    assert not torch.allclose(logits(tmp_path), before, atol=0.1)


def test_defaults_and_spellings():
    bare = {name: SHAPE[name] for name in list(SHAPE)[:8]} | {"norm_eps": 1e-5, "num_heads": None}
    config = Mamba2Config.from_dict(bare)
    assert (config.num_heads, config.conv_kernel, config.dt_limit) == (4, 4, (0.0, math.inf))
    assert config.use_conv_bias and not config.use_bias and config.rmsnorm
    odd: dict[str, Any] = {
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "eos_token_id": [1, 2],
        "chunk_size": 8,
    }
    theirs = Mamba2Config.from_dict(as_transformers(SHAPE) | odd)
    assert (theirs.dt_limit, theirs.eos_token_id, theirs.norm_eps) == ((0.0, math.inf), (1, 2), 1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_eps": 1e-5}, ["both norm_eps", "layer_norm_epsilon", "flash-linear-attention"]),
        ({"layer_norm_epsilon": 0}, ["norm_eps", "above 0"]),
        ({"time_step_limit": [0.5, 0.1]}, ["time step", "ascend", "0.5, 0.1"]),
        ({"time_step_limit": [-1, 1]}, ["time step", "-1"]),
        ({"time_step_limit": [0.0, "inf"]}, ["time step", "two numbers", "'inf'"]),
        ({"time_step_limit": 3}, ["time step", "two numbers"]),
        ({"num_heads": 3}, ["expand * hidden_size is 32", "num_heads * head_dim is 24"]),
        ({"n_groups": 3}, ["num_heads 4", "n_groups 3"]),
        ({"n_groups": None}, ["lacks n_groups"]),
        ({"state_size": 0}, ["state_size"]),
        ({"expand": -2}, ["expand"]),
        ({"use_bias": 1}, ["use_bias", "true or false"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"rms_norm": False}, ["rms_norm False", "only True"]),
        ({"quantization_config": {}}, ["quantization_config"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "1024"]),
        ({"eos_token_id": 61}, ["eos_token_id", "61"]),
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Mamba2ForCausalLM"]),
        ({"use_bias": True}, ["missing", "mixer.in_proj.bias", "mixer.out_proj.bias"]),
        ({"use_conv_bias": False}, ["unexpected", "mixer.conv1d.bias"]),
        ({"n_groups": 1}, ["has shape", "config.json asks for"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path):
    shutil.copytree(DATA / "mamba2", tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


def test_neither_librarys_fields(tmp_path: Path):
    raw = {name: value for name, value in SHAPE.items() if name not in ("norm_eps", "dt_limit")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    refuses(tmp_path, "layer_norm_epsilon", "norm_eps", "neither")


def test_missing_and_unexpected_weights_are_named(tmp_path: Path):
    weights = write_random(tmp_path, SHAPE)
    weights["backbone.layers.1.mixer.Dx"] = weights.pop("backbone.layers.1.mixer.D")
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, "1 missing (backbone.layers.1.mixer.D)", "1 unexpected (backbone.layers.1.mixer.Dx)")


def test_embeddings_go_by_an_older_name_too(tmp_path: Path):
    weights = write_random(tmp_path, SHAPE)
    before = logits(tmp_path)
    weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), before)
    save_file(
        {name: x for name, x in weights.items() if "embedding" not in name}, tmp_path / "model.safetensors"
    )
    refuses(tmp_path, "1 missing (backbone.embeddings.weight)")


def test_a_head_that_is_tied_and_stored_must_be_the_embeddings(tmp_path: Path):
    weights = write_random(tmp_path, SHAPE | {"tie_word_embeddings": True})
    table = weights["backbone.embeddings.weight"]
    before = logits(tmp_path)
    save_file(weights | {"lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), before)
    save_file(weights | {"lm_head.weight": table + 1}, tmp_path / "model.safetensors")
    refuses(tmp_path, "tie_word_embeddings", "lm_head.weight", "backbone.embeddings.weight")


def test_memory_of_a_sequence_and_of_a_draft_node(tmp_path: Path):
    """As docs/models.md has it: H = n_groups, HV = num_heads, K = state_size, V = head_dim."""
    write_random(tmp_path, SHAPE)
    pool = load_target(tmp_path, dtype="float32").new_pool(1, 5)
    channels = 2 * 2 * 6 + 4 * 8
    assert pool.bytes_per_sequence() == 2 * 4 * (4 * 8 * 6 + 3 * channels)
    assert pool.bytes_per_node() == 2 * 4 * (2 * 6 + 4 * 8 + 4 + channels)


def test_facts_for_people():
    facts = describe(DATA / "mamba2", "cpu", "float32")
    assert facts["heads"] == "2 key x 8, 4 value x 8"
    assert (facts["convolution"], facts["output_gate"]) == ("width 4", "silu")
    stored = load_file(DATA / "mamba2" / "model.safetensors")
    assert facts["parameters"] == sum(tensor.numel() for tensor in stored.values())
