"""Many ways to decode on one target, by batch, temperature and suite of prompts, in pieces that can be taken up again.

The pieces are in the order of their worth, for a run that ends early: greedy decoding at the first batch size, the
curve, the other batch sizes from the largest down, then the higher temperatures, then the parts of a round. An engine
is made once for a piece, a way at a batch size and temperature, and every suite runs on it. What differs from plain
decoding's tokens is counted and told, not refused: modes that sum in another order may differ.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch

from specla.bench.decode import decode_batch
from specla.bench.generate import (
    COMMIT,
    LIBRARY,
    SNAPSHOTS,
    UnavailableError,
    Way,
    drafter_name,
    plain_way,
    repeated_share,
)
from specla.bench.pieces import Table
from specla.drafters import SyntheticDrafter
from specla.drafters.network import Eagle
from specla.engine.choice import make_engine
from specla.engine.drafting import make_drafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.gated_deltanet import GatedDeltaNet

Suites = dict[str, list[list[int]]]


@dataclass(frozen=True)
class TableSettings:
    """What is measured.

    Args:
        batches: sequences that run together. per_suite: prompts of a suite, one number for all batch sizes or one for
            each, and at least as many as the batch. One by one they are timed alone; otherwise they queue for the
            batch's places, and those that wait are read in the time that is taken.
        max_tokens: new tokens of each; the end of a text is ignored. repeat: runs of each batch; times are medians.
        tree_steps, topk: depth and width of trees. prune_threshold: of pruned ones.
        rates, drafts: of the curve, largest first, at the first batch size and the lowest temperature, on the first
            suite.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    per_suite: tuple[int, ...] = (16,)
    max_tokens: int = 256
    repeat: int = 1
    seed: int = 0
    tree_steps: int = 8
    topk: int = 4
    prune_threshold: float = 3.0
    rates: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
    drafts: tuple[int, ...] = (4, 8, 16)

    def __post_init__(self) -> None:
        for name in ("repeat", "tree_steps", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.per_suite) not in (1, len(self.batches)) or min(self.per_suite) < 1:
            raise ValueError(
                f"per_suite must be one number of at least 1 or one for each of {len(self.batches)} batch sizes, "
                f"got {list(self.per_suite)}"
            )
        if self.max_tokens < 2 or not self.batches or min(self.batches) < 1 or not self.temperatures:
            raise ValueError("expected max_tokens of at least 2, batches of at least 1, and a temperature")

    def prompts(self, batch: int) -> int:
        """How many of a suite at this batch size."""
        each = dict(zip(self.batches, self.per_suite, strict=len(self.per_suite) > 1))
        return each.get(batch, self.per_suite[0])


def table_ways(settings: TableSettings, network: Eagle | None) -> list[Way]:
    """Plain decoding first, baselines last; `network` is the target's trained drafter, if it has one."""

    def tree(mode: str, prune: float | None = None) -> SpeculativeConfig:
        return SpeculativeConfig(15, settings.tree_steps, settings.topk, prune, mode)

    chain = SpeculativeConfig(8, 8, 1)
    ngram = Way("ngram chain 8", "ngram", chain)
    if network is None:
        return [plain_way(), Way("auto", "ngram", SpeculativeConfig()), ngram]
    return [
        plain_way(),
        Way("chain 8", network, chain),
        Way("tree 16", network, tree("auto")),
        Way("tree 16, pruned", network, tree("auto", settings.prune_threshold)),
        Way("auto", network, SpeculativeConfig()),
        ngram,
        *(Way(f"tree 16, {mode}", network, tree(mode)) for mode in ("serial", "hybrid", "parallel")),
        Way(f"tree 16, {SNAPSHOTS}", network, tree("auto"), SNAPSHOTS),
        Way(f"tree 16, {COMMIT}", network, tree("auto"), COMMIT),
        Way(f"chain 8, {LIBRARY}", network, chain, LIBRARY),
    ]


def measure_table(
    target: GatedDeltaNet,
    network: Eagle | None,
    suites: Suites,
    settings: TableSettings,
    table: Table,
    *,
    progress: TextIO | None = None,
    over: Callable[[], bool] = lambda: False,
) -> bool:
    """Fill the table and the curve; False when it was `over` before the end, which is asked between pieces."""
    first, *rest = settings.batches
    batches, (lowest, *higher) = [first, *sorted(rest, reverse=True)], sorted(settings.temperatures)

    def rows(batches: list[int], heat: float) -> bool:
        return all(
            _measure_batch(target, network, batch, heat, suites, settings, table, progress, over)
            for batch in batches
        )

    return (
        rows([first], lowest)
        and measure_curve(target, suites, settings, table, progress=progress, over=over)
        and rows(batches[1:], lowest)
        and all(rows(batches, heat) for heat in higher)
        and measure_parts(target, network, settings, table, progress=progress, over=over)
    )


def _measure_batch(
    target: GatedDeltaNet, network: Eagle | None, batch: int, heat: float, suites: Suites, settings: TableSettings,
    table: Table, progress: TextIO | None, over: Callable[[], bool],
) -> bool:  # fmt: skip
    """All ways at one batch size and temperature; False when it was `over` before the end."""
    for way in table_ways(settings, network):
        piece = {"batch": batch, "temperature": heat, "way": way.name}
        if table.settled("rows", **piece):
            continue
        if over():
            return False

        def measured(way: Way = way) -> list[dict[str, Any]]:
            engine = _engine(target, way, batch, settings.seed)
            return [
                _measure_cell(engine, way, suite, prompts, heat, batch, settings, table)
                for suite, prompts in suites.items()
            ]

        _tell(progress, _keep(table, "rows", piece, way.baseline, measured, progress))
    return True


def _keep(
    table: Table, part: str, piece: dict[str, Any], baseline: str | None,
    measured: Callable[[], list[dict[str, Any]]], progress: TextIO | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of a piece, by now in the table; none where a baseline cannot run, or fails, which is told there."""
    try:
        rows = measured()
    except UnavailableError as error:
        why, failed = str(error), False
    except Exception as error:  # others' kernels do not end the measurement of ours
        if baseline is None:
            raise
        why, failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", True
    else:
        table.unskip(part, piece)
        table.add(part, rows)
        return rows
    table.skip(part, piece, why, failed=failed)
    if progress is not None:
        told = "failed" if failed else "skipped"
        print(f"B={piece['batch']:<3} {piece['way']}: {told}, {why}", file=progress, flush=True)
    return []


def measure_curve(
    target: GatedDeltaNet,
    suites: Suites,
    settings: TableSettings,
    table: Table,
    *,
    progress: TextIO | None = None,
    over: Callable[[], bool] = lambda: False,
) -> bool:
    """Speed-up where drafts of a chain are right with chance p: from the table's first batch size and suite."""
    suite, batch, heat = next(iter(suites)), settings.batches[0], min(settings.temperatures)
    (plain,) = (
        row for row in table.made["rows"] if row["way"] == "plain" and _cell(row) == (suite, batch, heat)
    )
    for drafts in sorted(settings.drafts, reverse=True):
        engine: Engine | None = None
        for rate in sorted(settings.rates, reverse=True):
            if table.has("curve", drafts=drafts, rate=rate):
                continue
            if over():
                return False
            config = SpeculativeConfig(drafts, drafts, 1, synthetic_acceptance_rate=rate)
            way = Way(f"chain {drafts} at {rate:g}", "synthetic", config)
            engine = engine or _engine(target, way, batch, settings.seed)
            _tell_rate(engine, rate)
            row = _measure_cell(engine, way, suite, suites[suite], heat, batch, settings, table)
            kept = ("speedup", "tokens_per_s", "acceptance_length", "round_ms", "identical", "diverged")
            plain_steps = round(row["round_ms"] / plain["round_ms"], 3)
            table.add(
                "curve",
                [{"drafts": drafts, "rate": rate, "plain_steps": plain_steps, **{k: row[k] for k in kept}}],
            )
            _tell(progress, [row])
    return True


def _tell_rate(engine: Engine, rate: float) -> None:
    """Let drafts of a synthetic drafter be right with this chance from now on; graphs stay what they are."""
    assert isinstance(engine.drafter, SyntheticDrafter)
    engine.drafter.acceptance = [rate] * engine.drafter.num_steps
    rounds = getattr(engine, "rounds", None)
    if rounds is not None:
        rounds.proposer.acceptance.fill_(rate)


def measure_parts(
    target: GatedDeltaNet,
    network: Eagle | None,
    settings: TableSettings,
    table: Table,
    *,
    progress: TextIO | None = None,
    over: Callable[[], bool] = lambda: False,
) -> bool:
    """Where the time of a greedy round goes, in graphs of its parts: on a GPU, with a trained drafter at work."""
    if network is None or target.norm.weight.device.type != "cuda":
        return True
    from specla.bench.resident import Way as ToldWay, engine_of, time_parts
    from specla.bench.whole_rounds import run_as

    chain = ToldWay("chain 8", 8, 8, 1, 0.7, True)
    tree = ToldWay("tree 16", 15, settings.tree_steps, settings.topk, 0.7, True)
    own: list[tuple[ToldWay, str | None]] = [(chain, None), (tree, None)]
    others = [(tree, SNAPSHOTS), (tree, COMMIT), (chain, LIBRARY)]
    for batch in settings.batches:
        for way, baseline in own + others:
            name = way.name if baseline is None else f"{way.name}, {baseline}"
            piece = {"batch": batch, "way": name}
            if table.settled("parts", **piece):
                continue
            if over():
                return False

            def measured(way: ToldWay = way, baseline: str | None = baseline, batch: int = batch) -> Any:
                _free()
                engine = engine_of(target, network, way, batch, settings.seed)
                if baseline is not None:
                    run_as(engine, baseline)
                return [{"batch": batch, "way": name, "ms": time_parts(engine, way.drafts or 0)}]  # noqa: B023

            rows = _keep(table, "parts", piece, baseline, measured, progress)
            for row in rows if progress is not None else []:
                told = ", ".join(f"{part} {ms:.3f} ms" for part, ms in row["ms"].items())
                print(f"B={batch:<3} {name}: {told}", file=progress, flush=True)
    return True


def _measure_cell(
    engine: Engine, way: Way, suite: str, prompts: list[list[int]], heat: float, batch: int,
    settings: TableSettings, table: Table,
) -> dict[str, Any]:  # fmt: skip
    """All prompts of one suite, as one row."""
    count = max(settings.prompts(batch), batch)
    together = count if batch > 1 else 1
    prompts = (prompts * -(-count // len(prompts)))[:count]
    params = [
        SamplingParams(
            temperature=heat, max_tokens=settings.max_tokens, seed=settings.seed + n, ignore_eos=True
        )
        for n in range(count)
    ]
    key = f"{suite}/{batch}/{heat:g}"
    wanted = [] if way.drafter == "none" else table.plain[key]["outputs"]
    runs = []
    for n in range(0, count, together):
        part = slice(n, n + together)
        runs.append(decode_batch(engine, prompts[part], params[part], settings.repeat, wanted[part], n))
    outputs = [output for run in runs for output in run.outputs]
    seconds, reading, rounds, steps = (
        sum(getattr(run, name) for run in runs) for name in ("seconds", "reading", "rounds", "steps")
    )
    steady = len(runs) / sum(1 / run.steady_rate for run in runs)
    tokens = sum(map(len, outputs))
    if way.drafter == "none":
        table.plain[key] = {
            "outputs": outputs, "rate": tokens / seconds, "steady": steady, "rounds": tokens / (seconds - reading),
        }  # fmt: skip
    plain = table.plain[key]
    parted = [_parting(ours, theirs) for ours, theirs in zip(outputs, plain["outputs"], strict=True)]
    drafted, histogram = (
        sum(run.drafted for run in runs),
        sum((run.histogram for run in runs), Counter[int]()),
    )
    shares = [repeated_share(output) for output in outputs]
    config = way.config
    return {
        "suite": suite, "batch": batch, "temperature": heat, "way": way.name, "drafter": drafter_name(way),
        "num_speculative_tokens": config.num_speculative_tokens, "num_steps": config.num_steps, "topk": config.topk,
        "prune_threshold": config.prune_threshold, "verify": config.verify, "sequences": count, "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1), "steady_tokens_per_s": round(steady, 1),
        "speedup": round(tokens / seconds / plain["rate"], 3), "steady_speedup": round(steady / plain["steady"], 3),
        "reading_s": round(reading, 4), "rounds_speedup": round(tokens / (seconds - reading) / plain["rounds"], 3),
        "acceptance_length": round(tokens / steps, 3), "first_token_match": round(1 - histogram[0] / steps, 4),
        "acceptance_rate": round(sum(run.accepted for run in runs) / drafted, 4) if drafted else None,
        "acceptance_histogram": [histogram[n] for n in range(max(histogram) + 1)],
        "round_ms": round(1000 * seconds / rounds, 4), "rounds": rounds,
        "identical": all(at is None for at in parted), "diverged": sum(at is not None for at in parted),
        "first_divergence": min((at for at in parted if at is not None), default=None),
        "repeated_8grams": round(sum(shares) / len(shares), 4),
        "baseline": way.baseline, **_memory(engine),
    }  # fmt: skip


def _engine(target: GatedDeltaNet, way: Way, batch: int, seed: int) -> Engine:
    """Raises UnavailableError for a baseline that cannot run."""
    _free()
    drafter = make_drafter(way.drafter, way.config, target.config.vocab_size, seed, batch)
    engine = make_engine(target, drafter, way.config, max_num_seqs=batch)
    if way.baseline is not None:
        if not hasattr(engine, "rounds"):
            raise UnavailableError("needs rounds on a GPU")
        from specla.bench.whole_rounds import run_as
        from specla.engine.resident import ResidentEngine

        assert isinstance(engine, ResidentEngine)
        run_as(engine, way.baseline)
    return engine


def _free() -> None:
    """Give back what the engine before has held: graphs keep theirs until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _memory(engine: Engine) -> dict[str, int]:
    """Of one sequence: committed states and windows, and what drafts of all nodes take."""
    nodes = engine.config.max_draft + 1
    if hasattr(engine, "rounds"):
        from specla.bench.whole_rounds import slot_bytes

        committed, drafts = slot_bytes(engine.rounds)
    else:
        committed, drafts = engine.pool.bytes_per_sequence(), nodes * engine.pool.bytes_per_node()
    return {
        "state_bytes_per_sequence": committed + drafts, "committed_bytes_per_sequence": committed,
        "bytes_per_draft_node": drafts // nodes,
    }  # fmt: skip


def _parting(ours: list[int], theirs: list[int]) -> int | None:
    """The number of the first token that differs."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)


def _cell(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["suite"], row["batch"], row["temperature"]


def _tell(progress: TextIO | None, rows: list[dict[str, Any]]) -> None:
    for row in rows if progress is not None else []:
        same = "identical" if row["identical"] else f"{row['diverged']} of {row['sequences']} DIFFER"
        print(
            f"{row['suite']:10} B={row['batch']:<3} T={row['temperature']:<3g} {row['way']:18} "
            f"{row['tokens_per_s']:9.1f} tokens/s {row['speedup']:6.2f}x  {row['acceptance_length']:5.2f} a round, 1st "
            f"{row['first_token_match']:.2f}, {row['round_ms']:.3f} ms  {same}",
            file=progress, flush=True,
        )  # fmt: skip


def settings_identity(settings: TableSettings) -> dict[str, Any]:
    """The settings as JSON has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()
    }
