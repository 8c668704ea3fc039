"""Many ways to decode on one target, by batch, temperature and suite of prompts, in pieces that can be taken up again.

An engine is made once for a way and a batch size, and every suite and temperature runs on it. What differs from plain
decoding's tokens is counted and told, not refused: modes that sum in another order may differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from specla.bench.decode import decode_batch
from specla.bench.generate import Way, drafter_name, plain_way, repeated_share
from specla.drafters.network import Eagle
from specla.engine.choice import make_engine
from specla.engine.drafting import make_drafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import replace_file

FORMAT = 1

Suites = dict[str, list[list[int]]]


@dataclass(frozen=True)
class TableSettings:
    """What is measured.

    Args:
        batches: sequences that run together. per_suite: prompts of a suite, for larger batches as many as the batch.
        max_tokens: new tokens of each; the end of a text is ignored. repeat: runs of each batch; times are medians.
        tree_steps, topk: depth and width of trees. prune_threshold: of pruned ones.
        rates, drafts: of the curve, at the first batch size and the lowest temperature, on the first suite.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    per_suite: int = 16
    max_tokens: int = 256
    repeat: int = 1
    seed: int = 0
    tree_steps: int = 6
    topk: int = 4
    prune_threshold: float = 3.0
    rates: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
    drafts: tuple[int, ...] = (4, 8, 16)

    def __post_init__(self) -> None:
        for name in ("per_suite", "repeat", "tree_steps", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens < 2 or not self.batches or min(self.batches) < 1 or not self.temperatures:
            raise ValueError("expected max_tokens of at least 2, batches of at least 1, and a temperature")


def table_ways(settings: TableSettings, network: Eagle | None) -> list[Way]:
    """Plain decoding first; `network` is the target's trained drafter, if it has one."""

    def tree(mode: str, prune: float | None = None) -> SpeculativeConfig:
        return SpeculativeConfig(15, settings.tree_steps, settings.topk, prune, mode)

    ways = [plain_way(), Way("ngram chain 8", "ngram", SpeculativeConfig(8, 8, 1))]
    if network is not None:
        ways += [
            Way("chain 8", network, SpeculativeConfig(8, 8, 1)),
            Way("tree 16", network, tree("auto")),
            Way("tree 16, pruned", network, tree("auto", settings.prune_threshold)),
            *(Way(f"tree 16, {mode}", network, tree(mode)) for mode in ("serial", "hybrid", "parallel")),
        ]
    return [*ways, Way("auto", "ngram" if network is None else network, SpeculativeConfig())]


class Table:
    """The figures so far, in a file that is rewritten after each piece.

    Args:
        path: of the JSON document; the tokens of plain decoding are kept beside it, in `*.plain.json`.
        identity: what a file must agree on to be gone on with.

    Raises:
        ValueError: when the file is damaged or of another measurement.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.beside = path, path.with_suffix(".plain.json")
        self.made: dict[str, Any] = {
            "benchmark": "table",
            "format": FORMAT,
            "identity": identity,
            "rows": [],
            "parts": [],
            "curve": [],
        }
        self.plain: dict[str, Any] = {}
        if path.exists():
            try:
                made, plain = (json.loads(p.read_text(encoding="utf-8")) for p in (path, self.beside))
                known = made["identity"], made["rows"], made["curve"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a table to go on with: {error}") from None
            if known[0] != json.loads(json.dumps(identity)):
                parts = [
                    name for name in identity if known[0].get(name) != json.loads(json.dumps(identity[name]))
                ]
                raise ValueError(
                    f"{path} is of another measurement ({', '.join(parts)}); measure into another file"
                )
            self.made, self.plain = made, plain

    def has(self, part: str, **key: Any) -> bool:
        return any(all(row[name] == value for name, value in key.items()) for row in self.made[part])

    def add(self, part: str, rows: list[dict[str, Any]]) -> None:
        """Keep the rows, and whatever `plain` has by now."""
        self.made[part] += rows
        for path, content in ((self.beside, self.plain), (self.path, self.made)):
            replace_file(
                path, partial(Path.write_text, data=json.dumps(content, indent=1) + "\n", encoding="utf-8")
            )


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
    curve = False  # measured as soon as there is something to draft from
    for batch in settings.batches:
        for way in table_ways(settings, network):
            if table.has("rows", batch=batch, way=way.name):
                continue
            if over():
                return False
            rows = _measure_way(target, way, batch, suites, settings, table)
            table.add("rows", rows)
            _tell(progress, rows)
        if not curve and not (
            curve := measure_curve(target, suites, settings, table, progress=progress, over=over)
        ):
            return False
    return measure_parts(target, network, settings, table, progress=progress, over=over)


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
    for drafts in settings.drafts:
        for rate in settings.rates:
            if table.has("curve", drafts=drafts, rate=rate):
                continue
            if over():
                return False
            config = SpeculativeConfig(drafts, drafts, 1, synthetic_acceptance_rate=rate)
            way = Way(f"chain {drafts} at {rate:g}", "synthetic", config)
            engine = _engine(target, way, batch, settings.seed)
            row = _measure_cell(engine, way, suite, suites[suite], heat, batch, settings, table)
            kept = ("speedup", "tokens_per_s", "acceptance_length", "round_ms", "identical", "diverged")
            plain_steps = round(row["round_ms"] / plain["round_ms"], 3)
            table.add(
                "curve",
                [{"drafts": drafts, "rate": rate, "plain_steps": plain_steps, **{k: row[k] for k in kept}}],
            )
            _tell(progress, [row])
    return True


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

    for batch in settings.batches:
        for way in (
            ToldWay("chain 8", 8, 8, 1, 0.7, True),
            ToldWay("tree 16", 15, settings.tree_steps, settings.topk, 0.7, True),
        ):
            if table.has("parts", batch=batch, way=way.name):
                continue
            if over():
                return False
            engine = engine_of(target, network, way, batch, settings.seed)
            parts = time_parts(engine, way.drafts or 0)
            table.add("parts", [{"batch": batch, "way": way.name, "ms": parts}])
            if progress is not None:
                told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in parts.items())
                print(f"B={batch:<3} {way.name}: {told}", file=progress, flush=True)
    return True


def _measure_way(
    target: GatedDeltaNet, way: Way, batch: int, suites: Suites, settings: TableSettings, table: Table
) -> list[dict[str, Any]]:
    engine = _engine(target, way, batch, settings.seed)
    return [
        _measure_cell(engine, way, suite, prompts, heat, batch, settings, table)
        for heat in settings.temperatures
        for suite, prompts in suites.items()
    ]


def _measure_cell(
    engine: Engine, way: Way, suite: str, prompts: list[list[int]], heat: float, batch: int,
    settings: TableSettings, table: Table,
) -> dict[str, Any]:  # fmt: skip
    """All batches of one suite, as one row."""
    count = max(settings.per_suite, batch) // batch * batch
    prompts = (prompts * -(-count // len(prompts)))[:count]
    params = [
        SamplingParams(
            temperature=heat, max_tokens=settings.max_tokens, seed=settings.seed + n, ignore_eos=True
        )
        for n in range(count)
    ]
    key = f"{suite}/{batch}/{heat:g}"
    wanted = [] if way.drafter == "none" else table.plain[key]["outputs"]
    runs = [
        decode_batch(
            engine, prompts[n : n + batch], params[n : n + batch], settings.repeat, wanted[n : n + batch], n
        )
        for n in range(0, count, batch)
    ]
    outputs = [output for run in runs for output in run.outputs]
    seconds, rounds, steps = (
        sum(getattr(run, name) for run in runs) for name in ("seconds", "rounds", "steps")
    )
    steady = len(runs) / sum(1 / run.steady_rate for run in runs)
    tokens = sum(map(len, outputs))
    if way.drafter == "none":
        table.plain[key] = {"outputs": outputs, "rate": tokens / seconds, "steady": steady}
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
        "acceptance_length": round(tokens / steps, 3), "first_token_match": round(1 - histogram[0] / steps, 4),
        "acceptance_rate": round(sum(run.accepted for run in runs) / drafted, 4) if drafted else None,
        "acceptance_histogram": [histogram[n] for n in range(max(histogram) + 1)],
        "round_ms": round(1000 * seconds / rounds, 4), "rounds": rounds,
        "identical": all(at is None for at in parted), "diverged": sum(at is not None for at in parted),
        "first_divergence": min((at for at in parted if at is not None), default=None),
        "repeated_8grams": round(sum(shares) / len(shares), 4),
        "state_bytes_per_sequence": _state_bytes(engine),
    }  # fmt: skip


def _engine(target: GatedDeltaNet, way: Way, batch: int, seed: int) -> Engine:
    drafter = make_drafter(way.drafter, way.config, target.config.vocab_size, seed, batch)
    return make_engine(target, drafter, way.config, max_num_seqs=batch)


def _state_bytes(engine: Engine) -> int:
    """Memory of one sequence: committed states, windows, and the banks of its drafts' factors."""
    pool, rounds = engine.pool, getattr(engine, "rounds", None)
    banks = 2 if rounds is None else rounds.banks
    return pool.bytes_per_sequence() + banks * (engine.config.max_draft + 1) * pool.bytes_per_node()


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
