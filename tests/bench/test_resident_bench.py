"""Rounds of a random target: told acceptance beside a drafter at work changes no token, and mistakes are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specla.bench.decode import Decoded
from specla.bench.resident import (
    SHAPES,
    Way,
    _row,
    engine_of,
    format_row,
    random_network,
    random_target,
    run,
)
from specla.bench.resident_plots import plot
from specla.cli import main
from specla.drafters import NoDrafter
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from tests.ops.triton import DEVICE


def test_told_trees_beside_a_drafter_at_work_change_no_token() -> None:
    config = replace(
        SHAPES["tiny"], vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8, intermediate_size=32
    )
    target, network = random_target(config, 0, DEVICE).float(), random_network(config, 0, DEVICE).float()
    params = SamplingParams(max_tokens=6)
    plain = ResidentEngine(target, NoDrafter(), SpeculativeConfig(num_speculative_tokens=0), 1)
    want = run(plain, [[1, 2]], params, 1)
    engine = engine_of(target, network, Way("", 3, 2, 2, 0.9, True), 1, 0)
    got = run(engine, [[1, 2]], params, 1, want.outputs)
    assert got.outputs == want.outputs and got.rounds < want.rounds == 6
    assert engine.rounds.proposer.kept[0].any(), "the drafter has been shown the target's features"


def test_a_speed_whose_tokens_differ_is_left_out() -> None:
    plain = Decoded([[1, 2]], 2.0, 1.0, 2, 2)
    fast = _row("fast", Decoded([[1, 2]], 1.0, 2.0, 1, 1), plain)
    assert fast["speedup"] == 2 and fast["plain_steps"] == 1 and fast["tokens_per_s"] == 2
    wrong = _row("wrong", Decoded([[1, 3]], 1.0, 2.0, 1, 1), plain)
    assert wrong == {"name": "wrong", "identical": False}
    assert "2.00x" in format_row(fast) and "DIFFER" in format_row(wrong)


def test_pictures_show_every_way_and_every_part(tmp_path: Path) -> None:
    ways = [
        {"name": name, "identical": name != "eagle b", "steady_speedup": 1.5}
        for name in ("plain", "chain", "eagle a", "eagle b")
    ]
    parts = {"propose": 0.5, "verify": 1.2, "accept": 0.1, "gap": 0.0}
    report = {
        "device": "a GPU",
        "shape": "tiny",
        "batches": [{"batch": n, "ways": ways, "parts_ms": parts} for n in (1, 8)],
    }
    for path in plot(report, tmp_path / "pictures"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--random", "gdn-9b"], "--random must be one of gdn-1.3b, tiny"),
        (["--random", "tiny", "--drafter", "ngram"], "goes with neither a model nor a drafter"),
        (["--random", "tiny", "--device", "cpu"], "needs a CUDA device"),
        (
            ["--random", "tiny", "--limit", "9", "--ignore-eos"],
            "does not go with --limit, --ignore-eos",
        ),
        (["--batch-size", "1", "4"], "several of --batch-size need --random"),
        (["--plots", "x"], "--plots needs --random"),
        (["--ways", "eagle, auto at 0.7"], "--ways needs --random"),
        (["--random", "tiny", "--ways", "eagle"], "--ways must be among 'chain 8 at 0.8'"),
        (["--batch-size", "0"], "must be in 1..4096"),
    ],
)
def test_mistakes_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", *flags]) == 2
    assert said in capsys.readouterr().err
