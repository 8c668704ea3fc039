"""Acceptance of several drafters as chains of 8 on the same greedy texts, from one pass over each text.

A chain is right for as long as its drafts are what the target says, so the text alone tells how each round would have
ended; the same figures come out as from decoding (`acceptance.py`), in a hundredth of the time.

    python benchmarks/specla_mini/objectives.py PROMPTS OUT.json DRAFTER [DRAFTER ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from specla import LLM, SamplingParams
from specla.bench.prompts import read_prompts
from specla.drafters.checkpoint import load_drafter
from specla.drafters.network import Eagle
from specla.models.target import Tap
from specla.train.objectives import chain_matches

CHAIN, NEW_TOKENS, BATCH = 8, 128, 8


@torch.no_grad()
def rounds(llm: LLM, network: Eagle, prompt: list[int], text: list[int]) -> list[int]:
    """Accepted drafts of each round."""
    tokens = torch.tensor([prompt + text])
    streams: list[torch.Tensor] = []
    llm.target(tokens[:, :-1], tap=Tap(network.config.layer_ids, streams.append))
    right = chain_matches(network, tokens, streams[0], CHAIN).cumprod(0).sum(0)[0].tolist()
    counts, root = [], len(prompt) - 1
    while root < tokens.shape[1] - 1:
        counts.append(right[root - 1] if root else 0)
        root += counts[-1] + 1
    return counts


def main() -> None:
    prompts_file, out, *drafters = sys.argv[1:]
    prompts = [prompt.prompt for prompt in read_prompts(prompts_file)]
    llm = LLM(drafter="none")
    params = SamplingParams(max_tokens=NEW_TOKENS)
    texts = []
    for first in range(0, len(prompts), BATCH):
        outputs = llm.generate(prompts[first : first + BATCH], params)
        texts += [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    result = []
    for drafter in drafters:
        network = load_drafter(drafter, llm.target)
        counts = [rounds(llm, network, prompt, text) for prompt, text in texts]
        lengths = [len(text) / len(each) for (_, text), each in zip(texts, counts, strict=True)]
        every = [count for each in counts for count in each]
        row = {
            "drafter": Path(drafter).name,
            "acceptance_length": round(sum(lengths) / len(lengths), 3),  # mean over prompts
            "first_token_match": round(sum(count > 0 for count in every) / len(every), 4),
        }
        result.append(row)
        print(json.dumps(row), flush=True)
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
