"""`specla bench kernel` from flags to one JSON document, and the tables that a person reads."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton

from specla import __version__
from specla.bench.kernel import MODES, GraphTimer, Options, compile_ahead, measure_kernel
from specla.bench.kernel_inputs import Layer, read_shape
from specla.bench.kernel_plots import check_matplotlib, plot
from specla.bench.kernel_tune import tune, write_table
from specla.ops.triton.tuning import device_name, user_table


def measure_all(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Everything that was asked for, JSON-ready; pictures too, if they were.

    Raises:
        ValueError: for flags that make no sense, or without a CUDA device.
    """
    options = read_options(args)
    if args.plots is not None:
        check_matplotlib()
        make_directory(args.plots)
    device = cuda_device()
    compile_ahead(options, device)
    report = measure_kernel(options, GraphTimer(device), device) | facts(device, argv)
    if args.plots is not None:
        report["plots"] = [path.name for path in plot(report, Path(args.plots))]
    return report


def tune_all(args: argparse.Namespace, argv: Sequence[str], output: Path | None) -> dict[str, Any]:
    """A table of the fastest configurations, which is written to `output` or where `choose` looks for the user's own.

    Raises:
        ValueError: for flags that make no sense, or without a CUDA device.
    """
    options = replace(read_options(args), groups=())
    device = cuda_device()
    table = facts(device, argv) | {"pending": options.pending, "seed": options.seed, "trees": args.trees}
    table["entries"] = tune(options, GraphTimer(device), device)
    path = user_table(device_name(device)) if output is None else output
    write_table(path, table)
    print(f"{path} was written")
    return table


def make_directory(name: str) -> None:
    """Make the directory for pictures while nothing is lost by its being impossible.

    Raises:
        ValueError: when it cannot be made.
    """
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--plots {name} cannot be made: {error.strerror}") from None


def read_options(args: argparse.Namespace) -> Options:
    """What the flags ask for.

    Raises:
        ValueError: for heads or trees that cannot be.
    """
    if not 0 <= args.seed < 1 << 63:
        raise ValueError(f"--seed must be in 0..{(1 << 63) - 1}, got {args.seed}")
    layer = Layer(args.heads, args.value_heads or args.heads, args.head_dim, args.head_v_dim or args.head_dim)
    if layer.value_heads % layer.heads:
        raise ValueError(
            f"--value-heads must be a multiple of --heads ({layer.heads}), got {layer.value_heads}"
        )
    return Options(
        layer, tuple(dict.fromkeys(args.batch)), tuple(map(read_shape, dict.fromkeys(args.trees))),
        args.pending, args.seed, args.repeats, tuple(dict.fromkeys(args.only or ())),
    )  # fmt: skip


def cuda_device() -> torch.device:
    """The device to measure on.

    Raises:
        ValueError: when there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench kernel needs a CUDA device, and torch finds none")
    return torch.device("cuda", torch.cuda.current_device())


def facts(device: torch.device, argv: Sequence[str]) -> dict[str, Any]:
    """On what, when and how it was measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": name,
        "versions": {
            "specla": __version__, "torch": torch.__version__, "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(argv[0]).stem.replace("__main__", "specla"), *argv[1:]]),
    }  # fmt: skip


def print_tables(report: dict[str, Any]) -> None:
    """The figures of `measure_all` or `tune_all` for a person."""
    if "entries" in report:
        _print_configurations(report)
    else:
        _print_times(report)


def _print_times(report: dict[str, Any]) -> None:
    layer, size = report["layer"], report["bytes_per_draft_node"]
    sizes = f"{layer['heads']} heads, {layer['value_heads']} of values, {layer['dim_k']} x {layer['dim_v']}"
    print(f"{report['device']}: one layer of {sizes}, fp32 state, {report['pending']} nodes pending")
    print(f"copy {report['copy_tb_per_s']} TB/s, read and written")
    print("microseconds a launch, medians; results were checked before")
    by_tree: dict[str, list[dict[str, Any]]] = {}
    for row in report["results"]:
        by_tree.setdefault(row["tree"], []).append(row)
    if report["commits"]:
        by_tree["eight tokens"] = report["commits"]
    for tree, rows in by_tree.items():
        print(f"\n{tree:40}" + "".join(f"{'B=' + str(row['batch']):>10}" for row in rows))
        _line("state read and written once", [row["floor_us"] for row in rows], "{:.1f}")
        for part, form in (("us", "{:.1f}"), ("ratios", "{:.2f}x")):
            for name in dict.fromkeys(name for row in rows for name in row[part]):
                _line(name.replace("_", " "), [row[part].get(name) for row in rows], form)
    print(f"\na draft node takes {size['factors']:,} bytes, a dense snapshot {size['snapshot']:,}: "
          f"{size['ratio']:.1f}x\n")  # fmt: skip


def _line(name: str, values: Sequence[float | None], form: str) -> None:
    print(f"{name:40}" + "".join(f"{'-' if x is None else form.format(x):>10}" for x in values))


def _print_configurations(table: dict[str, Any]) -> None:
    print(f"{table['device']}: microseconds of the fastest configuration of each mode\n")
    print(f"{'nodes':>5} {'batch':>6} {'serial':>9} {'hybrid':>9} {'parallel':>9}   auto")
    for row in table["entries"]:
        figures = "".join(f" {row['us'][mode]:9.1f}" for mode in MODES)
        print(f"{row['nodes']:5} {row['batch']:6}{figures}   {row['auto']} {json.dumps(row[row['auto']])}")
    print()
