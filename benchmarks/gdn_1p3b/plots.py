"""Pictures of a table that `recipe measure` left.

python -m benchmarks.gdn_1p3b.plots TABLE.json DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def plot(table: dict[str, Any], folder: Path) -> list[Path]:
    """`ways-T.png` for each temperature, bars with a panel for each batch; and `curve.png`."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    heats = sorted({row["temperature"] for row in table["rows"]})
    written = [_ways(table, heat, folder / f"ways-{heat:g}.png") for heat in heats]
    return [*written, _curve(table, folder / "curve.png")] if table["curve"] else written


def _ways(table: dict[str, Any], heat: float, path: Path) -> Path:
    from matplotlib import pyplot

    rows = [row for row in table["rows"] if row["temperature"] == heat and row["way"] != "plain"]
    suites, ways = (list(dict.fromkeys(row[name] for row in rows)) for name in ("suite", "way"))
    batches = sorted({row["batch"] for row in rows})
    size = (3.5 + 3.5 * max(len(batches), 1), 1.6 + 0.4 * len(ways))
    figure, axes = pyplot.subplots(1, max(len(batches), 1), figsize=size, sharey=True, squeeze=False)
    width = 0.84 / max(len(suites), 1)
    for axis, batch in zip(axes[0], batches, strict=False):
        for n, suite in enumerate(suites):
            mine = [row for row in rows if row["batch"] == batch and row["suite"] == suite]
            at = [ways.index(row["way"]) + (n - (len(suites) - 1) / 2) * width for row in mine]
            bars = axis.barh(at, [row["speedup"] for row in mine], width, label=suite)
            told = [f"{row['speedup']:.2f}{'*' if row['diverged'] else ''}" for row in mine]
            axis.bar_label(bars, told, fontsize=6, padding=2)
        axis.set(title=f"batch {batch}", xlabel="times plain decoding")
        axis.margins(x=0.12)
        axis.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes[0][0].set(yticks=range(len(ways)), yticklabels=ways, ylim=(len(ways) - 0.4, -0.6))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=len(suites) or 1, loc="lower left")
    return _finish(table, figure, path, f"temperature {heat:g}; *: some texts are not plain decoding's")


def _curve(table: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 4.5))
    for drafts in dict.fromkeys(point["drafts"] for point in table["curve"]):
        points = sorted((p["rate"], p["speedup"]) for p in table["curve"] if p["drafts"] == drafts)
        axis.plot(
            [x for x, _ in points], [y for _, y in points], "o-", label=f"{drafts} drafts", markersize=4
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xlabel="chance that a draft is right", ylabel="times plain decoding", yscale="log")
    low, high = axis.get_ylim()
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16) if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks(sorted({point["rate"] for point in table["curve"]}))
    axis.minorticks_off()
    axis.legend()
    axis.grid(alpha=0.3)
    return _finish(table, figure, path, "chains of drafts for nothing, acceptance told")


def _finish(table: dict[str, Any], figure: Any, path: Path, what: str) -> Path:
    from matplotlib import pyplot

    own = "self-trained target" if table["about"]["self_trained"] else "given target"
    size = table["about"]["parameters"] / 1e9
    figure.suptitle(f"{table['identity']['device']}: {own} of {size:.2f} B parameters\n{what}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    source, out = sys.argv[1:]
    for made in plot(json.loads(Path(source).read_text(encoding="utf-8")), Path(out)):
        print(made)
