"""Targets made of tensors in memory: what loading their files gives, without copies where layouts agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specla.models.adopt import adopt_target
from specla.models.loader import load_target, read_raw_config
from tests.models.test_fixtures import DATA, VARIANTS


def stored(variant: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    directory = DATA / variant
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        weights |= load_file(path)
    return read_raw_config(directory), {name: w.to(dtype, copy=True) for name, w in weights.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_target_is_that_of_the_files(variant: str, dtype: torch.dtype):
    raw, weights = stored(variant, dtype)
    target, copied = adopt_target(raw, weights)
    ours, loaded = target.state_dict(), load_target(DATA / variant, dtype=dtype).state_dict()
    assert ours.keys() == loaded.keys()
    places = {w.data_ptr() for w in weights.values()}
    assert copied == sum(w.nbytes for w in ours.values() if w.data_ptr() not in places)
    for name, w in ours.items():
        # vectors that were stored in float32 are rounded here, as a model in bfloat16 has them
        expected = loaded[name] if dtype == torch.float32 or w.dtype == dtype else None
        assert w.dtype == loaded[name].dtype
        assert expected is None or torch.equal(w, expected)
        if name.endswith(("embeddings.weight", "lm_head.weight", "o_proj.weight")):
            assert w.data_ptr() in places


def test_a_shared_parameter_changes_with_its_tensor_and_a_joined_one_does_not():
    raw, weights = stored("fla/plain", torch.float32)
    target, _ = adopt_target(raw, weights)
    for w in weights.values():
        w.zero_()
    assert not target.lm_head.weight.any() and target.layers[0].attn.in_proj.weight.any()


@pytest.mark.parametrize("variant", ["fla/tied", "qwen/dense_tied"])
def test_a_head_that_is_tied_may_be_there_if_it_is_the_same(variant: str):
    raw, weights = stored(variant, torch.float32)
    (table,) = (
        w for name, w in weights.items() if name.endswith(("embeddings.weight", "embed_tokens.weight"))
    )
    assert adopt_target(raw, weights | {"lm_head.weight": table}).target.lm_head is None
    with pytest.raises(ValueError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
        adopt_target(raw, weights | {"lm_head.weight": table + 1})


@pytest.mark.parametrize(
    "change, told",
    [
        ({"model.norm.weight": None}, r"1 missing \(model\.norm\.weight\)"),
        ({"model.extra": torch.zeros(1)}, r"1 unexpected \(model\.extra\)"),
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape \[3\]"),
        ({"lm_head.weight": "int8"}, r"lm_head\.weight has dtype torch\.int8"),
    ],
)
def test_tensors_that_do_not_fit(change: dict[str, Any], told: str):
    raw, weights = stored("fla/plain", torch.float32)
    for name, value in change.items():
        weights[name] = weights[name].to(torch.int8) if isinstance(value, str) else value
    with pytest.raises(ValueError, match=told):
        adopt_target(raw, {name: w for name, w in weights.items() if w is not None})
