"""lm-eval through its `local-completions` on two tiny tasks; skipped where lm-eval is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from specla import SamplingParams
from tests.server.serving import Serving

QUESTIONS = [
    {"question": "the cat sat on the", "choices": [" mat", " dog", " cat"], "answer": 0},
    {"question": "def add(first,", "choices": [" second)", " return"], "answer": 0},
    {"question": "12 + 34 =", "choices": [" 46", " 12", " 34", " café"], "answer": 0},
]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
doc_to_text: "{{question}}"
metadata: {version: 1}
"""
CHOOSE = """
task: tiny_choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITE = """
task: tiny_write
output_type: generate_until
doc_to_target: "{{choices[0]}}"
target_delimiter: ""
generation_kwargs: {until: ["e"], max_gen_toks: 12, temperature: 0.0, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_scores_and_texts_are_those_of_the_model_alone(server: Serving, tmp_path: Path):
    data = tmp_path / "tiny.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, task in (("choose", CHOOSE), ("write", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(task + COMMON % data)
    model = f"model=tiny,base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_length=2048"
    command = [
        sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks",
        "tiny_choose,tiny_write", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
        "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline})
    assert done.returncode == 0, done.stdout + done.stderr

    for sample in _samples(tmp_path, "choose"):
        question = QUESTIONS[sample["doc_id"]]
        scores = [float(response[0][0]) for response in sample["resps"]]
        assert scores == pytest.approx(
            [_score(server, question["question"], c) for c in question["choices"]], abs=1e-3
        )
        assert float(sample["acc"]) == (scores.index(max(scores)) == 0)
    params = SamplingParams(max_tokens=12, stop=["e"])
    for sample in _samples(tmp_path, "write"):
        expected = server.alone.generate(QUESTIONS[sample["doc_id"]]["question"], params)[0].outputs[0].text
        assert sample["resps"] == [[expected]]


def _samples(directory: Path, name: str) -> list[dict]:
    (file,) = (directory / "out").rglob(f"samples_tiny_{name}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    return samples


def _score(server: Serving, question: str, choice: str) -> float:
    """The log-probability of a choice after its question."""
    encode = server.alone.tokenizer.encode
    start, whole = encode(question), encode(question + choice)
    answer = server.complete(prompt=whole, echo=True, max_tokens=0, logprobs=0)
    return sum(answer["choices"][0]["logprobs"]["token_logprobs"][len(start) :])
