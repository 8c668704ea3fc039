"""Pictures of what `specla bench kernel` measured: time against batch, and bars against what is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CURVES = {
    "verify_serial": "serial (exact)",
    "verify_hybrid": "hybrid (exact)",
    "verify_parallel": "parallel",
    "replay_rows": "leaves replayed",
    "decode_tokens": "one token at a time",
    "snapshots": "dense snapshots",
    "fla_chain_written": "flash-linear-attention",
}


def check_matplotlib() -> None:
    """Raise ValueError without matplotlib, before anything is measured."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install matplotlib") from None
    del matplotlib


def plot(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write `kernel-batch.png` and `kernel-baselines.png` into the directory, which is made if need be.

    A picture without anything to show is not written.
    """
    import matplotlib

    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    if report["results"]:
        written = [directory / "kernel-batch.png", directory / "kernel-baselines.png"]
        _batches(report, written[0])
        _baselines(report, written[1])
    return written


def _by_tree(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in report["results"]:
        rows.setdefault(row["tree"], []).append(row)
    return rows


def _batches(report: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    trees = _by_tree(report)
    figure, axes = pyplot.subplots(1, len(trees), figsize=(5 * len(trees), 4.5), squeeze=False, sharey=True)
    for axis, (tree, rows) in zip(axes[0], trees.items(), strict=True):
        batches = [row["batch"] for row in rows]
        for number, (name, label) in enumerate(CURVES.items()):
            points = [(row["batch"], row["us"][name]) for row in rows if name in row["us"]]
            if points:
                style = "o-" if name.startswith("verify") else "x--"
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    color=f"C{number}",
                    label=label,
                    linewidth=1.2,
                    markersize=4,
                )
        axis.plot(
            batches,
            [row["floor_us"] for row in rows],
            color="black",
            linewidth=0.8,
            label="state read and written",
        )
        axis.set(xscale="log", yscale="log", title=tree, xlabel="batch", xticks=batches, xticklabels=batches)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds")
    shown = dict(
        pair for axis in axes[0] for pair in zip(*axis.get_legend_handles_labels()[::-1], strict=True)
    )
    axes[0][-1].legend(shown.values(), shown, fontsize=8)
    _finish(report, figure, path)


def _baselines(report: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    trees = _by_tree(report)
    smallest = min(row["batch"] for row in report["results"])
    figure, axes = pyplot.subplots(1, len(trees), figsize=(5 * len(trees), 4.5), squeeze=False)
    for axis, (tree, rows) in zip(axes[0], trees.items(), strict=True):
        row = next(row for row in rows if row["batch"] == smallest)
        shown = {name: us for name, us in row["us"].items() if not name.startswith(("schedule", "conv"))}
        colours = ["tab:blue" if name.startswith("verify") else "tab:gray" for name in shown]
        bars = axis.barh([name.replace("_", " ") for name in shown], list(shown.values()), color=colours)
        axis.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        axis.axvline(row["floor_us"], color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.tick_params(axis="y", labelsize=8)
        axis.set(title=f"{tree}, batch {smallest}", xlabel="microseconds")
    _finish(report, figure, path)


def _finish(report: dict[str, Any], figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    layer = report["layer"]
    figure.suptitle(
        f"{report['device']}: one layer, {layer['value_heads']} heads, {layer['dim_k']} x {layer['dim_v']}, fp32 state",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
