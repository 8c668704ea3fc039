"""An engine whose prompts and rounds all go through graphs, as on a GPU, does what the engine on the host does."""

from __future__ import annotations

import copy
from functools import partial

import pytest

from specla.drafters import EagleDrafter
from specla.engine import resident
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.resident import eagle
from specla.resident.prompt import Prompts
from tests.resident import DEVICE
from tests.resident.test_eagle import make_network
from tests.targets import make_target

LENGTHS = (4, 16)  # of buckets
TEXTS = [[7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [4], [9, 3, 1, 7]]
PARAMS = [
    SamplingParams(max_tokens=3, temperature=1.0, seed=3),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=5, num_speculative_tokens=1),
    SamplingParams(max_tokens=2, temperature=0.7, seed=3),
]


@pytest.mark.usefixtures("recorded")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU always does so")
def test_prompts_and_rounds_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (resident, eagle):
        monkeypatch.setattr(module, "takes_prompt", lambda state: True)
    monkeypatch.setattr(resident, "Prompts", partial(Prompts, lengths=LENGTHS))
    monkeypatch.setattr(eagle, "LENGTHS", LENGTHS)
    config = SpeculativeConfig(num_speculative_tokens=2, num_steps=2, topk=2)
    outputs, counts = [], []
    for kind in (Engine, ResidentEngine):
        drafter = EagleDrafter(make_network(), 2, 2, 2, max_num_seqs=2)
        engine = kind(copy.deepcopy(make_target("plain")), drafter, config, 2)
        sequences = [engine.add(text, params) for text, params in zip(TEXTS, PARAMS, strict=True)]
        while engine.has_work:
            engine.step()
        outputs.append([(sequence.output, sequence.finish_reason) for sequence in sequences])
        counts.append([(s.metrics.num_draft_tokens, s.metrics.accepted_per_round) for s in sequences])
    assert outputs[0] == outputs[1] and counts[0] == counts[1]
    assert isinstance(engine, ResidentEngine) and engine.captures.count > len(LENGTHS)
