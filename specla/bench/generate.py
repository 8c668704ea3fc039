"""End-to-end speed of several ways to draft on one loaded target, in one process and in turns.

Every way must give the tokens of plain decoding. A speed from a run whose tokens differ is refused: the figures of
that way are left out and the error says where the tokens part.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specla.bench.prompts import BenchPrompt
from specla.drafters import SyntheticDrafter
from specla.drafters.network import DraftNetwork
from specla.engine.choice import make_engine
from specla.engine.drafting import make_drafter
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.target import Target


class UnrepeatableError(RuntimeError):
    """Plain decoding gave other tokens for the same prompts, so there is nothing to compare with."""


class UnavailableError(RuntimeError):
    """A way to decode that cannot be taken here; the message says why."""


SNAPSHOTS, COMMIT, LIBRARY = "dense snapshots", "separate commit", "flash-linear-attention"
BASELINES = (SNAPSHOTS, COMMIT, LIBRARY)  # where `table` compares whole rounds


@dataclass(frozen=True)
class Way:
    """One way to decode: a drafter, by name or with its network, and how much it may draft.

    baseline: one of BASELINES, for the table alone; None: rounds are the engine's.
    """

    name: str
    drafter: str | DraftNetwork
    config: SpeculativeConfig
    baseline: str | None = None


def drafter_name(way: Way) -> str:
    """What drafts: with "auto", a trained drafter leaves what the text repeats to lookup."""
    if isinstance(way.drafter, str):
        return way.drafter
    return f"{way.drafter.name}+ngram" if way.config.num_speculative_tokens == "auto" else way.drafter.name


def plain_way(verify: str = "auto") -> Way:
    return Way("plain", "none", SpeculativeConfig(num_speculative_tokens=0, verify=verify))


def default_ways(verify: str = "auto", network: DraftNetwork | None = None) -> list[Way]:
    """What a benchmark compares with plain decoding when nothing else is asked for; `network`: the target's drafter."""

    def config(tokens: int | str, topk: int, rate: float | None = None) -> SpeculativeConfig:
        return SpeculativeConfig(tokens, 8, topk, verify=verify, synthetic_acceptance_rate=rate)

    trained = [] if network is None else [
        Way(f"{network.name} chain 8", network, config(8, 1)),
        Way(f"{network.name} tree 16", network, config(16, 4)),
        Way(f"{network.name}+ngram auto", network, config("auto", 4)),
    ]  # fmt: skip
    return [
        *trained,
        Way("ngram chain 8", "ngram", config(8, 1)),
        Way("ngram tree 16", "ngram", config(16, 4)),
        Way("ngram auto", "ngram", config("auto", 4)),
        Way("synthetic chain 8 at 0.8", "synthetic", config(8, 1, 0.8)),
    ]


@dataclass
class BatchRun:
    """One batch of prompts decoded once. The first round, which holds the prefill, is not in `seconds`."""

    outputs: list[list[int]]
    tokens: int  # decoded in `seconds`
    seconds: float
    rounds: int  # over all sequences, the first included
    drafted: int
    accepted: int
    histogram: Counter[int]
    round_seconds: list[float] = field(default_factory=list)  # of each round in `seconds`


@dataclass
class WayRuns:
    """All runs of one way: by batch of prompts, then by repeat."""

    way: Way
    runs: list[list[BatchRun]] = field(default_factory=list)
    difference: dict[str, Any] | None = None  # where the tokens first parted from plain decoding's


def measure(
    target: Target,
    batches: Sequence[Sequence[tuple[BenchPrompt, list[int]]]],
    ways: Sequence[Way],
    params: SamplingParams,
    repeat: int,
    verify: str = "auto",
) -> list[WayRuns]:
    """Decode every batch in every way `repeat` times, plainly first; ways alternate within a repeat.

    Returns:
        plain decoding, then `ways` in the order given. A way whose tokens differ is not run again.

    Raises:
        UnrepeatableError: when the repeats of plain decoding differ among themselves.
    """
    everything = [WayRuns(way) for way in (plain_way(verify), *ways)]
    plain = everything[0]
    for number, batch in enumerate(batches):
        prompts = [ids for _, ids in batch]
        for each in everything:
            each.runs.append([])
        for again in range(repeat):
            for each in everything:
                if each.difference is not None:
                    continue
                references = plain.runs[-1][0].outputs if each is not plain else None
                run = decode(target, each.way, prompts, params, references, number)
                each.runs[-1].append(run)
                each.difference = _difference(batch, plain.runs[-1][0].outputs, run.outputs)
                if each is plain and each.difference is not None:
                    raise UnrepeatableError(
                        "plain decoding differs from itself: repeat {} of prompt {prompt} from token {token} on".format(
                            again + 1, **each.difference
                        )
                    )
    return everything


def decode(
    target: Target,
    way: Way,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    references: Sequence[list[int]] | None = None,
    number: int = 0,
) -> BatchRun:
    """Decode one batch; the synthetic drafter drafts from `references`, the outputs of plain decoding.

    `number` is the batch's own: its repeats draw the same drafts, other batches draw others.
    """
    assert way.baseline is None, "baselines are the table's"
    seed = ((params.seed or 0) << 20) + number
    drafter = make_drafter(way.drafter, way.config, target.config.vocab_size, seed, len(prompts))
    engine = make_engine(target, drafter, way.config, max_num_seqs=len(prompts))
    engine.prepare(params)
    sequences = [engine.add(ids, params) for ids in prompts]
    if isinstance(drafter, SyntheticDrafter):
        assert references is not None
        for sequence, prompt, output in zip(sequences, prompts, references, strict=True):
            drafter.references[sequence.key] = [*prompt, *output]
    engine.admit()
    engine.step()
    before = sum(len(sequence.output) for sequence in sequences)
    marks = [time.perf_counter()]
    while engine.has_work:
        engine.step()
        marks.append(time.perf_counter())
    metrics = [sequence.metrics for sequence in sequences]
    return BatchRun(
        outputs=[sequence.output for sequence in sequences],
        tokens=sum(len(sequence.output) for sequence in sequences) - before,
        seconds=marks[-1] - marks[0],
        rounds=sum(m.num_spec_steps for m in metrics),
        drafted=sum(m.num_draft_tokens for m in metrics),
        accepted=sum(m.num_accepted_draft_tokens for m in metrics),
        histogram=sum((m.accepted_per_round for m in metrics), Counter()),
        round_seconds=[b - a for a, b in itertools.pairwise(marks)],
    )


def figures(runs: WayRuns, plain: WayRuns, batches: Sequence[int]) -> dict[str, Any]:
    """The figures of one way over some batches (given by number), JSON-ready.

    The time of a batch is the median of its repeats, so that a moment in which the machine did something else costs
    nothing; counts (rounds, tokens, accepted drafts) are sums over all repeats.
    """
    way, config = runs.way, runs.way.config
    result: dict[str, Any] = {
        "name": way.name, "drafter": drafter_name(way),
        "num_speculative_tokens": config.num_speculative_tokens,
        "num_steps": config.num_steps, "topk": config.topk, "verify": config.verify,
        "synthetic_acceptance_rate": config.synthetic_acceptance_rate,
    }  # fmt: skip
    if runs.difference is not None:
        return result | {"identical": False, "first_difference": runs.difference}
    mine, theirs = ([each.runs[b] for b in batches] for each in (runs, plain))
    rate, plain_rate = _rate(mine), _rate(theirs)
    every = [run for repeats in mine for run in repeats]
    tokens = sum(len(output) for run in every for output in run.outputs)
    drafted = sum(run.drafted for run in every)
    rounds = sum(run.rounds for run in every)
    histogram = sum((run.histogram for run in every), Counter[int]())
    steps = [seconds for run in every for seconds in run.round_seconds]
    repeats = [_rate([[each[r]] for each in mine]) for r in range(len(mine[0]))]
    return result | {
        "identical": True,
        "tokens_per_s": rate and round(rate, 2),
        "tokens_per_s_of_each_repeat": [each and round(each, 2) for each in repeats],
        "speedup": round(rate / plain_rate, 3) if rate and plain_rate else None,
        "acceptance_length": round(tokens / rounds, 3),
        "first_token_match": round(1 - histogram[0] / rounds, 3),
        "acceptance_rate": round(sum(run.accepted for run in every) / drafted, 3) if drafted else None,
        "acceptance_histogram": [histogram[n] for n in range(max(histogram) + 1)],
        "median_round_ms": round(1000 * median(steps), 3) if steps else None,
        "rounds": rounds,
        "tokens": tokens,
    }


def repeated_share(tokens: Sequence[int], size: int = 8) -> float:
    """Share of the n-grams of `size` tokens that stood earlier in the same text: how much lookup could gain."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _rate(batches: Sequence[Sequence[BatchRun]]) -> float | None:
    """Tokens a second over batches, each with its repeats; None when every sequence ended in its first round."""
    timed = [repeats for repeats in batches if repeats[0].tokens]
    if not timed:
        return None
    seconds = sum(
        median(run.seconds / run.tokens for run in repeats) * repeats[0].tokens for repeats in timed
    )
    return sum(repeats[0].tokens for repeats in timed) / seconds


def _difference(
    batch: Sequence[tuple[BenchPrompt, list[int]]], wanted: list[list[int]], got: list[list[int]]
) -> dict[str, Any] | None:
    for (prompt, _), ours, theirs in zip(batch, got, wanted, strict=True):
        if ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            return {"prompt": prompt.id, "token": at}
    return None
