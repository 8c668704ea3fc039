"""`specla train tokenizer` and `specla train target`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

MINI = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_heads": 6,
    "head_dim": 64,
    "expand_v": 1.0,
    "intermediate_size": 704,
}


def add_train(commands: Any) -> None:
    """Add the `train` command and its parts to the command line."""
    kinds = commands.add_parser("train", help="train a tokenizer or a target").add_subparsers(
        dest="kind", required=True, metavar="WHAT"
    )
    _add_tokenizer(kinds)
    _add_target(kinds)


def _add_tokenizer(kinds: Any) -> None:
    p = kinds.add_parser("tokenizer", help="a byte-level BPE tokenizer")
    p.add_argument("--data", required=True, metavar="DIR", help="corpus: DIR/train/*.jsonl[.xz] or *.txt")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--vocab-size", type=int, default=8192)
    p.add_argument("--sample-bytes", type=int, default=64_000_000, help="text to learn from")
    p.add_argument("--seed", type=int, default=0)
    p.set_defaults(run=_train_tokenizer)


def _add_target(kinds: Any) -> None:
    from specla.train.target import TargetTraining

    p = kinds.add_parser("target", help="a Gated DeltaNet from scratch; the default shape is specla-mini's")
    p.add_argument(
        "--data", required=True, metavar="DIR", help="corpus: DIR/train and, for bits per byte, DIR/valid"
    )
    p.add_argument(
        "--extra", metavar="DIR", action="append", default=[], help="more training text, not split"
    )
    p.add_argument("--tokenizer", required=True, metavar="DIR")
    p.add_argument(
        "--out", required=True, metavar="DIR", help="checkpoint, log.jsonl and the resumable training.pt"
    )
    p.add_argument("--cache", metavar="DIR", help="tokenised corpus (default: OUT/tokens)")
    p.add_argument(
        "--weight", metavar="CATEGORY=W", action="append", default=[], help="visits of it an epoch"
    )
    p.add_argument("--resume", action="store_true", help="go on from OUT/training.pt if it is there")
    p.add_argument("--device", default="auto")
    p.add_argument("--max-seconds", type=float, metavar="S", help="stop after so long, resumable")
    for name, value in MINI.items():
        p.add_argument(_flag(name), type=type(value), default=value)
    p.add_argument("--no-tie", action="store_true", help="a head of its own")
    for field in fields(TargetTraining):
        kind = float if isinstance(field.default, float) else int
        p.add_argument(_flag(field.name), type=kind, default=field.default)
    p.set_defaults(run=_train_target)


def _train_tokenizer(args: argparse.Namespace) -> int:
    from specla.train.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        args.data, args.vocab_size, args.out, sample_bytes=args.sample_bytes, seed=args.seed
    )
    print(f"{args.out}: {tokenizer.vocab_size} tokens")
    return 0


def _train_target(args: argparse.Namespace) -> int:
    import shutil
    import time

    from specla.engine.llm import resolve_device
    from specla.models.config import GatedDeltaNetConfig
    from specla.tokenizer import load_tokenizer
    from specla.train.cache import prepare_tokens
    from specla.train.corpus import corpus_files
    from specla.train.target import RESUMABLE, TargetTraining, train_target

    device = resolve_device(args.device)
    tokenizer = load_tokenizer(args.tokenizer)
    out = Path(args.out)
    cache = Path(args.cache) if args.cache else out / "tokens"
    config = GatedDeltaNetConfig(
        vocab_size=tokenizer.vocab_size, tie_word_embeddings=not args.no_tie, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, **{name: getattr(args, name) for name in MINI},
    )  # fmt: skip
    training = TargetTraining(**{field.name: getattr(args, field.name) for field in fields(TargetTraining)})
    files = corpus_files(args.data) + [file for extra in args.extra for file in corpus_files(extra, None)]
    data = prepare_tokens(files, tokenizer, cache / "train", weights=_weights(args.weight))
    has_valid = (Path(args.data) / "valid").is_dir()
    valid = prepare_tokens(args.data, tokenizer, cache / "valid", split="valid") if has_valid else None
    print(f"{data.epoch_tokens(args.seed):,} tokens an epoch, {training.steps} steps of "
          f"{training.batch_size} x {training.seq_len} on {device}", file=sys.stderr)  # fmt: skip
    until = None if args.max_seconds is None else time.monotonic() + args.max_seconds
    model = train_target(
        config, training, data, valid, out, device=device, resume=args.resume, progress=sys.stderr,
        stop=None if until is None else lambda step: time.monotonic() > until,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        if (Path(args.tokenizer) / name).exists():
            shutil.copy(Path(args.tokenizer) / name, out / name)
    finished = not (out / RESUMABLE).exists()  # weights that stand there may be an older run's
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters"
          f"{'' if finished else ', not finished: go on with --resume'}")  # fmt: skip
    return 0


def _weights(given: list[str]) -> dict[str, float]:
    weights = {}
    for text in given:
        category, _, value = text.partition("=")
        try:
            weights[category] = float(value)
        except ValueError:
            raise ValueError(f"--weight takes CATEGORY=NUMBER, got {text!r}") from None
    return weights


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
