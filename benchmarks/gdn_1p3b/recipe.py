"""A target of 1.3 B, its drafter, and what speculation brings: one recipe in stages that each leave a file.

    python -m benchmarks.gdn_1p3b.recipe STAGE --work DIR [...]

README.md beside this file says what each stage reads and leaves, and what it takes.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gdn_1p3b import stages
from benchmarks.gdn_1p3b.ahead import compile_table
from benchmarks.gdn_1p3b.plan import SHAPES, Machine, drafter_needs, rollout_needs, target_needs
from specla.engine.llm import resolve_device
from specla.train.run import process_group, ranks

STAGES = ("tokens", "target", "rollouts", "drafter", "measure")
ALONE = ("tokens", "measure")  # stages of one process
GOING_ON = 3  # exit status of a command whose time was over before its stage was


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        args.began = time.monotonic()
        return _run(args)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"recipe: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="recipe", description=__doc__.splitlines()[0])
    p.add_argument("stage", choices=("pack", "plan", "compile", *STAGES, "all"))
    p.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="where every stage leaves its result"
    )
    p.add_argument("--shape", choices=sorted(SHAPES), default="gdn-1.3b")
    p.add_argument("--corpus", type=Path, metavar="DIR", help="DIR/train and DIR/valid, for pack and tokens")
    p.add_argument(
        "--extra", type=Path, metavar="DIR", action="append", default=[], help="more training text"
    )
    p.add_argument("--tokenizer", type=Path, metavar="DIR")
    p.add_argument("--num-slices", type=int, default=4, metavar="N", help="of pack; default: %(default)s")
    p.add_argument(
        "--slices", type=Path, metavar="DIR", help="what pack left, or some of it, instead of a corpus"
    )
    p.add_argument(
        "--weight", metavar="CATEGORY=W", action="append", default=[], help="visits of it an epoch"
    )
    p.add_argument(
        "--target", type=Path, metavar="DIR", help="a checkpoint to start from (default: WORK/target)"
    )
    p.add_argument("--drafter", type=Path, metavar="DIR", help="likewise (default: WORK/drafter)")
    p.add_argument("--device", default="auto")
    p.add_argument("--processes", type=int, metavar="N", help="default: one for each GPU")
    p.add_argument("--target-minutes", type=float, default=11.0, metavar="M", help="default: %(default)s")
    p.add_argument("--rollout-minutes", type=float, default=2.5, metavar="M", help="default: %(default)s")
    p.add_argument("--drafter-minutes", type=float, default=4.0, metavar="M", help="default: %(default)s")
    p.add_argument(
        "--measure-minutes", type=float, default=60.0, metavar="M", help="at most; default: %(default)s"
    )
    p.add_argument(
        "--command-minutes", type=float, metavar="M", help="stop so late, resumable, with exit status 3"
    )
    p.add_argument(
        "--rows", type=int, metavar="N", help="texts in memory of a process that trains the target"
    )
    p.add_argument("--accumulate", type=int, default=1, metavar="N", help="times that many rows make a step")
    p.add_argument(
        "--recompute", type=int, default=2, metavar="N", help="layers computed again to save memory"
    )
    p.add_argument("--compile", choices=("layers", "whole", "none"), default="layers", help="of the target")
    p.add_argument("--drafter-compile", choices=("whole", "none"), default="whole")
    p.add_argument("--rollout-rows", type=int, default=128, metavar="N", help="texts written together")
    p.add_argument("--draft-texts", type=int, default=2048, metavar="N", help="in memory with their features")
    p.add_argument("--prompts", type=Path, metavar="FILE", nargs="+", default=[], help="suites for measure")
    p.add_argument(
        "--chat",
        nargs="+",
        default=[],
        metavar="SUITE",
        help="suites whose prompts are a user's turn in a chat",
    )
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    p.add_argument(
        "--per-suite", type=int, nargs="+", default=[16], metavar="N",
        help="prompts, for larger batches as many as the batch; one number, or one for each of --batches",
    )  # fmt: skip
    p.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    p.add_argument(
        "--tree-steps", type=int, default=8, metavar="N", help="depth of trees; default: %(default)s"
    )
    p.add_argument("--prune-threshold", type=float, default=3.0, metavar="X", help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--dry-run", action="store_true", help="say what a stage needs, and whether it fits, and end"
    )
    p.add_argument(
        "--assume-h200", action="store_true", help="plan for --processes of them instead of this machine"
    )
    return p


def _run(args: argparse.Namespace) -> int:
    device = resolve_device(args.device)
    shape = SHAPES[args.shape]
    args.rows = shape.rows if args.rows is None else args.rows
    for name in ("num_slices", "rows", "accumulate", "rollout_rows", "draft_texts"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.processes is None:
        args.processes = torch.cuda.device_count() if device.type == "cuda" else 1
    if args.stage == "pack":
        stages.pack(args)
        return 0
    if args.stage == "compile":
        compile_table(args, shape, device)
        return 0
    todo = STAGES if args.stage in ("all", "plan") else (args.stage,)
    machine = Machine.here(device, args.processes, args.work)
    if args.assume_h200:
        if args.stage != "plan" and not args.dry_run:
            raise ValueError("--assume-h200 goes with plan or --dry-run")
        machine = Machine.h200(args.processes)
    if args.stage == "plan" or args.dry_run:
        _plan(args, machine, todo)
        return 0
    in_group = "LOCAL_RANK" in os.environ
    if not in_group:  # the last stage's lack of anything is no news for the end of the first
        stages.check_inputs(args, todo)
        for stage in todo:
            if not stages.is_done(stage, args):
                _needs(args, machine, stage, told=False)
    for stage in todo:
        if stages.is_done(stage, args):
            if not in_group or ranks()[0] == 0:
                print(f"{stage}: {stages.result(stage, args)} is there already", file=sys.stderr)
            continue
        if not in_group:
            _needs(args, machine, stage, told=True)
        several = args.processes > 1 and stage not in ALONE and not in_group
        if several or (args.stage == "all" and device.type == "cuda"):
            status = _spawn(args, stage, args.processes if several else 1)
        else:
            with process_group(device) as mine:
                status = 0 if stages.run(stage, args, shape, mine, partial(_over, args)) else GOING_ON
            gc.collect()
        if status:
            if not in_group:
                print(f"{stage}: not finished; the same command goes on with it", file=sys.stderr)
            return status
    return 0


def _over(args: argparse.Namespace, seconds: float = 0.0) -> bool:
    """Whether the command's time is over, or will be in so many seconds."""
    if args.command_minutes is None:
        return False
    return time.monotonic() - args.began + seconds > 60 * args.command_minutes


def _needs(args: argparse.Namespace, machine: Machine, stage: str, *, told: bool) -> None:
    """Say what a stage needs; ValueError when it cannot work. Sizes of a given target are its own."""
    shape = SHAPES[args.shape]
    config = stages.target_config(args, shape)
    if stage == "target":
        needs = target_needs(
            shape, config, machine, args.target_minutes, args.rows, args.accumulate, args.recompute
        )
    elif stage == "rollouts":
        needs = rollout_needs(shape, config, machine, args.rollout_minutes, args.rollout_rows)
    elif stage == "drafter":
        needs = drafter_needs(shape, config, machine, args.drafter_minutes, args.draft_texts)
    else:
        return
    if told:
        print(f"{needs.line()}   {machine.name} x {machine.processes}", file=sys.stderr, flush=True)
    needs.check(machine)


def _plan(args: argparse.Namespace, machine: Machine, todo: Sequence[str]) -> None:
    for stage in todo:
        _needs(args, machine, stage, told=True)
    stages.check_inputs(args, todo)
    shape = SHAPES[args.shape]
    own = {"target": args.target_minutes, "rollouts": args.rollout_minutes, "drafter": args.drafter_minutes}
    minutes = sum(own.get(stage, 0.0) for stage in todo)
    compiled = shape.compile_seconds * sum(stage in ("target", "drafter") for stage in todo) / 60
    print(f"{minutes:.1f} minutes of training and writing, about {compiled:.1f} to compile, "
          f"up to {args.measure_minutes if 'measure' in todo else 0:.1f} to measure", file=sys.stderr)  # fmt: skip


def _spawn(args: argparse.Namespace, stage: str, processes: int) -> int:
    """The stage in processes of its own, which leave a device empty behind them."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "benchmarks.gdn_1p3b.recipe", stage, *_flags(args, skipped=("stage", "began"))]
    if args.command_minutes is not None:
        left = args.command_minutes - (time.monotonic() - args.began) / 60
        command += ["--command-minutes", f"{max(left, 0.0):.3f}"]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    (args.work / stages.PAUSED).unlink(missing_ok=True)
    done = subprocess.run(command, env={"OMP_NUM_THREADS": threads} | os.environ, check=False)
    # torchrun hides the status of what it ran: whether there is a result says it
    if done.returncode and processes > 1 and (args.work / stages.PAUSED).exists():
        return GOING_ON
    return done.returncode


def _flags(args: argparse.Namespace, skipped: Sequence[str]) -> list[str]:
    """The command line of these arguments."""
    made: list[str] = []
    for name, value in vars(args).items():
        flag = "--" + name.replace("_", "-")
        if name in skipped or value is None or value is False or name == "command_minutes":
            continue
        if value is True:
            made.append(flag)
        elif name in ("extra", "weight"):
            made += [word for each in value for word in (flag, str(each))]
        elif isinstance(value, list):
            made += [flag, *map(str, value)] if value else []
        else:
            made += [flag, str(value)]
    return made


if __name__ == "__main__":
    sys.exit(main())
