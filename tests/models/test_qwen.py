"""Qwen checkpoints: as transformers writes them, whatever else lies beside, and every defect named in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla import LLM, SamplingParams
from specla.drafters import NgramDrafter, NoDrafter
from specla.engine.choice import make_engine
from specla.engine.engine import Engine
from specla.engine.params import SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.models.loader import load_target
from specla.models.qwen import Qwen
from specla.models.qwen_config import QwenConfig
from specla.show import describe
from tests.checkpoints import save_tokenizer
from tests.data.qwen.make import VARIANTS, write
from tests.models.test_loader import edit_config, refuses, shard
from tests.targets import make_target, prompt, run

DATA = Path(__file__).parent.parent / "data" / "qwen"
TEXT = torch.arange(40)[None]


def copy(variant: str, directory: Path) -> dict[str, Tensor]:
    """A fixture in a directory that may be changed, and its weights."""
    shutil.copytree(DATA / variant, directory, dirs_exist_ok=True)
    return load_file(directory / "model.safetensors")


def logits(directory: Path) -> Tensor:
    target = load_target(directory, dtype="float32")
    assert isinstance(target, Qwen)
    with torch.no_grad():
        return target.logits(target(TEXT))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fresh_checkpoint_gives_the_logits_and_tokens_of_its_own_library(variant: str, tmp_path: Path):
    pytest.importorskip("transformers")
    answer = write(tmp_path, variant)
    assert (tmp_path / "model.safetensors.index.json").exists() == (VARIANTS[variant][2] != "1GB")
    target = load_target(tmp_path, dtype="float32")
    with torch.no_grad():
        got = target.logits(target(answer["input_ids"]))
    torch.testing.assert_close(got, answer["logits"], rtol=0, atol=1e-4)
    prompts = [row[:16].tolist() for row in answer["greedy"]]
    made = run(target, NgramDrafter(9, 5, 3), prompts, SamplingParams(max_tokens=48, ignore_eos=True))
    assert made.tokens == answer["greedy"].tolist()


@pytest.mark.parametrize("variant", ["next", "experts"])
def test_experts_may_be_stored_as_one_tensor(variant: str, tmp_path: Path):
    weights = copy(variant, tmp_path)
    before = logits(tmp_path)
    each = [name for name in weights if ".experts." in name]
    starts = {name.split(".experts.")[0] for name in each}
    for start in starts:
        names = [f"{start}.experts.{i}" for i in range(4)]
        up = [torch.cat([weights[f"{name}.{x}_proj.weight"] for x in ("gate", "up")]) for name in names]
        weights[f"{start}.experts.gate_up_proj"] = torch.stack(up)
        weights[f"{start}.experts.down_proj"] = torch.stack([weights[f"{n}.down_proj.weight"] for n in names])
    kept = {name: weight for name, weight in weights.items() if name not in each}
    save_file(kept, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), before)


def test_shards_drafting_heads_and_images_change_nothing(tmp_path: Path):
    weights = copy("images", tmp_path)
    before = logits(tmp_path)
    assert any(name.startswith("model.visual.") for name in weights)
    save_file(weights | {"mtp.fc.weight": torch.ones(24, 48)}, tmp_path / "model.safetensors")
    shard(tmp_path)
    assert torch.equal(logits(tmp_path), before)


def test_a_head_that_is_tied_and_stored_must_be_the_embeddings(tmp_path: Path):
    weights = copy("dense_tied", tmp_path)
    before, table = logits(tmp_path), weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), before)
    save_file(weights | {"lm_head.weight": table + 1}, tmp_path / "model.safetensors")
    refuses(tmp_path, "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight")


def test_older_spellings_of_a_configuration(tmp_path: Path):
    copy("next", tmp_path)
    before = load_target(tmp_path).config
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw.pop("layer_types") and raw.pop("rope_parameters")
    raw |= {
        "full_attention_interval": 4, "rope_theta": 10000, "partial_rotary_factor": 0.25, "rope_scaling": None,
        "eos_token_id": [3, 5], "torch_dtype": "bfloat16", "architectures": None, "auto_map": {"A": "evil.Model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    after = load_target(tmp_path).config
    assert isinstance(after, QwenConfig) and after.eos_token_id == (3, 5)
    assert after == type(after)(**{**vars(before), "eos_token_id": (3, 5)})


@pytest.mark.parametrize(
    "name", ["model.layers.0.linear_attn.A_log", "model.layers.3.self_attn.q_norm.weight"]
)
def test_missing_and_unexpected_weights_are_named(name: str, tmp_path: Path):
    weights = copy("next", tmp_path)
    weights[f"{name}x"] = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, f"1 missing ({name})", f"1 unexpected ({name}x)")


def test_a_text_part_without_its_embeddings_is_still_looked_for_where_it_lies(tmp_path: Path):
    weights, name = copy("images", tmp_path), "model.language_model.embed_tokens.weight"
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, f"do not fit config.json: 1 missing ({name})")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 2}, ["linear_attn", "has shape", "config.json asks for"]),
        (
            {"layer_types": ["full_attention"] * 4},
            ["missing", "unexpected", "model.layers.0.linear_attn.A_log"],
        ),
        ({"num_experts": 5}, ["model.layers.0.mlp.gate.weight", "[4, 24]", "[5, 24]"]),
        ({"num_experts": 0}, ["missing", "model.layers.0.mlp.down_proj.weight"]),
        ({"hidden_size": 32}, ["has shape", "config.json asks for"]),
        ({"model_type": "qwen3_5_text", "architectures": None}, ["missing", "linear_attn.in_proj_a.weight"]),
    ],
)
def test_a_configuration_that_contradicts_the_weights(
    changes: dict[str, Any], words: list[str], tmp_path: Path
):
    copy("next", tmp_path)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["mamba"]}, ["layer 3", "'mamba'", "full_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types has 1", "num_hidden_layers is 4"]),
        ({"layer_types": "full_attention"}, ["layer_types must be a list"]),
        ({"layer_types": None, "num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"attn_output_gate": False}, ["attn_output_gate"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, ["rope_type", "'yarn'"]),
        ({"rope_parameters": [1]}, ["rope_parameters"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, ["partial_rotary_factor", "even"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"linear_num_value_heads": 3}, ["linear_num_value_heads 3", "linear_num_key_heads 2"]),
        ({"head_dim": None, "hidden_size": None}, ["lacks", "head_dim", "hidden_size"]),
        ({"vocab_size": "61"}, ["vocab_size"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok 5", "num_experts 4"]),
        ({"num_experts": 5000}, ["num_experts", "4096", "5000"]),
        ({"moe_intermediate_size": None}, ["moe_intermediate_size"]),
        ({"mlp_only_layers": [4]}, ["mlp_only_layers [4]"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ({"eos_token_id": 61}, ["eos_token_id", "61"]),
        ({"model_type": "qwen3_5", "architectures": None}, ["text_config"]),
        ({"model_type": "qwen3_5_moe", "architectures": None, "text_config": {"model_type": "qwen3"}}, ["text_config"]),
        ({"model_type": "llama"}, ["'llama'", "gated_deltanet", "qwen3_next", "qwen3_5"]),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path):
    copy("next", tmp_path)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


def test_memory_of_a_sequence_and_of_a_draft_node():
    """As docs/models.md has it: recurrent layers do not grow, attention does by doubling."""
    target, nodes = make_target("qwen_dense"), 9  # one layer of each kind
    pool = target.new_pool(2, nodes)
    recurrent = 4 * (4 * 8 * 8 + 3 * (2 * 2 * 8 + 4 * 8))
    assert pool.bytes_per_sequence() == recurrent + 256 * 2 * 4 * 2 * 16
    assert pool.bytes_per_node() == 4 * (2 * 8 + 4 * 8 + 4 + (2 * 2 * 8 + 4 * 8)) + 2 * 4 * 2 * 16
    target.prefill(torch.tensor(prompt(300)), pool.alloc(), pool)
    assert pool.bytes_per_sequence() == recurrent + 512 * 2 * 4 * 2 * 16


def test_no_kernels_are_promised():
    target, config = make_target("qwen_dense"), SpeculativeConfig(num_speculative_tokens=4)
    assert not ResidentEngine.takes(target, NoDrafter(), config)
    assert type(make_engine(target, NoDrafter(), config)) is Engine


def test_text_in_and_text_out(tmp_path: Path):
    copy("images", tmp_path)
    assert save_tokenizer(tmp_path) >= 61
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = {token: i for token, i in raw["model"]["vocab"].items() if i < 61}
    merges = [pair for pair in raw["model"]["merges"] if "".join(pair) in vocabulary]
    raw["model"] |= {"vocab": vocabulary, "merges": merges}
    raw["normalizer"] = {"type": "NFC"}
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    models = [LLM(tmp_path, drafter, device="cpu", dtype="float32") for drafter in ("none", "ngram", None)]
    assert [model.drafter.name for model in models] == ["none", "ngram", "mtp+ngram"]
    plain, *drafted = (model.generate("the cat sat", params)[0].outputs[0] for model in models)
    assert plain.text and len(plain.token_ids) == 12
    assert all(output.token_ids == plain.token_ids and output.text == plain.text for output in drafted)
    facts = describe(tmp_path, "cpu", "float32")
    assert facts["drafter"] == "its mtp head"
    assert facts["layers"] == "2 of hidden size 24; softmax attention (global) at 1"
    assert facts["heads"] == "2 key x 8, 4 value x 8"
