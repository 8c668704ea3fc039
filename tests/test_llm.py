"""The front door: prompts of every kind, order, stops, seeds, streams and slots, on a checkpoint made on the spot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specla
from specla import LLM, SamplingParams, SpeculativeConfig
from specla.cli import main
from specla.engine.llm import BUNDLED_MODEL
from specla.engine.outputs import RequestOutput
from tests.checkpoints import save_checkpoint, save_companion

PROMPTS = ["the cat", "def add(", "café", "on the mat, and", "12 + 34", "s"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory)
    return directory


def load(checkpoint: Path, drafter: str | None = "none", **options: Any) -> LLM:
    if drafter == "synthetic":
        options.setdefault(
            "speculative_config", {"synthetic_acceptance_rate": 0.7, "num_speculative_tokens": 8}
        )
    return LLM(checkpoint, drafter=drafter, dtype="float32", **options)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> LLM:
    return load(checkpoint)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_public_names():
    assert specla.__all__ == ["LLM", "SamplingParams", "SpeculativeConfig", "Tree"]
    assert all(hasattr(specla, name) for name in specla.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = specla.nothing_of_the_kind


def test_prompts_of_every_kind(plain: LLM):
    texts = PROMPTS[:2]
    ids = [plain.tokenizer.encode(text) for text in texts]
    answer = plain.generate(texts, GREEDY)
    assert [output.prompt for output in answer] == texts
    assert [output.prompt_token_ids for output in answer] == ids
    assert tokens(plain.generate(ids, GREEDY)) == tokens(answer)
    assert tokens(plain.generate(texts[1], GREEDY)) == tokens(answer)[1:]
    assert tokens(plain.generate(ids[1], GREEDY)) == tokens(answer)[1:]
    assert plain.generate(ids[1], GREEDY)[0].prompt is None
    assert plain.generate([], GREEDY) == []
    assert tokens(answer)[0] != tokens(answer)[1]


def test_text_is_the_tokens_decoded(plain: LLM):
    for output in plain.generate(PROMPTS, GREEDY):
        completion = output.outputs[0]
        assert len(completion.token_ids) == 24
        assert completion.finish_reason == "length"
        assert output.finished
        assert completion.text == plain.tokenizer.decode(completion.token_ids, continues=True)
        assert "".join(completion.pieces) == completion.text


@pytest.mark.parametrize("drafter", ["none", "ngram", "synthetic"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_order_is_kept_with_more_prompts_than_slots(
    checkpoint: Path, plain: LLM, drafter: str, params: SamplingParams
):
    """Every prompt alone, by plain decoding, is the answer, whatever drafts and whoever shares the batch."""
    answer = [plain.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
    llm = load(checkpoint, drafter, max_num_seqs=2)
    assert tokens(llm.generate(PROMPTS, params)) == answer
    assert tokens(llm.generate(PROMPTS[::-1], params)) == answer[::-1]


@pytest.mark.parametrize("verify", ["serial", "parallel", "hybrid"])
def test_synthetic_drafts_are_accepted_and_change_nothing(checkpoint: Path, plain: LLM, verify: str):
    config = {
        "synthetic_acceptance_rate": 0.7,
        "num_speculative_tokens": 8,
        "num_steps": 4,
        "topk": 3,
        "verify": verify,
    }
    outputs = load(checkpoint, "synthetic", speculative_config=config).generate(PROMPTS, GREEDY)
    assert tokens(outputs) == tokens(plain.generate(PROMPTS, GREEDY))
    assert all(1.2 < output.metrics.acceptance_length < 5 for output in outputs)
    everything = config | {"synthetic_acceptance_rate": 1.0, "topk": 1}
    (output,) = load(checkpoint, "synthetic", speculative_config=everything).generate("the", GREEDY)
    assert output.metrics.num_spec_steps == 5  # 24 tokens by 4 drafts and the bonus


def test_synthetic_drafts_know_the_seeds_of_unseeded_requests(checkpoint: Path):
    config = {"synthetic_acceptance_rate": 1.0, "num_speculative_tokens": 4, "num_steps": 4, "topk": 1}
    llm = load(checkpoint, "synthetic", speculative_config=config)
    for prompts in (["the"], ["the", "on"], ["cat"]):
        outputs = llm.generate(prompts, replace(DRAWN, seed=None))
        assert [output.metrics.num_spec_steps for output in outputs] == [5] * len(prompts)


def test_metrics_add_up(checkpoint: Path):
    (output,) = load(checkpoint, "synthetic").generate("the cat", GREEDY)
    metrics, completion = output.metrics, output.outputs[0]
    assert (
        metrics.num_tokens
        == len(completion.token_ids)
        == len(completion.from_draft)
        == len(completion.pieces)
        == 24
    )
    assert metrics.num_accepted_draft_tokens == sum(completion.from_draft) > 0
    assert metrics.num_draft_tokens > metrics.num_accepted_draft_tokens
    assert metrics.acceptance_length == 24 / metrics.num_spec_steps
    histogram = metrics.acceptance_histogram
    assert sum(histogram) == metrics.num_spec_steps
    assert sum(n * rounds for n, rounds in enumerate(histogram)) == metrics.num_accepted_draft_tokens


@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle"])
def test_what_inference_mode_has_seen_runs_outside_of_it(
    checkpoint: Path, plain: LLM, drafter: str, tmp_path: Path
):
    if drafter == "eagle":
        save_companion(tmp_path, plain.target)
        drafter = str(tmp_path / "drafter")
    params = SamplingParams(max_tokens=20)
    with torch.inference_mode():
        llm = LLM(checkpoint, drafter)
        inside = llm.generate([[2, 3, 4] * 30] * 2, params)
    assert tokens(llm.generate([[2, 3, 4] * 30] * 2, params)) == tokens(inside)


def test_seeds(plain: LLM, checkpoint: Path):
    first, again, other = (
        plain.generate("the", replace(DRAWN, seed=seed))[0].outputs[0].token_ids for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    unseeded = replace(DRAWN, seed=None)
    fresh = [load(checkpoint, seed=seed).generate(["the", "the"], unseeded) for seed in (0, 0, 1)]
    assert tokens(fresh[0]) == tokens(fresh[1])
    assert tokens(fresh[0]) != tokens(fresh[2])
    assert tokens(fresh[0])[0] != tokens(fresh[0])[1], "two requests draw different noise"
    drafted = load(checkpoint, "synthetic").generate(["the", "the"], unseeded)
    assert tokens(drafted) == tokens(fresh[0])


@pytest.mark.parametrize("drafter", ["none", "ngram", "synthetic"])
def test_stop_string_that_spans_tokens(checkpoint: Path, plain: LLM, drafter: str):
    llm = load(checkpoint, drafter)
    whole = plain.generate("the cat", GREEDY)[0].outputs[0]
    tried = 0
    for n in range(6, 20):
        before, first, second = "".join(whole.pieces[:n]), whole.pieces[n], whole.pieces[n + 1]
        stop = first[-1:] + second[:1]
        if len(stop) < 2 or whole.text.find(stop) != len(before) + len(first) - 1:
            continue
        tried += 1
        for stops in (stop, ["never to be seen", stop]):
            (output,) = llm.generate("the cat", replace(GREEDY, stop=stops))
            completion = output.outputs[0]
            assert completion.text == before + first[:-1]
            assert completion.token_ids == whole.token_ids[: n + 2]
            assert completion.finish_reason == "stop"
        streamed = [o.outputs[0].text for o in llm.stream("the cat", replace(GREEDY, stop=stop))]
        assert all(completion.text.startswith(text) for text in streamed), "never past the stop string"
        assert streamed[-1] == completion.text
    assert tried >= 3


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("drafter", ["none", "synthetic"])
def test_end_tokens_and_ignore_eos(checkpoint: Path, plain: LLM, where: str, drafter: str, tmp_path: Path):
    whole = plain.generate("the cat", GREEDY)[0].outputs[0].token_ids
    end = whole[9]
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / where).read_text())
    (tmp_path / where).write_text(json.dumps(raw | {"eos_token_id": [1, end]}))
    llm = load(tmp_path, drafter)
    completion = llm.generate("the cat", replace(GREEDY, ignore_eos=False))[0].outputs[0]
    assert completion.token_ids == whole[: whole.index(end) + 1]
    assert completion.finish_reason == "stop"
    assert llm.generate("the cat", GREEDY)[0].outputs[0].token_ids == whole
    stopped = plain.generate("the cat", replace(GREEDY, stop_token_ids=[end]))[0].outputs[0]
    assert stopped.token_ids == completion.token_ids


@pytest.mark.parametrize("drafter", ["none", "ngram", "synthetic"])
def test_stream_ends_with_what_generate_gives(checkpoint: Path, drafter: str):
    llm = load(checkpoint, drafter)
    (whole,) = llm.generate("def add(", DRAWN)
    outputs = list(llm.stream("def add(", DRAWN))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for early, late in pairwise(outputs):
        assert late.outputs[0].text.startswith(early.outputs[0].text)
        assert late.outputs[0].token_ids[: len(early.outputs[0].token_ids)] == early.outputs[0].token_ids
        assert early.metrics.num_spec_steps + 1 == late.metrics.num_spec_steps, "a snapshot, not a view"
    last, answer = outputs[-1].outputs[0], whole.outputs[0]
    assert (last.text, last.token_ids, last.finish_reason) == (
        answer.text,
        answer.token_ids,
        answer.finish_reason,
    )


def test_streams_take_turns(plain: LLM):
    answers = [plain.generate(prompt, GREEDY)[0].outputs[0] for prompt in PROMPTS[:3]]
    streams = [plain.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    last: list[RequestOutput | None] = [None] * 3
    while any(streams):
        for i, stream in enumerate(streams):
            got = next(stream, None) if stream else None
            streams[i] = stream if got else None
            last[i] = got or last[i]
    assert [output.outputs[0] for output in last] == answers


def test_generate_leaves_an_open_stream_alone(plain: LLM):
    (whole,) = plain.generate("the cat", GREEDY)
    stream = plain.stream("the cat", GREEDY)
    first = next(stream)
    assert not first.finished
    plain.generate("s", replace(GREEDY, max_tokens=2))
    assert len(next(stream).outputs[0].token_ids) < 24
    assert list(stream)[-1].outputs == whole.outputs


@pytest.mark.parametrize("close", ["close", "drop"])
def test_an_abandoned_stream_frees_its_slot(checkpoint: Path, close: str):
    llm = load(checkpoint, "synthetic", max_num_seqs=1)
    (answer,) = llm.generate("s", GREEDY)
    stream = llm.stream("the cat", GREEDY)
    next(stream)
    assert llm._engine.pool.num_free == 0
    if close == "close":
        stream.close()
    del stream
    assert llm._engine.pool.num_free == 1
    assert not llm._engine.has_work
    assert llm.drafter.references == {}
    assert tokens(llm.generate("s", GREEDY)) == tokens([answer])


def test_a_stream_whose_round_another_spoilt_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    llm = load(checkpoint)
    first, second = llm.stream("the cat", GREEDY), llm.stream("s", GREEDY)
    next(first), next(second)

    def broken(*args: object) -> None:
        raise FloatingPointError("logits are not finite")

    monkeypatch.setattr("specla.engine.engine.run_round", broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        next(first)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="another request"):
        next(second)
    assert llm._engine.pool.num_free == 8 and not llm._engine.has_work


def test_a_stream_that_never_starts_takes_no_slot(checkpoint: Path):
    llm = load(checkpoint, max_num_seqs=1)
    waiting = llm.stream("the cat", GREEDY)
    assert not llm._engine.has_work
    assert len(llm.generate("s", GREEDY)) == 1
    del waiting


def test_a_stream_waits_for_a_slot(checkpoint: Path, plain: LLM):
    llm = load(checkpoint, max_num_seqs=1)
    first, second = llm.stream("the cat", GREEDY), llm.stream("s", GREEDY)
    next(first)
    outputs = list(second)
    assert len(outputs) == 24
    assert outputs[-1].outputs == plain.generate("s", GREEDY)[0].outputs
    assert list(first)[-1].outputs == plain.generate("the cat", GREEDY)[0].outputs


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("\u20ac", "no tokens for"), ("", "empty"), ([""], "empty"),
    (["the", ""], "empty"), ([[]], "empty"), ([[1], []], "empty"),
    ([-1], "0..89"), ([5, 90], "90"), ([[5], [10**30]], "token ids"), ([True], "token ids"), ([1, "a"], "token ids"),
    ([1.5], "prompts"), (None, "prompts"), (5, "prompts"), ({"a": 1}, "prompts"), ([None], "prompts"),
    ("a\ud800b", "surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "said"), BAD_PROMPTS, ids=repr)
def test_bad_prompts_are_refused_and_leave_no_trace(plain: LLM, prompts: Any, said: str):
    assert plain.target.config.vocab_size == 90
    with pytest.raises(ValueError, match=said):
        plain.generate(prompts, GREEDY)
    assert not plain._engine.has_work
    assert plain._engine.pool.num_free == 8


def test_a_bad_text_is_refused_before_its_stream_starts(plain: LLM):
    with pytest.raises(ValueError, match="empty"):
        plain.stream("", GREEDY)
    with pytest.raises(ValueError, match="SamplingParams"):
        plain.stream("the", {"max_tokens": 3})  # type: ignore[arg-type]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"drafter": "eagle"}, "ngram, none, synthetic"),
    ({"drafter": ""}, "ngram, none, synthetic"),
    ({"drafter": "synthetic"}, "synthetic_acceptance_rate"),
    (
        {"drafter": "ngram", "speculative_config": {"synthetic_acceptance_rate": 0.5}},
        "synthetic_acceptance_rate",
    ),
    ({"speculative_config": {"prune_threshold": 0.5}}, "prune_threshold"),
    ({"speculative_config": {"num_tokens": 5, "topk": 1}}, r"num_tokens.*num_speculative_tokens"),
    ({"speculative_config": "auto"}, "speculative_config"),
    ({"speculative_config": {"verify": "fast"}}, "auto, serial, parallel, hybrid"),
    ({"device": "tpu"}, "auto, cpu, cuda"),
    ({"device": "meta"}, "auto, cpu, cuda"),
    ({"device": "cuda:77"}, "CUDA"),
    ({"dtype": "int8"}, "dtype must be"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_num_seqs": 2.0}, "max_num_seqs"),
    ({"seed": 2**62}, "seed"),
    ({"model": "nowhere"}, "nowhere"),
]


@pytest.mark.parametrize(("options", "said"), BAD_OPTIONS, ids=str)
def test_bad_options_are_refused(checkpoint: Path, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        LLM(**({"model": checkpoint} | options))


BAD_SAMPLING: list[dict[str, Any]] = [
    *[{"max_tokens": value} for value in (0, -1, 1.5, True, None, "5")],
    *[{"temperature": value} for value in (-0.1, float("nan"), float("inf"), "1", None)],
    *[{name: value} for name in ("top_p", "min_p") for value in (-0.1, 1.1, float("nan"))],
    {"top_p": 0.0}, {"top_p": 1e-300}, {"repetition_penalty": 1e-300}, {"top_k": 0},
    {"top_k": -2}, {"top_k": 2**40}, {"top_k": 1.0},
    {"repetition_penalty": 0}, {"repetition_penalty": float("nan")},
    {"seed": 2**63}, {"seed": 0.5}, {"stop": ""}, {"stop": ["a", ""]}, {"stop": 5}, {"stop": [5]},
    {"stop_token_ids": 5}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_SAMPLING, ids=str)
def test_bad_sampling_is_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


BAD_SPECULATION: list[dict[str, Any]] = [
    *[{"num_speculative_tokens": value} for value in (-1, 256, 1.5, "many", None, True)],
    {"num_steps": 0}, {"topk": 0}, {"topk": 65}, {"prune_threshold": -1}, {"prune_threshold": float("nan")},
    {"verify": None}, {"verify": ["auto"]},
    *[{"synthetic_acceptance_rate": value} for value in (1.1, -1, "x", [0.5, 2], {})],
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_SPECULATION, ids=str)
def test_bad_speculation_is_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1e-300}, {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0, "top_k": 2**31 - 1},
     {"temperature": 1.0, "seed": -(2**63)}, {"temperature": 1.0, "seed": 2**63 - 1}, {"temperature": 100},
     {"max_tokens": 5, "stop_token_ids": [10**40]}, {"repetition_penalty": 1e-6}, {"repetition_penalty": 100}],
    ids=str,
)  # fmt: skip
def test_extreme_but_allowed_sampling_runs(checkpoint: Path, fields: dict[str, Any]):
    params = SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | fields))
    answer, drafted = (load(checkpoint, name).generate("the", params) for name in ("none", "synthetic"))
    assert tokens(answer) == tokens(drafted)
    assert len(tokens(answer)[0]) == params.max_tokens


def test_logits_that_are_not_finite_are_an_error_and_leave_no_trace(checkpoint: Path, tmp_path: Path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][40] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    llm = load(tmp_path, "ngram")
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="not finite"):
            llm.generate(["the", "s"], GREEDY)
        with pytest.raises(FloatingPointError, match="not finite"):
            next(llm.stream("the", GREEDY))
        assert not llm._engine.has_work
        assert llm._engine.pool.num_free == 8


def test_no_drafter_named_is_prompt_lookup_where_none_comes_with_the_model(checkpoint: Path):
    assert load(checkpoint, None).drafter.name == "ngram"
    assert load(checkpoint, "ngram", speculative_config={"num_speculative_tokens": 0}).drafter.name == "none"


def test_the_bundled_model_speaks():
    llm = LLM()
    (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=12))
    text = output.outputs[0].text
    assert llm.model_path == BUNDLED_MODEL
    assert llm.drafter.name == "eagle+ngram"
    assert "\ufffd" not in text
    assert text.count(" ") >= 3


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_drafts_of_the_bundled_model_change_nothing(capsys: pytest.CaptureFixture[str], drafter: str | None):
    prompt = "def area(width, height):\n    return width * height\n\n\ndef area("
    argv = ["generate", "-p", prompt, "--max-tokens", "24", "--compare", "--json"]
    assert main(argv + ([] if drafter is None else ["--drafter", drafter])) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["drafter"] == (drafter or "eagle+ngram")
    assert report["compare"]["identical"] is True
    assert report["num_accepted_draft_tokens"] > 0


def test_triton_is_an_extra() -> None:
    """Without it everything that a CPU needs still loads and runs."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from specla import LLM, SamplingParams; import specla.bench.report, specla.ops\n"
        "print(len(LLM(device='cpu').generate('The', SamplingParams(max_tokens=2))[0].outputs[0].token_ids))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr[-2000:]
