"""config.json: what is read, what is refused, and that every refusal is one line that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specla.models.config import AttentionConfig, GatedDeltaNetConfig

BASE: dict[str, Any] = {"model_type": "gated_deltanet", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2,
                        "num_heads": 2, "head_dim": 4, "intermediate_size": 8}  # fmt: skip
ATTN: dict[str, Any] = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}


def read(**changes: Any) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig.from_dict(BASE | changes)


def test_defaults_are_the_librarys():
    config = GatedDeltaNetConfig.from_dict({"model_type": "gated_deltanet"})
    assert (config.hidden_size, config.num_hidden_layers, config.num_heads, config.head_dim) == (
        2048,
        21,
        6,
        256,
    )
    assert (config.expand_v, config.value_dim, config.conv_size, config.norm_eps) == (2.0, 3072, 4, 1e-6)
    assert (config.use_gate, config.output_gate_activation, config.tie_word_embeddings) == (
        True,
        "swish",
        False,
    )


@pytest.mark.parametrize(
    ("hidden", "ratio", "size"),
    [(2048, 4, 5632), (64, 4, 256), (384, 4, 1024), (385, 4, 1280), (96, 2, 256), (2048, None, 5632)],
)
def test_null_intermediate_size_is_two_thirds_of_the_ratio_in_256s(hidden: int, ratio: int | None, size: int):
    assert read(hidden_size=hidden, hidden_ratio=ratio, intermediate_size=None).mlp_dim == size


def test_value_heads_and_their_size():
    assert (read(num_v_heads=6).value_heads, read(num_v_heads=None).value_heads) == (6, 2)
    assert (read(expand_v=1.5).head_v_dim, read(expand_v=2, num_v_heads=4).value_dim) == (6, 32)


def test_fields_that_do_not_change_the_computation_are_left_out():
    odd = {"attn_mode": "chunk", "fuse_norm": True, "use_cache": True, "transformers_version": "5", "dtype": "float32",
           "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "attnres_block_size": None}  # fmt: skip
    assert read(**odd) == read()


def test_attention_is_an_object_or_a_list_of_them():
    one = read(attn=ATTN)
    assert one.attn == (AttentionConfig((1,), 4, 2),)
    assert one.attention(0) is None
    assert one.attention(1) is one.attn[0]
    two = read(
        num_hidden_layers=3, attn=[ATTN, {"layers": [0], "num_heads": 2, "window_size": 5, "qk_norm": True}]
    )
    assert two.attention(0) == AttentionConfig((0,), 2, 2, qk_norm=True, window_size=5)
    assert two.attention(2) is None
    assert read(attn=None) == read(attn=[]) == read()


@pytest.mark.parametrize(
    "changes",
    [{}, {"attn": ATTN}, {"attn": [ATTN, {"layers": [0], "num_heads": 2}]},
     {"eos_token_id": [1, 2]}, {"eos_token_id": None},
     {"expand_v": 1.5, "num_v_heads": 4, "use_gate": False, "conv_bias": True, "intermediate_size": None}],
)  # fmt: skip
def test_to_dict_survives_json(changes: dict[str, Any]):
    config = read(**changes)
    assert GatedDeltaNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


WRONG: list[tuple[dict[str, Any], str]] = [
    *[({"model_type": kind}, "model_type") for kind in ("llama", "qwen3_next", None, 5, [])],
    *[({name: value}, name)
      for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "conv_size",
                   "num_v_heads", "intermediate_size", "max_position_embeddings")
      for value in (0, -1, 2.5, "4", True, [4], 2**40)],
    *[({name: None}, name) for name in ("vocab_size", "conv_size", "norm_eps", "use_gate", "expand_v")],
    *[({name: value}, name)
      for name in ("use_gate", "use_short_conv", "conv_bias", "allow_neg_eigval", "tie_word_embeddings")
      for value in (1, "true", None)],
    *[({name: value}, name)
      for name in ("expand_v", "norm_eps", "hidden_ratio")
      for value in (0, -1.0, float("nan"), float("inf"), 1e300, "2", True)],
    ({"num_hidden_layers": 5000}, "num_hidden_layers"),
    ({"num_heads": 4096, "head_dim": 2**20}, "key heads"),
    ({"num_heads": 2, "num_v_heads": 3}, "num_v_heads"),
    ({"num_heads": 2, "num_v_heads": 1}, "num_v_heads"),
    ({"head_dim": 5, "expand_v": 1.5}, "expand_v"),
    ({"head_dim": 4, "expand_v": 0.1}, "expand_v"),
    ({"output_gate_activation": "gelu"}, "output_gate_activation"),
    ({"hidden_act": "relu"}, "hidden_act"),
    ({"attnres_block_size": 4}, "attnres_block_size"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"bos_token_id": 50}, "bos_token_id"),
    ({"eos_token_id": -1}, "eos_token_id"),
    ({"eos_token_id": [1, 50]}, "eos_token_id"),
    ({"eos_token_id": "2"}, "eos_token_id"),
    *[({"attn": value}, "attn") for value in (5, "all", [5], {}, {"layers": [1]}, {"num_heads": 4})],
    *[({"attn": ATTN | change}, "attn")
      for change in ({"layers": [2]}, {"layers": [-1]}, {"layers": [1, 1]}, {"layers": ["1"]}, {"layers": 1},
                     {"num_heads": 3}, {"num_heads": "4"}, {"num_heads": 16}, {"num_kv_heads": 3}, {"num_kv_heads": 0},
                     {"window_size": 0}, {"window_size": -3}, {"window_size": 2.0}, {"qkv_bias": 1}, {"qk_norm": "no"},
                     {"rope_theta": 0}, {"rope_theta": float("nan")}, {"rope_scaling": {"type": "yarn"}})],
    ({"attn": [ATTN, ATTN]}, "attn"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), WRONG, ids=str)
def test_a_contradiction_is_refused_in_one_line_that_names_the_field(changes: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)
