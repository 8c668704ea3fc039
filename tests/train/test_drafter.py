"""Training a drafter: it learns its target, resumes to the bit, and refuses what cannot work before it starts."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specla.cli import main
from specla.drafters import EagleDrafter
from specla.drafters.checkpoint import load_drafter
from specla.engine.params import SamplingParams
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import load_target, save_target
from specla.tokenizer import load_tokenizer
from specla.train.cache import prepare_tokens
from specla.train.data import TokenDataset
from specla.train.drafter import DrafterTraining, SelfText, frequent_tokens, train_drafter
from specla.train.objectives import Objective
from specla.train.tokenizer import train_tokenizer
from tests.checkpoints import write_random
from tests.targets import (
    build_target,
    family_raw,
    make_config,
    make_qwen_config,
    pairs,
    prompt,
    run as generate,
    same_bits,
)

WORDS = "the cat sat on a mat and the dog ran to see if it could find some more food in the red house".split()
TRAINING = DrafterTraining(
    steps=12, batch_size=4, length=24, rows=8, passes=2, shortest_prompt=2, longest_prompt=6, eval_rows=3,
    eval_every=6, checkpoint_every=5, log_every=3, learning_rate=2e-2, objective=Objective(unroll_steps=3),
)  # fmt: skip
SHAPE = {"mixer": "attention", "layer_ids": (0, 1, 2), "draft_vocab_size": 200, "num_heads": 2, "head_dim": 8,
         "intermediate_size": 24, "sliding_window": 16}  # fmt: skip

FAMILY_HEADS = ["delta_net", "gla_conv", "retnet", "mamba2", "kda", "kimi"]  # one of each model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a tokenizer, and a random target of their vocabulary."""
    root = tmp_path_factory.mktemp("drafter")
    chance = random.Random(0)
    for split in ("train", "valid"):
        (root / split).mkdir()
        lines = [json.dumps({"text": " ".join(chance.choices(WORDS, k=200))}) for _ in range(8)]
        (root / split / "prose.jsonl").write_text("\n".join(lines))
    train_tokenizer(root, 280, root / "target")
    save_target(build_target(make_config(vocab_size=280, tie_word_embeddings=True)), root / "target")
    return root


@pytest.fixture(scope="module")
def data(home: Path) -> tuple[GatedDeltaNet, TokenDataset, TokenDataset]:
    tokenizer = load_tokenizer(home / "target")
    train = prepare_tokens(home, tokenizer, home / "cache" / "train")
    return (
        load_target(home / "target", dtype="float32"),
        train,
        prepare_tokens(home, tokenizer, home / "cache" / "valid", split="valid"),
    )


def run(data, out: Path, training: DrafterTraining = TRAINING, **further):
    target, train, valid = data
    shape = SHAPE | further.pop("shape", {})
    return train_drafter(target, shape, training, train, valid, out, target_name="a target", **further)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mixer", ["delta", "attention"])
def test_the_loss_falls_and_the_drafter_loads(data, tmp_path: Path, mixer: str) -> None:
    network, finished = run(data, tmp_path, replace(TRAINING, steps=24), shape={"mixer": mixer})
    log = rows(tmp_path)
    assert finished and log[0]["loss"] > log[-1]["loss"] + 0.1
    assert {"acceptance_length", "valid_first_token_match", "first_token_match"} <= log[-1].keys()
    loaded = load_drafter(tmp_path, data[0])
    assert loaded.token_ids.tolist() == network.token_ids.tolist()
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, network.get_parameter(name).data, rtol=8e-3, atol=1e-5)
    assert not (tmp_path / "training.pt").exists()


@pytest.mark.parametrize("variant", ["qwen_dense", "qwen_next"])
def test_a_drafter_of_a_qwen_target_learns_and_says_whose_it_is(data, tmp_path: Path, variant: str) -> None:
    target = build_target(make_qwen_config(variant, vocab_size=280))
    layer_ids = (0, 1, target.config.num_hidden_layers)
    training = replace(TRAINING, steps=24)
    _, finished = run((target, *data[1:]), tmp_path, training, shape={"layer_ids": layer_ids})
    log = rows(tmp_path)
    assert finished and log[0]["loss"] > log[-1]["loss"] + 0.1
    assert load_drafter(tmp_path, target).config.layer_ids == layer_ids
    verifier = json.loads((tmp_path / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["architectures"] == [target.config.architecture]


@pytest.mark.parametrize("features, share", [("recurrent", 0.1), ("parallel", 0.1), ("parallel", 1.0)])
def test_a_killed_run_goes_on_bit_for_bit(data, tmp_path: Path, features: str, share: float) -> None:
    training = replace(TRAINING, features=features, corpus_share=share)
    whole, _ = run(data, tmp_path / "whole", training)
    _, finished = run(data, tmp_path / "cut", training, stop=lambda step: step == 7)
    assert not finished and not (tmp_path / "cut" / "model.safetensors").exists()
    resumed, finished = run(data, tmp_path / "cut", training, resume=True)
    assert finished
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_another_run_is_refused(data, tmp_path: Path) -> None:
    run(data, tmp_path, stop=lambda step: step == 2)
    with pytest.raises(ValueError, match=r"another run, not of the same shape \(mixer\)"):
        run(data, tmp_path, shape={"mixer": "delta"}, resume=True)
    other = replace(TRAINING, objective=Objective(unroll_steps=2))
    with pytest.raises(ValueError, match=r"another run, not of the same training \(objective\)"):
        run(data, tmp_path, other, resume=True)


def test_a_full_disk_leaves_a_resumable_checkpoint(data, tmp_path: Path, monkeypatch) -> None:
    whole, _ = run(data, tmp_path / "whole")
    save, calls = torch.save, []

    def full(state, path) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run(data, tmp_path / "cut")
    resumed, _ = run(data, tmp_path / "cut", resume=True)
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_every_text_of_a_shard_is_trained_on_in_each_pass(data) -> None:
    target, train, _ = data
    source = SelfText(target, (0, 1, 2), train, TRAINING)
    laps = TRAINING.rows // TRAINING.batch_size
    seen = [source.batch(step).tokens for step in range(2 * TRAINING.passes * laps)]
    kept = [torch.cat(seen[at : at + laps]) for at in range(0, len(seen), laps)]
    texts = [sorted(map(tuple, lap.tolist())) for lap in kept]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
    assert not torch.equal(kept[0], kept[1]), "another order in each pass"
    again = source.batch(1)
    assert torch.equal(again.tokens, seen[1]), "a batch is a function of its step"


def test_texts_are_the_targets_own_but_for_the_corpus_share(data) -> None:
    target, train, _ = data
    greedy = replace(TRAINING, corpus_share=0.0, greedy_share=1.0)
    shard = SelfText(target, (0, 1, 2), train, greedy).shard(0)
    wanted = target.logits(shard.hidden).argmax(-1)
    own = shard.tokens[:, 1:]
    assert torch.equal(wanted[:, greedy.longest_prompt :], own[:, greedy.longest_prompt :])
    corpus = SelfText(target, (0, 1, 2), train, replace(TRAINING, corpus_share=1.0)).shard(3)
    assert torch.equal(corpus.tokens, train.batch(3, TRAINING.rows, TRAINING.length, seed=TRAINING.seed))


def test_finished_texts_are_read_as_they_would_be_recorded(data) -> None:
    target, train, _ = data
    recorded = SelfText(target, (0, 2), train, replace(TRAINING, corpus_share=1.0))
    read = SelfText(target, (0, 2), train, replace(TRAINING, corpus_share=1.0, features="parallel"))
    assert read.recorder is None and recorded.recorder is not None
    for a, b in zip(vars(read.shard(1)).values(), vars(recorded.shard(1)).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert torch.equal(read.usual_tokens(), torch.from_numpy(train.tokens.astype("int64")))


def test_the_draft_vocabulary_is_what_occurs_most() -> None:
    texts = torch.tensor([[5, 5, 5, 2, 2, 9], [9, 9, 9, 1, 2, 5]])
    assert frequent_tokens(texts, 12, 3).tolist() == [2, 5, 9]
    assert frequent_tokens(texts, 12, 6).tolist() == [0, 1, 2, 3, 5, 9]


@pytest.mark.parametrize(
    "bad, told",
    [
        ({"rows": 6}, "multiple of batch_size"),
        ({"features": "guessed"}, "features must be one of"),
        ({"corpus_share": 1.5}, "corpus_share must be in"),
        ({"greedy_share": -0.1}, "greedy_share must be in"),
        ({"longest_prompt": 23}, "prompts must be shorter"),
        ({"passes": 0}, "passes must be at least 1"),
        ({"length": 10, "objective": Objective(unroll_steps=9)}, "length must exceed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(TRAINING, **bad)


def test_what_does_not_fit_is_refused_before_training(data, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer_ids must be in 0\.\.2"):
        run(data, tmp_path, shape={"layer_ids": (0, 1, 3)})
    with pytest.raises(ValueError, match="the corpus is too small"):
        run(data, tmp_path, replace(TRAINING, rows=4096))
    assert not list(tmp_path.iterdir())


SIZE = "--steps 3 --batch-size 2 --rows 4 --length 24 --shortest-prompt 2 --longest-prompt 5 --eval-rows 2"


@pytest.mark.parametrize(("variant", "mixer"), [*zip(FAMILY_HEADS, ["delta", "attention"] * 3, strict=True)])
def test_the_command_trains_a_drafter_for_every_model_that_changes_no_token(
    home: Path, tmp_path: Path, capsys, variant: str, mixer: str
) -> None:
    write_random(tmp_path / "target", family_raw(variant, vocab_size=280, eos_token_id=1))
    shutil.copy(home / "target" / "tokenizer.json", tmp_path / "target")
    given = f"train drafter {tmp_path / 'target'} --data {home} --out {tmp_path / 'out'} --device cpu --mixer {mixer}"
    shape = "--draft-vocab-size 200 --unroll-steps 2 --layer-ids 0,1,2 --intermediate-size 16"
    assert main([*given.split(), *SIZE.split(), *shape.split()]) == 0
    assert "parameters" in capsys.readouterr().out
    prompts = [
        prompt(9, vocab=280) * 2,
        prompt(3, 1, vocab=280),
        prompt(20, 2, vocab=280),
        prompt(1, vocab=280),
    ]
    for mode, heat, batch in pairs(["serial", "hybrid", "parallel"], [0.0, 1.0], [1, 4]):
        target = load_target(tmp_path / "target", dtype="float64" if mode == "parallel" else "float32")
        params = SamplingParams(temperature=heat, seed=7, max_tokens=12)
        want = generate(target, None, prompts[:batch], params, drafts=0)
        drafter = EagleDrafter(load_drafter(tmp_path / "out", target), 7, 3, 3)
        got = generate(target, drafter, prompts[:batch], params, drafts=7, mode=mode)
        assert got.outputs == want.outputs
        assert sum(s.metrics.num_draft_tokens for s in got.sequences) > 0
        if mode != "parallel":
            assert all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_the_command_trains_and_names_its_mistakes(home: Path, tmp_path: Path, capsys) -> None:
    shape = "--num-heads 2 --head-dim 8 --intermediate-size 16 --draft-vocab-size 100 --unroll-steps 2 --log-every 1"
    given = f"train drafter {home / 'target'} --data {home} --out {tmp_path / 'out'} --device cpu"
    command = [*given.split(), *SIZE.split(), *shape.split()]
    assert main(command) == 0
    assert "parameters" in (told := capsys.readouterr().out) and "not finished" not in told
    assert main([*command, "--max-seconds", "0"]) == 0
    assert "not finished" in capsys.readouterr().out
    assert main([*command, "--resume"]) == 0
    capsys.readouterr()
    for wrong, words in (
        (["--loss", "mse"], "loss must be one of"),
        (["--layer-ids", "0,x"], "--layer-ids takes numbers"),
        (["--layer-ids", "0,7"], "layer_ids must be in"),
        (["--mixer", "mamba"], "invalid choice"),
        (["--data", str(tmp_path / "none")], "is not a directory"),
    ):
        try:
            status = main([*command, *wrong])
        except SystemExit as end:
            status = end.code
        assert status == 2
        error = capsys.readouterr().err
        assert words in error and error.count("error") == 1
    (tmp_path / "bad" / "train").mkdir(parents=True)
    (tmp_path / "bad" / "train" / "x.jsonl").write_text("{not json\n")
    assert main([*command, "--data", str(tmp_path / "bad"), "--cache", str(tmp_path / "other")]) == 2
    assert "x.jsonl, line 1" in capsys.readouterr().err
