"""Prompts decoded together, timed without captures of graphs and without the reading of the first prompts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

import torch

from specla.bench.generate import UnrepeatableError
from specla.drafters import SyntheticDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams

MOST_RUNS = 12  # of one batch, those included that capture graphs


class Decoded(NamedTuple):
    """Prompts decoded; seconds, rates and rounds are medians of the repeats, all else is the last one's.

    steady_rate: tokens a second as long as there is a sequence for every place. rounds: of the engine; steps: of all
    sequences. alike: whether all runs gave the same tokens, those that captured included. reading: those of the seconds
    in which prompts were read.
    """

    outputs: list[list[int]]
    seconds: float
    steady_rate: float
    rounds: int
    steps: int
    drafted: int = 0
    accepted: int = 0
    histogram: Counter[int] = Counter()  # noqa: RUF012
    alike: bool = True
    reading: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a sequence took in a round."""
        return sum(map(len, self.outputs)) / self.steps


def decode_batch(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    repeat: int = 1,
    references: Sequence[list[int]] = (),
    first: int = 0,
) -> Decoded:
    """Decode prompts together, again until `repeat` runs needed no new graphs.

    Those beyond the engine's places wait for one, and are read in the time that is taken.

    Args:
        references: what plain decoding gives, for a drafter that is told. first: number of the first prompt, with which
            its luck differs.

    Raises:
        UnrepeatableError: when every run needs new graphs.
    """
    runs: list[Decoded] = []
    texts: list[list[list[int]]] = []
    for _ in range(MOST_RUNS):
        before = _prepared(engine)
        engine.num_requests = first  # the same drafts each time
        sequences = [engine.add(ids, p) for ids, p in zip(prompts, params, strict=True)]
        if isinstance(engine.drafter, SyntheticDrafter):
            for sequence, output in zip(sequences, references, strict=True):
                engine.drafter.references[sequence.key] = [*sequence.tokens, *output]
        engine.admit()
        places = len(engine.running)
        if engine.pool.device.type == "cuda":
            torch.cuda.synchronize(engine.pool.device)
        spans: list[tuple[Any, Any]] = []
        start, rounds, rate = time.perf_counter(), 0, 0.0
        while engine.has_work:
            full = len(engine.running) == places or bool(engine.waiting)
            if engine.waiting and engine.pool.num_free:
                begun = _now(engine)
                engine.admit()
                spans.append((begun, _now(engine)))
            engine.step()
            rounds += 1
            if full:
                seconds = max(time.perf_counter() - start, 1e-9)
                rate = sum(len(sequence.output) for sequence in sequences) / seconds
        seconds = time.perf_counter() - start
        texts.append([sequence.output for sequence in sequences])
        metrics = [sequence.metrics for sequence in sequences]
        if _prepared(engine) == before:
            runs.append(Decoded(
                texts[-1], seconds, rate, rounds, sum(m.num_spec_steps for m in metrics),
                sum(m.num_draft_tokens for m in metrics), sum(m.num_accepted_draft_tokens for m in metrics),
                sum((m.accepted_per_round for m in metrics), Counter()), reading=sum(_seconds(*span) for span in spans),
            ))  # fmt: skip
        if len(runs) == repeat:
            break
    else:
        raise UnrepeatableError("a batch that is decoded again needs new graphs again and again")
    return runs[-1]._replace(
        seconds=median(run.seconds for run in runs), steady_rate=median(run.steady_rate for run in runs),
        rounds=median_low(run.rounds for run in runs), alike=all(text == texts[0] for text in texts),
        reading=median(run.reading for run in runs),
    )  # fmt: skip


def _now(engine: Engine) -> Any:
    """A moment: on a GPU when it is done with all that it was given before."""
    device = engine.pool.device
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(start: Any, end: Any) -> float:
    """Between two moments."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _prepared(engine: Engine) -> int:
    """Graphs that an engine has, 0 where it needs none."""
    captures = getattr(engine, "captures", None)
    return 0 if captures is None else captures.count
