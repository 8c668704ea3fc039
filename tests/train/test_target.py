"""Training a target: it learns, resumes to the bit, and refuses what cannot work before it starts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from specla.cli import main
from specla.models.config import GatedDeltaNetConfig
from specla.models.loader import load_target, replace_file
from specla.train.cache import prepare_tokens
from specla.train.data import TokenDataset
from specla.train.files import load_checkpoint
from specla.train.target import TargetTraining, train_target
from specla.train.tokenizer import train_tokenizer

WORDS = "the cat sat on a mat and the dog ran to see if it could find some more food in the red house".split()
TRAINING = TargetTraining(
    steps=24, batch_size=4, seq_len=48, eval_every=12, checkpoint_every=8, log_every=4, learning_rate=8e-3
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    for split in ("train", "valid"):
        (root / split).mkdir()
        lines = [json.dumps({"text": " ".join(chance.choices(WORDS, k=200))}) for _ in range(20)]
        (root / split / "prose.jsonl").write_text("\n".join(lines))
    train_tokenizer(root, 280, root / "tokenizer")
    return root


@pytest.fixture(scope="module")
def data(corpus: Path) -> tuple[GatedDeltaNetConfig, TokenDataset, TokenDataset]:
    from specla.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(corpus / "tokenizer")
    config = GatedDeltaNetConfig(
        vocab_size=280, hidden_size=48, num_hidden_layers=2, num_heads=2, head_dim=16, expand_v=1.0,
        intermediate_size=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    train = prepare_tokens(corpus, tokenizer, corpus / "cache" / "train")
    return config, train, prepare_tokens(corpus, tokenizer, corpus / "cache" / "valid", split="valid")


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_checkpoint_loads(data, tmp_path: Path) -> None:
    config, train, valid = data
    model = train_target(config, TRAINING, train, valid, tmp_path)
    log = rows(tmp_path)
    assert log[0]["loss"] > log[-1]["loss"] + 1.0
    measured = [row["bits_per_byte"] for row in log if "bits_per_byte" in row]
    assert len(measured) == 2 and measured[1]["all"] < measured[0]["all"]
    assert set(measured[1]) == {"prose", "all"}
    loaded = load_target(tmp_path, dtype="float32")
    for ours, theirs in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=8e-3, atol=1e-6)  # stored in bfloat16
    assert not (tmp_path / "training.pt").exists()


def test_a_killed_run_goes_on_bit_for_bit(data, tmp_path: Path) -> None:
    config, train, _ = data
    whole = train_target(config, TRAINING, train, None, tmp_path / "whole")
    train_target(config, TRAINING, train, None, tmp_path / "cut", stop=lambda step: step == 13)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    resumed = train_target(config, TRAINING, train, None, tmp_path / "cut", resume=True)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [row["step"] for row in rows(tmp_path / "cut")] == [4, 8, 12, 13, 16, 20, 24]


@pytest.mark.parametrize("changed", [{"accumulate": 2}, {"recompute": 1}, {"accumulate": 4, "recompute": 2}])
def test_what_saves_memory_changes_little_but_the_memory(data, tmp_path: Path, changed: dict) -> None:
    config, train, _ = data
    short = {**TRAINING.__dict__, "steps": 6}
    plain = train_target(config, TargetTraining(**short), train, None, tmp_path / "plain")
    other = train_target(config, TargetTraining(**short | changed), train, None, tmp_path / "other")
    for a, b in zip(plain.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert rows(tmp_path / "plain")[0]["loss"] == pytest.approx(rows(tmp_path / "other")[0]["loss"], rel=1e-5)
    assert "forward" not in vars(other.layers[0])


def test_what_a_killed_run_logged_after_its_checkpoint_is_dropped(data, tmp_path: Path) -> None:
    config, train, _ = data

    def killed(step: int) -> bool:
        if step == 14:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train_target(config, TRAINING, train, None, tmp_path, stop=killed)
    assert rows(tmp_path)[-1]["step"] == 12
    train_target(config, TRAINING, train, None, tmp_path, resume=True)  # from step 8
    assert [row["step"] for row in rows(tmp_path)] == [4, 8, 12, 16, 20, 24]


def test_a_checkpoint_of_another_run_is_refused(data, tmp_path: Path) -> None:
    config, train, _ = data
    train_target(config, TRAINING, train, None, tmp_path, stop=lambda step: step == 2)
    other = TargetTraining(**{**TRAINING.__dict__, "seed": 1})
    with pytest.raises(ValueError, match=r"another run, not of the same training \(seed\)"):
        train_target(config, other, train, None, tmp_path, resume=True)
    folder = Path(train.tokens.filename).parent
    with pytest.raises(ValueError, match=r"another run, not of the same weights \(prose\)"):
        train_target(config, TRAINING, TokenDataset(folder, {"prose": 2.0}), None, tmp_path, resume=True)
    retokenized = TokenDataset(folder)
    retokenized.meta = retokenized.meta | {"tokenizer": "another"}
    with pytest.raises(ValueError, match="another run, not of the same tokenizer"):
        train_target(config, TRAINING, retokenized, None, tmp_path, resume=True)


def test_a_run_may_go_on_with_other_held_out_text(data, tmp_path: Path) -> None:
    config, train, valid = data
    train_target(config, TRAINING, train, None, tmp_path, stop=lambda step: step == 2)
    train_target(config, TRAINING, train, valid, tmp_path, resume=True)
    assert "bits_per_byte" in rows(tmp_path)[-1]


def test_held_out_text_is_measured_between_rows_of_the_log(data, tmp_path: Path) -> None:
    config, train, valid = data
    training = TargetTraining(**{**TRAINING.__dict__, "steps": 10, "eval_every": 3})
    train_target(config, training, train, valid, tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [3, 4, 6, 8, 9, 10]
    assert [row["step"] for row in rows(tmp_path) if "bits_per_byte" in row] == [3, 6, 9, 10]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "training.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_checkpoint(path, {})
    for foreign in ({"model": {}}, {"identity": 3}, [1, 2]):
        torch.save(foreign, path)
        with pytest.raises(ValueError, match="not a checkpoint of a training run"):
            load_checkpoint(path, {"config": {}})


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "training.pt"
    replace_file(path, lambda p: p.write_bytes(b"old"))

    def full_disk(partial: Path) -> None:
        partial.write_bytes(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        replace_file(path, full_disk)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_corpus_smaller_than_a_batch_is_refused(data, tmp_path: Path) -> None:
    config, train, _ = data
    large = TargetTraining(steps=2, batch_size=512, seq_len=1024)
    with pytest.raises(ValueError, match="the corpus is too small"):
        train_target(config, large, train, None, tmp_path)


def test_the_command_trains_and_names_its_mistakes(corpus: Path, tmp_path: Path, capsys) -> None:
    shape = "--hidden-size 32 --num-hidden-layers 1 --num-heads 2 --head-dim 16 --intermediate-size 32"
    size = "--steps 3 --batch-size 2 --seq-len 32 --log-every 1 --device cpu"
    given = f"train target --data {corpus} --tokenizer {corpus / 'tokenizer'} --out {tmp_path / 'out'}"
    assert main([*given.split(), *shape.split(), *size.split()]) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert "not finished" not in capsys.readouterr().out
    assert main([*given.split(), *shape.split(), *size.split(), "--max-seconds", "0"]) == 0
    assert "not finished" in capsys.readouterr().out  # though the weights of the run before are there
    assert main([*given.split(), *shape.split(), *size.split(), "--resume"]) == 0
    assert "parameters" in (told := capsys.readouterr().out) and "not finished" not in told
    assert main([*given.split(), "--weight", "prose=much"]) == 2
    assert "CATEGORY=NUMBER" in capsys.readouterr().err
    assert main([*given.replace(str(corpus), str(tmp_path / "none"), 1).split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_batch_that_cannot_be_shared_evenly_is_refused(data, tmp_path: Path) -> None:
    config, train, _ = data
    uneven = TargetTraining(**TRAINING.__dict__ | {"accumulate": 3})
    with pytest.raises(
        ValueError, match="batch_size must be a multiple of processes x accumulate = 1 x 3, got 4"
    ):
        train_target(config, uneven, train, None, tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"warmup": 0.9, "decay": 0.5},
        {"batch_size": -1},
        {"clock_seconds": -1.0},
        {"accumulate": 0},
        {"recompute": -1},
        {"compile": "some"},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        TargetTraining(**bad)
