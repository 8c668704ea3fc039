"""Pictures of rounds on a GPU: speed-up against batch, and where the time of a round goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PARTS = ("propose", "verify", "accept")


def plot(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write `rounds-speedup.png` and `rounds-parts.png` into the directory, which is made if need be."""
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / "rounds-speedup.png", directory / "rounds-parts.png"]
    _speedups(report, written[0])
    _parts(report, written[1])
    return written


def _speedups(report: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    batches = [made["batch"] for made in report["batches"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    names = [row["name"] for row in report["batches"][0]["ways"] if row["name"] != "plain"]
    for name in names:
        axis = axes[int(name.startswith("eagle"))]
        points = [
            (made["batch"], row["steady_speedup"])
            for made in report["batches"]
            for row in made["ways"]
            if row["name"] == name and row["identical"]
        ]
        axis.plot(
            [x for x, _ in points], [y for _, y in points], "o-", label=name, linewidth=1.2, markersize=4
        )
    for axis, title in zip(axes, ("drafts for nothing", "a trained drafter at work"), strict=True):
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", title=title, xlabel="batch", xticks=batches, xticklabels=batches)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("tokens a second over those of plain decoding")
    _finish(report, figure, path)


def _parts(report: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 0.6 * len(report["batches"]) + 1.6))
    labels, left = [f"batch {made['batch']}" for made in report["batches"]], [0.0] * len(report["batches"])
    for part in PARTS:
        shares = [made["parts_ms"][part] for made in report["batches"]]
        bars = axis.barh(labels, shares, left=left, label=part)
        axis.bar_label(
            bars, [f"{x:.2f}" if x > 0.1 * max(left) else "" for x in shares], label_type="center", fontsize=8
        )
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds of a round: a trained drafter's tree of 16 nodes")
    axis.legend(fontsize=8)
    _finish(report, figure, path)


def _finish(report: dict[str, Any], figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.suptitle(
        f"{report['device']}: {report['shape']}, random weights, acceptance told, tokens identical",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
