"""Acceptance of drafters on a file of prompts: greedy and at temperature 1, as chains of 8 and trees of 16.

Every text is checked against plain decoding's. Prompts run in batches; nothing here depends on the machine's speed.

    python benchmarks/specla_mini/acceptance.py [--greedy] PROMPTS OUT.json DRAFTER [DRAFTER ...]

A drafter is a directory or `ngram`. First-token match: share of rounds that accept at least one draft.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from specla import LLM, SamplingParams
from specla.bench.generate import repeated_share
from specla.bench.prompts import read_prompts
from specla.engine.outputs import RequestOutput

WAYS = (
    ("chain 8", {"num_speculative_tokens": 8, "topk": 1}, 0.0),
    ("tree 16", {"num_speculative_tokens": 16, "topk": 4}, 0.0),
    ("tree 16, temperature 1", {"num_speculative_tokens": 16, "topk": 4}, 1.0),
)
BATCH, NEW_TOKENS, SEED = 8, 128, 0


def run(llm: LLM, prompts: list[str], temperature: float) -> list[RequestOutput]:
    params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, seed=SEED)
    outputs: list[RequestOutput] = []
    for first in range(0, len(prompts), BATCH):
        outputs += llm.generate(prompts[first : first + BATCH], params)
    return outputs


def figures(outputs: list[RequestOutput]) -> dict[str, Any]:
    lengths = [output.metrics.acceptance_length for output in outputs]
    rounds = sum(output.metrics.num_spec_steps for output in outputs)
    idle = sum(output.metrics.acceptance_histogram[0] for output in outputs)
    return {
        "acceptance_length": round(sum(lengths) / len(lengths), 3),  # mean over prompts
        "acceptance_length_of_all_rounds": round(
            sum(len(output.outputs[0].token_ids) for output in outputs) / rounds, 3
        ),
        "first_token_match": round(1 - idle / rounds, 4),
    }


def main() -> None:
    greedy = "--greedy" in sys.argv
    prompts_file, out, *drafters = (word for word in sys.argv[1:] if word != "--greedy")
    ways = [way for way in WAYS if way[2] == 0 or not greedy]
    prompts = [prompt.prompt for prompt in read_prompts(prompts_file)]
    result: dict[str, Any] = {"prompts": Path(prompts_file).name, "num_prompts": len(prompts), "runs": []}
    plain: dict[float, list[list[int]]] = {}
    for temperature in sorted({temperature for *_, temperature in ways}):
        texts = [output.outputs[0].token_ids for output in run(LLM(drafter="none"), prompts, temperature)]
        plain[temperature] = texts
        shares = [repeated_share(text) for text in texts]
        result[f"repeated_8grams_at_temperature_{temperature:g}"] = round(sum(shares) / len(shares), 3)
    for drafter in drafters:
        for name, config, temperature in ways:
            outputs = run(LLM(drafter=drafter, speculative_config=config), prompts, temperature)
            assert [output.outputs[0].token_ids for output in outputs] == plain[temperature], "tokens differ"
            row = {"drafter": drafter, "way": name, **figures(outputs)}
            result["runs"].append(row)
            print(json.dumps(row), flush=True)
        Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
