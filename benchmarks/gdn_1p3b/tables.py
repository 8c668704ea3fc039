"""The figures of a table that `recipe measure` left, as Markdown: speed-up over plain decoding, and tokens a round.

python -m benchmarks.gdn_1p3b.tables TABLE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def markdown(table: dict[str, Any]) -> str:
    """A table for each temperature and batch size, then the curve, then the parts of a round."""
    rows = table["rows"]
    cells = sorted({(row["temperature"], row["batch"]) for row in rows})
    parts = [_ways([row for row in rows if (row["temperature"], row["batch"]) == cell]) for cell in cells]
    parts += [_curve(table["curve"])] if table["curve"] else []
    parts += [_parts(table["parts"])] if table["parts"] else []
    return "\n\n".join(parts) + "\n"


def _ways(rows: list[Row]) -> str:
    suites, ways = (list(dict.fromkeys(row[name] for row in rows)) for name in ("suite", "way"))
    temperature, batch = rows[0]["temperature"], rows[0]["batch"]
    head = [
        f"temperature {temperature:g}, B = {batch}",
        *suites,
        "texts that differ",
        "ms a round",
        "MiB a sequence",
    ]
    lines = []
    for way in ways:
        mine = {row["suite"]: row for row in rows if row["way"] == way}
        parted, count = (sum(row[name] for row in mine.values()) for name in ("diverged", "sequences"))
        memory = max(row["state_bytes_per_sequence"] for row in mine.values()) / 2**20
        lines.append([
            way, *(_speed(mine.get(suite), batch) for suite in suites), f"{parted} of {count}" if parted else "none",
            _span([row["round_ms"] for row in mine.values()], ".2f"), f"{memory:.0f}",
        ])  # fmt: skip
    return _table(head, lines)


def _speed(row: Row | None, batch: int) -> str:
    """Where prompts queue, also without the time of reading them."""
    if row is None:
        return ""
    rounds = f" ({row['rounds_speedup']:.2f}x)" if batch > 1 else ""
    return f"{row['speedup']:.2f}x{rounds}, {row['acceptance_length']:.2f}"


def _curve(points: list[Row]) -> str:
    rates, drafts = sorted({point["rate"] for point in points}), sorted({point["drafts"] for point in points})
    found = {(point["drafts"], point["rate"]): f"{point['speedup']:.2f}" for point in points}
    lines = [[f"chain of {n}", *(found.get((n, rate), "") for rate in rates)] for n in drafts]
    return _table(["speed-up, drafts for nothing", *(f"p = {rate:g}" for rate in rates)], lines)


def _parts(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    lines = [
        [
            f"B = {row['batch']}, {row['way']}",
            *(f"{row['ms'][name]:.3f}" if name in row["ms"] else "" for name in names),
        ]
        for row in rows
    ]
    return _table(["ms of a greedy round", *names], lines)


def _span(values: list[float], form: str) -> str:
    low, high = (format(x, form) for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


if __name__ == "__main__":
    (source,) = sys.argv[1:]
    sys.stdout.write(markdown(json.loads(Path(source).read_text(encoding="utf-8"))))
