"""Long texts: read in stretches or at once, drafted for or not, they come to the same, in the memory that docs say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specla import SamplingParams
from specla.drafters import Drafter, NgramDrafter, NoDrafter
from specla.engine.engine import Engine
from specla.engine.params import SpeculativeConfig
from specla.engine.sequence import Sequence
from specla.models import language_model
from specla.models.language_model import LanguageModel
from specla.state import ROWS, StatePool
from specla.tree import Tree
from tests.targets import (
    build_target,
    committed,
    distance,
    equal,
    make_family_config,
    make_target,
    prompt,
    take,
)

LENGTH, NEW, STRETCH = 8000, 24, 192
# bytes of a row of an attention layer that sees the whole text, as in docs/models.md: 8 HKV A, or 4 R of latent rows
ROW_BYTES = {
    "kimi": 4 * (12 + 4),
    "delta_net_hybrid": 8 * 2 * 8,
    "qwen_next": 8 * 2 * 16,
}
HAVE_ATTENTION = [*ROW_BYTES, "gla_hybrid"]  # the last one in a window, hence rows that do not grow
TARGETS = ["plain", "delta_net", "gla", "retnet", "kda", "mamba2", "rwkv7", *HAVE_ATTENTION]


def target_of(variant: str) -> LanguageModel:
    if variant != "kimi":
        return make_target(variant)
    # a layer after attention: its state tells what attention saw
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return build_target(make_family_config("kimi", num_hidden_layers=3, layer_types=kinds))


def decode(
    target: LanguageModel, drafter: Drafter, text: list[int], step: int
) -> tuple[Sequence, list[Tensor], StatePool]:
    """What an engine says after a text that it reads `step` tokens at a time, and what it had committed by then."""
    config = SpeculativeConfig(num_speculative_tokens=7)
    engine = Engine(target, drafter, config, max_num_seqs=1, max_num_batched_tokens=step)
    sequence = engine.add(text, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=5), keep_slot=True)
    engine.admit()
    assert sequence.slot is not None
    read = committed(engine.pool, sequence.slot)
    while engine.has_work:
        engine.step()
    return sequence, read, engine.pool


def foretelling(target: LanguageModel) -> list[int]:
    """A text that says early on, after the same few tokens, what its end will be followed by: there to be looked up.

    What is said there hardly changes what follows thousands of tokens later.
    """
    text = prompt(LENGTH)
    said = decode(target, NoDrafter(), text, LENGTH)[0].output
    text[1000 : 1005 + NEW] = text[-5:] + said
    return text


def decode_at_once(
    target: LanguageModel, text: list[int], patch: pytest.MonkeyPatch
) -> tuple[list[int], list[Tensor]]:
    """The same by hand: the text goes through the layers as a whole, then token by token what the logits prefer."""
    patch.setattr(language_model, "PREFILL_CHUNK", LENGTH)
    pool = target.new_pool(1, 1)
    target.prefill(torch.tensor(text[:-1]), pool.alloc(), pool)
    read, token, said = committed(pool, 0), text[-1], []
    for _ in range(NEW):
        logits = target.verify(torch.tensor([[token]]), Tree([[-1]]), [0], pool)
        take(pool, [0], [[0]])
        said.append(token := int(logits.argmax()))
    return said, read


@pytest.mark.parametrize("variant", TARGETS)
def test_a_text_of_8000_tokens_stays_equal(variant: str, monkeypatch: pytest.MonkeyPatch):
    target = target_of(variant)
    text = foretelling(target)
    plain, read, _ = decode(target, NoDrafter(), text, LENGTH)
    drafter = NgramDrafter(7, 7, 2, max_ngram=6, min_ngram=3)
    drafted, read_in_stretches, pool = decode(target, drafter, text, STRETCH)
    assert drafted.output == plain.output and drafted.logprobs == plain.logprobs
    assert drafted.metrics.num_accepted_draft_tokens > NEW // 2
    assert equal(read_in_stretches, read)

    said, read_at_once = decode_at_once(target, text, monkeypatch)
    assert plain.output == said
    if variant in HAVE_ATTENTION:  # which sums in another order
        assert distance(read, read_at_once) < 1e-4
    else:
        assert equal(read, read_at_once)
    _, last_alone = decode_at_once(target, text[-STRETCH:], monkeypatch)
    assert not equal(last_alone[:2], read[:2]), "what came before the last stretch is to matter"

    _, _, short = decode(target, NoDrafter(), prompt(9), STRETCH)
    rows = 8192 - ROWS if variant in ROW_BYTES else 0  # doubled until the text has room
    assert pool.bytes_per_sequence() == short.bytes_per_sequence() + rows * ROW_BYTES.get(variant, 0)
