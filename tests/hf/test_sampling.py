"""Sampled text follows the distribution of `generate` itself, and no drafter changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specla.hf import Speculative, speculative
from tests.hf.loaded import load_qwen, prompts, qwen, told

PLAIN = {"do_sample": True, "pad_token_id": 0, "top_k": 0}
WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3, "temperature": 1.4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2, "temperature": 1.3},
    "three": {"top_k": 6, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
    "cutoffs": {"typical_p": 0.8, "epsilon_cutoff": 0.02, "eta_cutoff": 0.05, "top_h": 0.6},
    "penalty": {"repetition_penalty": 1.8, "top_p": 0.9},
    "ngrams": {"no_repeat_ngram_size": 1, "temperature": 0.8, "renormalize_logits": True},
}
ROWS, KINDS = 400, 61


def draw(model: Any, setting: Speculative, seed: int, **asked: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    return model.generate(**PLAIN | asked, num_return_sequences=ROWS, custom_generate=setting)


@pytest.mark.parametrize("name", WAYS)
def test_distribution_of_the_second_token(name: str):
    """Of many texts, drafted for by others of them; `generate` gives the exact probabilities of the next token."""
    model, prompt = qwen(), torch.tensor([[3]])
    asked = {"input_ids": prompt, "max_new_tokens": 2} | WAYS[name]
    with told(model, draw(model, speculative, 1, **asked)) as setting:
        texts = torch.cat([draw(model, setting, seed, **asked) for seed in (2, 3)])
    firsts, counts = texts[:, 1].unique(return_counts=True)
    first = firsts[counts.argmax()]
    prefix = torch.cat([prompt, first.view(1, 1)], 1)
    for ids, drawn in ((prompt, texts[:, 1]), (prefix, texts[texts[:, 1] == first, 2])):
        exact = model.generate(
            ids, **PLAIN | WAYS[name], max_new_tokens=1, return_dict_in_generate=True, output_scores=True
        ).scores[0][0].double().softmax(0)  # fmt: skip
        observed = drawn.bincount(minlength=KINDS).double()
        assert observed[exact == 0].sum() == 0
        expected = exact * len(drawn)
        rare = expected < 5
        cells, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (observed, expected))
        wanted = wanted.clamp(min=1e-9)
        statistic, freedom = ((cells - wanted) ** 2 / wanted).sum(), len(cells) - 1
        assert freedom > 1 and statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_no_drafter_changes_a_sampled_text():
    model, asked = qwen("next"), prompts() | {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95}
    torch.manual_seed(5)
    expected = model.generate(**PLAIN | asked, custom_generate=Speculative("none"))
    with told(model, expected, asked["attention_mask"]) as setting:
        torch.manual_seed(5)
        output = model.generate(**PLAIN | asked, custom_generate=setting, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert sum(m.num_accepted_draft_tokens for m in output.metrics) > 10
    torch.manual_seed(5)
    assert torch.equal(model.generate(**PLAIN | asked, custom_generate=speculative), expected)
    assert not torch.equal(model.generate(**PLAIN | asked, custom_generate=speculative), expected)


def test_rows_that_begin_alike_are_drawn_apart():
    text = draw(qwen(), speculative, 1, input_ids=torch.tensor([[3]]), max_new_tokens=6)
    assert len({tuple(row) for row in text.tolist()}) > ROWS * 0.9


def test_greedy_text_draws_nothing():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    qwen().generate(**prompts(), max_new_tokens=4, pad_token_id=0, custom_generate=speculative)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_logits_that_are_not_finite():
    model = load_qwen("dense")
    with torch.no_grad():
        model.lm_head.weight[4] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        model.generate(**prompts(), **PLAIN, max_new_tokens=4, custom_generate=speculative)
    with torch.no_grad():
        model.lm_head.weight[4] = 0.0
    assert model.generate(**prompts(), **PLAIN, max_new_tokens=4, custom_generate=speculative).shape[1] == 16
