"""`specla bench`: flags, and what the benchmarks print."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.modes import MODES


def add_bench(commands: Any) -> None:
    """Add the `bench` command and its parts to the command line."""
    kinds = commands.add_parser("bench", help="measure speed").add_subparsers(
        dest="kind", required=True, metavar="WHAT"
    )
    asked, speculative = SamplingParams(), SpeculativeConfig()
    p = kinds.add_parser(
        "generate",
        help="plain against speculative decoding",
        description="Decode prompts plainly and speculatively on one loaded target, check that the tokens are the "
        "same, and print speeds. The last line of output is one JSON document. Exit status 1: tokens differ.",
    )
    p.add_argument(
        "model", nargs="?", metavar="MODEL", help="checkpoint directory (default: the bundled one)"
    )
    p.add_argument(
        "--prompts", metavar="FILE", help="JSON lines: id, category, prompt (default: built-in ones)"
    )
    p.add_argument("--limit", type=int, metavar="N", help="take N prompts, spread evenly")
    p.add_argument("--max-tokens", type=int, default=128, metavar="N")
    p.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences that run together")
    p.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="runs of each prompt; figures are medians"
    )
    p.add_argument("--rounds", type=int, default=100, metavar="N", help="single rounds to time, 0 for none")
    p.add_argument("--temperature", type=float, default=asked.temperature, metavar="T", help="0 is greedy")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ignore-eos", action="store_true", help="always generate max-tokens tokens")
    p.add_argument("--drafter", metavar="NAME", help="ngram or synthetic, instead of a choice of both")
    p.add_argument("--num-speculative-tokens", type=int_or_auto, default=speculative.num_speculative_tokens,
                   metavar="N", help="with --drafter: drafts in a tree, or auto")  # fmt: skip
    p.add_argument("--num-steps", type=int, default=speculative.num_steps, metavar="N", help="with --drafter")
    p.add_argument(
        "--topk", type=int, default=speculative.topk, metavar="K", help="with --drafter; 1: a chain"
    )
    p.add_argument("--synthetic-acceptance-rate", type=float, metavar="P", help="with --drafter synthetic")
    p.add_argument("--verify", choices=MODES, default=speculative.verify)
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own choice)")
    p.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Measure, print the tables and the JSON document; 1 when a speculative text differs from the plain one."""
    from specla.bench.report import measure_all, print_tables

    for name, least in (("limit", 1), ("max_tokens", 2), ("batch_size", 1), ("repeat", 1), ("rounds", 0),
                        ("threads", 1)):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    report = measure_all(args, sys.argv)
    print_tables(report)
    for error in report["errors"]:
        print(f"specla bench: error: {error}", file=sys.stderr)
    print(json.dumps(report))
    return 1 if report["errors"] else 0


def int_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be an integer or "auto", got {text!r}') from None
