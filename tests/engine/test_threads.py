"""Exactness in the shapes and with the threads that people run: specla-mini's width, two threads."""

from __future__ import annotations

import pytest
import torch

from specla.engine.params import SamplingParams
from tests.targets import ScriptedDrafter, build_target, make_config, prompt, run, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_threads_change_no_bit_between_plain_and_speculative_decoding(dtype: torch.dtype) -> None:
    config = make_config(
        hidden_size=384, num_heads=6, head_dim=64, intermediate_size=704, initializer_range=0.05
    )
    target = build_target(config, dtype)
    prompts = [prompt(20), prompt(7, seed=1)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = run(target, None, prompts, params)
        scripted = ScriptedDrafter(seed=2, right=0.8, idle=0.1)
        got = run(target, scripted, prompts, params, references=want.tokens)
    finally:
        torch.set_num_threads(before)
    assert got.outputs == want.outputs
    assert all(same_bits(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    assert sum(s.metrics.num_accepted_draft_tokens for s in got.sequences) > 10
