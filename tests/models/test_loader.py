"""Checkpoints: every variant there and back against an independent forward pass, and every defect named in one line."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla.models.config import GatedDeltaNetConfig
from specla.models.fla_layout import gated_deltanet
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import check_room, load_target, resolve_dtype, save_target
from specla.tree import Tree
from tests.models.naive_forward import logits as naive_logits

SHAPE: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 3, "num_heads": 2, "head_dim": 4,
                         "expand_v": 1.0, "intermediate_size": 12, "initializer_range": 0.3}  # fmt: skip
GLOBAL: dict[str, Any] = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gva": {"num_v_heads": 6},
    "expand": {"expand_v": 1.5, "num_v_heads": 4},
    "no gate": {"use_gate": False},
    "sigmoid gate": {"output_gate_activation": "sigmoid"},
    "no conv": {"use_short_conv": False},
    "conv 1": {"conv_size": 1},
    "conv 2": {"conv_size": 2},
    "conv 3 with bias": {"conv_size": 3, "conv_bias": True},
    "conv 6": {"conv_size": 6},
    "negative eigenvalues": {"allow_neg_eigval": True},
    "tied": {"tie_word_embeddings": True},
    "null intermediate": {"intermediate_size": None, "hidden_ratio": 2},
    "attention": {"attn": GLOBAL},
    "windowed attention": {"attn": GLOBAL | {"window_size": 3, "rope_theta": 100.0}},
    "attention of one key head": {"attn": GLOBAL | {"num_kv_heads": 1, "layers": [0, 2]}},
    "attention with bias and norms": {"attn": GLOBAL | {"qkv_bias": True, "qk_norm": True}},
    "attention everywhere": {"attn": [GLOBAL | {"layers": [0, 2], "window_size": 4},
                                      {"layers": [1], "num_heads": 2, "qk_norm": True}]},
}  # fmt: skip
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 22, 0]


def make(**changes: Any) -> GatedDeltaNet:
    """A random model whose every parameter matters: no weight stays at its neutral value."""
    config = GatedDeltaNetConfig.from_dict({"model_type": "gated_deltanet"} | SHAPE | changes)
    model = GatedDeltaNet(config)
    noise = torch.Generator().manual_seed(5)
    model.reset_parameters(noise)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                scale = 0.5 if "norm" in name else 1.0
                weight.add_(torch.randn(weight.shape, generator=noise) * scale)
    return model.requires_grad_(False)


def save(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Tensor]:
    save_target(make(**changes), directory, dtype)
    return load_file(directory / "model.safetensors")


def shard(directory: Path) -> dict[str, str]:
    """Split model.safetensors in three files with an index, as large checkpoints come."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    placed = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: weights[name] for name in names if placed[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    return placed


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refuses(directory: Path, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_target(directory)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def check_logits(answer: Tensor, directory: Path) -> None:
    """That a checkpoint gives these of TEXT: all at once, and read in pieces, a prefill and two verified chains."""
    model = load_target(directory, dtype="float64")
    whole = model.logits(model(torch.tensor([TEXT])))[0]
    torch.testing.assert_close(whole, answer, rtol=0, atol=1e-9)
    pool = model.new_pool(1, 6)
    slot = pool.alloc()
    model.prefill(torch.tensor(TEXT[:5]), slot, pool)
    for first, last in ((5, 7), (7, 13)):
        got = model.verify(torch.tensor([TEXT[first:last]]), Tree.chain(last - first), [slot], pool)
        torch.testing.assert_close(got[0], answer[first:last], rtol=0, atol=1e-9)
        pool.accept([slot], torch.arange(last - first)[None], torch.tensor([last - first - 1]))


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_an_independent_forward_pass(name: str, tmp_path: Path):
    weights = save(tmp_path, **VARIANTS[name])
    raw = json.loads((tmp_path / "config.json").read_text())
    check_logits(naive_logits(raw, weights, TEXT), tmp_path)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_survives_saving_and_loading(name: str, tmp_path: Path):
    model = make(**VARIANTS[name])
    save_target(model, tmp_path, torch.float32)
    back = load_target(tmp_path, dtype="float32")
    assert back.config == model.config
    ours, theirs = model.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    stored = load_file(tmp_path / "model.safetensors")
    shapes = {
        part: shape
        for source in gated_deltanet(model.config).values()
        for part, shape in source.shapes.items()
    }
    assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == shapes
    if model.config.tie_word_embeddings:
        assert "lm_head.weight" not in stored


def test_names_and_shapes_are_the_librarys(tmp_path: Path):
    stored = save(tmp_path, num_hidden_layers=1, num_v_heads=4, expand_v=2.0, conv_bias=True)
    mixer = {"q_proj.weight": [8, 16], "k_proj.weight": [8, 16], "v_proj.weight": [32, 16], "a_proj.weight": [4, 16],
             "b_proj.weight": [4, 16], "g_proj.weight": [32, 16], "o_proj.weight": [16, 32], "A_log": [4],
             "dt_bias": [4], "q_conv1d.weight": [8, 1, 4], "k_conv1d.weight": [8, 1, 4],
             "v_conv1d.weight": [32, 1, 4], "q_conv1d.bias": [8], "k_conv1d.bias": [8], "v_conv1d.bias": [32],
             "o_norm.weight": [8]}  # fmt: skip
    block = {"attn_norm.weight": [16], "mlp_norm.weight": [16], "mlp.gate_proj.weight": [12, 16],
             "mlp.up_proj.weight": [12, 16], "mlp.down_proj.weight": [16, 12]}  # fmt: skip
    expected = {"model.embeddings.weight": [23, 16], "model.norm.weight": [16], "lm_head.weight": [23, 16]}
    expected |= {f"model.layers.0.attn.{name}": shape for name, shape in mixer.items()}
    expected |= {f"model.layers.0.{name}": shape for name, shape in block.items()}
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype, tmp_path: Path):
    stored = save(tmp_path, dtype)
    assert stored["model.embeddings.weight"].dtype == dtype
    assert stored["model.layers.0.attn.A_log"].dtype == torch.float32
    model = load_target(tmp_path, dtype="float32")
    assert torch.equal(model.embeddings.weight, stored["model.embeddings.weight"].float())
    assert {x.dtype for x in model.parameters()} == {torch.float32}


def test_matrices_take_the_dtype_and_gates_and_norms_stay_exact(tmp_path: Path):
    save(tmp_path, conv_bias=True, attn=GLOBAL | {"qk_norm": True, "qkv_bias": True})
    model = load_target(tmp_path, dtype="bfloat16")
    for name, weight in model.named_parameters():
        matrix = weight.dim() == 2 and "conv" not in name
        assert weight.dtype == (torch.bfloat16 if matrix else torch.float32), name
    assert model.new_pool(1, 2).layers[0].state.dtype == torch.float32


def test_shards_with_an_index(tmp_path: Path):
    save(tmp_path)
    whole = load_target(tmp_path, dtype="float32").state_dict()
    shard(tmp_path)
    parts = load_target(tmp_path, dtype="float32").state_dict()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_tied_checkpoint_may_store_the_head_too(tmp_path: Path):
    stored = save(tmp_path, tie_word_embeddings=True)
    save_file(
        stored | {"lm_head.weight": stored["model.embeddings.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert load_target(tmp_path).lm_head is None


def test_tied_checkpoint_with_another_head_is_refused(tmp_path: Path):
    stored = save(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    head = stored["model.embeddings.weight"].float()
    save_file(stored | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert load_target(tmp_path).lm_head is None  # the same numbers, stored wider
    head[3, 1] += 1e-4
    save_file(stored | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    refuses(tmp_path, "tie_word_embeddings", "lm_head.weight differs", str(tmp_path))
    save_file(stored | {"lm_head.weight": head[1:].clone()}, tmp_path / "model.safetensors")
    refuses(tmp_path, "lm_head.weight has shape")


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(tensors: dict[str, Tensor], path: Path, **kwargs: Any) -> None:
        Path(path).write_bytes(b"half")
        raise fault

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match=r"model.safetensors could not be written .*No space left"):
        save_target(make(), tmp_path, torch.float32)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_configuration_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(self: Path, data: str, **kwargs: Any) -> int:
        self.write_bytes(b"{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match=r"config.json could not be written"):
        save_target(make(), tmp_path, torch.float32)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_without_room_on_a_gpu_says_how_much_it_needs(monkeypatch: pytest.MonkeyPatch):
    model, gpu = torch.nn.Linear(10, 5), torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (110, 10**9))
    check_room(model, gpu, torch.bfloat16)
    check_room(model, torch.device("cpu"), torch.float64)
    with pytest.raises(ValueError, match="needs 220 bytes in float32, and 110 are free on cuda:1"):
        check_room(model, gpu, torch.float32)


def test_loaded_weights_do_not_change_with_their_file(tmp_path: Path):
    save(tmp_path, use_gate=False)
    model = load_target(tmp_path, dtype="float32")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(size - 2000)
        file.write(b"\x11" * 2000)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_missing_and_unexpected_weights_are_named(tmp_path: Path):
    stored = save(tmp_path)
    gone = stored.pop("model.layers.1.attn.A_log")
    save_file(stored | {"model.layers.1.attn.A_lag": gone}, tmp_path / "model.safetensors")
    refuses(
        tmp_path,
        "1 missing (model.layers.1.attn.A_log)",
        "1 unexpected (model.layers.1.attn.A_lag)",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_hidden_layers": 2}, ("unexpected", "model.layers.2.")),
     ({"num_hidden_layers": 4}, ("missing", "model.layers.3.")),
     ({"use_gate": False}, ("3 unexpected", "g_proj")),
     ({"use_short_conv": False}, ("9 unexpected", "conv1d")),
     ({"conv_bias": True}, ("9 missing", "conv1d.bias")),
     ({"hidden_size": 32}, ("shape", "config.json")),
     ({"vocab_size": 24}, ("[23, 16]", "[24, 16]")),
     ({"conv_size": 3}, ("conv1d", "[8, 1, 4]", "[8, 1, 3]")),
     ({"num_v_heads": 4}, ("shape",)),
     ({"attn": GLOBAL}, ("attn",)),
     ({"model_type": "llama"}, ("'llama' is not supported", "gated_deltanet", "qwen3_next")),
     ({"architectures": ["GatedDeltaNetModel"]}, ("GatedDeltaNetModel", "GatedDeltaNetForCausalLM")),
     ({"architectures": "GatedDeltaNetForCausalLM"}, ("architectures", "GatedDeltaNetForCausalLM")),
     ({"model_type": None}, ("model_type",))],
    ids=str,
)  # fmt: skip
def test_a_config_that_does_not_fit_the_weights_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
):
    save(tmp_path)
    edit_config(tmp_path, **changes)
    refuses(tmp_path, *words)


def test_weights_of_another_kind_are_refused(tmp_path: Path):
    stored = save(tmp_path)
    name = "model.norm.weight"
    save_file(stored | {name: torch.ones(16, dtype=torch.int32)}, tmp_path / "model.safetensors")
    refuses(tmp_path, name, "int32")
    save_file(stored | {name: torch.ones(1, 16)}, tmp_path / "model.safetensors")
    refuses(tmp_path, name, "[1, 16]", "[16]")


class Trap:
    """Unpickling this leaves a trace."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.ckpt", "weights.pkl"])
def test_pickles_are_refused_and_never_opened(file: str, tmp_path: Path):
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    trace = tmp_path / "executed"
    (tmp_path / file).write_bytes(pickle.dumps(Trap(trace)))
    refuses(tmp_path, file, "safetensors")
    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(tmp_path, file, "safetensors")
    assert not trace.exists()
    pickle.loads((tmp_path / file).read_bytes())
    assert trace.exists(), "the trap works, so its silence meant something"


def test_code_in_a_checkpoint_is_ignored(tmp_path: Path):
    save(tmp_path)
    trace = tmp_path / "executed"
    for module in ("modeling_gated_deltanet", "configuration_gated_deltanet", "__init__", "conftest"):
        (tmp_path / f"{module}.py").write_text(f"open({str(trace)!r}, 'w').close()")
    before = load_target(tmp_path, dtype="float32").state_dict()
    remote = {
        "AutoModelForCausalLM": "modeling_gated_deltanet.Model",
        "AutoConfig": "configuration_gated_deltanet.Config",
    }
    edit_config(tmp_path, auto_map=remote, trust_remote_code=True)
    after = load_target(tmp_path, dtype="float32").state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not trace.exists()


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/other.safetensors",
        "sub/../../other.safetensors",
        "..",
        "",
        ".",
        "sub/x.safetensors",
    ],
)
def test_an_index_may_not_point_elsewhere(name: str, tmp_path: Path):
    directory = tmp_path / "model"
    save(directory)
    (directory / "model.safetensors").rename(tmp_path / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(directory, "model.safetensors.index.json")


@pytest.mark.parametrize(
    "content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[]", "{"]
)
def test_a_broken_index_is_named(content: str, tmp_path: Path):
    save(tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refuses(tmp_path, "model.safetensors.index.json")


def test_a_lost_shard_is_named(tmp_path: Path):
    save(tmp_path)
    lost = shard(tmp_path)["model.norm.weight"]
    (tmp_path / lost).unlink()
    refuses(tmp_path, lost)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path):
    save(tmp_path)
    placed = shard(tmp_path)
    file = next(file for name, file in placed.items() if file != placed["model.norm.weight"])
    save_file(load_file(tmp_path / file) | {"model.norm.weight": torch.ones(16)}, tmp_path / file)
    refuses(tmp_path, "model.norm.weight", "twice")


def test_truncated_and_forged_files_are_named(tmp_path: Path):
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = struct.pack("<Q", 2**62)
    for broken in (
        b"",
        whole[:4],
        whole[:50],
        whole[:-1],
        whole[:-400],
        header + whole[8:],
        b"PK\x03\x04" + whole,
        whole + b"x",
    ):
        path.write_bytes(broken)
        refuses(tmp_path, str(path))
    path.unlink()
    path.mkdir()
    refuses(tmp_path, str(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe{}",
        b"[" * 200_000,
        b'{"model_type": "gated_deltanet", "norm_eps": NaN}',
    ],
)
def test_a_broken_config_is_named(content: bytes, tmp_path: Path):
    save(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    refuses(tmp_path, "config.json")


def test_a_path_without_a_checkpoint_is_named(tmp_path: Path):
    refuses(tmp_path / "nowhere", "nowhere")
    (tmp_path / "file").write_text("text")
    refuses(tmp_path / "file", "file", "not a directory")
    refuses(tmp_path, "config.json")
    (tmp_path / "config.json").mkdir()
    refuses(tmp_path, "config.json")
    (tmp_path / "config.json").rmdir()
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refuses(tmp_path, "model.safetensors")


def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path)

    def denied(self: Path, *args: Any, **kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        refuses(tmp_path, "config.json", "Permission denied")

    def denied_weights(path: Path, framework: str) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("safetensors.safe_open", denied_weights)
    refuses(tmp_path, "model.safetensors", "Permission denied")


def test_dtypes(tmp_path: Path):
    save(tmp_path)
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("bf16", cpu) == resolve_dtype(torch.bfloat16, cpu) == torch.bfloat16
    for wrong in ("int8", "", "float", torch.int32, None, 16):
        with pytest.raises(ValueError, match="dtype must be auto, float32"):
            load_target(tmp_path, dtype=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float16 is not supported on a CPU"):
        load_target(tmp_path, dtype="float16")
