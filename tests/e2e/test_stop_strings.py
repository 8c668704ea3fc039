"""A stop string ends the text in the same place whatever was drafted, also inside an accepted block."""

from __future__ import annotations

from pathlib import Path

import pytest

from specla import LLM, SamplingParams
from tests.checkpoints import save_checkpoint

WARM = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory)
    return directory


@pytest.mark.parametrize("rate", [0.0, 0.8, 1.0])
def test_a_stop_string_cuts_wherever_the_blocks_end(checkpoint: Path, rate: float) -> None:
    """For many substrings of one text."""
    settings = {"num_speculative_tokens": 6, "num_steps": 6, "topk": 1, "synthetic_acceptance_rate": rate}
    plain = LLM(checkpoint, drafter="none", dtype="float32")
    drafting = LLM(checkpoint, drafter="synthetic", speculative_config=settings, dtype="float32")
    whole = plain.generate("the cat", SamplingParams(**WARM))[0].outputs[0]
    text, cut = whole.text, 0
    for start in range(3, len(text) - 3, 5):
        stop = text[start : start + 3]
        params = SamplingParams(**WARM, stop=["no such", stop])
        for model in (plain, drafting):
            completion = model.generate("the cat", params)[0].outputs[0]
            assert completion.text == text[: text.find(stop)]
            assert completion.finish_reason == "stop"
            count = len(completion.token_ids)
            assert completion.token_ids == whole.token_ids[:count]
            # the last token, and none before it, completes the stop string
            assert stop not in "".join(whole.pieces[: count - 1])
            assert stop in "".join(whole.pieces[:count])
        cut += completion.from_draft[-1]
    assert (cut > 0) == (rate > 0), "a stop inside an accepted block"
