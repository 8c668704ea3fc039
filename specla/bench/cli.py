"""`specla bench`: flags, and what the benchmarks print."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from specla.engine.params import SamplingParams
from specla.flags import add_model, add_speculation


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
    p.add_argument("--max-tokens", type=int, default=128, metavar="N")
    p.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences that run together")
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
    p.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Measure, print the tables and the JSON document; 1 when a speculative text differs from the plain one."""
    from specla.bench.generate import UnrepeatableError
    from specla.bench.report import measure_all, print_tables
    from specla.models.loader import replace_file

    for name, least, most in (("limit", 1, 10**6), ("max_tokens", 2, 10**6), ("batch_size", 1, 4096),
                              ("repeat", 1, 10**4), ("rounds", 0, 10**6), ("threads", 1, 4096)):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} must be in {least}..{most}, got {value}")
    output = None if args.output is None else Path(args.output)
    if output is not None and ((output.exists() and not output.is_file()) or not output.parent.is_dir()):
        raise ValueError(f"--output must be a regular file in a directory that exists, got {args.output}")
    try:
        report = measure_all(args, sys.argv)
    except UnrepeatableError as error:
        print(f"specla bench: error: {error}", file=sys.stderr)
        return 1
    if output is not None:
        text = json.dumps(report, indent=1) + "\n"
        replace_file(
            output.resolve(), partial(Path.write_text, data=text)
        )  # of a link, the file that it names
    print_tables(report)
    for line in report["errors"]:
        print(f"specla bench: error: {line}", file=sys.stderr)
    print(json.dumps(report))
    return 1 if report["errors"] else 0
