"""The recipe of the headline experiment at a tiny shape: all stages, two processes, interruptions, mistakes."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gdn_1p3b import recipe, stages
from benchmarks.gdn_1p3b.plan import SHAPES, Machine, flops_per_token, parameters, target_needs
from benchmarks.gdn_1p3b.plots import plot
from benchmarks.gdn_1p3b.tables import markdown
from specla.models.loader import load_target
from specla.train.data import TokenDataset
from specla.train.tokenizer import train_tokenizer

WORDS = "the cat sat on a mat and the dog ran to see if it could find some more food in the red house".split()
SHORT = """
--shape tiny --device cpu --target-minutes 0.02 --rollout-minutes 0.01 --drafter-minutes 0.04 --rollout-rows 4
--draft-texts 8 --batches 1 --per-suite 2 --max-tokens 10 --temperatures 0 --tree-steps 3
""".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recipe")
    chance = random.Random(0)
    for split in ("train", "valid"):
        (root / split).mkdir()
        lines = [json.dumps({"text": " ".join(chance.choices(WORDS, k=100))}) for _ in range(24)]
        (root / split / "prose.jsonl").write_text("\n".join(lines))
    for suite in ("gsm8k", "mixed"):
        lines = [json.dumps({"prompt": " ".join(chance.choices(WORDS, k=5))}) for _ in range(3)]
        (root / f"{suite}.jsonl").write_text("\n".join(lines))
    train_tokenizer(root, 280, root / "tokenizer")
    return root


def given(home: Path, work: Path, stage: str, *more: str) -> list[str]:
    inputs = [
        "--corpus",
        home,
        "--tokenizer",
        home / "tokenizer",
        "--prompts",
        home / "gsm8k.jsonl",
        home / "mixed.jsonl",
    ]
    return [stage, "--work", str(work), *map(str, inputs), *SHORT, *more]


@pytest.fixture(scope="module")
def done(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a whole run, from slices."""
    work = tmp_path_factory.mktemp("work")
    assert recipe.main(given(home, work / "packed", "pack", "--num-slices", "2")) == 0
    args = [word for word in given(home, work, "all") if word not in ("--corpus", str(home))]
    args += ["--batches", "1", "2", "--chat", "gsm8k", "--slices", str(work / "packed" / "slices")]
    assert recipe.main(args) == 0
    return work


def test_every_stage_leaves_its_file(done: Path) -> None:
    for name in ("tokens/train/meta.json", "target/model.safetensors", "target/tokenizer.json", "rollouts/meta.json",
                 "drafter/model.safetensors", "table.json", "measure.done"):  # fmt: skip
        assert (done / name).exists(), name
    table = json.loads((done / "table.json").read_text())
    assert table["identity"]["chat"] == ["gsm8k"]
    assert {row["batch"] for row in table["rows"]} == {1, 2} and {r["suite"] for r in table["rows"]} == {
        "gsm8k",
        "mixed",
    }
    exact = [row for row in table["rows"] if not row["way"].endswith("parallel")]
    assert all(row["identical"] and row["diverged"] == 0 for row in exact)
    skipped = {(each["batch"], each["way"]): each["why"] for each in table["skipped"]}
    assert len(skipped) == 2 * 3 and set(skipped.values()) == {"needs rounds on a GPU"}
    assert len(table["curve"]) == 21 and table["about"]["self_trained"] is True
    assert table["about"]["training"]["target"]["valid_loss"] > 0


def test_a_table_becomes_pictures(done: Path, tmp_path: Path) -> None:
    table = json.loads((done / "table.json").read_text())
    written = plot(table, tmp_path / "plots")
    assert [path.name for path in written] == ["ways-0.png", "curve.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_table_becomes_markdown_with_every_figure(done: Path) -> None:
    table = json.loads((done / "table.json").read_text())
    table["parts"] = [{"batch": 2, "way": "chain 8", "ms": {"propose": 0.25, "verify": 1.5}}]
    table["rows"][0] |= {"diverged": 3}
    *ways, curve, parts = markdown(table).split("\n\n")
    assert len(ways) == 2 and "3 of 4" in ways[0]
    for text, batch in zip(ways, (1, 2), strict=True):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        assert len({len(line) for line in lines}) == 1 and lines[0][:3] == [
            f"temperature 0, B = {batch}",
            "gsm8k",
            "mixed",
        ]
        for row in (row for row in table["rows"] if row["batch"] == batch):
            (line,) = (line for line in lines if line[0] == row["way"])
            cell = line[lines[0].index(row["suite"])]
            assert cell.startswith(f"{row['speedup']:.2f}x") and cell.endswith(
                f"{row['acceptance_length']:.2f}"
            )
    assert all(f"{point['speedup']:.2f}" in curve for point in table["curve"])
    assert len(curve.splitlines()) == 5
    assert parts.splitlines()[-1] == "| B = 2, chain 8 | 0.250 | 1.500 |"


def test_rollouts_are_windows_of_the_drafter(done: Path) -> None:
    texts, length = TokenDataset(done / "rollouts"), SHAPES["tiny"].text_length
    assert set(texts.end - texts.start) == {length}
    batch = texts.batch(0, 4, length)
    eos = texts.meta["eos_token_id"]
    assert (batch[:, 0] == eos).all() and (batch[:, -1] == eos).all()
    assert json.loads((done / "target" / "tokenizer_config.json").read_text())["add_bos_token"] is False


def test_the_ways_of_the_table_run_before_there_is_a_target(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipe.main(given(home, tmp_path, "compile")) == 0
    told = capsys.readouterr().err.splitlines()
    assert not list(tmp_path.iterdir()), "it leaves nothing"
    assert len(told) == 3 and all("needs rounds on a GPU" in line for line in told)


def test_a_finished_run_does_nothing_again(
    home: Path, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (done / "table.json").read_bytes()
    assert recipe.main(given(home, done, "all")) == 0
    assert capsys.readouterr().err.count("is there already") == len(recipe.STAGES)
    assert (done / "table.json").read_bytes() == before


def test_the_last_stages_run_from_given_checkpoints(home: Path, done: Path, tmp_path: Path) -> None:
    args = given(
        home, tmp_path, "measure", "--target", str(done / "target"), "--drafter", str(done / "drafter")
    )
    assert recipe.main(args) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["about"]["self_trained"] is False and "chain 8" in {row["way"] for row in table["rows"]}


def test_interrupted_stages_go_on(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage is cut at its first chance; the same command then ends it."""
    assert recipe.main(given(home, tmp_path, "tokens")) == 0
    for stage in recipe.STAGES[1:]:
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "_over", lambda args, seconds=0.0: True)
            assert recipe.main(given(home, tmp_path, stage)) == recipe.GOING_ON
        assert (tmp_path / stages.PAUSED).exists()
        assert recipe.main(given(home, tmp_path, stage)) == 0
        assert not (tmp_path / stages.PAUSED).exists()
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    keys = [(row["suite"], row["batch"], row["temperature"], row["way"]) for row in rows]
    assert len(keys) == len(set(keys))


def test_rollouts_are_a_function_of_their_number(home: Path, done: Path, tmp_path: Path) -> None:
    from benchmarks.gdn_1p3b.rollouts import write_parts

    target, data = load_target(done / "target"), TokenDataset(done / "tokens" / "train")
    write_parts(target, data, tmp_path / "whole", 3, 24, 0, lambda parts: parts == 2, sys.stderr)
    write_parts(target, data, tmp_path / "cut", 3, 24, 0, lambda parts: parts == 1, sys.stderr)
    assert len(list((tmp_path / "cut").iterdir())) == 1
    write_parts(target, data, tmp_path / "cut", 3, 24, 0, lambda parts: parts == 2, sys.stderr)
    for name in ("part-00000.npy", "part-00001.npy"):
        assert np.array_equal(np.load(tmp_path / "whole" / name), np.load(tmp_path / "cut" / name))


def test_two_processes_share_a_batch(home: Path, done: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").symlink_to(done / "tokens")
    words = given(home, tmp_path, "target", "--processes", "2")
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gdn_1p3b.recipe", *words], capture_output=True, text=True, timeout=100
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "8 x 32 a step" in ran.stderr  # 4 texts a process
    assert stages.is_done("target", argparse.Namespace(work=tmp_path, target=None, drafter=None))


@pytest.mark.parametrize(
    "more, told",
    [
        (["--target-minutes", "0.00001"], "too little time for target"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--weight", "prose"], "--weight takes CATEGORY=NUMBER"),
        (["--rows", "5000", "--target-minutes", "60"], "the corpus is too small"),
        (["--assume-h200"], "goes with plan"),
    ],
)
def test_mistakes_are_told_before_a_stage_starts(
    home: Path, done: Path, tmp_path: Path, more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").symlink_to(done / "tokens")
    assert recipe.main(given(home, tmp_path, "target", *more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert told in error and error.startswith("recipe: error:")
    assert not (tmp_path / "target" / "log.jsonl").exists()


def test_a_stage_names_what_it_lacks(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage, told in (("target", "run the stage tokens first"), ("rollouts", "run the stage tokens first"),
                        ("measure", "run the stage target first")):  # fmt: skip
        assert recipe.main(given(home, tmp_path, stage)) == 2
        assert told in capsys.readouterr().err
    assert recipe.main(["tokens", "--work", str(tmp_path), *SHORT]) == 2
    assert "tokens needs --slices" in capsys.readouterr().err
    late = [
        ("--prompts", str(tmp_path / "none.jsonl"), "cannot be read"),
        ("--drafter-minutes", "0.00001", "little time"),
        ("--chat", "gsm9k", "names 'gsm9k'"),
        ("--per-suite", "0", "per_suite must be one number of at least 1 or one for each of 1 batch sizes"),
    ]
    for flag, value, told in late:  # nothing starts that could not end
        assert recipe.main(given(home, tmp_path, "all", flag, value)) == 2
        assert told in capsys.readouterr().err and not (tmp_path / "tokens").exists()


def test_the_plan_of_the_real_shape_knows_its_size_and_limits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = SHAPES["gdn-1.3b"]
    config = shape.config(32000, 1, 2)
    total, ends = parameters(config)
    assert ends == 2 * 32000 * 2048 and 1.3e9 < total - ends < 1.4e9
    assert 2.7e9 < flops_per_token(config) < 3.3e9
    machine = Machine.h200(1)
    target_needs(shape, config, machine, 11, 16, 1, 0).check(machine)
    with pytest.raises(ValueError, match="too little memory for target"):
        target_needs(shape, config, machine, 11, 64, 1, 0).check(machine)
    target_needs(shape, config, machine, 11, 64, 1, 24).check(machine)  # layers computed again take less
    small = Machine("disk", 1, 280e12, None, 1 << 30)
    with pytest.raises(ValueError, match="too little disk for target"):
        target_needs(shape, config, small, 11, 16, 1, 0).check(small)
    args = ["plan", "--work", str(tmp_path), "--assume-h200", "--processes", "2", "--slices", str(tmp_path)]
    assert recipe.main(args) == 2 and "holds no slices" in (told := capsys.readouterr().err)
    assert told.count("NVIDIA H200 x 2") == 3
