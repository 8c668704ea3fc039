"""The command line: what it prints, and that every mistake is one clear line on stderr with exit status 2."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specla.modes
import specla.ops
from specla import __version__
from specla.cli import main
from specla.engine.llm import BUNDLED_MODEL
from specla.engine.params import DRAFTERS, SamplingParams, SpeculativeConfig
from tests.checkpoints import save_checkpoint, save_companion

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory)
    return str(directory)


@pytest.fixture(scope="module")
def with_drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that comes with a trained drafter, or what stands in for one."""
    directory = tmp_path_factory.mktemp("with_drafter")
    save_companion(directory, save_checkpoint(directory))
    return str(directory)


def run(*argv: str) -> int:
    """The exit status, also where argparse exits by itself."""
    try:
        return main(argv)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a mistake and return its one line."""
    status = run(*argv)
    out, err = capsys.readouterr()
    assert status == 2, (out, err)
    assert err.startswith("specla")
    assert "error: " in err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert len(err) < 700
    return err


def test_the_modes_are_those_of_the_ops():
    assert specla.modes.MODES == specla.ops.MODES
    assert specla.modes.AUTO in specla.modes.MODES[1:]


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"specla {__version__}\n"
    assert run() == 0
    bare = capsys.readouterr().out
    assert run("--help") == 0
    assert capsys.readouterr().out == bare
    assert all(f"\n    {command} " in bare for command in ("generate", "info", "train", "bench"))
    assert run("generate", "--help") == 0
    told = capsys.readouterr().out
    flags = ("--max-tokens", "--temperature", "--seed", "--drafter", "--num-speculative-tokens", "--num-steps",
             "--topk", "--prune-threshold", "--verify {auto,serial,parallel,hybrid}", "--json")  # fmt: skip
    assert all(flag in told for flag in flags)
    assert run("train", "--help") == run("train", "target", "--help") == run("bench", "--help") == 0


@pytest.mark.parametrize("command", [["generate"], ["bench", "generate"]], ids=" ".join)
def test_help_lists_every_drafter(capsys: pytest.CaptureFixture[str], command: list[str]):
    assert run(*command, "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"--drafter NAME a directory, {', '.join(DRAFTERS)}; default" in told


def test_help_does_not_load_torch():
    code = (
        "import sys, specla.cli\n"
        "wrong = ['generate', '-p', 'x', '--max-tokens', '0']\n"
        "for argv in (['--version'], ['--help'], ['generate', '--help'], wrong):\n"
        "    try: status = specla.cli.main(argv)\n"
        "    except SystemExit as end: status = end.code\n"
        "    assert status == (2 if argv is wrong else 0), (argv, status)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "import specla.engine.llm\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_flags_take_their_defaults_from_the_dataclasses(monkeypatch: pytest.MonkeyPatch, checkpoint: str):
    seen = {}

    class CaughtError(Exception):
        pass

    def caught(model: str, **options: object) -> None:
        seen.update(options, model=model)
        raise CaughtError

    def params(**fields: object) -> SamplingParams:
        seen["params"] = SamplingParams(**fields)  # type: ignore[arg-type]
        return seen["params"]

    monkeypatch.setattr("specla.engine.llm.LLM", caught)
    monkeypatch.setattr("specla.engine.params.SamplingParams", params)
    with pytest.raises(CaughtError):
        main(["generate", checkpoint, "-p", "the"])
    assert seen["params"] == SamplingParams(seed=0)
    assert seen["speculative_config"] == SpeculativeConfig()
    assert (seen["model"], seen["drafter"], seen["device"], seen["dtype"]) == (
        checkpoint,
        None,
        "auto",
        "auto",
    )


def test_every_flag_arrives(capsys: pytest.CaptureFixture[str], checkpoint: str):
    argv = [checkpoint, "-p", "the cat", "--max-tokens", "9", "--ignore-eos", "--drafter", "synthetic", "--topk", "1",
            "--synthetic-acceptance-rate", "1", "--num-speculative-tokens", "2", "--num-steps", "2",
            "--verify", "serial", "--dtype", "float32", "--json", "--device", "cpu"]  # fmt: skip
    assert run("generate", *argv) == 0
    report = json.loads(capsys.readouterr().out)
    told = {
        name: report[name]
        for name in ("num_tokens", "num_rounds", "drafter", "verify", "dtype", "device", "prompt")
    }
    assert told == {"num_tokens": 9, "num_rounds": 3, "drafter": "synthetic", "verify": "serial", "dtype": "float32",
                    "device": "cpu", "prompt": "the cat"}  # fmt: skip
    sampled = []
    for flags in ([], ["--temperature", "1"], ["--temperature", "1", "--seed", "5"],
                  ["--temperature", "1", "--top-k", "1"],
                  ["--temperature", "1", "--top-p", "0.00001"], ["--temperature", "1", "--min-p", "1"],
                  ["--repetition-penalty", "9"]):  # fmt: skip
        assert run("generate", *argv, *flags) == 0
        sampled.append(json.loads(capsys.readouterr().out)["token_ids"])
    greedy, seed_0, seed_5, *narrow, penalised = sampled
    assert greedy not in (seed_0, seed_5, penalised)
    assert seed_0 != seed_5
    assert narrow == [greedy] * 3


def generated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert run("generate", *argv, "-p", "the cat", "--max-tokens", "24", "--ignore-eos", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_drafter_of_the_model_runs_unless_another_is_named(
    capsys: pytest.CaptureFixture[str], with_drafter: str, checkpoint: str
):
    own = str(Path(with_drafter, "drafter"))
    named = {
        "eagle+ngram": ([with_drafter], [checkpoint, "--drafter", own]),
        "eagle": ([with_drafter, "--num-speculative-tokens", "6"],),
        "ngram": ([with_drafter, "--drafter", "ngram"], [checkpoint]),
        "none": ([with_drafter, "--drafter", "none"], [with_drafter, "--num-speculative-tokens", "0"]),
    }
    texts = []
    for name, commands in named.items():
        for argv in commands:
            report = generated(capsys, *argv, "--compare")
            assert report["drafter"] == name and report["compare"]["identical"] is True
            texts.append(report["token_ids"])
    assert texts == texts[:1] * len(texts)


def test_a_prune_threshold_drafts_less_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], with_drafter: str
):
    sizes = ["--num-speculative-tokens", "40", "--num-steps", "4"]
    whole, pruned = (
        generated(capsys, with_drafter, *sizes, *flags) for flags in ([], ["--prune-threshold", "0.1"])
    )
    assert 0 < pruned["num_draft_tokens"] < whole["num_draft_tokens"]
    assert pruned["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize("changes", [{"hidden_size": 64}, {"num_hidden_layers": 1}], ids=str)
def test_a_drafter_of_another_model_is_one_line(
    capsys: pytest.CaptureFixture[str], with_drafter: str, tmp_path: Path, changes: dict[str, int]
):
    save_checkpoint(tmp_path, **changes)
    own = str(Path(with_drafter, "drafter"))
    assert "target" in fails(capsys, "generate", str(tmp_path), "-p", "the", "--drafter", own)
    assert "drafter" in fails(capsys, "generate", with_drafter, "-p", "the", "--drafter", with_drafter)


def test_prompt_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: str
):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert run("generate", checkpoint, "-p", "-", "--max-tokens", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "the cat\n"


USAGE: list[tuple[list[str], str]] = [
    (["frobnicate"], "frobnicate"),
    (["--frob"], "COMMAND"),
    (["generate"], "--prompt"),
    (["generate", "-p"], "expected one argument"),
    (["generate", "a", "b", "-p", "x"], "b"),
    (["generate", "-p", "x", "--max-tok", "3"], "--max-tok"),
    (["generate", "-p", "x", "--max-tokens", "many"], "many"),
    (["generate", "-p", "x", "--max-tokens", "0"], "max_tokens"),
    (["generate", "-p", "x", "--max-tokens", "-3"], "max_tokens"),
    (["generate", "-p", "x", "--max-tokens", "1.5"], "1.5"),
    (["generate", "-p", "x", "--max-tokens", "9" * 9999], "--max-tokens"),
    (["generate", "-p", "x", "--temperature", "nan"], "temperature"),
    (["generate", "-p", "x", "--temperature", "inf"], "temperature"),
    (["generate", "-p", "x", "--temperature", "-1"], "temperature"),
    (["generate", "-p", "x", "--top-p", "0"], "top_p"),
    (["generate", "-p", "x", "--top-p", "nan"], "top_p"),
    (["generate", "-p", "x", "--top-k", "0"], "top_k"),
    (["generate", "-p", "x", "--top-k", "9" * 30], "top_k"),
    (["generate", "-p", "x", "--min-p", "2"], "min_p"),
    (["generate", "-p", "x", "--repetition-penalty", "0"], "repetition_penalty"),
    (["generate", "-p", "x", "--seed", "9" * 30], "seed"),
    (["generate", "-p", "x", "--seed", "-" + "9" * 30], "seed"),
    (["generate", "-p", "x", "--stop", ""], "stop"),
    (["generate", "-p", "x", "--verify", "fast"], "'auto', 'serial', 'parallel', 'hybrid'"),
    (["generate", "-p", "x", "--num-speculative-tokens", "lots"], "auto"),
    (["generate", "-p", "x", "--num-speculative-tokens", "-1"], "num_speculative_tokens"),
    (["generate", "-p", "x", "--num-speculative-tokens", "9" * 30], "num_speculative_tokens"),
    (["generate", "-p", "x", "--num-steps", "0"], "num_steps"),
    (["generate", "-p", "x", "--topk", "100"], "topk"),
    (["generate", "-p", "x", "--prune-threshold", "nan"], "prune_threshold"),
    (["generate", "-p", "x", "--synthetic-acceptance-rate", "1.5"], "synthetic_acceptance_rate"),
    (["generate", "-p", ""], "the prompt is empty"),
    (["train"], "WHAT"),
    (["train", "nothing"], "nothing"),
    (["train", "target", "--data"], "--data"),
    (["train", "tokenizer", "--data", "nowhere", "--out", "nowhere"], "nowhere"),
    (["info", "nowhere"], "nowhere"),
    (["info", "--dtype", "int8"], "dtype"),
    (["info", "--device", "tpu"], "device"),
]


@pytest.mark.parametrize(
    ("argv", "said"), USAGE, ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else ""
)
def test_a_mistake_in_the_command_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str):
    assert said in fails(capsys, *argv)


WITH_MODEL: list[tuple[list[str], str]] = [
    (["--drafter", "eagle"], "ngram, none, synthetic"),
    (["--drafter", ""], "ngram, none, synthetic"),
    (["--drafter", "none", "--prune-threshold", "0.5"], "prune_threshold"),
    (["--prune-threshold", "0.5"], "prune_threshold"),
    (["--drafter", "ngram", "--prune-threshold", "0.5"], "prune_threshold"),
    (["--drafter", "synthetic"], "synthetic_acceptance_rate"),
    (["--drafter", "none", "--synthetic-acceptance-rate", "0.5"], "synthetic_acceptance_rate"),
    (["--device", "tpu"], "auto, cpu, cuda"),
    (["--device", "cuda:99"], "CUDA"),
    (["--dtype", "int8"], "float32, bfloat16"),
    (["--dtype", "float16"], "float16"),
    (["-p", "a\udcffb"], "surrogate"),
    (["-p", "\u20ac"], "no tokens for"),
]


@pytest.mark.parametrize(("flags", "said"), WITH_MODEL, ids=str)
def test_a_mistake_about_the_model_is_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: str, flags: list[str], said: str
):
    assert said in fails(capsys, "generate", checkpoint, "-p", "the", "--device", "cpu", *flags)


def spoil_config(**changes: object) -> Damage:
    def spoil(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def spoil_weights(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][3] = float("nan")
    save_file(weights, directory / "model.safetensors")


def lose_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors")


def pickle_weights(directory: Path) -> None:
    torch.save({}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no such directory": (lambda d: shutil.rmtree(d), "is not a directory"),
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("text")), "is not a directory"),
    "an empty directory": (lambda d: (shutil.rmtree(d), d.mkdir()), "config.json"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    "pickled weights": (pickle_weights, "pytorch_model.bin"),
    "truncated weights": (lambda d: os.truncate(d / "model.safetensors", 5000), "safetensors"),
    "weights of another shape": (spoil_config(hidden_size=64), "shape"),
    "weights too few": (lose_weight, "1 missing (model.norm.weight)"),
    "weights too many": (spoil_config(num_hidden_layers=1), "unexpected"),
    "logits not finite": (spoil_weights, "not finite"),
    "unknown model type": (spoil_config(model_type="llama"), "'llama' is not supported"),
    "contradictory config": (spoil_config(num_v_heads=3), "num_v_heads"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{\n'a': 1\n"), "config.json"),
    "config nested too deep": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text('{"version": "1.0"}'), "tokenizer"),
    "tokenizer nested too deep": (lambda d: (d / "tokenizer.json").write_text("[" * 100_000), ""),
    "tokenizer is a directory": (
        lambda d: ((d / "tokenizer.json").unlink(), (d / "tokenizer.json").mkdir()), "tokenizer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path, name: str
):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint, directory)
    damage, said = DAMAGES[name]
    damage(directory)
    assert said in fails(capsys, "generate", str(directory), "-p", "the", "--max-tokens", "3", "--json")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "x.json"), OSError(5, "Input/output error")]
)
def test_an_unreadable_file_is_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch, error: OSError
):
    def unreadable(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert error.strerror in fails(capsys, "generate", checkpoint, "-p", "the")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, checkpoint: str):
    def broken(*args: object, **kwargs: object) -> None:
        raise AssertionError("impossible")

    monkeypatch.setattr("specla.engine.llm.load_target", broken)
    with pytest.raises(AssertionError, match="impossible"):
        main(["generate", checkpoint, "-p", "the"])


def test_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: str):
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specla.engine.llm.load_target", interrupted)
    assert run("generate", checkpoint, "-p", "the") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_stdout_that_was_never_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: str
):
    monkeypatch.setattr("sys.stdout", None)
    status = run("generate", checkpoint, "-p", "the")
    monkeypatch.undo()
    assert status == 2
    assert capsys.readouterr().err == "specla: error: standard output is closed\n"


def child(*argv: str, **options: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= options.pop("environment", {})  # type: ignore[arg-type]
    command = [sys.executable, "-m", "specla", *argv]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options
    )  # type: ignore[call-overload,no-any-return]


def test_a_reader_that_goes_away_is_no_traceback(checkpoint: str):
    process = child("generate", checkpoint, "-p", "the", "--max-tokens", "20000", "--ignore-eos")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 1
    assert err == b""


def test_a_terminal_of_another_encoding(checkpoint: str):
    plain = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = child("generate", checkpoint, "-p", "café", "--max-tokens", "3", environment=plain)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"caf?")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_stdin_that_is_not_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: str, errors: str
):
    stdin = io.TextIOWrapper(io.BytesIO(b"ab\xff\xfe"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert fails(capsys, "generate", checkpoint, "-p", "-")


def test_info(capsys: pytest.CaptureFixture[str], checkpoint: str):
    assert run("info", checkpoint, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["specla"] == __version__
    assert facts["torch"] == torch.__version__
    assert facts["model"] == checkpoint
    assert facts["parameters"] == sum(
        x.numel() for x in load_file(Path(checkpoint, "model.safetensors")).values()
    )
    assert facts["vocabulary"] == 90
    assert facts["state_bytes"] == 2 * 4 * (2 * 8 * 8 + 3 * 48)
    assert facts["bytes_per_draft_node"] == 2 * 4 * (2 * (8 + 8 + 1) + 48)
    assert "hybrid" in facts["verify"]
    assert "float32 state" in facts["dtype"]
    assert run("info", checkpoint) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) == len(facts)
    assert f"bytes per draft node  {facts['bytes_per_draft_node']}\n" in out


def test_info_of_hybrids_and_of_checkpoints_without_tokenizer_or_drafter(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    attention = {"num_heads": 4, "num_kv_heads": 2, "window_size": 7}
    save_checkpoint(tmp_path, num_hidden_layers=3, attn=attention | {"layers": [0, 2]})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "drafter").mkdir()
    assert run("info", str(tmp_path), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"] == "3 of hidden size 32; softmax attention (window 7) at 0, 2"
    assert "no tokenizer files" in facts["tokenizer"] and "no config.json" in facts["drafter"]


def test_info_of_a_model_with_a_drafter(capsys: pytest.CaptureFixture[str], with_drafter: str):
    assert run("info", with_drafter, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == sum(
        x.numel() for x in load_file(Path(with_drafter, "model.safetensors")).values()
    )


def test_info_of_the_bundled_model(capsys: pytest.CaptureFixture[str]):
    assert run("info", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == str(BUNDLED_MODEL)
    assert 10e6 < facts["parameters"] < 13e6


def test_info_offers_no_mode_that_the_model_refuses(
    capsys: pytest.CaptureFixture[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch
):
    offered = []
    for takes in (True, False):
        monkeypatch.setattr("specla.state.StatePool.takes_parallel", takes)
        assert run("info", checkpoint, "--json") == 0
        offered.append(json.loads(capsys.readouterr().out)["verify"].partition("others: ")[2].split(", "))
    assert offered == [["serial", "parallel"], ["serial"]]
