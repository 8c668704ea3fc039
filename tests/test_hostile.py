"""Input that nobody means to give: each ends in one clear error, and nothing on the machine is harmed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from specla import LLM, SpeculativeConfig, Tree
from specla.cli import main
from specla.tokenizer import load_tokenizer
from tests.checkpoints import save_checkpoint, save_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    save_checkpoint(directory, vocab_size=save_tokenizer(directory))
    return directory


BENCH = "--limit 1 --max-tokens 2 --repeat 1 --rounds 0 --drafter none".split()


def test_a_result_never_replaces_what_is_not_a_file(checkpoint: Path, tmp_path: Path, capsys) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["bench", "generate", str(checkpoint), *BENCH, "--output", str(pipe)]) == 2
    assert "regular file" in capsys.readouterr().err
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_result_goes_to_the_file_that_a_link_names(checkpoint: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    assert main(["bench", "generate", str(checkpoint), *BENCH, "--output", str(link)]) == 0
    assert link.is_symlink() and json.loads(real.read_text())["benchmark"] == "generate"


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "generate", "--batch-size", "99999"],
        ["bench", "generate", "--threads", "99999999999"],
        ["train", "tokenizer", "--data", ".", "--out", "x", "--vocab-size", "99999999999999999999"],
    ],
)
def test_absurd_sizes_are_one_line(argv: list[str], capsys) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_running_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def too_much(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("specla.show.describe", too_much)
    assert main(["info"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("specla info: error: not enough memory") and err.count("\n") == 1


def test_an_id_that_no_table_could_hold_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    raw = json.loads((checkpoint / "tokenizer.json").read_text())
    raw["model"]["vocab"]["zzzz"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="expected ids below"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("prompt", [None, 5, b"abc", (1, 2), {"a": 1}])
def test_prompts_of_other_types_are_refused(checkpoint: Path, prompt: Any) -> None:
    llm = LLM(checkpoint)
    with pytest.raises(ValueError):
        llm.generate(prompt)
    with pytest.raises(ValueError):
        llm.stream(prompt)
    with llm.session() as session, pytest.raises(ValueError):
        session.generate(prompt)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
def test_special_tokens_beyond_the_model_are_refused(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path, vocab_size=save_tokenizer(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({name: 99999}))
    with pytest.raises(ValueError, match="99999"):
        LLM(tmp_path)


@pytest.mark.parametrize("model", [5, "a" * 5000])
def test_a_model_that_is_no_path_is_a_value_error(model: Any) -> None:
    with pytest.raises(ValueError):
        LLM(model)


def test_keys_of_any_type_are_named() -> None:
    with pytest.raises(ValueError, match="unknown"):
        SpeculativeConfig.from_dict({1: 2, "a": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("sizes", [(0,), (-1,), (10**9,), ("a",), (2, 0), (True,)])
def test_chains_of_no_length_are_refused(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        Tree.chain(*sizes)
