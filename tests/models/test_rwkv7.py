"""RWKV-7 checkpoints: every variant against an independent forward pass, and every defect named in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specla.models.loader import load_target
from specla.models.rwkv7 import Rwkv7
from specla.models.rwkv7_config import Rwkv7Config
from specla.models.rwkv7_layout import sources
from specla.ops.elementwise import sigmoid
from specla.show import describe
from specla.tree import Tree
from tests.models.naive_rwkv7 import logits as naive_logits
from tests.models.test_loader import edit_config, refuses, shard
from tests.targets import RWKV7, make_rwkv7_config, make_target, prompt

SHAPE: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 3, "head_dim": 4, "decay_low_rank_dim": 3,
    "gate_low_rank_dim": 5, "a_low_rank_dim": 2, "v_low_rank_dim": 4, "intermediate_size": 24,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"num_hidden_layers": 1},
    "heads by number": {"head_dim": None, "num_heads": 2},
    "no norm first": {"norm_first": False},
    "norms without bias": {"norm_bias": False},
    "unfused": {"fuse_norm": False},
    "wide values": {"value_dim": 32},
    "values layer by layer": {"value_dim": [16, 16, 16]},
    "tied": {"tie_word_embeddings": True},
    "ranks by size": dict.fromkeys(
        ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")
    ),
    "null intermediate": {"intermediate_size": None, "hidden_ratio": None},
    "other ratio": {"intermediate_size": None, "hidden_ratio": 2.5, "norm_eps": 1e-3},
}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 22, 0, 8, 8, 8, 7, 21, 13]


def save(directory: Path, **changes: Any) -> dict[str, Tensor]:
    """A random checkpoint as flash-linear-attention names its tensors, whose every parameter matters."""
    raw = {"model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], **SHAPE, **changes}
    config, rng = Rwkv7Config.from_dict(raw), torch.Generator().manual_seed(5)
    weights = {}
    for source in sources(config, ()).values():
        for name, shape in source.shapes.items():
            drawn = torch.randn(shape, generator=rng)
            scale, shift = (0.3, 1.0) if "norm" in name and name.endswith("weight") else (0.5, 0.0)
            mixes = name.rsplit(".", 1)[-1].startswith("x_")
            weights[name] = sigmoid(drawn) if mixes else drawn * scale + shift
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_dict() | raw))
    save_file(weights, directory / "model.safetensors")
    return weights


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_an_independent_forward_pass(name: str, tmp_path: Path):
    """The whole text at once, and read in pieces: a prefill, a verified chain, and one token at a time."""
    weights = save(tmp_path, **VARIANTS[name])
    answer = naive_logits(json.loads((tmp_path / "config.json").read_text()), weights, TEXT)
    assert float((answer[1:] - answer[:-1]).abs().amax(-1).min()) > 0.1  # the text matters
    model = load_target(tmp_path, dtype="float64")
    assert isinstance(model, Rwkv7)
    whole = model.logits(model(torch.tensor([TEXT])))[0]
    torch.testing.assert_close(whole, answer, rtol=0, atol=1e-9)
    pool = model.new_pool(1, 6)
    slot, at = pool.alloc(), 9
    model.prefill(torch.tensor(TEXT[:5]), slot, pool)
    model.prefill(torch.tensor(TEXT[5:9]), slot, pool)
    for length in (2, 6, 1, 1):
        got = model.verify(torch.tensor([TEXT[at : at + length]]), Tree.chain(length), [slot], pool)
        torch.testing.assert_close(got[0], answer[at : at + length], rtol=0, atol=1e-9)
        pool.accept([slot], torch.arange(length)[None], torch.tensor([length - 1]))
        at += length
    assert at == len(TEXT)


@pytest.mark.parametrize("mode", ["serial", "hybrid", "parallel"])
def test_nodes_of_a_tree_see_their_own_path_and_rejected_ones_leave_nothing(mode: str, tmp_path: Path):
    weights = save(tmp_path)
    raw, model = json.loads((tmp_path / "config.json").read_text()), load_target(tmp_path, dtype="float64")
    pool = model.new_pool(2, 8)
    slots, text, parent = [pool.alloc(), pool.alloc()], TEXT[:6], [-1, 0, 0, 1, 3, 2]
    tokens = torch.tensor([[7, 1, 2, 3, 4, 5], [9, 5, 4, 3, 2, 1]])
    for slot in slots:
        model.prefill(torch.tensor(text), slot, pool)
    got = model.verify(tokens, Tree([parent] * 2), slots, pool, mode)
    paths = {4: [0, 1, 3, 4], 5: [0, 2, 5]}
    for row in range(2):
        for node, path in paths.items():
            want = naive_logits(raw, weights, text + tokens[row, path].tolist())[-1]
            torch.testing.assert_close(got[row, node], want, rtol=0, atol=1e-9)
    pool.accept(slots, torch.tensor([[0, 1, 3], [0, 2, 0]]), [2, 1])
    after = model.verify(torch.tensor([[11], [12]]), Tree([[-1]] * 2), slots, pool, mode)
    for row, (path, token) in enumerate(zip(([0, 1, 3], [0, 2]), (11, 12), strict=True)):
        want = naive_logits(raw, weights, [*text, *tokens[row, path].tolist(), token])[-1]
        torch.testing.assert_close(after[row, 0], want, rtol=0, atol=1e-9)


def test_mixes_may_be_stored_as_one_tensor(tmp_path: Path):
    weights = save(tmp_path)
    before = load_target(tmp_path, dtype="float32").state_dict()
    for layer in range(3):
        start = f"model.layers.{layer}.attn.x_"
        weights[f"{start}x"] = torch.cat([weights.pop(f"{start}{x}")[0] for x in "rwkvag"])
    save_file(weights, tmp_path / "model.safetensors")
    after = load_target(tmp_path, dtype="float32").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_matrices_take_the_dtype_and_vectors_stay_exact(tmp_path: Path):
    save(tmp_path)
    shard(tmp_path)
    model = load_target(tmp_path, dtype="bfloat16")
    for name, weight in model.named_parameters():
        assert weight.dtype == (torch.bfloat16 if weight.dim() == 2 else torch.float32), name
    assert model.new_pool(1, 2).layers[0].state.dtype == torch.float32


def test_missing_and_unexpected_weights_are_named(tmp_path: Path):
    weights = save(tmp_path)
    name = "model.layers.1.attn.v_lora.lora.2.bias"
    weights[f"{name}x"] = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors")
    refuses(tmp_path, f"1 missing ({name})", f"1 unexpected ({name}x)")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_hidden_layers": 2}, ("unexpected", "model.layers.2.")),
     ({"num_hidden_layers": 4}, ("missing", "model.layers.3.")),
     ({"norm_first": False}, ("2 unexpected", "pre_norm")),
     ({"norm_bias": False}, ("unexpected", "norm.bias")),
     ({"head_dim": 8}, ("r_k", "[4, 4]", "[2, 8]")),
     ({"value_dim": 32}, ("has shape", "config.json asks for")),
     ({"gate_low_rank_dim": 6}, ("g_lora", "[5, 16]", "[6, 16]")),
     ({"intermediate_size": 25}, ("ffn", "has shape")),
     ({"model_type": "gated_deltanet"}, ("architectures", "RWKV7ForCausalLM")),
     ({"architectures": ["RWKV6ForCausalLM"]}, ("RWKV6ForCausalLM", "RWKV7ForCausalLM")),
     ({"model_type": "rwkv6"}, ("'rwkv6'", "rwkv7"))],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_contradicts_the_weights(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
):
    save(tmp_path)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"attn": {"layers": [1], "num_heads": 4}}, ("attn", "rwkv7")),
     ({"quantization_config": {}}, ("quantization_config",)),
     ({"hidden_act": "relu"}, ("hidden_act", "sqrelu", "'relu'")),
     ({"head_dim": 5}, ("head_dim 5", "hidden_size 16")),
     ({"head_dim": 4, "num_heads": 3}, ("num_heads 3", "hidden_size 16")),
     ({"head_dim": None}, ("head_dim", "num_heads", "null")),
     ({"head_dim": None, "num_heads": 32}, ("num_heads 32",)),
     ({"value_dim": 24}, ("value_dim 24", "multiple of hidden_size 16")),
     ({"value_dim": [16, 32, 16]}, ("value_dim", "the same for all layers")),
     ({"value_dim": [16]}, ("value_dim has 1 entries", "num_hidden_layers is 3")),
     ({"value_dim": []}, ("value_dim has 0 entries",)),
     ({"value_dim": ["16"] * 3}, ("value_dim", "'16'")),
     ({"decay_low_rank_dim": "8"}, ("decay_low_rank_dim", "'8'")),
     ({"v_low_rank_dim": 0}, ("v_low_rank_dim", "0")),
     ({"norm_first": 1}, ("norm_first", "true or false")),
     ({"norm_bias": None}, ("norm_bias", "true or false")),
     ({"fuse_norm": "yes"}, ("fuse_norm", "true or false")),
     ({"norm_eps": 0}, ("norm_eps",)),
     ({"intermediate_size": None, "hidden_ratio": -1}, ("hidden_ratio",)),
     ({"num_hidden_layers": 10**9}, ("num_hidden_layers",)),
     ({"eos_token_id": 23}, ("eos_token_id", "23")),
     ({"max_position_embeddings": -1}, ("max_position_embeddings",)),
     ({"vocab_size": "23"}, ("vocab_size",))],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
):
    save(tmp_path)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


def test_a_configuration_survives_being_written():
    for variant in RWKV7:
        config = make_rwkv7_config(variant, eos_token_id=[3, 4])
        assert Rwkv7Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_sizes_that_a_configuration_leaves_open_are_the_librarys():
    config = Rwkv7Config(
        **dict.fromkeys(("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"))
    )
    assert config.ranks == {"w": 128, "g": 224, "a": 128, "v": 64}
    assert Rwkv7Config().ranks == {"w": 64, "g": 128, "a": 64, "v": 16}
    assert (config.mlp_dim, config.heads, config.values) == (8192, 32, 2048)
    assert Rwkv7Config(hidden_size=96, head_dim=32, hidden_ratio=3.1).mlp_dim == 320


def test_memory_of_a_sequence_and_of_a_draft_node():
    """As docs/models.md has it."""
    pool = make_target("rwkv7").new_pool(2, 9)
    layers, heads, size, hidden = 2, 4, 8, 32
    assert pool.bytes_per_sequence() == 4 * layers * (heads * size * size + 2 * hidden)
    assert pool.bytes_per_node() == 4 * layers * (heads * (4 * size + 2 * size) + 2 * hidden)


def test_the_facts_that_info_prints(tmp_path: Path):
    save(tmp_path)
    facts = describe(tmp_path, "cpu", "float32")
    assert facts["architecture"] == "RWKV7ForCausalLM (rwkv7)"
    assert facts["heads"] == "4 key x 4, 4 value x 4"
    assert facts["convolution"] == "none, token shift" and facts["output_gate"] == "of rank 5"


def test_the_state_of_a_long_text_is_that_of_one_token_after_another():
    """In float64: prefill in chunks and decoding compute the same."""
    target, text = make_target("rwkv7", torch.float64), prompt(700)
    pool = target.new_pool(2, 1)
    for slot in (pool.alloc(), pool.alloc()):
        target.prefill(torch.tensor(text[: 600 if slot else 1]), slot, pool)
    for at in range(1, 600):
        target.verify(torch.tensor([[text[at]]]), Tree([[-1]]), [0], pool)
        pool.accept([0], torch.zeros(1, 1, dtype=torch.long), [0])
    pool.flush([0])
    for layer in pool.layers:
        torch.testing.assert_close(layer.state[0], layer.state[1], rtol=0, atol=1e-9)
        torch.testing.assert_close(layer.conv_state[0], layer.conv_state[1], rtol=0, atol=1e-9)
