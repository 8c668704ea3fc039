"""Pictures of a table that `recipe measure` left.

python -m benchmarks.gdn_1p3b.plots TABLE.json DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def plot(table: dict[str, Any], folder: Path) -> list[Path]:
    """`ways-T.png` for each temperature: bars at the smallest batch, lines over batches; and `curve.png`."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    heats = sorted({row["temperature"] for row in table["rows"]})
    written = [_ways(table, heat, folder / f"ways-{heat:g}.png") for heat in heats]
    return [*written, _curve(table, folder / "curve.png")] if table["curve"] else written


def _ways(table: dict[str, Any], heat: float, path: Path) -> Path:
    from matplotlib import pyplot

    rows = [row for row in table["rows"] if row["temperature"] == heat]
    suites, ways = (list(dict.fromkeys(row[name] for row in rows)) for name in ("suite", "way"))
    batches = sorted({row["batch"] for row in rows})
    speed = {(row["suite"], row["way"], row["batch"]): row["speedup"] for row in rows}
    drawn = [way for way in ways if way != "plain"]
    figure, axes = pyplot.subplots(1, 1 + len(suites), figsize=(5 + 4 * len(suites), 5))
    width = 0.8 / len(suites)
    for n, suite in enumerate(suites):
        at = [i + (n - (len(suites) - 1) / 2) * width for i in range(len(drawn))]
        axes[0].barh(at, [speed.get((suite, way, batches[0]), 0) for way in drawn], width, label=suite)
    axes[0].set(
        yticks=range(len(drawn)),
        yticklabels=drawn,
        title=f"batch {batches[0]}",
        xlabel="times plain decoding",
    )
    axes[0].invert_yaxis()
    for axis, suite in zip(axes[1:], suites, strict=True):
        for way in drawn:
            points = [(batch, speed[suite, way, batch]) for batch in batches if (suite, way, batch) in speed]
            axis.plot(
                [x for x, _ in points], [y for _, y in points], "o-", label=way, linewidth=1.2, markersize=4
            )
        axis.set(xscale="log", title=suite, xlabel="batch", xticks=batches, xticklabels=batches)
        axis.minorticks_off()
        axis.axhline(1, color="black", linewidth=0.8)
    axes[0].axvline(1, color="black", linewidth=0.8)
    axes[0].legend(fontsize=8)
    axes[-1].legend(fontsize=7)
    return _finish(table, figure, path, f"temperature {heat:g}")


def _curve(table: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4.5))
    for drafts in dict.fromkeys(point["drafts"] for point in table["curve"]):
        points = sorted((p["rate"], p["speedup"]) for p in table["curve"] if p["drafts"] == drafts)
        axis.plot(
            [x for x, _ in points], [y for _, y in points], "o-", label=f"{drafts} drafts", markersize=4
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xlabel="chance that a draft is right", ylabel="times plain decoding")
    axis.legend()
    axis.grid(alpha=0.3)
    return _finish(table, figure, path, "drafts for nothing, acceptance told")


def _finish(table: dict[str, Any], figure: Any, path: Path, what: str) -> Path:
    from matplotlib import pyplot

    own = "self-trained target" if table["about"]["self_trained"] else "given target"
    size = table["about"]["parameters"] / 1e9
    figure.suptitle(f"{table['identity']['device']}: {own} of {size:.2f} B parameters, {what}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    source, out = sys.argv[1:]
    for made in plot(json.loads(Path(source).read_text(encoding="utf-8")), Path(out)):
        print(made)
