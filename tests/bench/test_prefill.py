"""The benchmark of prompts: nothing is timed that is wrong, and mistakes are one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specla.bench import prefill
from specla.bench.kernel_checks import CheckError
from specla.bench.kernel_inputs import Layer
from specla.cli import main

CPU = torch.device("cpu")


def timer(calls: Any, repeats: int) -> float:
    calls[0]()
    return float(repeats)


def test_every_length_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    report = prefill.measure(Layer(1, 2, 16, 16), [1, 2], [5, 40], 0, 10, timer, CPU)
    assert [(row["batch"], row["tokens"]) for row in report["results"]] == [(1, 5), (1, 40), (2, 5), (2, 40)]
    assert all(row["us"]["specla"] == 10 for row in report["results"])
    prefill.print_table(report | {"device": "a GPU"})
    assert "40 tokens" in capsys.readouterr().out


def test_wrong_outputs_are_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "chunk_prefill", lambda q, k, v, *_, **__: v)
    with pytest.raises(CheckError, match="specla, 1 x 5: relative error"):
        prefill.measure(Layer(1, 1, 16, 16), [1], [5], 0, 10, pytest.fail, CPU)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tokens", "0"], "--tokens must be in 1..1048576, got 0"),
        (["--batch", "5000"], "--batch must be in 1..4096, got 5000"),
        (["--heads", "3", "--value-heads", "4"], "a multiple of --heads (3), got 4"),
        (["--repeats", "1"], "--repeats must be in 10..10000, got 1"),
        ([], "needs a CUDA device"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    if not flags and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["bench", "prefill", *flags]) == 2
    assert said in capsys.readouterr().err
