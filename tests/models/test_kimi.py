"""Kimi-Linear checkpoints: as transformers writes them, as hubs have them, and every defect named in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla import SamplingParams
from specla.drafters import NgramDrafter
from specla.models.experts import SigmoidRouter
from specla.models.kimi_config import KimiConfig
from specla.models.loader import load_target
from specla.show import describe
from specla.tree import Tree
from tests.data.transformers.make import VARIANTS, write
from tests.models.test_loader import edit_config, refuses
from tests.targets import run

DATA = Path(__file__).parent.parent / "data" / "transformers"
TEXT = torch.arange(40)[None]


def copy(variant: str, directory: Path) -> dict[str, Tensor]:
    """A fixture in a directory that may be changed, and its weights."""
    shutil.copytree(DATA / variant, directory, dirs_exist_ok=True)
    return load_file(directory / "model.safetensors")


def numbered(kda: list[Any], full: list[Any]) -> dict[str, Any]:
    """Kinds of layers as hubs have them."""
    return {"layer_types": None, "linear_attn_config": {"kda_layers": kda, "full_attn_layers": full}}


def logits(directory: Path) -> Tensor:
    target = load_target(directory, dtype="float32")
    with torch.no_grad():
        return target.logits(target(TEXT))


@pytest.mark.parametrize(
    "variant", [name for name, (family, _) in VARIANTS.items() if family == "KimiLinear"]
)
def test_a_fresh_checkpoint_gives_the_logits_and_tokens_of_its_own_library(variant: str, tmp_path: Path):
    check_fresh(variant, tmp_path)


def check_fresh(variant: str, directory: Path) -> None:
    """One with other weights than the fixture's, which were rounded: written here, by transformers."""
    pytest.importorskip("transformers", minversion="5.24")
    answer = write(directory, variant)
    target = load_target(directory, dtype="float32")
    with torch.no_grad():
        got = target.logits(target(answer["input_ids"]))
    torch.testing.assert_close(got, answer["logits"], rtol=0, atol=1e-4)
    prompts = [row[:16].tolist() for row in answer["greedy"]]
    made = run(target, NgramDrafter(9, 5, 3), prompts, SamplingParams(max_tokens=48, ignore_eos=True))
    assert made.tokens == answer["greedy"].tolist()


def test_spellings_of_hubs_and_of_transformers_mean_the_same(tmp_path: Path):
    copy("kimi_hub", tmp_path)
    before, config = logits(tmp_path), load_target(tmp_path, dtype="float32").config
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("linear_attn_config"), raw.pop("first_k_dense_replace")
    for ours, theirs in (("num_experts", "num_local_experts"), ("num_experts_per_token", "num_experts_per_tok"),
                         ("num_shared_experts", "n_shared_experts"), ("num_expert_group", "n_group"),
                         ("moe_renormalize", "norm_topk_prob"),
                         ("model_max_length", "max_position_embeddings")):  # fmt: skip
        raw[theirs] = raw.pop(ours)
    raw |= {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_head_dim": 8,
        "mlp_layer_types": ["dense", "dense", "sparse"], "linear_num_heads": 3, "linear_conv_kernel_dim": 3,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_target(tmp_path, dtype="float32").config == config
    assert torch.equal(logits(tmp_path), before)


def test_dense_layers_go_by_either_name(tmp_path: Path):
    weights = copy("kimi_hub", tmp_path)
    before = logits(tmp_path)
    dense = [name for name in weights if ".mlp." in name]
    assert dense
    for name in dense:
        weights[name.replace(".mlp.", ".block_sparse_moe.")] = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), before)


@pytest.mark.parametrize("variant", ["kimi", "kimi_groups"])
def test_tensors_may_have_the_names_that_transformers_holds_them_by(variant: str, tmp_path: Path):
    weights = copy(variant, tmp_path)
    before = logits(tmp_path)
    for name in list(weights):
        held = name.replace(".block_sparse_moe.", ".mlp.")
        for part in ("f_a_proj.", "f_b_proj.", "A_log", "dt_bias"):
            held = held.replace(f".self_attn.{part}", f".self_attn.forget_gate.{part}")
        weights[held] = weights.pop(name)
    for start in {name.split("q_conv1d")[0] for name in weights if "q_conv1d" in name}:
        weights[f"{start}conv1d.weight"] = torch.cat(
            [weights.pop(f"{start}{x}_conv1d.weight") for x in "qkv"]
        )
    for start in {name.split(".experts.")[0] for name in weights if ".experts." in name}:
        each = [f"{start}.experts.{i}" for i in range(load_target(tmp_path).config.num_experts)]
        up = [torch.cat([weights.pop(f"{one}.{x}.weight") for x in ("w1", "w3")]) for one in each]
        weights[f"{start}.experts.gate_up_proj"] = torch.stack(up)
        weights[f"{start}.experts.down_proj"] = torch.stack([weights.pop(f"{one}.w2.weight") for one in each])
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), before)
    weights["model.layers.0.self_attn.conv1d.bias"] = weights.pop("model.layers.0.self_attn.conv1d.weight")
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, "1 missing (model.layers.0.self_attn.conv1d.weight)", "1 unexpected", "conv1d.bias")


def test_a_router_chooses_by_groups_and_bias_and_weighs_by_sigmoids_alone():
    router = SigmoidRouter(3, 6, 2, groups=3, top_groups=2, normalise=True, scaling=1.5)
    wanted = torch.tensor([0.9, 0.8, 0.1, 0.2, 0.85, 0.05])  # the scores of experts for the token (1, 0, 0)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.logit(wanted)
        router.choice_bias.copy_(torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0]))
        share, chosen = router.choose(torch.tensor([[1.0, 0.0, 0.0]]))
    # groups are as good as 1.7, 2.3 and 0.9, so that 0.85 is out of the question; the bias decides among the others
    assert sorted(chosen[0].tolist()) == [2, 3]
    by_expert = dict(zip(chosen[0].tolist(), share[0].tolist(), strict=True))
    assert by_expert == pytest.approx({2: 1.5 * 0.1 / 0.3, 3: 1.5 * 0.2 / 0.3})


@pytest.mark.parametrize(
    "name",
    [
        "0.self_attn.dt_bias",
        "1.self_attn.kv_b_proj.weight",
        "2.block_sparse_moe.gate.e_score_correction_bias",
    ],
)
def test_missing_and_unexpected_weights_are_named(name: str, tmp_path: Path):
    weights = copy("kimi", tmp_path)
    weights[f"model.layers.{name}x"] = weights.pop(f"model.layers.{name}")
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, f"1 missing (model.layers.{name})", f"1 unexpected (model.layers.{name}x)")


def test_a_dense_layer_that_lacks_a_tensor_is_not_taken_for_one_by_the_other_name(tmp_path: Path):
    weights, name = copy("kimi_hub", tmp_path), "model.layers.0.mlp.down_proj.weight"
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, f"do not fit config.json: 1 missing ({name})")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention"] * 2 + ["mamba"]}, ["layer 2 of layer_types", "'mamba'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types has 1", "num_hidden_layers is 3"]),
        ({"mlp_layer_types": ["dense", "moe", "dense"]}, ["layer 1 of mlp_layer_types", "'moe'", "sparse"]),
        ({"layer_types": "linear_attention"}, ["layer_types must be a list"]),
        ({"layer_types": None}, ["layer_types", "kda_layers", "full_attn_layers"]),
        (numbered([0, 1], [2]), ["1..3 once", "[0, 1]"]),
        (numbered([1, 2, 3], [2]), ["1..3 once", "[2]"]),
        (numbered(["1", 2], [3]), ["1..3 once", "'1'"]),
        ({"linear_attn_config": [1]}, ["linear_attn_config must be an object"]),
        ({"mlp_layer_types": None, "first_k_dense_replace": -1}, ["first_k_dense_replace"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"q_lora_rank": 8}, ["q_lora_rank 8", "None"]),
        ({"mla_use_nope": False}, ["mla_use_nope False"]),
        ({"attention_bias": True}, ["attention_bias True"]),
        ({"moe_router_activation_func": "softmax"}, ["moe_router_activation_func 'softmax'", "'sigmoid'"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq 2"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads 1", "num_attention_heads 2"]),
        ({"use_grouped_topk": False, "num_expert_group": 3}, ["use_grouped_topk", "num_expert_group"]),
        ({"num_expert_group": 4}, ["num_experts 6", "num_expert_group 4"]),
        ({"num_expert_group": 6}, ["num_experts 6", "twice"]),
        ({"topk_group": 2}, ["topk_group 2", "num_expert_group 1"]),
        ({"num_experts_per_token": 7}, ["num_experts_per_token 7", "6 experts"]),
        ({"num_experts": 5000}, ["num_experts", "4096", "5000"]),
        ({"num_shared_experts": 0}, ["num_shared_experts"]),
        ({"moe_intermediate_size": None}, ["moe_intermediate_size"]),
        ({"routed_scaling_factor": 0}, ["routed_scaling_factor"]),
        ({"kv_lora_rank": None, "v_head_dim": None}, ["lacks", "kv_lora_rank", "v_head_dim"]),
        ({"eos_token_id": 61}, ["eos_token_id", "61"]),
        ({"kv_lora_rank": 16}, ["kv_a", "has shape", "config.json asks for"]),
        ({"num_experts": 7}, ["block_sparse_moe"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path):
    copy("kimi", tmp_path)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


def test_memory_of_a_sequence_and_of_a_draft_node():
    """As docs/models.md has it: an attention layer keeps one latent row a token, whatever the number of heads."""
    target = load_target(DATA / "kimi", dtype="float32")
    assert isinstance(target.config, KimiConfig)
    pool, row, channels = target.new_pool(1, 5), 12 + 4, 3 * 2 * 8
    assert pool.bytes_per_sequence() == 4 * (2 * (2 * 8 * 8 + 3 * channels) + 256 * row)
    assert pool.bytes_per_node() == 4 * (2 * (2 * 8 + 2 * 8 + 2 * 8 + channels) + row)


def test_latent_rows_outgrow_their_room(tmp_path: Path):
    """Past 256 rows, with what was read before still there."""
    target = load_target(DATA / "kimi", dtype="float32")
    text = torch.arange(300) % 61
    with torch.inference_mode():
        whole = target.logits(target(text[None]))[0]
    pool = target.new_pool(1, 3)
    slot = pool.alloc()
    target.prefill(text[:255], slot, pool)
    got = target.verify(text[None, 255:258], Tree.chain(3), [slot], pool)[0]
    torch.testing.assert_close(got, whole[255:258], rtol=0, atol=1e-4)
    pool.accept([slot], torch.arange(3)[None], torch.tensor([2]))
    target.prefill(text[258:299], slot, pool)
    got = target.verify(text[None, 299:], Tree.chain(1), [slot], pool)[0]
    torch.testing.assert_close(got, whole[299:], rtol=0, atol=1e-4)


def test_facts_for_people():
    facts = describe(DATA / "kimi", "cpu", "float32")
    assert facts["layers"] == "3 of hidden size 24; softmax attention (global) at 1"
    assert (facts["heads"], facts["output_gate"]) == ("2 key x 8, 2 value x 8", "sigmoid")
