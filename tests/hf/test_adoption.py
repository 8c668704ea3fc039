"""Weights are shared where layouts agree, followed where they change, and let go with their model."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specla.hf import Speculative, forget, speculative
from specla.hf.adoption import adopt
from specla.models.loader import load_target
from tests.hf.loaded import DATA, OTHERS, QWEN, FlaModel, load, load_qwen, prompts, qwen, transformers

huggingface_hub = pytest.importorskip("huggingface_hub")
ASKED = {"max_new_tokens": 12, "pad_token_id": 0}


def check(model: Any) -> torch.Tensor:
    expected = model.generate(**ASKED, **prompts())
    assert torch.equal(model.generate(**ASKED, **prompts(), custom_generate=speculative), expected)
    return expected


@pytest.mark.parametrize("variant", QWEN)
def test_the_target_is_that_of_the_files_and_shares_what_it_can(variant: str):
    model = load_qwen(variant)
    adoption = adopt(model)
    ours = adoption.target.state_dict()
    theirs = {w.data_ptr() for w in model.state_dict().values()}
    loaded = load_target(DATA / "qwen" / variant, dtype="float32").state_dict()
    assert ours.keys() == loaded.keys()
    assert all(torch.equal(ours[name], loaded[name]) for name in ours)
    copies = {name for name, w in ours.items() if w.data_ptr() not in theirs}
    assert adoption.copied == sum(ours[name].nbytes for name in copies)
    kinds = ("in_proj.weight", "qkv_proj.weight", "gate_up_proj.weight", "norm.weight", "conv_weight")
    assert all(name.endswith(kinds) for name in copies)


@pytest.mark.parametrize("variant", OTHERS)
def test_mamba2_and_kimi_linear_are_those_of_their_files(variant: str):
    model = load(DATA / "transformers" / variant)
    adoption = adopt(model)
    ours = adoption.target.state_dict()
    loaded = load_target(DATA / "transformers" / variant, dtype="float32").state_dict()
    assert ours.keys() == loaded.keys()
    assert all(torch.equal(ours[name], loaded[name]) for name in ours)
    theirs = {w.data_ptr() for w in model.state_dict().values()}
    for name, w in ours.items():  # the large ones among them
        if name.endswith(("mlp.gate_up_proj", "mlp.down_proj", "embeddings.weight", "o_proj.weight")):
            assert w.data_ptr() in theirs, name


def test_a_model_by_the_names_of_fla_shares_what_it_can():
    model = FlaModel("plain")
    adoption = adopt(model)
    theirs = {w.data_ptr() for w in model.state_dict().values()}
    copies = {
        name.rsplit(".", 2)[-2 if name.endswith("weight") else -1]
        for name, w in adoption.target.state_dict().items()
        if w.data_ptr() not in theirs
    }
    assert copies == {"in_proj", "gate_up_proj", "attn"}  # the last is conv_weight's
    loaded = load_target(DATA / "fla" / "plain", dtype="float32").state_dict()
    assert all(torch.equal(w, loaded[name]) for name, w in adoption.target.state_dict().items())


def test_one_target_for_all_calls_and_another_when_weights_have_changed():
    model = load_qwen("dense")
    before = check(model)
    adopted = adopt(model)
    check(model)
    assert adopt(model) is adopted
    with torch.no_grad():  # as an optimizer does: one of a joined parameter, then one that is shared
        for weight in (model.model.layers[0].linear_attn.in_proj_z.weight, model.lm_head.weight):
            weight.mul_(-1.5)
            after = check(model)
            assert not torch.equal(after, before)
            assert adopt(model) is not adopted
            before, adopted = after, adopt(model)
    model.load_state_dict(qwen("dense").state_dict())
    assert torch.equal(check(model), qwen("dense").generate(**ASKED, **prompts()))
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(-model.model.layers[1].mlp.up_proj.weight)
    check(model)


def test_what_inference_mode_has_seen_runs_outside_of_it():
    with torch.inference_mode():
        model = load_qwen("dense")
        before = check(model)
    assert torch.equal(check(model), before)


def test_writes_that_leave_no_trace_need_forget():
    model = load_qwen("dense")
    check(model)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(-2)
    forget(model)
    check(model)


def test_a_model_that_is_gone_is_let_go():
    model = load_qwen("dense")
    check(model)
    target, own = weakref.ref(adopt(model).target), weakref.ref(model)
    del model
    gc.collect()
    assert own() is None and target() is None


def test_adapters_are_refused():
    model = load_qwen("dense")
    projection = model.model.layers[0].mlp.up_proj
    projection.lora_A = nn.Linear(24, 2, bias=False)
    with pytest.raises(ValueError, match=r"^adapters are not supported \(.*lora_A.*merge"):
        model.generate(**ASKED, **prompts(), custom_generate=speculative)
    del projection.lora_A
    model._hf_peft_config_loaded = True
    with pytest.raises(ValueError, match=r"^adapters are not supported: merge"):
        model.generate(**ASKED, **prompts(), custom_generate=speculative)


def test_quantised_weights_are_refused():
    model = load_qwen("dense")
    model.is_quantized = True
    with pytest.raises(ValueError, match=r"^quantised weights are not supported"):
        adopt(model)
    model.is_quantized = False
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        torch.zeros(40, 24, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"up_proj\.weight has dtype torch\.int8"):
        adopt(model)


def test_hooks_are_refused_but_for_those_of_transformers():
    model = load_qwen("dense")
    model(prompts()["input_ids"], output_hidden_states=True)
    check(model)
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match=r"^model\.layers\.1 has forward hooks"):
        adopt(model)
    handle.remove()
    check(model)


def test_dropout_at_work_is_refused():
    model = load_qwen("dense")
    model.train()
    check(model)  # it has none
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        adopt(model)
    model.eval()
    check(model)


def test_autocast_is_refused():
    with (
        pytest.raises(ValueError, match=r"^autocast is not supported"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        qwen().generate(**ASKED, **prompts(), custom_generate=speculative)


def test_weights_elsewhere_are_refused():
    model = load_qwen("dense").to("meta")
    with pytest.raises(ValueError, match="one device, a CPU or a CUDA GPU, and are on meta"):
        adopt(model)


def test_tensors_of_another_kind_are_refused():
    class Sharded(torch.Tensor):
        pass

    model = load_qwen("dense")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Sharded))
    with pytest.raises(ValueError, match=r"^lm_head\.weight is a Sharded: only plain tensors"):
        adopt(model)


def test_models_of_other_kinds_are_refused():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="model_type 'llama' is not supported"):
        model.generate(torch.tensor([[3]]), max_new_tokens=3, custom_generate=speculative)


def test_weights_that_do_not_fit_the_configuration():
    model = load_qwen("dense")
    model.model.layers[0].mlp.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"do not fit config\.json: 2 unexpected"):
        adopt(model)
    del model.model.layers[0].mlp.extra
    model.lm_head.weight = nn.Parameter(torch.zeros(60, 24))
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[60, 24\]"):
        adopt(model)


def test_a_model_from_the_hub_drafts_with_what_its_snapshot_holds(monkeypatch: pytest.MonkeyPatch):
    model = load_qwen("dense_tied")
    assert adopt(model).directory == DATA / "qwen" / "dense_tied"
    model.name_or_path = model.config.name_or_path = "someone/dense_tied"
    forget(model)
    assert adopt(model).directory is None
    found = str(DATA / "qwen" / "dense_tied" / "config.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: found)
    forget(model)
    assert adopt(model).directory == DATA / "qwen" / "dense_tied"
    assert (
        adopt(model).engine((None, Speculative().config), False, 1).drafter.layer_ids
    )  # reads the target's features


def test_a_model_that_was_loaded_from_nowhere_drafts_by_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "drafter").mkdir()
    monkeypatch.chdir(tmp_path)
    model = load_qwen("dense_tied")
    for name in ("", "no/name of a repository/at all"):
        model.name_or_path = model.config.name_or_path = name
        forget(model)
        check(model)
        assert adopt(model).directory is None
        with pytest.raises(ValueError, match="drafter mtp is read from the directory"):
            model.generate(**ASKED, **prompts(), custom_generate=Speculative("mtp"))


def test_threads_take_turns():
    model, texts = load_qwen("dense"), {}
    expected = check(model)

    def work(name: int) -> None:
        for _ in range(3):
            texts.setdefault(name, []).append(
                model.generate(**ASKED, **prompts(), custom_generate=speculative)
            )

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(text, expected) for made in texts.values() for text in made)
    assert [len(made) for made in texts.values()] == [3, 3, 3]
