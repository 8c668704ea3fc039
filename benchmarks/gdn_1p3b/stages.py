"""What the stages do: each reads what those before it left in the work folder, or what was given in their place."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.gdn_1p3b.plan import Shape
from benchmarks.gdn_1p3b.rollouts import join_parts, write_parts
from specla import __version__
from specla.bench.pieces import Table
from specla.bench.prompts import read_prompts
from specla.bench.table import TableSettings, measure_table, settings_identity
from specla.drafters.network import Eagle
from specla.engine.drafting import load_network
from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import load_target, read_config
from specla.tokenizer import Tokenizer, load_tokenizer
from specla.train.cache import prepare_tokens
from specla.train.cli import copy_tokenizer
from specla.train.corpus import corpus_files
from specla.train.data import META, TokenDataset
from specla.train.drafter import DrafterTraining, fingerprint, train_drafter
from specla.train.run import LOG, RESUMABLE, ranks
from specla.train.slices import join_slices, write_slice
from specla.train.target import TargetTraining, train_target

MANY = 10**7  # steps: the clock ends a run
CHECKPOINT_SECONDS = 240.0
PAUSED = "paused"  # stands in the work folder when a stage's time was over before its end
USER_TURN = "<|user|>\n{}<|assistant|>\n"  # as chats of the corpus are written
NO_BOS = {"add_bos_token": False}  # texts of the corpus begin without one, so prompts do, too

Over = Callable[[float], bool]


def result(stage: str, args: argparse.Namespace) -> Path:
    """The file that is there when a stage is done."""
    return {
        "tokens": args.work / "tokens" / "train" / META,
        "target": args.target / "config.json" if args.target else args.work / "target" / "model.safetensors",
        "rollouts": args.work / "rollouts" / META,
        "drafter": args.drafter / "config.json"
        if args.drafter
        else args.work / "drafter" / "model.safetensors",
        "measure": args.work / "measure.done",
    }[stage]


def is_done(stage: str, args: argparse.Namespace) -> bool:
    path = result(stage, args)
    unneeded = (stage == "target" and args.target is not None) or (
        stage == "drafter" and args.drafter is not None
    )
    if unneeded and not path.exists():
        raise ValueError(f"{path.parent} holds no {stage}: {path.name} is missing")
    return path.exists() and not (path.parent / RESUMABLE).exists()


def run(stage: str, args: argparse.Namespace, shape: Shape, device: torch.device, over: Over) -> bool:
    """Whether the stage reached its end before its time was over."""
    (args.work / PAUSED).unlink(missing_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    check_inputs(args, (stage,))
    begun = time.monotonic()
    finished = {
        "tokens": _tokens,
        "target": _target,
        "rollouts": _rollouts,
        "drafter": _drafter,
        "measure": _measure,
    }[stage](args, shape, device, over)
    if ranks()[0] == 0:
        told = f"done, {result(stage, args)}" if finished else "its time is over"
        print(f"{stage}: {told} after {(time.monotonic() - begun) / 60:.2f} min", file=sys.stderr, flush=True)
        if not finished:
            (args.work / PAUSED).touch()
    return finished


def check_inputs(args: argparse.Namespace, todo: Sequence[str]) -> None:
    """ValueError when what the stages read is neither there nor made by one before."""
    if "tokens" in todo and not is_done("tokens", args):
        if args.slices is None and (args.corpus is None or args.tokenizer is None):
            raise ValueError("tokens needs --slices DIR, or --corpus DIR and --tokenizer DIR")
        if args.slices is not None and not sorted(args.slices.glob("train-*.xz")):
            raise ValueError(f"{args.slices} holds no slices, expected train-*.xz as pack leaves them")
    for stage, before in (("target", "tokens"), ("rollouts", "tokens"), ("rollouts", "target"),
                          ("drafter", "target"), ("drafter", "rollouts"), ("measure", "target")):  # fmt: skip
        if stage in todo and before not in todo and not is_done(before, args):
            raise ValueError(f"{stage} needs {result(before, args)}: run the stage {before} first")
    for path in args.prompts if "measure" in todo else []:
        read_prompts(path, 1)
    unknown = sorted(set(args.chat) - {path.stem for path in args.prompts})
    if "measure" in todo and unknown:
        raise ValueError(f"--chat names {unknown[0]!r}, which is the name of none of --prompts")
    if "measure" in todo:
        table_settings(args)
        if not args.prompts:
            raise ValueError("measure needs --prompts FILE [FILE ...], one file a suite")


def table_settings(args: argparse.Namespace) -> TableSettings:
    return TableSettings(
        batches=tuple(args.batches), temperatures=tuple(args.temperatures), per_suite=tuple(args.per_suite),
        max_tokens=args.max_tokens, seed=args.seed, tree_steps=args.tree_steps, prune_threshold=args.prune_threshold,
    )  # fmt: skip


def target_config(args: argparse.Namespace, shape: Shape) -> GatedDeltaNetConfig:
    """Of the target that is given or trained; before there is a tokenizer, with 32,000 tokens."""
    if is_done("target", args):
        config = read_config(args.target or args.work / "target")
        if not isinstance(config, GatedDeltaNetConfig):
            raise ValueError(f"{args.target} must hold a Gated DeltaNet, got {type(config).__name__}")
        return config
    tokenizer = _tokenizer_folder(args)
    if tokenizer is None:
        return shape.config(32000, 1, 2)
    known = load_tokenizer(tokenizer)
    return shape.config(known.vocab_size, known.bos_token_id, known.eos_token_id)


def pack(args: argparse.Namespace) -> None:
    """The corpus as slices and the tokenizer in WORK/slices, ahead of time, without a GPU."""
    if args.corpus is None or args.tokenizer is None:
        raise ValueError("pack needs --corpus DIR and --tokenizer DIR")
    data, valid = _tokenise(args, load_tokenizer(args.tokenizer))
    folder = args.work / "slices"
    _keep_tokenizer(args.tokenizer, folder)
    for number in range(args.num_slices):
        size = write_slice(data, number, args.num_slices, folder / f"train-{number:02}.xz")
        print(f"{folder / f'train-{number:02}.xz'}: {size:,} bytes", file=sys.stderr, flush=True)
    size = write_slice(valid, 0, 1, folder / "valid.xz")
    print(
        f"{folder / 'valid.xz'}: {size:,} bytes, {data.num_tokens:,} + {valid.num_tokens:,} tokens",
        file=sys.stderr,
    )


def _tokens(args: argparse.Namespace, shape: Shape, device: torch.device, over: Over) -> bool:
    cache = args.work / "tokens"
    if args.slices is not None:
        _keep_tokenizer(args.slices, cache / "tokenizer")
        valid = join_slices([args.slices / "valid.xz"], cache / "valid")
        data = join_slices(sorted(args.slices.glob("train-*.xz")), cache / "train")
    else:
        _keep_tokenizer(args.tokenizer, cache / "tokenizer")
        data, valid = _tokenise(args, load_tokenizer(args.tokenizer))
    print(f"tokens: {data.num_tokens:,} to train on, {valid.num_tokens:,} held out", file=sys.stderr)
    return True


def _tokenise(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[TokenDataset, TokenDataset]:
    valid = prepare_tokens(args.corpus, tokenizer, args.work / "tokens" / "valid", split="valid")
    files = corpus_files(args.corpus) + [file for extra in args.extra for file in corpus_files(extra, None)]
    return prepare_tokens(files, tokenizer, args.work / "tokens" / "train"), valid


def _target(args: argparse.Namespace, shape: Shape, device: torch.device, over: Over) -> bool:
    data, valid = _read_tokens(args)
    training = TargetTraining(
        steps=MANY, clock_seconds=60 * args.target_minutes, checkpoint_seconds=CHECKPOINT_SECONDS,
        batch_size=args.rows * args.accumulate * ranks()[1], seq_len=shape.seq_len, accumulate=args.accumulate,
        recompute=args.recompute, compile=args.compile, learning_rate=shape.learning_rate,
        vector_rate=shape.vector_rate, warmup=0.03, decay=0.5, seed=args.seed, eval_every=MANY,
        checkpoint_every=MANY, log_every=10,
    )  # fmt: skip
    config = target_config(args, shape)
    out = args.work / "target"
    if ranks()[0] == 0:
        _keep_tokenizer(args.work / "tokens" / "tokenizer", out)
        epoch = data.epoch_tokens(args.seed)
        print(
            f"target: {epoch:,} tokens an epoch, {training.batch_size} x {training.seq_len} a step",
            file=sys.stderr,
        )
    train_target(
        config, training, data, valid, out, device=device, resume=True, progress=sys.stderr, stop=lambda _: over(30.0)
    )  # fmt: skip
    return not (out / RESUMABLE).exists()


def _rollouts(args: argparse.Namespace, shape: Shape, device: torch.device, over: Over) -> bool:
    data, _ = _read_tokens(args)
    target = _load_target(args, device, data)
    if ranks()[0] == 0:
        (args.work / "rollouts").mkdir(exist_ok=True)
    begun, halted = time.monotonic(), False

    def ends(parts: int) -> bool:
        nonlocal halted
        elapsed = time.monotonic() - begun
        one = elapsed / parts
        halted = over(one)
        return halted or elapsed + one > 60 * args.rollout_minutes

    folder = args.work / "rollouts" / "parts"
    write_parts(target, data, folder, args.rollout_rows, shape.text_length, args.seed, ends, sys.stderr)
    if ranks()[1] > 1:
        told = torch.tensor(int(halted))
        torch.distributed.all_reduce(told)
        halted = bool(told)
    if halted:
        return False
    if ranks()[0] == 0:
        join_parts(folder, data, args.work / "rollouts")
    if ranks()[1] > 1:
        torch.distributed.barrier()
    return True


def _drafter(args: argparse.Namespace, shape: Shape, device: torch.device, over: Over) -> bool:
    texts = TokenDataset(args.work / "rollouts")
    target = _load_target(args, device, texts)
    valid = (
        TokenDataset(args.work / "tokens" / "valid")
        if (args.work / "tokens" / "valid" / META).exists()
        else None
    )
    batch = shape.draft_rows
    rows = min(args.draft_texts * ranks()[1], texts.num_tokens // shape.text_length) // batch * batch
    if rows == 0:
        raise ValueError(
            f"too few texts in {args.work / 'rollouts'}: one step takes {batch} of {shape.text_length} tokens"
        )
    config = target.config
    layers = config.num_hidden_layers
    given = {
        "mixer": "delta", "layer_ids": tuple(sorted({layers // 4, layers // 2, layers})),
        "draft_vocab_size": min(shape.draft_vocab_size, config.vocab_size), "num_heads": config.num_heads,
        "head_dim": config.head_dim, "intermediate_size": config.mlp_dim, "rms_norm_eps": config.norm_eps,
    }  # fmt: skip
    small = shape.text_length < 256
    training = DrafterTraining(
        steps=MANY, clock_seconds=60 * args.drafter_minutes, checkpoint_seconds=CHECKPOINT_SECONDS, batch_size=batch,
        length=shape.text_length, rows=rows, passes=4, corpus_share=1.0, features="parallel", seed=args.seed,
        compile=args.drafter_compile,
        learning_rate=shape.learning_rate, vector_rate=shape.vector_rate, warmup=0.03, decay=0.5, eval_every=MANY,
        checkpoint_every=MANY, log_every=20, eval_rows=4 if small else 64, shortest_prompt=4 if small else 16,
        longest_prompt=8 if small else 96,
    )  # fmt: skip
    _, finished = train_drafter(
        target, given, training, texts, valid, args.work / "drafter", target_name="gdn-1.3b", standalone=False,
        resume=True, progress=sys.stderr, stop=lambda _: over(15.0),
    )  # fmt: skip
    return finished


def _measure(args: argparse.Namespace, shape: Shape, device: torch.device, over: Over) -> bool:
    folder = args.target or args.work / "target"
    target, tokenizer = _load(folder, device), load_tokenizer(folder)
    network = None
    if is_done("drafter", args):
        network = load_network(args.drafter or args.work / "drafter", target, folder)
    if network is not None and not isinstance(network, Eagle):
        raise ValueError(f"{args.drafter} is no drafter of its own")
    settings = table_settings(args)
    most = max(*args.per_suite, *args.batches)
    suites = {}
    for path in args.prompts:
        form = USER_TURN if path.stem in args.chat else "{}"
        suites[path.stem] = [tokenizer.encode(form.format(p.prompt)) for p in read_prompts(path, most)]
    identity = {
        "target": fingerprint(target), "drafter": None if network is None else _fingerprint(network),
        "settings": settings_identity(settings), "suites": {name: len(ids) for name, ids in suites.items()},
        "chat": sorted(args.chat),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }  # fmt: skip
    table = Table(args.work / "table.json", identity)
    table.made["about"] = _about(args, target)
    begun = time.monotonic()

    def ends() -> bool:
        return over(20.0) or time.monotonic() - begun > 60 * args.measure_minutes

    finished = measure_table(target, network, suites, settings, table, progress=sys.stderr, over=ends)
    if finished:
        (args.work / "measure.done").touch()
    return finished


def _about(args: argparse.Namespace, target: torch.nn.Module) -> dict[str, Any]:
    """Where and how: what a reader of the figures wants to know of them."""
    try:
        import triton

        compiler = triton.__version__
    except ImportError:
        compiler = None
    logs: dict[str, dict[str, Any]] = {}
    for stage in ("target", "drafter"):
        path = args.work / stage / LOG
        if getattr(args, stage) is None and path.exists():
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            logs[stage] = {"minutes": getattr(args, f"{stage}_minutes"), "last": rows[-1] if rows else None}
    bits = ((logs.get("target") or {}).get("last") or {}).get("bits_per_byte")
    valid = args.work / "tokens" / "valid" / META
    if bits and valid.exists():
        counts = json.loads(valid.read_text(encoding="utf-8"))["categories"].values()
        size, tokens = (sum(count[name] for count in counts) for name in ("bytes", "tokens"))
        logs["target"]["valid_loss"] = round(bits["all"] * math.log(2) * size / tokens, 4)  # nats a token
    return {
        "self_trained": args.target is None, "parameters": sum(p.numel() for p in target.parameters()),
        "training": logs, "processes": args.processes, "seed": args.seed,
        "versions": {"specla": __version__, "torch": torch.__version__, "triton": compiler,
                     "python": platform.python_version()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def _read_tokens(args: argparse.Namespace) -> tuple[TokenDataset, TokenDataset]:
    weights = {}
    for text in args.weight:
        name, _, value = text.partition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            raise ValueError(f"--weight takes CATEGORY=NUMBER, got {text!r}") from None
    folder = args.work / "tokens"
    return TokenDataset(folder / "train", weights), TokenDataset(folder / "valid")


def _load(folder: Path, device: torch.device) -> GatedDeltaNet:
    target = load_target(folder, device)
    assert isinstance(target, GatedDeltaNet)  # or its configuration would have been refused
    return target


def _load_target(args: argparse.Namespace, device: torch.device, data: TokenDataset) -> GatedDeltaNet:
    folder = args.target or args.work / "target"
    if load_tokenizer(folder).fingerprint != data.meta["tokenizer"]:
        raise ValueError(
            f"the tokenizer of {folder} is not that of the tokens in {args.work}: train or pack them again"
        )
    return _load(folder, device)


def _fingerprint(network: torch.nn.Module) -> float:
    """What tells one drafter from another."""
    return round(sum(float(p.detach().double().abs().sum()) for p in network.parameters()), 6)


def _tokenizer_folder(args: argparse.Namespace) -> Path | None:
    choices = (args.work / "tokens" / "tokenizer", args.slices, args.tokenizer)
    return next(
        (path for path in choices if path is not None and (path / "tokenizer_config.json").exists()), None
    )


def _keep_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer_config.json").exists():
        raise ValueError(f"{source} holds no tokenizer: tokenizer_config.json is missing")
    folder.mkdir(parents=True, exist_ok=True)
    if source.resolve() != folder.resolve():
        copy_tokenizer(source, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | NO_BOS, indent=2) + "\n", encoding="utf-8")
