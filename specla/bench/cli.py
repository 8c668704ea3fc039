"""`specla bench`: flags, and what the benchmarks print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specla.engine.params import SamplingParams
from specla.flags import add_model, add_speculation

KERNEL_GROUPS = ("verify", "separate", "replay", "decode", "fla", "snapshots", "conv", "schedule", "commit")


def add_bench(commands: Any) -> None:
    """Add the `bench` command and its parts to the command line."""
    kinds = commands.add_parser("bench", help="measure generation; one JSON line last").add_subparsers(
        dest="kind", required=True, metavar="WHAT"
    )
    p = kinds.add_parser(
        "generate",
        help="plain against speculative decoding",
        description="Decode prompts plainly and speculatively on one loaded target, check that the tokens are the "
        "same, and print speeds. The last line of output is one JSON document. Exit status 1: tokens differ.",
        epilog="How to draft (--num-speculative-tokens and so on) needs --drafter.",
    )
    add_model(p)
    p.add_argument(
        "--prompts", metavar="FILE", help="JSON lines: id, category, prompt (default: built-in ones)"
    )
    p.add_argument("--limit", type=int, metavar="N", help="take N prompts, spread evenly")
    p.add_argument("--max-tokens", type=int, metavar="N", help="default: 128, with --random 256")
    p.add_argument(
        "--random",
        metavar="SHAPE",
        help="instead of a model, random weights of this shape on a GPU and acceptance that is told: gdn-1.3b or tiny",
    )
    p.add_argument("--ways", nargs="+", metavar="NAME", help="with --random: these ways to draft alone")
    p.add_argument(
        "--batch-size", type=int, nargs="+", default=[1], metavar="B",
        help="sequences that run together; several with --random",
    )  # fmt: skip
    p.add_argument(
        "--repeat",
        type=int,
        default=3,
        metavar="N",
        help="runs of each prompt; times are medians, counts sums",
    )
    p.add_argument("--rounds", type=int, default=100, metavar="N", help="single rounds to time, 0 for none")
    p.add_argument(
        "--temperature", type=float, default=SamplingParams().temperature, metavar="T", help="0 is greedy"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ignore-eos", action="store_true", help="always generate max-tokens tokens")
    add_speculation(p, drafter="several ways to draft, compared")
    p.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own choice)")
    p.add_argument("--output", metavar="FILE", help="write the JSON document there too")
    p.add_argument("--plots", metavar="DIR", help="with --random: write pictures there")
    p.set_defaults(run=run_generate)
    _add_kernel(kinds)
    _add_prefill(kinds)
    _add_serve(kinds)


def _add_serve(kinds: Any) -> None:
    p = kinds.add_parser(
        "serve",
        help="streams of a server against the engine alone",
        description="Start a server in a process of its own and stream prompts from it at once, in turns with the "
        "engine alone on the same prompts as one batch; check that the texts are the same, and print both speeds. The "
        "last line of output is one JSON document. Exit status 1: texts differ, or requests failed.",
    )
    add_model(p)
    p.add_argument(
        "--prompts", metavar="FILE", help="JSON lines: id, category, prompt (default: built-in ones)"
    )
    p.add_argument("--streams", type=int, default=8, metavar="N", help="at once; default: %(default)s")
    p.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of each; default: %(default)s")
    p.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="speeds are medians; default: %(default)s"
    )
    p.add_argument(
        "--temperature", type=float, default=SamplingParams().temperature, metavar="T", help="0 is greedy"
    )
    p.add_argument("--seed", type=int, default=0)
    add_speculation(p, drafter="the one that comes with the model, else ngram", told=False)
    p.add_argument(
        "--threads", type=int, metavar="N", help="of torch, for each of both (default: its own choice)"
    )
    p.add_argument("--output", metavar="FILE", help="write the JSON document there too")
    p.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Measure, print the table and the JSON document; 1 when texts differ or requests failed."""
    if find_spec("uvicorn") is None:
        raise ValueError("bench serve needs the server: pip install -e '.[server]', in a clone of specla")
    for name, least, most in (("streams", 1, 4096), ("max_tokens", 1, 10**6), ("repeat", 1, 10**4),
                              ("threads", 1, 4096)):  # fmt: skip
        _check_range(args, name, least, most)
    output = _output("--output", args.output)

    from specla.bench.serve import measure_all, print_tables

    report = measure_all(args, sys.argv)
    _save(report, output)
    print_tables(report)
    print(json.dumps(report))
    return 1 if report["failed"] or report["different"] else 0


def _add_kernel(kinds: Any) -> None:
    p = kinds.add_parser(
        "kernel",
        help="one layer's kernels on draft trees, on a GPU",
        description="Check the kernels of one layer on drawn draft trees and time them in CUDA graphs, beside plain "
        "decoding, replay, snapshots and flash-linear-attention, if it is installed. The last line of output is one "
        "JSON document. Exit status 1: results are wrong, and nothing is timed. Needs a CUDA device and triton.",
    )
    _add_layer(p)
    p.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32, 128], metavar="B", help="default: 1 8 32 128"
    )
    p.add_argument(
        "--trees",
        nargs="+",
        default=["chain:16", "2x12:16", "4x4:32"],
        metavar="TREE",
        help="chain:NODES or TOPKxDEPTH:NODES; default: chain:16 2x12:16 4x4:32",
    )
    p.add_argument(
        "--pending", type=int, default=5, metavar="N", help="nodes to commit first; default: %(default)s"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="replays of a graph; times are medians"
    )
    p.add_argument("--only", nargs="+", metavar="NAME", help=f"some of {', '.join(KERNEL_GROUPS)}")
    p.add_argument("--json", metavar="FILE", help="write the JSON document there too")
    p.add_argument("--plots", metavar="DIR", help="write pictures there")
    p.add_argument(
        "--tune", action="store_true", help="find the fastest launches instead, and write their table"
    )
    p.add_argument(
        "--tune-output", metavar="FILE", help="the table's file; default: where it will be looked up"
    )
    p.set_defaults(run=run_kernel)


def _add_layer(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--heads", type=int, default=8, metavar="N", help="of queries and keys; default: %(default)s"
    )
    p.add_argument("--value-heads", type=int, metavar="N", help="a multiple of --heads; default: as many")
    p.add_argument("--head-dim", type=int, default=256, metavar="N", help="default: %(default)s")
    p.add_argument("--head-v-dim", type=int, metavar="N", help="of values; default: as --head-dim")


def _add_prefill(kinds: Any) -> None:
    p = kinds.add_parser(
        "prefill",
        help="one layer's reading of prompts, on a GPU",
        description="Check how one layer reads prompts and time it in CUDA graphs, beside flash-linear-attention, if "
        "it is installed. The last line of output is one JSON document. Exit status 1: outputs are wrong. Needs a CUDA "
        "device and triton.",
    )
    _add_layer(p)
    p.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="default: 1 8")
    p.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[512, 2048, 4096],
        metavar="T",
        help="default: 512 2048 4096",
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--repeats", type=int, default=20, metavar="N", help="replays of a graph")
    p.add_argument("--json", metavar="FILE", help="write the JSON document there too")
    p.set_defaults(run=run_prefill)


def run_prefill(args: argparse.Namespace) -> int:
    """Measure, print the table and the JSON document; 1 when outputs are wrong."""
    _check_layer(args)
    for name, most in (("batch", 4096), ("tokens", 1 << 20)):
        if not all(1 <= value <= most for value in getattr(args, name)):
            raise ValueError(f"--{name} must be in 1..{most}, got {' '.join(map(str, getattr(args, name)))}")
    output = _output("--json", args.json)

    from specla.bench.prefill import measure_all, print_table

    return _tell_checked(lambda: measure_all(args, sys.argv), print_table, output)


def _check_layer(args: argparse.Namespace) -> None:
    if find_spec("triton") is None:
        raise ValueError(f"bench {args.kind} needs triton: pip install 'specla[gpu]'")
    for name, most in (("heads", 1024), ("value_heads", 1024), ("head_dim", 512), ("head_v_dim", 512)):
        _check_range(args, name, 1, most)
    _check_range(args, "repeats", 10, 10**4)


def run_kernel(args: argparse.Namespace) -> int:
    """Measure or tune, print the tables and the JSON document; 1 when results are wrong."""
    _check_layer(args)
    _check_range(args, "pending", 1, 64)
    if not all(1 <= batch <= 4096 for batch in args.batch):
        raise ValueError(f"--batch must be in 1..4096, got {' '.join(map(str, args.batch))}")
    unknown = sorted(set(args.only or ()) - set(KERNEL_GROUPS))
    if unknown:
        raise ValueError(f"--only must name some of {', '.join(KERNEL_GROUPS)}, got {' '.join(unknown)}")
    if args.tune and (args.only or args.plots):
        raise ValueError("--tune measures configurations only: it goes with neither --only nor --plots")
    if args.tune_output is not None and not args.tune:
        raise ValueError("--tune-output needs --tune")
    output = _output("--json", args.json)
    table = _output("--tune-output", args.tune_output)

    from specla.bench.kernel_report import measure_all, print_tables, tune_all

    return _tell_checked(
        lambda: tune_all(args, sys.argv, table) if args.tune else measure_all(args, sys.argv),
        print_tables,
        output,
    )


def _tell_checked(
    measure: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], None], output: Path | None
) -> int:
    """Measure, save and print; 1 when results were wrong, and nothing is told."""
    from specla.bench.kernel_checks import CheckError

    try:
        report = measure()
    except CheckError as error:
        print(f"specla bench: error: {error}", file=sys.stderr)
        return 1
    _save(report, output)
    show(report)
    print(json.dumps(report))
    return 0


def run_generate(args: argparse.Namespace) -> int:
    """Measure, print the tables and the JSON document; 1 when a speculative text differs from the plain one."""
    from specla.bench.generate import UnrepeatableError
    from specla.bench.report import measure_all, measure_random, print_tables

    if not all(1 <= batch <= 4096 for batch in args.batch_size):
        raise ValueError(f"--batch-size must be in 1..4096, got {' '.join(map(str, args.batch_size))}")
    for name, least, most in (("limit", 1, 10**6), ("max_tokens", 2, 10**6),
                              ("repeat", 1, 10**4), ("rounds", 0, 10**6), ("threads", 1, 4096)):  # fmt: skip
        _check_range(args, name, least, most)
    output = _output("--output", args.output)
    if args.random is None:
        if len(args.batch_size) > 1:
            raise ValueError("several of --batch-size need --random")
        for name in ("plots", "ways"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} needs --random")
        args.batch_size, args.max_tokens = args.batch_size[0], args.max_tokens or 128
    try:
        report = (measure_all if args.random is None else measure_random)(args, sys.argv)
    except UnrepeatableError as error:
        print(f"specla bench: error: {error}", file=sys.stderr)
        return 1
    _save(report, output)
    if args.random is None:  # the other's tables are printed as they come
        print_tables(report)
    for line in report["errors"]:
        print(f"specla bench: error: {line}", file=sys.stderr)
    print(json.dumps(report))
    return 1 if report["errors"] else 0


def _check_range(args: argparse.Namespace, name: str, least: int, most: int) -> None:
    value = getattr(args, name)
    if value is not None and not least <= value <= most:
        raise ValueError(f"--{name.replace('_', '-')} must be in {least}..{most}, got {value}")


def _output(flag: str, name: str | None) -> Path | None:
    """The file that a flag names."""
    path = None if name is None else Path(name)
    if path is not None and ((path.exists() and not path.is_file()) or not path.parent.is_dir()):
        raise ValueError(f"{flag} must be a regular file in a directory that exists, got {name}")
    return path


def _save(report: dict[str, Any], output: Path | None) -> None:
    """The JSON document in a file, if one was named."""
    from specla.models.loader import replace_file

    if output is not None:
        text = json.dumps(report, indent=1) + "\n"
        replace_file(
            output.resolve(), partial(Path.write_text, data=text)
        )  # of a link, the file that it names
