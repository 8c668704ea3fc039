"""One benchmark from flags to figures: what was measured, where, and how; then the tables a person reads."""

from __future__ import annotations

import argparse
import platform
import resource
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specla import __version__
from specla.bench.generate import Way, default_ways, drafter_name, figures, measure, repeated_share
from specla.bench.prompts import BenchPrompt, read_prompts
from specla.bench.steps import time_rounds
from specla.drafters.network import DraftNetwork
from specla.engine.drafting import choose_drafter, load_network
from specla.engine.llm import BUNDLED_MODEL, LLM
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.flags import given, speculative_config

CONTEXT = 64  # tokens of the prompt that single rounds start from


def measure_all(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Everything `specla bench generate` measures, JSON-ready."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    config = speculative_config(args)
    if args.drafter is None and given(args):
        raise ValueError(f"{', '.join(given(args))} needs --drafter: the ways compared without it are fixed")
    model = BUNDLED_MODEL if args.model is None else Path(args.model)
    chosen = choose_drafter(args.drafter, model, config)  # a wrong flag should not wait for the model
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed, ignore_eos=args.ignore_eos
    )
    prompts = read_prompts(args.prompts, args.limit)
    llm = LLM(args.model, drafter="none", device=args.device, dtype=args.dtype)
    target = llm.target
    network = load_network(chosen, target, model)
    if args.drafter is None:
        ways = default_ways(args.verify, network if isinstance(network, DraftNetwork) else None)
    else:
        ways = [_asked_way(args, config, network)]
    encoded = sorted(
        ((p, llm.tokenizer.encode(p.prompt)) for p in prompts), key=lambda pair: pair[0].category
    )
    batches = _same_category_batches(encoded, args.batch_size)

    measure(target, batches[:1], ways, SamplingParams(max_tokens=min(16, args.max_tokens)), 1, args.verify)
    everything = measure(target, batches, ways, params, args.repeat, args.verify)
    plain = everything[0]
    runs = [figures(each, plain, range(len(batches))) for each in everything]
    categories: dict[str, list[int]] = {}
    for number, batch in enumerate(batches):
        categories.setdefault(batch[0][0].category, []).append(number)
    for row, each in zip(runs, everything, strict=True):
        if row["identical"]:
            keys = ("tokens_per_s", "speedup", "acceptance_length")
            parts = {name: figures(each, plain, ids) for name, ids in categories.items()}
            row["by_category"] = {name: {key: part[key] for key in keys} for name, part in parts.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before what follows adds pools of its own
    context = (encoded[0][1] * CONTEXT)[:CONTEXT]
    rounds = time_rounds(target, context, args.batch_size, args.rounds, args.verify) if args.rounds else []

    pool = target.new_pool(1, 2)
    shares = [repeated_share(output) for batch in plain.runs for output in batch[0].outputs]
    return {
        "benchmark": "generate",
        "regime": _regime(args),
        "model": "specla-mini" if llm.model_path == BUNDLED_MODEL else llm.model_path.name,
        "parameters": sum(p.numel() for p in target.parameters()),
        "device": torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else "cpu",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.embeddings.weight.dtype).removeprefix("torch."),
        "prompts": "built-in" if args.prompts is None else Path(args.prompts).name,
        "num_prompts": len(prompts),
        "batch_size": args.batch_size,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "seed": args.seed,
        "repeat": args.repeat,
        "repeated_8grams": round(sum(shares) / len(shares), 3),
        "peak_rss_mb": round(peak * (1 if sys.platform == "darwin" else 1024) / 1e6, 1),
        "state_bytes_per_sequence": pool.bytes_per_sequence(),
        "state_bytes_per_draft_node": pool.bytes_per_node(),
        "runs": runs,
        "rounds": rounds,
        "errors": [
            "{}: the tokens of prompt {prompt} differ from plain decoding's from number {token} on, so its speed "
            "means nothing".format(row["name"], **row["first_difference"])
            for row in runs
            if not row["identical"]
        ],
        "versions": {"specla": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(argv),
    }


def measure_random(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Rounds of a target with random weights, JSON-ready.

    Raises:
        ValueError: for an unknown shape, a model beside it, or without a GPU and Triton.
    """
    from specla.bench.kernel_plots import check_matplotlib
    from specla.bench.resident import SHAPES, TOKENS, choose_ways, measure as measure_rounds
    from specla.bench.resident_plots import plot
    from specla.engine.llm import resolve_device

    if args.random not in SHAPES:
        raise ValueError(f"--random must be one of {', '.join(SHAPES)}, got {args.random!r}")
    if args.model is not None or args.drafter is not None or given(args):
        raise ValueError("--random goes with neither a model nor a drafter")
    unread = {
        "prompts": None, "limit": None, "rounds": 100, "ignore_eos": False, "threads": None,
        "dtype": "auto", "verify": SpeculativeConfig().verify,
    }  # fmt: skip
    asked = [
        f"--{name.replace('_', '-')}" for name, default in unread.items() if getattr(args, name) != default
    ]
    if asked:
        raise ValueError(f"--random does not go with {', '.join(asked)}")
    ways = choose_ways(args.ways)
    device = resolve_device(args.device)
    if device.type != "cuda" or find_spec("triton") is None:
        raise ValueError("--random needs a CUDA device and triton: pip install 'specla[gpu]'")
    if args.plots is not None:
        check_matplotlib()
    report = measure_rounds(
        SHAPES[args.random], args.batch_size, args.temperature, args.seed, args.repeat, args.max_tokens or TOKENS,
        device, ways,
    )  # fmt: skip
    differing = [
        f"batch {made['batch']}, {row['name']}: the tokens differ from plain decoding's"
        for made in report["batches"]
        for row in made["ways"]
        if not row["identical"]
    ]
    made = {
        "benchmark": "rounds",
        "shape": args.random,
        "device": torch.cuda.get_device_name(device),
        "temperature": args.temperature,
        "seed": args.seed,
        "repeat": args.repeat,
        **report,
        "errors": differing,
        "versions": {
            "specla": __version__, "torch": torch.__version__, "triton": version("triton"),
            "python": platform.python_version(),
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(argv),
    }  # fmt: skip
    if args.plots is not None:
        for path in plot(made, Path(args.plots)):
            print(path, file=sys.stderr)
    return made


def _command(argv: Sequence[str]) -> str:
    return shlex.join([Path(argv[0]).stem.replace("__main__", "specla"), *argv[1:]])


def print_tables(report: dict[str, Any]) -> None:
    """The figures of `measure_all` for a person."""
    print(f"{report['model']}, {report['parameters']:,} parameters, {report['dtype']} on {report['device']} "
          f"({report['cpu']}, {report['threads']} threads)")  # fmt: skip
    print(f"{report['regime']}\n")
    print(
        f"{'':26} {'tokens/s':>9} {'speed-up':>9} {'acc. length':>12} {'rounds':>7} {'ms a round':>11}   tokens"
    )
    for row in report["runs"]:
        if not row["identical"]:
            print(f"{row['name']:26} {'refused':>9} {'':9} {'':12} {'':7} {'':11}   DIFFER")
            continue
        speed = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        ratio = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        same = "" if row["name"] == "plain" else "identical"
        length, rounds, step = row["acceptance_length"], row["rounds"], row["median_round_ms"]
        step = "-" if step is None else f"{step:.2f}"
        print(f"{row['name']:26} {speed:>9} {ratio:>9} {length:12.2f} {rounds:7} {step:>11}   {same}")
    if report["rounds"]:
        print(f"\n{'one round of the target':34} {'verify':>9} {'accept':>9} {'plain steps':>12}")
        for row in report["rounds"]:
            print(
                f"{row['name']:34} {row['verify_ms']:6.2f} ms {row['accept_ms']:6.2f} ms {row['plain_steps']:12.2f}"
            )
    print(f"\nrepeated 8-grams {report['repeated_8grams']:.1%}, peak memory {report['peak_rss_mb']:.0f} MB, state "
          f"{report['state_bytes_per_sequence']:,} bytes a sequence and {report['state_bytes_per_draft_node']:,} a "
          f"draft node\n")  # fmt: skip


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _asked_way(args: argparse.Namespace, config: SpeculativeConfig, network: str | DraftNetwork) -> Way:
    rate = args.synthetic_acceptance_rate
    shape = "chain" if config.topk == 1 else f"top-k {config.topk}"
    name = f"{drafter_name(Way('', network, config))} {shape} {config.num_speculative_tokens}" + (
        "" if rate is None else f" at {rate:g}"
    )
    return Way(name, network, config)


def _same_category_batches(
    encoded: Sequence[tuple[BenchPrompt, list[int]]], size: int
) -> list[list[tuple[BenchPrompt, list[int]]]]:
    """Batches of up to `size` prompts, none with two categories, so that each category has times of its own."""
    batches: list[list[tuple[BenchPrompt, list[int]]]] = []
    for pair in encoded:
        if batches and len(batches[-1]) < size and batches[-1][0][0].category == pair[0].category:
            batches[-1].append(pair)
        else:
            batches.append([pair])
    return batches


def _regime(args: argparse.Namespace) -> str:
    choice = "greedy" if args.temperature == 0 else f"temperature {args.temperature:g}"
    end = "end of text ignored" if args.ignore_eos else "up to the end of text"
    return (
        f"batch {args.batch_size}, {choice}, at most {args.max_tokens} tokens, {end}; wall time of whole rounds after "
        f"the first (drafting, verification, acceptance, commit; no prefill), ways in turns; "
        f"times are medians of {args.repeat} repeats, counts are sums over them"
    )
