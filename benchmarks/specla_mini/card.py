"""Write specla-mini's model card: figures from its log, its config and run.json, the loss curve, ten unedited samples.

Usage: python benchmarks/specla_mini/card.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from specla import LLM, SamplingParams
from specla.engine.llm import BUNDLED_MODEL
from specla.models.config import GatedDeltaNetConfig

LOG = Path(__file__).parent / "training_log.jsonl"
RUN = Path(__file__).parent / "run.json"  # what the log does not say
PROMPTS = (
    "It was late in the evening when the captain",
    "The garden behind the house had been",
    '"I do not believe a word of it," said',
    "In economics, the demand for a good",
    "The human heart is",
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "Installation\n============\n\nTo install the package",
    "<|user|>\nWrite a short note to thank a friend for a book.<|assistant|>\n",
)
CARD = """---
license: apache-2.0
language: en
library_name: specla
pipeline_tag: text-generation
---

# specla-mini

A Gated DeltaNet language model of {parameters:,} parameters, small enough to ship inside a package. It exists so that
`specla` works from a fresh clone, on a laptop CPU, and so that its figures can be repeated. It writes grammatical
English and plausible Python, often without sense: it loses the thread after a sentence or two, repeats itself, makes up
facts and does not follow instructions. Do not use it for anything that matters.

- **Shape**: {layers} layers, hidden {hidden}, {heads} heads of {head_dim} x {head_dim}, MLP {mlp}, convolution of {conv},
  {tied} embeddings, {dtype}; flash-linear-attention's `gated_deltanet` layout.
- **Tokenizer**: byte-level BPE of {vocab:,} tokens, trained on the same text. A text starts from nothing;
  `<|endoftext|>` ends it. Chats are written `<|user|>\\n...<|assistant|>\\n...`.
- **Training**: `benchmarks/specla_mini/train.sh`, on one {device} (torch {torch}), {date}, seed {seed}: {steps:,} steps of
  {batch_size} x {seq_len:,} tokens ({tokens:.0f} M tokens, {epochs:.1f} passes over the weighted corpus of {epoch_tokens:,} tokens), Muon for
  matrices and AdamW for the rest. About {minutes:.0f} minutes at {speed:,} tokens/s, and about {compile_minutes} more to compile; stopped and
  resumed at step {resumed_at_step:,}. Its own chunked, differentiable torch form of the gated delta rule; no other library's kernels.
- **Data**: {data}
- **Drafter**: in `drafter/`, with a card of its own.
- **Licence**: Apache-2.0 for the weights. The training text keeps its own licences (see Data).

## Held-out text

Bits per UTF-8 byte on whole documents that were not trained on, read in windows of {seq_len:,} tokens:

| {names} |
|{dashes}|
| {values} |

![loss](loss.png)

## Ten samples

Temperature {temperature}, top-p {top_p}, seed {sample_seed}, at most {max_tokens} tokens; one draw a prompt, unedited: the prompt, then what the model wrote.

{samples}
"""
DATA = """{corpus:.1f} M tokens of English prose, documentation, Python, C and chats: public-domain books (Standard Ebooks, CC0),
  OpenStax textbooks (CC BY 4.0; access for free at openstax.org), Wikipedia leads and Schema-Guided Dialogue
  (CC BY-SA 4.0), d2l-en and A Byte of Python (CC BY-SA 4.0), GNOME help (CC BY-SA 3.0), African Storybook (CC BY 4.0),
  documentation and source of permissively licensed open-source projects. Every source with its licence is listed in
  `sources.tsv`. Texts that overlap common benchmarks by 13 words were removed before training."""


def main() -> None:
    log = [json.loads(line) for line in LOG.read_text().splitlines()]
    measured = [(row["step"], row["bits_per_byte"]) for row in log if "bits_per_byte" in row]
    run = json.loads(RUN.read_text())
    batch_tokens = run["batch_size"] * run["seq_len"]
    draw(log, measured, batch_tokens)
    llm = LLM(drafter="none")
    config = llm.target.config
    assert isinstance(config, GatedDeltaNetConfig)
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=0, max_tokens=120)
    outputs = llm.generate(list(PROMPTS), params)
    samples = [show(n, output.prompt, output.outputs[0].text) for n, output in enumerate(outputs, 1)]
    final, steps, speed = measured[-1][1], log[-1]["step"], log[-1]["tokens_per_s"]
    tokens = steps * batch_tokens
    card = CARD.format(
        parameters=sum(p.numel() for p in llm.target.parameters()), layers=config.num_hidden_layers,
        hidden=config.hidden_size, heads=config.num_heads, head_dim=config.head_dim, mlp=config.mlp_dim,
        conv=config.conv_size, tied="tied" if config.tie_word_embeddings else "untied",
        dtype=json.loads((BUNDLED_MODEL / "config.json").read_text())["dtype"], vocab=config.vocab_size,
        steps=steps, tokens=tokens / 1e6, epochs=tokens / run["epoch_tokens"], speed=speed,
        minutes=tokens / speed / 60, data=DATA.format(corpus=run["corpus_tokens"] / 1e6), names=" | ".join(final),
        dashes="|".join(["---"] * len(final)), values=" | ".join(f"{value:.3f}" for value in final.values()),
        temperature=params.temperature, top_p=params.top_p, sample_seed=params.seed, max_tokens=params.max_tokens,
        samples="\n\n".join(samples), **run,
    )  # fmt: skip
    (BUNDLED_MODEL / "README.md").write_text(card, encoding="utf-8")


def show(number: int, prompt: str | None, text: str) -> str:
    """One sample: the prompt as a Python string, the continuation as it came."""
    return f"**{number}.** `{prompt!r}`\n\n~~~~text\n{text}\n~~~~"


def draw(log: list[dict[str, Any]], measured: list[tuple[int, dict[str, float]]], batch_tokens: int) -> None:
    figure, left = plt.subplots(figsize=(7, 3.6), dpi=110)
    steps, losses = [row["step"] for row in log], [row["loss"] for row in log]
    smooth = [
        sum(losses[max(0, i - 10) : i + 1]) / len(losses[max(0, i - 10) : i + 1]) for i in range(len(losses))
    ]
    left.plot(steps, losses, color="#c8d6e5", lw=0.8, label="training loss, one batch")
    left.plot(steps, smooth, color="#2e5c8a", lw=1.6, label="mean of 11 logged batches")
    left.set_ylim(2, 4.5)
    left.set_xlabel(f"step ({batch_tokens:,} tokens each)")
    left.set_ylabel("nats a token")
    right = left.twinx()
    right.plot(*zip(*[(step, bits["all"]) for step, bits in measured], strict=True), "o-", color="#c0582b", ms=4,
               label="held-out bits per byte")  # fmt: skip
    right.set_ylim(1.0, 1.5)
    right.set_ylabel("bits a byte")
    lines = [*left.get_lines(), *right.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="upper right")
    for axis in (left, right):
        axis.spines["top"].set_visible(False)
    figure.tight_layout()
    figure.savefig(BUNDLED_MODEL / "loss.png")


if __name__ == "__main__":
    main()
