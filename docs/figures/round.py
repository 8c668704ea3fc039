"""Draw docs/figures/round.svg: one round of speculative decoding on a recurrent state, in four steps."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SOFT, LINE, PAPER = "#1f2933", "#6b7785", "#aab4bf", "#ffffff"
DRAFT, TARGET, KEPT, BONUS = "#e8eef6", "#3a6ea5", "#2e8b57", "#d9822b"
PLACES = {"on": (0, 0), "the": (-0.62, -1), "a": (0.72, -1), "mat": (-1.12, -2), "sofa": (-0.12, -2),
          "chair": (0.86, -2), "with": (-1.12, -3)}  # fmt: skip
PARENTS = {"the": "on", "a": "on", "mat": "the", "sofa": "the", "chair": "a", "with": "mat"}
DRAWN = {"on": "the", "the": "mat", "a": "hill", "mat": "and", "sofa": "bed", "chair": ".", "with": "a"}
ACCEPTED = ("on", "the", "mat")
STEP = 0.88  # height of a level
TOP = 3.22
PANEL = 3.72


def box(ax: Axes, x: float, y: float, text: str, face: str, edge: str, ink: str, style: str = "-") -> None:
    width, height = 0.78, 0.42
    corner = (x - width / 2, y - height / 2)
    shape = FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.12", facecolor=face,
                           edgecolor=edge, linewidth=1.5, linestyle=style, zorder=3)  # fmt: skip
    ax.add_patch(shape)
    ax.text(x, y - 0.015, text, ha="center", va="center", color=ink, fontsize=11, zorder=4)


def at(panel: int, name: str) -> tuple[float, float]:
    x, depth = PLACES[name]
    return panel * PANEL + 1.68 + x, TOP + depth * STEP


def edges(ax: Axes, panel: int, bold: tuple[str, ...] = (), faint: bool = False, below: float = 0.21) -> None:
    for child, parent in PARENTS.items():
        (x0, y0), (x1, y1) = at(panel, parent), at(panel, child)
        strong = child in bold
        ax.plot([x0, x1], [y0 - below, y1 + 0.21], color=KEPT if strong else LINE, zorder=1,
                linewidth=2.6 if strong else 1.5, alpha=0.45 if faint and not strong else 1)  # fmt: skip


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str, bend: float = 0.0
) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=color, linewidth=1.5,
                                 connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0, zorder=2))  # fmt: skip


def heading(ax: Axes, panel: int, number: int, title: str, caption: str) -> None:
    left = panel * PANEL + 0.12
    ax.text(left + 0.17, 4.5, str(number), ha="center", va="center", color=PAPER, fontsize=12, weight="bold",
            bbox={"boxstyle": "circle,pad=0.28", "facecolor": INK, "edgecolor": INK})  # fmt: skip
    ax.text(left + 0.5, 4.485, title, ha="left", va="center", color=INK, fontsize=15, weight="bold")
    ax.text(left, 4.13, caption, ha="left", va="top", color=SOFT, fontsize=10, linespacing=1.35)


def propose(ax: Axes) -> None:
    heading(ax, 0, 1, "propose", "the drafter guesses a tree of\nnext tokens below the root")
    edges(ax, 0)
    for name in PLACES:
        root = name == "on"
        box(ax, *at(0, name), name, INK if root else DRAFT, INK if root else LINE, PAPER if root else INK)
    x, y = at(0, "on")
    ax.text(x - 0.5, y, "the cat sat", ha="right", va="center", color=SOFT, fontsize=11, style="italic")


def verify(ax: Axes) -> None:
    heading(ax, 1, 2, "verify", "one pass of the target over all nodes,\nfrom one read of the state")
    edges(ax, 1, below=0.46)
    for name in PLACES:
        root = name == "on"
        x, y = at(1, name)
        box(ax, x, y, name, INK if root else DRAFT, INK if root else LINE, PAPER if root else INK)
        ax.text(x - 0.03, y - 0.335, f"→ {DRAWN[name]}", ha="center", va="center", color=TARGET, fontsize=9.5)
    x, y = at(1, "with")
    note = "→ what the target says\n    after the path so far"
    ax.text(x + 0.75, y - 0.02, note, ha="left", va="center", color=TARGET, fontsize=9.5, linespacing=1.3)


def accept(ax: Axes) -> None:
    heading(ax, 2, 3, "accept", "walk down while a draft is what the\ntarget says; its last word is a bonus")
    edges(ax, 2, bold=ACCEPTED, faint=True)
    for name in PLACES:
        x, y = at(2, name)
        if name in ACCEPTED:
            box(ax, x, y, name, INK if name == "on" else KEPT, INK if name == "on" else KEPT, PAPER)
        else:
            box(ax, x, y, name, "#f6f7f9", "#dde2e8", "#b3bcc6")
    x, y = at(2, "with")
    bonus = (x + 1.12, y)
    (mx, my) = at(2, "mat")
    arrow(ax, (mx + 0.2, my - 0.22), (bonus[0] - 0.2, bonus[1] + 0.23), BONUS)
    box(ax, *bonus, "and", PAPER, BONUS, BONUS, "--")
    ax.text(bonus[0] + 0.5, bonus[1], "bonus", ha="left", va="center", color=BONUS, fontsize=10)


def commit(ax: Axes) -> None:
    heading(ax, 3, 4, "commit", "the accepted path moves the state,\nwithout another pass of the target")
    x = 3 * PANEL + 0.72
    for row, name in enumerate(ACCEPTED):
        y = TOP - row * STEP
        box(ax, x, y, name, INK if row == 0 else KEPT, INK if row == 0 else KEPT, PAPER)
        ax.text(x + 0.52, y, "k  d  g", ha="left", va="center", color=INK, fontsize=11, style="italic",
                family="serif")  # fmt: skip
        arrow(ax, (x + 1.13, y), (x + 1.62, TOP - STEP + (1 - row) * 0.22), KEPT)
    sx, sy, side = x + 1.68, TOP - STEP - 0.5, 1.0
    ax.add_patch(FancyBboxPatch((sx, sy), side, side, boxstyle="round,pad=0,rounding_size=0.06", zorder=3,
                                facecolor="#eef5f0", edgecolor=KEPT, linewidth=1.8))  # fmt: skip
    ax.text(sx + side / 2, sy + side / 2 - 0.02, "S", ha="center", va="center", fontsize=24, style="italic",
            family="serif", color=INK, zorder=4)  # fmt: skip
    rule = r"$S \leftarrow e^{g} S + d\,k^{\top}$"
    ax.text(sx + side / 2 - 0.03, sy - 0.24, rule, ha="center", va="center", color=INK,
            fontsize=12)  # fmt: skip
    y = TOP - 3 * STEP
    box(ax, x, y, "and", PAPER, BONUS, BONUS, "--")
    ax.text(x + 0.52, y, "is the root of the next round", ha="left", va="center", color=BONUS, fontsize=10)
    ax.text(
        x - 0.39,
        0.12,
        "rejected drafts leave nothing behind",
        ha="left",
        va="center",
        color=SOFT,
        fontsize=9.5,
    )


def draw() -> plt.Figure:
    plt.rcParams.update({"font.family": "DejaVu Sans", "mathtext.fontset": "dejavuserif", "svg.fonttype": "path",
                         "svg.hashsalt": "specla"})  # fmt: skip
    width, height = 4 * PANEL, 4.95
    figure = plt.figure(figsize=(width * 0.86, height * 0.86), facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-0.1, width - 0.1), ylim=(-0.12, height - 0.12))
    ax.axis("off")
    for panel in range(1, 4):
        ax.plot([panel * PANEL - 0.18] * 2, [0.05, 4.65], color="#e3e7ec", linewidth=1.2)
    for step in (propose, verify, accept, commit):
        step(ax)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    arguments = parser.parse_args()
    draw().savefig(
        arguments.out, metadata={"Date": None} if arguments.out.suffix == ".svg" else None, dpi=110
    )
