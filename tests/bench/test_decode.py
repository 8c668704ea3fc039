"""What is timed of prompts that are decoded together."""

from __future__ import annotations

import pytest

import specla.bench.decode as decode
from specla.bench.decode import decode_batch
from specla.drafters import NoDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams
from tests.targets import make_target, prompt

PROMPTS = [prompt(n, n) for n in (9, 3, 5, 1)]


@pytest.mark.parametrize(("places", "read_in_time"), [(4, 0), (3, 1), (1, 3)])
def test_reading_is_timed_of_those_that_wait_for_a_place(
    monkeypatch: pytest.MonkeyPatch, places: int, read_in_time: int
) -> None:
    """On a clock that goes on by one with every look at it."""
    looks = iter(range(10**6))
    monkeypatch.setattr(decode.time, "perf_counter", lambda: float(next(looks)))
    engine = Engine(make_target("plain"), NoDrafter(), max_num_seqs=places)
    params = [SamplingParams(max_tokens=4, ignore_eos=True)] * len(PROMPTS)
    decoded = decode_batch(engine, PROMPTS, params)
    assert decoded.reading == read_in_time < decoded.seconds
