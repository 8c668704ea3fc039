"""Models of the family: an independent forward pass, what is refused, and what a sequence costs."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specla.drafters import NgramDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.architectures import ARCHITECTURES, architecture_of
from specla.models.loader import load_target, read_config
from specla.show import describe
from tests.checkpoints import write_random
from tests.models import naive_family
from tests.models.naive_forward import logits as naive_logits
from tests.models.test_loader import TEXT, check_logits
from tests.ops.triton import DEVICE
from tests.ops.triton.test_dispatch import switched_on
from tests.targets import (
    FAMILY,
    FURTHER,
    ScriptedDrafter,
    build_target,
    family_raw,
    make_family_config,
    make_target,
    prompt,
    run,
    same_bits,
)


def naive(raw: dict[str, Any]) -> Any:
    return getattr(naive_family, raw["model_type"])


@pytest.mark.parametrize("variant", FAMILY)
def test_a_checkpoint_equals_an_independent_forward_pass(variant: str, tmp_path: Path):
    raw = family_raw(variant)
    filled = {"tie_word_embeddings": False, "norm_eps": 1e-6} | raw
    answer = naive_logits(filled, write_random(tmp_path, raw), TEXT, naive(raw))
    check_logits(answer, tmp_path)


@pytest.mark.parametrize("variant", FAMILY)
def test_what_a_checkpoint_says_of_itself(variant: str, tmp_path: Path):
    write_random(tmp_path, family_raw(variant))
    told = describe(str(tmp_path), dtype="float32")
    config = read_config(tmp_path)
    assert told["architecture"] == f"{config.architecture} ({config.model_type})"
    pool = make_target(variant).new_pool(1, 2)
    assert told["state_bytes"] == pool.bytes_per_sequence()
    assert told["bytes_per_draft_node"] == pool.bytes_per_node()
    assert told["output_gate"] in ("swish", "none")


def test_memory_of_a_sequence_and_of_a_draft_node():
    """As docs/models.md has it; two layers of two heads each."""
    for variant, keys, values, decay, channels, window in (
        ("delta_net", 16, 16, 1, 96, 4),
        ("gla", 8, 16, 8, 0, 1),
        ("retnet", 16, 32, 1, 0, 1),
    ):
        pool = make_target(variant).new_pool(1, 4)
        assert pool.bytes_per_sequence() == 2 * 4 * (2 * keys * values + (window - 1) * channels), variant
        assert pool.bytes_per_node() == 2 * 4 * (2 * (keys + values + decay) + channels), variant


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("delta_net", {"qk_norm": "l1"}, ["qk_norm", "l2, sum", "'l1'"]),
        ("delta_net", {"qk_activation": "gelu"}, ["qk_activation", "silu, relu, elu, identity", "'gelu'"]),
        ("delta_net", {"expand_k": 0.7}, ["hidden_size * expand_k", "22.4"]),
        ("delta_net", {"num_heads": 5}, ["hidden_size * expand_k = 32", "num_heads 5"]),
        ("delta_net", {"use_beta": 1}, ["use_beta", "true or false"]),
        ("delta_net", {"conv_size": 0}, ["conv_size"]),
        ("delta_net", {"hidden_act": "powlu"}, ["hidden_act", "swish, silu", "'powlu'"]),
        ("delta_net", {"attnres_block_size": 4}, ["attnres_block_size", "not supported"]),
        ("delta_net", {"quantization_config": {}}, ["quantization_config", "not supported"]),
        ("delta_net", {"attn": {"layers": [2], "num_heads": 2}}, ["attn layers [2]"]),
        ("gla", {"num_kv_heads": 3}, ["num_heads 2", "num_kv_heads 3"]),
        ("gla", {"expand_v": -1.0}, ["expand_v"]),
        ("gla", {"feature_map": "gelu"}, ["feature_map", "relu, sigmoid, silu, swish", "'gelu'"]),
        ("gla", {"clamp_min": 0.5}, ["clamp_min", "0.5"]),
        ("gla", {"clamp_min": "low"}, ["clamp_min", "'low'"]),
        ("gla", {"elementwise_affine": None}, ["elementwise_affine", "true or false"]),
        ("retnet", {"num_heads": 32}, ["num_heads", "even", "got 1"]),
        ("retnet", {"hidden_size": 1024, "num_heads": 2}, ["at most 256", "got 512"]),
        ("retnet", {"model_type": "hgrn2"}, ["'hgrn2' is not supported", "retnet", "gated_deltanet", "qwen3_5"]),
        ("retnet", {"model_type": None, "architectures": ["XForCausalLM"]}, ["None is not supported", "XForCausalLM"]),
        ("retnet", {"architectures": ["RetNetModel"]}, ["RetNetModel", "RetNetForCausalLM"]),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_supported(
    variant: str, changes: dict[str, Any], words: list[str], tmp_path: Path
):
    write_random(tmp_path, family_raw(variant))
    (tmp_path / "config.json").write_text(json.dumps(family_raw(variant, **changes)))
    refuses(tmp_path, words)


@pytest.mark.parametrize("variant", [*FAMILY, *FURTHER])
def test_any_value_in_any_field_is_read_or_refused_in_one_line(variant: str):
    raw, refused = family_raw(variant), 0
    further = ("attn", "expand", "lower_bound", "safe_gate", "num_v_heads", "time_step_limit", "eos_token_id",
               "linear_attn_config", "first_k_dense_replace", "mlp_layer_types", "use_grouped_topk")  # fmt: skip
    for name in (*raw, *further):
        for value in (
            None,
            "x",
            -1,
            0,
            0.5,
            True,
            [],
            {},
            [[]],
            [{}],
            float("nan"),
            float("inf"),
            10**30,
            ["x"],
        ):
            changed = raw | {name: value}
            try:
                architecture_of(changed).config(changed)
            except ValueError as error:
                refused += 1
                assert str(error) and "\n" not in str(error)
    assert refused > 80


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("delta_net", {"use_gate": True}, ["2 missing", "attn.g_proj.weight"]),
        ("delta_net", {"use_beta": False}, ["2 unexpected", "attn.b_proj.weight"]),
        ("delta_net", {"use_short_conv": False}, ["6 unexpected", "attn.k_conv1d.weight"]),
        ("delta_net", {"expand_v": 2.0}, ["model.layers.0.attn.", "shape"]),
        ("gla", {"num_kv_heads": 1}, ["attn.", "_proj.", "shape"]),
        ("gla", {"elementwise_affine": False}, ["2 unexpected", "attn.g_norm.weight"]),
        ("gla", {"num_hidden_layers": 3}, ["missing", "model.layers.2."]),
        ("retnet", {"use_output_gate": False}, ["2 unexpected", "attn.g_proj.weight"]),
        (
            "retnet",
            {"model_type": "gla", "expand_k": 1.0, "expand_v": 2.0},
            ["6 missing", "attn.gk_proj.0.weight"],
        ),
    ],
)
def test_weights_that_do_not_fit(variant: str, changes: dict[str, Any], words: list[str], tmp_path: Path):
    write_random(tmp_path, family_raw(variant))
    (tmp_path / "config.json").write_text(json.dumps(family_raw(variant, **changes)))
    refuses(tmp_path, words)


def refuses(directory: Path, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load_target(directory)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_both_names_of_a_norm(tmp_path: Path):
    """The library fuses the norm with the gate, or does not; the weights are the same."""
    weights = write_random(tmp_path, family_raw("gla"))
    apart = load_target(tmp_path, dtype="float32").state_dict()
    renamed = {re.sub("g_norm", "g_norm_swish_gate", name): x for name, x in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert renamed.keys() != weights.keys()
    fused = load_target(tmp_path, dtype="float32").state_dict()
    assert all(torch.equal(fused[name], x) for name, x in apart.items())


def test_the_table_of_architectures_is_what_the_docs_say():
    told = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for kind, architecture in ARCHITECTURES.items():
        assert f"`{kind}`" in told and architecture.classes


@pytest.mark.parametrize("variant", FAMILY)
def test_configurations_survive_a_round_trip(variant: str):
    config: Any = make_family_config(variant)
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("variant", "mode"),
    [
        *(("delta_net", "serial"), ("gla_conv", "hybrid"), ("retnet", "serial")),
        *(("kda_grouped", "hybrid"), ("mamba2", "serial")),
    ],
)
def test_kernels_verify_and_commit_them_in_plain_rounds(variant: str, mode: str):
    config = make_family_config(variant, num_hidden_layers=1)
    target, on_device = build_target(config), build_target(config).to(DEVICE)
    params, prompts = SamplingParams(max_tokens=4), [prompt(9), prompt(4, 1)]
    with switched_on() as launched:
        plain = run(on_device, None, prompts, params, drafts=0, mode=mode)
        scripted = ScriptedDrafter(seed=1, right=0.8, idle=0)
        got = run(on_device, scripted, prompts, params, drafts=5, mode=mode, references=plain.tokens)
    assert {"verify", "commit"} <= set(launched)
    assert got.outputs == plain.outputs
    assert sum(s.metrics.num_accepted_draft_tokens for s in got.sequences) > 0
    assert all(same_bits(a, b) for a, b in zip(got.logits, plain.logits, strict=True))
    torch_alone = run(target, None, prompts, params, drafts=0)
    assert torch_alone.outputs == plain.outputs
    for ours, theirs in zip(plain.logits, torch_alone.logits, strict=True):
        assert all((ours[at].cpu() - theirs[at]).abs().max() < 1e-3 for at in theirs)


@pytest.mark.parametrize("variant", ["delta_net", "gla", "retnet", "kda", "mamba2", "kimi", "rwkv7"])
def test_a_mode_that_the_kernels_do_not_have_is_refused_before_anything_runs(variant: str):
    config = SpeculativeConfig(num_speculative_tokens=4, verify="parallel")
    on_device = copy.deepcopy(make_target(variant)).to(DEVICE)
    with switched_on():
        if variant in ("gla", "kda", "kimi"):
            with pytest.raises(
                ValueError, match=r"verify 'parallel' needs one decay a head.*'serial', 'hybrid'"
            ):
                Engine(on_device, NgramDrafter(), config)
        else:
            params = SamplingParams(max_tokens=2)
            run(on_device, NgramDrafter(4, 4, 2), [prompt(4) * 2], params, mode="parallel")
    Engine(make_target(variant), NgramDrafter(), config)  # plain torch has it
