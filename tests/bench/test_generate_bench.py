"""`specla bench generate`: what its JSON document holds, and that no speed is quoted for a text that differs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from specla.bench.generate import BatchRun, WayRuns, default_ways, figures, measure, plain_way, repeated_share
from specla.bench.prompts import BUILT_IN, BenchPrompt, read_prompts
from specla.bench.steps import PLAIN, SHAPES, chain, fan, spine, time_rounds
from specla.cli import main
from specla.engine.params import SamplingParams
from specla.models.gated_deltanet import GatedDeltaNet
from specla.tree import Tree
from tests.checkpoints import save_checkpoint, save_companion
from tests.targets import make_target

WAYS = ["plain", "ngram chain 8", "ngram tree 16", "ngram auto", "synthetic chain 8 at 0.8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    save_checkpoint(directory)
    return str(directory)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    lines = [
        {"id": "a", "category": "cats", "prompt": "the cat sat on"},
        {"id": "b", "category": "code", "prompt": "def add(first"},
        {"id": "c", "category": "cats", "prompt": "the dog"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[str], str]:
    status = main(["bench", "generate", *argv])
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err


def test_the_last_line_is_one_json_document(
    capsys: pytest.CaptureFixture[str], checkpoint: str, prompts: str
):
    status, lines, err = run(
        capsys, checkpoint, "--prompts", prompts, "--max-tokens", "12", "--repeat", "2", "--rounds", "4",
        "--batch-size", "2", "--ignore-eos",
    )  # fmt: skip
    report = json.loads(lines[-1])
    assert status == 0 and err == "" and report["errors"] == []
    assert [row["name"] for row in report["runs"]] == WAYS
    for row in report["runs"]:
        assert row["identical"] and row["tokens"] == 72 and row["tokens_per_s"] > 0
        assert len(row["tokens_per_s_of_each_repeat"]) == 2
        assert row["acceptance_length"] == pytest.approx(72 / row["rounds"], abs=1e-3)
        assert sum(row["acceptance_histogram"]) == row["rounds"]
        assert row["median_round_ms"] > 0
        assert set(row["by_category"]) == {"cats", "code"}
    assert report["runs"][0]["speedup"] == 1 and report["runs"][0]["acceptance_length"] == 1
    assert report["runs"][-1]["acceptance_length"] > 2  # drafts that are right in four of five cases
    assert [row["name"] for row in report["rounds"]] == [shape.name for shape in (PLAIN, *SHAPES)]
    assert all(row["round_ms"] > 0 and row["repeats"] == 4 for row in report["rounds"])
    assert report["rounds"][0]["plain_steps"] == 1
    assert 10 < report["peak_rss_mb"] < 10_000 and report["state_bytes_per_draft_node"] > 0
    assert report["num_prompts"] == 3 and report["model"] == "tiny" and report["prompts"] == "prompts.jsonl"
    assert {"regime", "cpu", "threads", "dtype", "versions", "date", "command", "seed"} <= set(report)
    assert any(line.startswith("ngram tree 16") and line.endswith("identical") for line in lines)


def test_the_document_goes_to_a_file_too(
    capsys: pytest.CaptureFixture[str], checkpoint: str, prompts: str, tmp_path: Path
):
    path = tmp_path / "result.json"
    path.write_text("the one before")
    argv = [checkpoint, "--prompts", prompts, "--limit", "1", "--max-tokens", "4", "--repeat", "1",
            "--rounds", "0", "--drafter", "none"]  # fmt: skip
    status, lines, _ = run(capsys, *argv, "--output", str(path))
    assert status == 0 and json.loads(path.read_text()) == json.loads(lines[-1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl", "result.json"]
    for bad in (tmp_path, tmp_path / "nowhere" / "x.json"):
        status, lines, err = run(capsys, *argv, "--output", str(bad))
        assert status == 2 and lines == [] and "--output must be" in err and err.count("\n") == 1


def test_repeats_meet_the_same_synthetic_drafts_and_batches_others():
    """What the drafter gets right depends on seed, batch and request number, not on how often it was asked."""
    prompt = [5, 6, 7, 5, 6]
    batches = [[(BenchPrompt(name, "all", "unused"), prompt)] for name in "ab"]
    ways = [way for way in default_ways() if way.drafter == "synthetic"]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    runs = [measure(make_target(), batches, ways, params, repeat=3)[1].runs for _ in range(2)]
    patterns = [[(run.rounds, run.accepted, run.histogram) for run in repeats] for repeats in runs[0]]
    assert all(repeats == repeats[:1] * 3 for repeats in patterns)
    assert patterns[0][0] != patterns[1][0], "the same text in another batch draws other drafts"
    assert patterns == [[(r.rounds, r.accepted, r.histogram) for r in repeats] for repeats in runs[1]]


def test_counts_are_over_all_repeats():
    def one(rounds: int, accepted: int) -> BatchRun:
        return BatchRun(
            [[1] * 12], 10, 1.0, rounds, 20, accepted, Counter({0: rounds - accepted, 1: accepted})
        )

    runs = WayRuns(default_ways()[0], [[one(6, 6), one(12, 0)]])
    row = figures(runs, runs, [0])
    assert (row["rounds"], row["tokens"], row["acceptance_length"]) == (
        18,
        24,
        pytest.approx(24 / 18, abs=1e-3),
    )
    assert row["acceptance_histogram"] == [12, 6] and row["acceptance_rate"] == 6 / 40


def test_plain_decoding_that_differs_from_itself_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: str, prompts: str
):
    verify, calls = GatedDeltaNet.verify, []

    def moody(self, *args):
        calls.append(1)
        return verify(self, *args).roll(len(calls) // 7, -1)

    monkeypatch.setattr(GatedDeltaNet, "verify", moody)
    status, lines, err = run(
        capsys, checkpoint, "--prompts", prompts, "--max-tokens", "8", "--repeat", "2", "--rounds", "0",
        "--ignore-eos", "--drafter", "none",
    )  # fmt: skip
    assert status == 1 and lines == []
    assert "plain decoding differs from itself" in err and err.count("\n") == 1


def test_an_asked_drafter_runs_beside_plain_decoding_alone(
    capsys: pytest.CaptureFixture[str], checkpoint: str, prompts: str
):
    status, lines, _ = run(
        capsys, checkpoint, "--prompts", prompts, "--limit", "1", "--max-tokens", "8", "--repeat", "1",
        "--rounds", "0", "--drafter", "synthetic", "--synthetic-acceptance-rate", "1",
        "--num-speculative-tokens", "4", "--topk", "1", "--ignore-eos", "--temperature", "1", "--seed", "3",
    )  # fmt: skip
    report = json.loads(lines[-1])
    assert status == 0 and report["rounds"] == []
    assert [row["name"] for row in report["runs"]] == ["plain", "synthetic chain 4 at 1"]
    assert report["runs"][1]["rounds"] == 2  # 5 + 3 tokens


TRAINED = ["eagle chain 8", "eagle tree 16", "eagle+ngram auto"]


def test_a_model_with_a_drafter_is_compared_with_it_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prompts: str
):
    model = tmp_path / "with_drafter"
    save_companion(model, save_checkpoint(model))
    few = [str(model), "--prompts", prompts, "--limit", "1", "--max-tokens", "12", "--repeat", "1", "--rounds", "0",
           "--ignore-eos"]  # fmt: skip
    status, lines, err = run(capsys, *few)
    report = json.loads(lines[-1])
    assert status == 0 and err == "" and report["errors"] == []
    assert [row["name"] for row in report["runs"]] == ["plain", *TRAINED, *WAYS[1:]]
    assert all(row["identical"] for row in report["runs"])
    assert [row["drafter"] for row in report["runs"][1:4]] == ["eagle", "eagle", "eagle+ngram"]
    for drafter in (str(model / "drafter"), "ngram"):
        status, lines, _ = run(
            capsys, *few, "--drafter", drafter, "--num-speculative-tokens", "5", "--topk", "2"
        )
        kind = "ngram" if drafter == "ngram" else "eagle"
        rows = json.loads(lines[-1])["runs"]
        assert status == 0 and [row["name"] for row in rows] == ["plain", f"{kind} top-k 2 5"]
        assert rows[1]["drafter"] == kind


def test_a_speed_of_other_tokens_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: str, prompts: str
):
    verify = GatedDeltaNet.verify

    def wrong_below_the_root(self, tokens, tree, *rest):
        logits = verify(self, tokens, tree, *rest).clone()
        logits[:, 1:] = logits[:, 1:].roll(1, -1)
        return logits

    monkeypatch.setattr(GatedDeltaNet, "verify", wrong_below_the_root)
    status, lines, err = run(
        capsys, checkpoint, "--prompts", prompts, "--max-tokens", "16", "--repeat", "1", "--rounds", "0",
        "--ignore-eos", "--drafter", "synthetic", "--synthetic-acceptance-rate", "0.9", "--topk", "1",
        "--num-speculative-tokens", "8",
    )  # fmt: skip
    report = json.loads(lines[-1])
    plain, refused = report["runs"]
    assert status == 1 and plain["identical"] and not refused["identical"]
    assert "tokens_per_s" not in refused and "speedup" not in refused and "by_category" not in refused
    assert refused["first_difference"]["prompt"] in ("a", "b", "c")
    assert len(report["errors"]) == 1 and report["errors"][0] in err and "differ" in err
    assert any("refused" in line and "DIFFER" in line for line in lines)


def test_a_state_that_keeps_rejected_drafts_is_refused(monkeypatch: pytest.MonkeyPatch):
    """One token too many in the state changes the text; the way is not run again, plain decoding is."""
    from specla.state import StatePool

    accept = StatePool.accept

    def keeps_a_rejected_draft(self, slots, path, num_accepted):
        longer = [min(n + 1, path.shape[1] - 1) for n in num_accepted]
        accept(self, slots, path, longer)

    monkeypatch.setattr(StatePool, "accept", keeps_a_rejected_draft)
    batch = [(BenchPrompt("x", "all", "unused"), [5, 6, 7, 5, 6, 7, 5, 6])]
    plain, *others = measure(make_target(), [batch], default_ways(), SamplingParams(max_tokens=24), repeat=2)
    assert plain.difference is None and len(plain.runs[0]) == 2
    refused = [each for each in others if each.difference is not None]
    assert refused and all(len(each.runs[0]) == 1 for each in refused)
    row = figures(refused[0], plain, [0])
    assert (
        row["identical"] is False and row["first_difference"]["prompt"] == "x" and "tokens_per_s" not in row
    )


def test_a_slow_moment_does_not_count():
    """The time of a batch is the median of its repeats; the speed-up is that of the whole."""

    def runs(*seconds: tuple[float, ...]) -> WayRuns:
        each = [[BatchRun([[1] * 11], 10, s, 11, 0, 0, Counter({0: 11})) for s in batch] for batch in seconds]
        return WayRuns(plain_way(), each)

    plain = runs((1.0, 1.0, 50.0), (3.0, 90.0, 3.0))
    fast = runs((0.5, 70.0, 0.5), (1.5, 1.5, 1.5))
    assert figures(plain, plain, [0, 1])["tokens_per_s"] == 5
    assert figures(fast, plain, [0, 1])["speedup"] == 2
    assert figures(fast, plain, [1])["tokens_per_s"] == pytest.approx(6.67)


def test_nothing_to_time_is_no_speed():
    ended_at_once = WayRuns(plain_way(), [[BatchRun([[1]], 0, 0.0, 1, 0, 0, Counter({0: 1}))]])
    row = figures(ended_at_once, ended_at_once, [0])
    assert row["tokens_per_s"] is None and row["speedup"] is None and row["tokens"] == 1


def test_shapes_are_trees_of_the_size_they_name():
    for shape in SHAPES:
        assert f"of {len(shape.parent)}" in shape.name
        Tree(list(shape.parent))
    depths = {shape.name: int(Tree(list(shape.parent)).depth.max()) for shape in SHAPES}
    assert depths[spine(16, 4, 5).name] == 5 and depths[spine(16, 2, 8).name] == 8
    assert depths[chain(9).name] == 8 and depths[fan(16, 4).name] == 4


def test_a_timed_round_commits_the_deepest_path_before_it(monkeypatch: pytest.MonkeyPatch):
    target, committed = make_target(), []
    verify = GatedDeltaNet.verify

    def watched(self, tokens, tree, slots, pool, *rest):
        before = [pool.length[slot] for slot in slots]
        logits = verify(self, tokens, tree, slots, pool, *rest)
        committed.append((tree.size, [pool.length[s] - b for s, b in zip(slots, before, strict=True)]))
        return logits

    monkeypatch.setattr(GatedDeltaNet, "verify", watched)
    rows = time_rounds(target, [1, 2, 3], batch=2, repeats=4, shapes=[spine(16, 4, 5)])
    assert [row["nodes"] for row in rows] == [1, 16]
    assert {size for size, _ in committed} == {1, 16}
    for size, counts in committed:
        assert counts in ([0, 0], [1, 1] if size == 1 else [6, 6])


def test_repeated_share():
    assert repeated_share(list(range(20))) == 0
    assert repeated_share([1, 2, 3] * 10) == pytest.approx(20 / 23)
    assert repeated_share([1, 2, 3]) == 0


def test_prompts_are_spread_evenly(tmp_path: Path):
    assert read_prompts(None) == list(BUILT_IN)
    assert len({p.id for p in BUILT_IN}) == len(BUILT_IN)
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(10)))
    assert [p.prompt for p in read_prompts(path, 5)] == ["p0", "p2", "p4", "p6", "p8"]
    assert read_prompts(path, 99)[3] == BenchPrompt("4", "all", "p3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1 is not JSON"),
        ('{"prompt": ""}', 'non-empty string "prompt"'),
        ('{"prompt": "ok"}\n[]', "line 2 must be"),
        ("\n", "no prompts"),
    ],
)
def test_a_bad_prompt_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    status, lines, err = run(capsys, "--prompts", str(path))
    assert status == 2 and lines == [] and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-tokens", "1"], "--max-tokens must be in 2.."),
        (["--repeat", "0"], "--repeat must be in 1.."),
        (["--batch-size", "0"], "--batch-size must be in 1..4096"),
        (["--threads", "0"], "--threads must be in 1..4096"),
        (["--drafter", "oracle"], "drafter must be one of mtp, ngram, none, synthetic"),
        (["--drafter", ""], "drafter must be one of mtp, ngram, none, synthetic"),
        (["--drafter", "synthetic"], "synthetic_acceptance_rate"),
        (["--topk", "1"], "--topk needs --drafter"),
        (["--num-steps", "8"], "--num-steps needs --drafter"),
        (["--num-speculative-tokens", "auto"], "--num-speculative-tokens needs --drafter"),
        (["--synthetic-acceptance-rate", "0.5"], "--synthetic-acceptance-rate needs --drafter"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["nowhere"], "nowhere is not a directory"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str):
    status, lines, err = run(capsys, *argv)
    assert status == 2 and lines == [] and said in err and err.count("\n") == 1


def test_threads_arrive(capsys: pytest.CaptureFixture[str], checkpoint: str, prompts: str):
    before = torch.get_num_threads()
    try:
        _, lines, _ = run(
            capsys, checkpoint, "--prompts", prompts, "--limit", "1", "--max-tokens", "2", "--repeat", "1",
            "--rounds", "0", "--threads", "2", "--drafter", "none",
        )  # fmt: skip
        assert json.loads(lines[-1])["threads"] == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
