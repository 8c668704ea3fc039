"""Drafters' checkpoints: speculators' files and answers, SpecForge's form, there and back, every defect in one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla import SamplingParams
from specla.drafters import EagleDrafter, NoDrafter
from specla.drafters.checkpoint import load_drafter, save_drafter
from specla.drafters.network import Eagle, EagleConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import save_target
from specla.models.past import FullText
from tests.targets import QWEN, build_target, make_config, make_qwen_config, prompt, run

DATA = Path(__file__).parent.parent / "data" / "speculators"
EXAMPLES = (
    "llama",
    "llama_eagle31",
    "llama_norm_before_fc",
    "llama_whole_vocabulary",
    "qwen3",
    "qwen3_window",
)
CLOSE = 1e-5  # a wrong norm, order or epsilon shifts answers by 1e-2 and more
LAYER = "transformer_layer_config"
IDS = "eagle_aux_hidden_state_layer_ids"
SHAPE: dict[str, Any] = {"hidden_size": 32, "vocab_size": 64, "draft_vocab_size": 16, "layer_ids": (0, 5, 8),
                         "num_heads": 4, "head_dim": 8, "intermediate_size": 24, "rms_norm_eps": 1e-3}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "delta": {},
    "delta without a gate": {"use_gate": False, "norm_before_residual": True, "conv_size": 1},
    "delta of one stream": {"layer_ids": (3,), "feature_norm": "each", "norm_output": True},
    "attention": {"mixer": "attention", "num_key_value_heads": 2, "rope_theta": 77.0},
    "attention with everything": {"mixer": "attention", "qk_norm": True, "sliding_window": 3, "head_dim": 16,
                                  "feature_norm": "joint", "norm_output": True, "norm_before_residual": True},
    "whole vocabulary": {"mixer": "attention", "draft_vocab_size": 64, "feature_norm": "each"},
}  # fmt: skip


@cache
def target(dtype: torch.dtype = torch.float32, **changes: Any) -> GatedDeltaNet:
    return build_target(make_config(vocab_size=64, **{"num_hidden_layers": 8, **changes}), dtype)


def make(**changes: Any) -> Eagle:
    """A random drafter whose every parameter matters, with every fourth token of the target's."""
    network = Eagle(EagleConfig(**{**SHAPE, **changes}))
    noise = torch.Generator().manual_seed(3)
    network.reset_parameters(noise)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * (0.2 if weight.dim() == 2 else 0.4))
    network.token_ids = torch.arange(64).reshape(-1, 64 // network.config.draft_vocab_size)[:, -1]
    return network.requires_grad_(False)


class Steps:
    """Every place of a text drafts on by itself, as in speculators' training: it sees the text up to itself as it was
    read first, and itself at every step since.
    """

    def __init__(self, length: int):
        self.places = torch.arange(length)
        self.positions = self.places[None]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        self.keys.append(k.repeat_interleave(groups, 2))
        self.values.append(v.repeat_interleave(groups, 2))
        self.positions = self.positions + 1
        behind = self.places[:, None] - self.places
        read = (behind >= 0) & (behind < (window or len(self.places)))
        visible = torch.cat([read] + [behind == 0] * (len(self.keys) - 1), 1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, torch.cat(self.keys, 1)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, torch.cat(self.values, 1))


def draft(network: Eagle, ids: Tensor, features: Tensor) -> list[Tensor]:
    """What is fed back after each of three steps over a text."""
    past, hidden, states = Steps(ids.shape[1]), network.fuse(features), []
    for step in range(3):
        shifted = torch.cat([ids[:, step:], ids.new_zeros(1, step)], 1)
        hidden = network(shifted, hidden, past)
        states.append(hidden)
    return states


def output(network: Eagle) -> Tensor:
    noise = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 64, (2, 9), generator=noise)
    features = torch.randn(2, 9, 32 * len(network.config.layer_ids), generator=noise)
    with torch.no_grad():
        hidden = network(ids, network.fuse(features), FullText(2, 9, ids.device))
        return torch.cat([hidden, network.logits(hidden)], -1)


def edited(
    directory: Path, example: str, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
) -> Path:
    """An example with fields replaced (`a.b` is b within a) and tensors; `...` takes a field away, None a tensor."""
    raw = json.loads((DATA / example / "config.json").read_text())
    weights = load_file(DATA / example / "model.safetensors")
    for path, value in (config or {}).items():
        *outer, name = path.split(".")
        place = raw[outer[0]] if outer else raw
        place.pop(name, None)
        if value is not ...:
            place[name] = value
    for name, value in (tensors or {}).items():
        weights.pop(name, None)
        if value is not None:
            weights[name] = value
    return write(directory, raw, weights)


def write(directory: Path, raw: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(weights, directory / "model.safetensors")
    return directory


def forge(directory: Path, **changes: Any) -> Path:
    """The llama example in SpecForge's form."""
    raw = json.loads((DATA / "llama" / "config.json").read_text())
    layer = {name: value for name, value in raw[LAYER].items() if name not in ("head_dim", "rope_parameters")}
    flat = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 16,
            "rope_theta": 500.0, "rope_scaling": None, "attention_bias": False, "sliding_window": None}  # fmt: skip
    weights = load_file(DATA / "llama" / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    return write(directory, layer | flat | changes, renamed)


def same(a: Eagle, b: Eagle) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(a.token_ids, b.token_ids)
    assert torch.equal(output(a), output(b))


def test_every_example_is_there():
    assert tuple(sorted(p.name for p in DATA.iterdir() if p.is_dir())) == EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES)
def test_three_steps_equal_speculators(example: str):
    network, answer = (
        load_drafter(DATA / example, target()),
        load_file(DATA / example / "reference.safetensors"),
    )
    for step, hidden in enumerate(draft(network, answer["input_ids"], answer["features"])):
        told = answer[f"hidden.{step}"]
        told = network.norm(told) if network.config.norm_output else told
        torch.testing.assert_close(hidden, told, rtol=0, atol=CLOSE)
        torch.testing.assert_close(network.logits(hidden), answer[f"logits.{step}"], rtol=0, atol=CLOSE)
    assert not network.training and not any(weight.requires_grad for weight in network.parameters())


@pytest.mark.parametrize(
    "changes",
    [{}, {"eagle_config": {IDS: [1, 3, 4]}}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
     {"rope_scaling": {"type": "default"}, "use_sliding_window": False, "sliding_window": 4096, "head_dim": 8}],
    ids=str,
)  # fmt: skip
def test_specforge_writes_the_same_by_other_names(changes: dict[str, Any], tmp_path: Path):
    ours = load_drafter(forge(tmp_path, **changes), target())
    same(ours, load_drafter(DATA / "llama", target()))
    assert ours.config.layer_ids == (2, 4, 5)


@pytest.mark.parametrize("variant", QWEN)
def test_both_forms_go_with_qwen_targets(variant: str, tmp_path: Path):
    """Layers, streams and vocabulary are all that they ask of a target."""
    config = make_qwen_config(variant, vocab_size=64, num_hidden_layers=8, layer_types=None)
    other, params = build_target(config), SamplingParams(max_tokens=12)
    network = load_drafter(DATA / "llama", other)
    same(load_drafter(forge(tmp_path), other), network)
    want = run(other, NoDrafter(), [prompt(9)], params, drafts=0)
    got = run(other, EagleDrafter(network, 6, 4, 2), [prompt(9)], params, drafts=6)
    assert got.outputs == want.outputs
    assert got.sequences[0].metrics.num_draft_tokens > 6


def test_layer_ids_are_inputs_of_layers(tmp_path: Path):
    assert load_drafter(edited(tmp_path, "llama", {IDS: [8, 0, 3]}), target()).config.layer_ids == (8, 0, 3)
    assert load_drafter(edited(tmp_path, "llama", {IDS: None}), target()).config.layer_ids == (2, 4, 5)
    forge(tmp_path, eagle_config={IDS: [7, 0, 3]})
    assert load_drafter(tmp_path, target()).config.layer_ids == (8, 1, 4)


@pytest.mark.parametrize("lost", [("d2t",), ("t2d",)])
def test_one_map_of_the_vocabulary_is_enough(lost: tuple[str, ...], tmp_path: Path):
    network = load_drafter(edited(tmp_path, "qwen3", tensors=dict.fromkeys(lost)), target())
    same(network, load_drafter(DATA / "qwen3", target()))
    marks = load_file(DATA / "qwen3" / "model.safetensors")["t2d"]
    assert torch.equal(network.token_ids, marks.nonzero()[:, 0])


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head_come_with_the_target(tied: bool, tmp_path: Path):
    owner = target(tie_word_embeddings=tied)
    head = owner.embeddings.weight if owner.lm_head is None else owner.lm_head.weight
    lost = {"embed_tokens.weight": None, "lm_head.weight": None}
    network = load_drafter(edited(tmp_path, "llama", tensors=lost), owner)
    assert network.embeddings.weight is owner.embeddings.weight
    assert torch.equal(network.lm_head.weight, head[network.token_ids])
    network = load_drafter(edited(tmp_path, "llama_whole_vocabulary", tensors=lost), owner)
    assert network.lm_head.weight.data_ptr() == head.data_ptr()


@pytest.mark.parametrize("standalone", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, standalone: bool, tmp_path: Path):
    network, owner = make(**VARIANTS[variant]), target()
    if not standalone:
        assert owner.lm_head is not None
        network.embeddings.weight = owner.embeddings.weight
        network.lm_head.weight.data = owner.lm_head.weight[network.token_ids]
    save_drafter(network, tmp_path, "a target", dtype=torch.float32, standalone=standalone)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("embed_tokens.weight" in stored) == ("lm_head.weight" in stored) == standalone
    assert ("d2t" in stored) == ("t2d" in stored) == (variant != "whole vocabulary")
    same(load_drafter(tmp_path, owner), network)


def test_delta_layers_have_the_names_of_flash_linear_attention(tmp_path: Path):
    save_drafter(make(), tmp_path, "a target")
    own = {"A_log", "dt_bias", "o_norm.weight", *(f"{x}_proj.weight" for x in "qkvabgo")}
    own |= {f"{x}_conv1d.weight" for x in "qkv"}
    others = load_file(DATA / "llama" / "model.safetensors").keys()
    shared = {name for name in others if "self_attn" not in name}
    assert load_file(tmp_path / "model.safetensors").keys() == shared | {
        f"layers.0.self_attn.{x}" for x in own
    }
    assert json.loads((tmp_path / "config.json").read_text())[LAYER] == {
        "model_type": "gated_deltanet", "hidden_size": 32, "num_heads": 4, "head_dim": 8, "use_gate": True,
        "conv_size": 4, "intermediate_size": 24, "rms_norm_eps": 1e-3, "vocab_size": 64, "num_hidden_layers": 1,
    }  # fmt: skip


def test_a_drafter_takes_the_dtypes_of_its_target(tmp_path: Path):
    save_drafter(make(), tmp_path, "a target")
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert kept == {"layers.0.self_attn.A_log", "layers.0.self_attn.dt_bias"}
    assert stored["layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    for matrices, vectors in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        for name, weight in load_drafter(tmp_path, target(matrices)).named_parameters():
            is_matrix = weight.dim() == 2 and not name.endswith("conv_weight")
            assert weight.dtype == (matrices if is_matrix else vectors), name


def test_loaded_weights_do_not_change_with_their_file(tmp_path: Path):
    network = load_drafter(edited(tmp_path, "qwen3"), target())
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x11" * 4000)
    same(network, load_drafter(DATA / "qwen3", target()))


def test_a_drafter_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_drafter(make(), tmp_path, "a target")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(tensors: dict[str, Tensor], path: Path, **kwargs: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match=r"model.safetensors could not be written .*No space left"):
        save_drafter(make(), tmp_path, "a target")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def a_target(path: Path) -> None:
    save_target(target(), path)


def pickled(path: Path) -> None:
    edited(path, "llama")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def spoilt(
    config: dict[str, Any] | None = None, example: str = "llama", **tensors: Any
) -> Callable[[Path], object]:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda path: edited(path, example, config, named)


def forged(**changes: Any) -> Callable[[Path], object]:
    return lambda path: forge(path, **changes)


def delta(**changes: Any) -> Callable[[Path], object]:
    def build(path: Path) -> None:
        save_drafter(make(), path, "a target")
        raw = json.loads((path / "config.json").read_text())
        raw[LAYER] |= changes
        (path / "config.json").write_text(json.dumps(raw))

    return build


FLOATS, OFFSETS = torch.zeros(16), torch.zeros(16, dtype=torch.int64)
DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda path: path.rmdir(), "is not a directory"),
    "nothing": (lambda path: None, "has no config.json"),
    "a target": (a_target, "is a target, not a drafter"),
    "a target of transformers": (spoilt({"speculators_model_type": ..., "model_type": "qwen3",
                                         "architectures": ["Qwen3ForCausalLM"]}), "is a target, not a drafter"),
    "pickles": (pickled, "pytorch_model.bin"),
    "another algorithm": (spoilt({"speculators_model_type": "dflash"}), "'dflash'"),
    "no type": (spoilt({"speculators_model_type": ...}), "speculators_model_type 'eagle3'"),
    "another plan": (spoilt({"speculators_config.algorithm": "mtp"}), "'mtp'"),
    "another class": (spoilt({"architectures": ["PEagleDraftModel"]}), "PEagleDraftModel"),
    "another class of SpecForge": (forged(architectures=["LlamaForCausalLMEagle"]), "LlamaForCausalLMEagle3"),
    "no layer": (spoilt({LAYER: ...}), "model_type of transformer_layer_config must be llama, qwen3, gated_deltanet"),
    "a list for a layer": (spoilt({LAYER: []}), "transformer_layer_config must be an object"),
    "another layer": (spoilt({f"{LAYER}.model_type": "mistral"}), "'mistral'"),
    "two layers": (spoilt({f"{LAYER}.num_hidden_layers": 2}), "num_hidden_layers must be 1, got 2"),
    "bias": (spoilt({f"{LAYER}.attention_bias": True}), "attention_bias must be false"),
    "bias of the MLP": (spoilt({f"{LAYER}.mlp_bias": True}), "mlp_bias must be false"),
    "gelu": (spoilt({f"{LAYER}.hidden_act": "gelu"}), "hidden_act must be \"silu\", got 'gelu'"),
    "rope": (spoilt({f"{LAYER}.rope_parameters": {"rope_type": "llama3", "factor": 8.0}}), "'llama3'"),
    "old rope": (spoilt({f"{LAYER}.rope_scaling": {"type": "linear", "factor": 2.0}}), "rope_scaling may hold"),
    "rope of layer types": (spoilt({f"{LAYER}.rope_parameters": {"full_attention": {}}}), "full_attention"),
    "theta": (spoilt({f"{LAYER}.rope_parameters": {"rope_theta": -1.0}}), "rope_theta must be"),
    "epsilon": (spoilt({f"{LAYER}.rms_norm_eps": "1e-6"}), "rms_norm_eps must be"),
    "no window": (spoilt({f"{LAYER}.layer_types": ["sliding_attention"]}), "with a sliding_window in use"),
    "window of unknown layers": (spoilt({f"{LAYER}.sliding_window": 4}), "layer_types must be"),
    "window that is off": (spoilt({f"{LAYER}.use_sliding_window": False}, "qwen3_window"), "with a sliding_window"),
    "window below 1": (spoilt({f"{LAYER}.sliding_window": 0}, "qwen3_window"), "sliding_window must be an integer"),
    "window of SpecForge": (forged(sliding_window=4, layer_types=["sliding_attention"]), "sliding_window is not"),
    "norm_output of SpecForge": (forged(norm_output=True), "norm_output is not supported"),
    "residual of SpecForge": (forged(norm_before_residual=True), "norm_before_residual is not supported"),
    "both norms": (spoilt({"fc_norm": True, "norm_before_fc": True}), "exclude each other"),
    "a flag": (spoilt({"fc_norm": 1}), "fc_norm must be true or false, got 1"),
    "no residual": (spoilt({"norm_before_residual": ...}), "norm_before_residual must be true or false"),
    "hidden size": (spoilt({f"{LAYER}.hidden_size": 48}), "hidden_size is 48, but the target's is 32"),
    "features": (spoilt({"target_hidden_size": 48}), "target_hidden_size is 48, but the target's is 32"),
    "vocabulary": (spoilt({f"{LAYER}.vocab_size": 65}), "vocab_size is 65, but the target's is 64"),
    "draft vocabulary": (spoilt({"draft_vocab_size": 65}), "draft_vocab_size must be at most"),
    "no draft vocabulary": (spoilt({"draft_vocab_size": ...}), "draft_vocab_size must be an integer >= 1, got None"),
    "no heads": (spoilt({f"{LAYER}.num_attention_heads": ...}), "num_attention_heads must be"),
    "odd heads": (spoilt({f"{LAYER}.num_key_value_heads": 3}), "num_key_value_heads must divide"),
    "true for a size": (spoilt({f"{LAYER}.intermediate_size": True}), "intermediate_size must be an integer >= 1"),
    "no gate": (delta(use_gate=None), "use_gate must be true or false"),
    "no delta heads": (delta(num_heads=0), "num_heads must be an integer >= 1, got 0"),
    "other delta heads": (delta(num_heads=8), "config.json asks for"),
    "deep": (spoilt({IDS: [2, 4, 9]}), "must be different integers in 0..8, as the target has 8 layers, got [2, 4, 9]"),
    "deep in SpecForge": (forged(eagle_config={IDS: [1, 3, 8]}), "in 0..7"),
    "twice": (spoilt({IDS: [2, 2, 4]}), "different integers"),
    "no streams": (spoilt({IDS: []}), "different integers"),
    "named streams": (spoilt({IDS: ["2"]}), "different integers"),
    "four streams": (spoilt({IDS: [1, 2, 3, 4]}), "fc.weight has shape [32, 96], config.json asks for [32, 128]"),
    "shape": (spoilt(norm__weight=torch.ones(31)), "norm.weight has shape [31], config.json asks for [32]"),
    "kind": (spoilt(norm__weight=torch.ones(32, dtype=torch.int32)), "norm.weight has dtype torch.int32"),
    "missing": (spoilt(fc__weight=None), "1 missing (fc.weight)"),
    "unexpected": (spoilt(fc__bias=torch.ones(32)), "1 unexpected (fc.bias)"),
    "q_norm": (spoilt({f"{LAYER}.model_type": "llama"}, "qwen3"), "2 unexpected (layers.0.self_attn.k_norm"),
    "no maps": (spoilt(d2t=None, t2d=None), "d2t or t2d must say which 16 of the target's 64 tokens"),
    "fractions": (spoilt(d2t=FLOATS), "d2t has dtype torch.float32, expected integers"),
    "few offsets": (spoilt(d2t=OFFSETS[1:]), "d2t has shape [15]"),
    "other offsets": (spoilt(d2t=OFFSETS), "d2t and t2d name different tokens"),
    "back": (spoilt(d2t=-torch.arange(16)), "d2t must give ascending tokens in 0..63"),
    "behind": (spoilt(d2t=OFFSETS + 49, t2d=None), "d2t must give ascending tokens in 0..63"),
    "below": (spoilt(d2t=OFFSETS - 2**63, t2d=None), "d2t must give ascending tokens in 0..63"),
    "many marks": (spoilt(t2d=torch.ones(64, dtype=torch.bool)), "t2d marks 64 tokens, but draft_vocab_size is 16"),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_in_one_line(defect: str, tmp_path: Path):
    build, words = DEFECTS[defect]
    build(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_drafter(tmp_path, target())
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_default_streams_that_a_shallow_target_lacks_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"as the target has 2 layers, and the default is \[2, 1, -1\]"):
        load_drafter(edited(tmp_path, "llama", {IDS: None}), target(num_hidden_layers=2))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "delta" not in name])
def test_speculators_loads_what_is_saved(variant: str, tmp_path: Path):
    """The library's own code; run by hand, where it is installed."""
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import Qwen3Config, Qwen3ForCausalLM

    verifier = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=8, num_hidden_layers=8, head_dim=8,
                           num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    Qwen3ForCausalLM(verifier).save_pretrained(tmp_path / "verifier")
    network = make(**VARIANTS[variant])
    save_drafter(network, tmp_path / "drafter", str(tmp_path / "verifier"), dtype=torch.float32)
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "drafter", config=config).eval()
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    state = {name: tensor for name, tensor in theirs.state_dict().items() if "verifier" not in name}
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    seen: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    noise = torch.Generator().manual_seed(2)
    ids, features = torch.randint(0, 64, (1, 7), generator=noise), torch.randn(1, 7, 96, generator=noise)
    with torch.no_grad():
        theirs(hidden_states=features, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=3)
    for ours, logits in zip(draft(network, ids, features), seen, strict=True):
        torch.testing.assert_close(network.logits(ours), logits, rtol=1e-5, atol=CLOSE)
