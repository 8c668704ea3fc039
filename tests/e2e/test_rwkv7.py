"""RWKV-7 from a checkpoint's directory to text: a drafter trained by the command speculates without loss."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from specla import LLM, SamplingParams
from specla.cli import main
from specla.train.tokenizer import train_tokenizer
from tests.models.test_rwkv7 import save

WORDS = "the cat sat on a mat and the dog ran to see if it could find some more food in the red house".split()
TRAIN = (
    "--steps 12 --batch-size 2 --rows 4 --length 24 --shortest-prompt 2 --longest-prompt 5 --eval-rows 2 --mixer delta "
    "--num-heads 2 --head-dim 8 --intermediate-size 16 --draft-vocab-size 200 --unroll-steps 2 --learning-rate 0.02"
)
PROMPTS = [
    "the cat sat on a mat and the cat sat on a",
    "the dog",
    "red house red house red",
    "if it could find",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a tokenizer, and the drafter that `specla train drafter` made for it."""
    root, chance = tmp_path_factory.mktemp("rwkv7"), random.Random(0)
    (root / "train").mkdir()
    lines = [json.dumps({"text": " ".join(chance.choices(WORDS, k=200))}) for _ in range(8)]
    (root / "train" / "prose.jsonl").write_text("\n".join(lines))
    target = root / "target"
    train_tokenizer(root, 280, target)
    save(target, vocab_size=280, hidden_size=32, head_dim=8)
    command = f"train drafter {target} --data {root} --out {target / 'drafter'} --device cpu {TRAIN}"
    assert main(command.split()) == 0
    return target


def load(checkpoint: Path, drafter: str | None, mode: str = "auto") -> LLM:
    config = {} if drafter == "none" else {"num_speculative_tokens": 8, "topk": 2, "verify": mode}
    dtype = "float64" if mode == "parallel" else "float32"  # parallel sums in another order
    return LLM(checkpoint, drafter, device="cpu", dtype=dtype, speculative_config=config, max_num_seqs=4)


@pytest.mark.parametrize("mode", ["serial", "hybrid", "parallel"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_plain_decoding(checkpoint: Path, temperature: float, mode: str):
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=32, ignore_eos=True)
    want = load(checkpoint, "none", mode).generate(PROMPTS, params)
    for drafter, name in ((None, "eagle"), ("ngram", "ngram")):
        llm = load(checkpoint, drafter, mode)
        assert name in llm.drafter.name
        got = llm.generate(PROMPTS, params)
        assert [x.outputs[0].token_ids for x in got] == [x.outputs[0].token_ids for x in want]
        assert [x.outputs[0].text for x in got] == [x.outputs[0].text for x in want]
        assert sum(x.metrics.num_draft_tokens for x in got) > 0
        if name == "eagle":
            assert sum(x.metrics.num_accepted_draft_tokens for x in got) > 0


def test_a_session_goes_on_where_it_stopped(checkpoint: Path):
    half, full = (SamplingParams(temperature=1.0, seed=7, max_tokens=n, ignore_eos=True) for n in (20, 40))
    (whole,) = load(checkpoint, "none").generate("the cat", full)
    with load(checkpoint, None).session() as session:
        session.generate("the cat", half)
        session.generate("", half)
        assert session.token_ids == whole.prompt_token_ids + whole.outputs[0].token_ids


def test_the_drafter_says_whose_it_is(checkpoint: Path):
    raw = json.loads((checkpoint / "drafter" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["architectures"] == ["RWKV7ForCausalLM"]
