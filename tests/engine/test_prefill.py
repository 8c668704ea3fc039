"""Reading a prompt in pieces, at once, or token by token comes to the same state, in bounded memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specla.models import language_model, past
from specla.models.gated_deltanet import GatedDeltaNet
from specla.ops import chunk
from specla.state import StatePool
from specla.tree import Tree
from tests.targets import (
    FAMILY,
    FURTHER,
    QWEN,
    VARIANTS,
    committed,
    distance,
    equal,
    make_target,
    prompt,
    read_one_by_one,
    take,
)


def prefilled(target: GatedDeltaNet, pieces: list[list[int]]) -> StatePool:
    pool = target.new_pool(1, 4)
    for piece in pieces:
        target.prefill(torch.tensor(piece), 0, pool)
    return pool


@pytest.mark.parametrize("variant", [*VARIANTS, *QWEN, *FAMILY, *FURTHER])
def test_a_prefill_equals_reading_token_by_token(variant: str) -> None:
    target = make_target(variant, torch.float64)
    text = prompt(75)
    decoded = target.new_pool(1, 4)
    read_one_by_one(target, text, decoded, 0)
    pool = prefilled(target, [text])
    assert pool.length == decoded.length == [75]
    assert distance(committed(pool, 0), committed(decoded, 0)) < 1e-10
    other = prefilled(target, [[*text[:-1], (text[-1] + 1) % 40]])
    assert distance(committed(pool, 0), committed(other, 0)) > 1e-3  # one wrong token shows


@pytest.mark.parametrize(
    "variant",
    [
        "grouped_wide",
        "conv_2",
        "no_conv",
        "hybrid_global",
        "hybrid_window",
        "qwen_next",
        "gla_conv",
        "retnet",
        *FURTHER,
    ],
)
def test_a_prefill_in_stretches_equals_one_in_one_piece(variant: str) -> None:
    target = make_target(variant, torch.float64)
    text = prompt(151)
    whole = committed(prefilled(target, [text]), 0)
    for cuts in ([1, 2], [64], [63, 65, 128], [150], [3, 4, 5, 6, 7, 140]):
        edges = [0, *cuts, len(text)]
        pieces = [text[a:b] for a, b in pairwise(edges)]
        assert distance(committed(prefilled(target, pieces), 0), whole) < 1e-10


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((name, torch.float64) for name in ("plain", "hybrid_two_kinds", "mamba2", "kda", "kimi")),
     ("plain", torch.float32), ("hybrid_two_kinds", torch.float32)],
)  # fmt: skip
def test_prompts_of_1_to_600_tokens(variant: str, dtype: torch.dtype) -> None:
    """Across the chunks of the rule (64) and of the prefill (512), one slot for all."""
    target = make_target(variant, dtype)
    text = prompt(601)
    decoded = target.new_pool(1, 4)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-3
    done = 0
    for length in (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 511, 512, 513, 600):
        read_one_by_one(target, text[done:length], decoded, 0)
        done = length
        pool = prefilled(target, [text[:length]])
        assert pool.length == [length]
        assert distance(committed(pool, 0), committed(decoded, 0)) < tolerance, length


def test_a_prefill_after_drafts_first_commits_what_is_pending() -> None:
    target = make_target("hybrid_window", torch.float64)
    text = prompt(40)
    pool = target.new_pool(1, 4)
    target.prefill(torch.tensor(text[:10]), 0, pool)
    read_one_by_one(target, text[10:12], pool, 0)
    target.verify(torch.tensor([text[12:16]]), Tree.chain(4), [0], pool)
    take(pool, [0], [[0, 1, 2, 3]])
    target.prefill(torch.tensor(text[16:]), 0, pool)
    assert pool.length == [40]
    assert distance(committed(pool, 0), committed(prefilled(target, [text]), 0)) < 1e-10


def test_the_stretch_length_bounds_memory_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a prefill has a row for each token of the prompt, however long the prompt."""
    target = make_target("plain", torch.float64)
    text = prompt(900)
    whole = committed(prefilled(target, [text]), 0)
    monkeypatch.setattr(language_model, "PREFILL_CHUNK", 96)
    largest = Largest()
    with largest:
        pool = prefilled(target, [text])
    assert distance(committed(pool, 0), whole) < 1e-10
    long = Largest()
    with long:
        prefilled(target, [prompt(2000)])
    assert long.numel == largest.numel


def test_a_prefill_does_not_loop_over_tokens() -> None:
    """Operations grow with the number of chunks: a further token costs less than one in each of three layers."""
    target = make_target("hybrid_two_kinds")
    counts = {}
    for length in (65, 128, 500):
        with Largest() as seen:
            prefilled(target, [prompt(length)])
        counts[length] = seen.operations
    assert counts[128] - counts[65] < 128 - 65  # as many chunks
    assert counts[500] - counts[128] < 3 * (500 - 128)


class Largest(TorchDispatchMode):
    """Counts operations and keeps the size of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.operations += 1
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return made


@pytest.mark.parametrize("variant", ["plain", "hybrid_global", *FURTHER])
def test_the_text_form_gives_the_logits_of_decoding(variant: str) -> None:
    """What training computes is what inference computes."""
    target = make_target(variant, torch.float64)
    text = prompt(130)
    pool = target.new_pool(1, 4)
    decoded = read_one_by_one(target, text, pool, 0)
    with torch.inference_mode():
        trained = target.logits(target(torch.tensor([text])))[0]
    assert float((trained - decoded).abs().max()) < 1e-9


def test_a_prefill_of_the_same_text_gives_the_same_bits() -> None:
    target = make_target("grouped")
    first, second = (prefilled(target, [prompt(170)]) for _ in range(2))
    assert equal(committed(first, 0), committed(second, 0))


@pytest.mark.parametrize("variant", ["plain", "grouped_wide", "no_conv"])
def test_a_prompt_read_by_kernels_leaves_the_same_state(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    target, text, reads = make_target(variant), prompt(75), 0
    want = prefilled(target, [text])

    def launched(*args: torch.Tensor) -> torch.Tensor:
        nonlocal reads
        reads += 1
        return chunk.launch(*args)

    assert not chunk.takes(want.layers[0].state, None)  # on a CPU plain torch reads
    monkeypatch.setattr(past, "takes_prompt", lambda *args: True)
    monkeypatch.setattr(past, "launch_prompt", launched)
    monkeypatch.setattr(language_model, "PREFILL_CHUNK", 40)
    got = prefilled(target, [text])
    assert reads == 2 * target.config.num_hidden_layers
    assert distance(committed(got, 0), committed(want, 0)) < 1e-4
