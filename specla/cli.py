"""The command line: generate, serve, info, train, bench. Mistakes end in one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from specla import __version__


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {_one_line(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 if --compare found a difference, 2 for a mistake."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:
        return _fail("specla", "standard output is closed")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character of a text
    parser = _parser(argv)
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    prog = f"specla {args.command}"
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has seen enough; Python must not try to flush again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, FloatingPointError, OSError, RecursionError) as error:
        return _fail(prog, error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _fail(prog, f"not enough memory: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _parser(argv: Sequence[str]) -> _Parser:
    from specla.server.cli import add_serve

    parser = _Parser(
        prog="specla", description="Lossless speculative decoding for linear-attention language models."
    )
    parser.add_argument("--version", action="version", version=f"specla {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    add_serve(commands)
    _add_info(commands)
    # their flags come from modules that load torch, which `specla --help` does not wait for
    asked = next((word for word in argv if not word.startswith("-")), None)
    if asked == "train":
        from specla.train.cli import add_train

        add_train(commands)
    else:
        commands.add_parser("train", help="train a tokenizer, a target or a drafter")
    if asked == "bench":
        from specla.bench.cli import add_bench

        add_bench(commands)
    else:
        commands.add_parser("bench", help="measure generation, kernels or a server; one JSON line last")
    return parser


def _add_generate(commands: Any) -> None:
    from specla.engine.params import SamplingParams
    from specla.flags import add_model, add_speculation

    asked = SamplingParams()
    p = commands.add_parser(
        "generate", help="continue a prompt", description="Continue a prompt, speculatively."
    )
    add_model(p)
    p.add_argument(
        "-p", "--prompt", required=True, metavar="TEXT", help="text to continue; - reads it from stdin"
    )
    p.add_argument(
        "--max-tokens", type=int, default=asked.max_tokens, metavar="N", help="default: %(default)s"
    )
    p.add_argument(
        "--temperature", type=float, default=asked.temperature, metavar="T", help="0, the default: greedy"
    )
    p.add_argument(
        "--top-p", type=float, default=asked.top_p, metavar="P", help="smallest set with this mass"
    )
    p.add_argument("--top-k", type=int, default=asked.top_k, metavar="K", help="this many tokens; -1: all")
    p.add_argument(
        "--min-p", type=float, default=asked.min_p, metavar="P", help="share of the best's probability"
    )
    p.add_argument(
        "--repetition-penalty", type=float, default=asked.repetition_penalty, metavar="R", help="1: none"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    p.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    p.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add_speculation(p, drafter="the one that comes with the model, else ngram")
    p.add_argument(
        "--compare", action="store_true", help="also decode plainly; print both speeds, check the tokens"
    )
    p.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    p.set_defaults(run=_generate)


def _add_info(commands: Any) -> None:
    from specla.flags import add_model

    p = commands.add_parser(
        "info", help="versions, device, kernels", description="What specla would run on here."
    )
    add_model(p, "checkpoint to describe")
    p.add_argument("--json", action="store_true", help="print one JSON document")
    p.set_defaults(run=_info)


def _generate(args: argparse.Namespace) -> int:
    from specla.engine.params import SamplingParams

    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("the prompt is empty")
    from specla.flags import load_llm

    llm = load_llm(args, max_num_seqs=1)

    from specla.show import compare, has_colour, run_and_show

    colour = has_colour(sys.stdout) and not args.json
    report = run_and_show(llm, prompt, params, quiet=args.json, colour=colour)
    if args.compare:
        report["compare"] = compare(llm, prompt, params, report, quiet=args.json)
    if args.json:
        print(json.dumps(report))
    return 0 if not args.compare or report["compare"]["identical"] else 1


def _info(args: argparse.Namespace) -> int:
    from specla.show import describe

    facts = describe(args.model, args.device, args.dtype)
    if args.json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):<{width}}  {f'{value:,}' if isinstance(value, int) else value}")
    return 0


def _fail(prog: str, error: object) -> int:
    print(f"{prog}: error: {_one_line(error)}", file=sys.stderr)
    return 2


def _one_line(message: object) -> str:
    line = " ".join(str(message).split())
    return line if len(line) <= 600 else line[:600] + " ..."
