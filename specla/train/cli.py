"""`specla train tokenizer`, `specla train target` and `specla train drafter`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

    from specla.models.language_model import LanguageModel
    from specla.tokenizer import Tokenizer
    from specla.train.data import TokenDataset

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
    kinds = commands.add_parser("train", help="train a tokenizer, a target or a drafter").add_subparsers(
        dest="kind", required=True, metavar="WHAT"
    )
    _add_tokenizer(kinds)
    _add_target(kinds)
    _add_drafter(kinds)


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

    p = kinds.add_parser(
        "target",
        help="a Gated DeltaNet from scratch; the default shape is specla-mini's; with torchrun, on several GPUs",
    )
    p.add_argument("--tokenizer", required=True, metavar="DIR")
    _add_run(p, "bits per byte", "checkpoint")
    for name, value in MINI.items():
        metavar = "N" if isinstance(value, int) else "X"
        p.add_argument(
            _flag(name), type=type(value), default=value, metavar=metavar, help="default: %(default)s"
        )
    p.add_argument("--no-tie", action="store_true", help="a head of its own")
    _add_fields(p, TargetTraining)
    p.set_defaults(run=_train_target)


def _add_drafter(kinds: Any) -> None:
    from specla.drafters.network import MIXERS, EagleConfig
    from specla.train.drafter import DrafterTraining
    from specla.train.objectives import Objective

    p = kinds.add_parser(
        "drafter",
        help="an EAGLE-style drafter for a target",
        description="Train a one-layer drafter on text that the target writes itself, from prompts of a corpus. "
        "With torchrun, on several GPUs.",
    )
    p.add_argument("target", metavar="TARGET", help="checkpoint directory of the target")
    _add_run(p, "acceptance", "drafter")
    p.add_argument("--mixer", choices=MIXERS, default=EagleConfig.mixer, help="default: %(default)s")
    p.add_argument(
        "--layer-ids", metavar="I,J,K", help="streams of the target to read (default: low, middle, last)"
    )
    p.add_argument("--draft-vocab-size", type=int, default=4096, metavar="N", help="default: %(default)s")
    for name in ("num_heads", "head_dim", "intermediate_size"):
        p.add_argument(_flag(name), type=int, metavar="N", help="default: the target's")
    p.add_argument(
        "--sliding-window", type=int, default=256, metavar="N", help="of attention; default: %(default)s"
    )
    p.add_argument(
        "--compact", action="store_true", help="leave out embeddings and head, which are the target's"
    )
    _add_fields(p, DrafterTraining)
    _add_fields(p, Objective)
    p.set_defaults(run=_train_drafter)


def _add_run(p: Any, measured: str, result: str) -> None:
    """What every run has: a corpus, a place to write, and when to stop."""
    p.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help=f"corpus: DIR/train/*.jsonl[.xz] or *.txt and, for {measured}, DIR/valid",
    )
    p.add_argument(
        "--extra", metavar="DIR", action="append", default=[], help="more training text, not split"
    )
    p.add_argument(
        "--out", required=True, metavar="DIR", help=f"{result}, log.jsonl and the resumable training.pt"
    )
    p.add_argument("--cache", metavar="DIR", help="tokenised corpus (default: OUT/tokens)")
    p.add_argument(
        "--weight", metavar="CATEGORY=W", action="append", default=[], help="visits of it an epoch"
    )
    p.add_argument("--resume", action="store_true", help="go on from OUT/training.pt if it is there")
    p.add_argument("--device", default="auto")
    p.add_argument("--max-seconds", type=float, metavar="S", help="stop after so long, resumable")


def _add_fields(p: Any, settings: type[Any]) -> None:
    """A flag for each field of a dataclass that is a number or a word."""
    for field in fields(settings):
        if isinstance(field.default, (int, float, str)):
            p.add_argument(
                _flag(field.name),
                type=type(field.default),
                default=field.default,
                metavar={int: "N", float: "X", str: "NAME"}[type(field.default)],
                help="default: %(default)s",
            )


def _given_fields(args: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in fields(settings) if hasattr(args, field.name)}


def _train_tokenizer(args: argparse.Namespace) -> int:
    from specla.train.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        args.data, args.vocab_size, args.out, sample_bytes=args.sample_bytes, seed=args.seed
    )
    print(f"{args.out}: {tokenizer.vocab_size} tokens")
    return 0


def _train_target(args: argparse.Namespace) -> int:
    from specla.engine.llm import resolve_device
    from specla.models.config import GatedDeltaNetConfig
    from specla.tokenizer import load_tokenizer
    from specla.train.run import RESUMABLE, process_group, ranks
    from specla.train.target import TargetTraining, train_target

    tokenizer = load_tokenizer(args.tokenizer)
    out = Path(args.out)
    config = GatedDeltaNetConfig(
        vocab_size=tokenizer.vocab_size, tie_word_embeddings=not args.no_tie, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, **{name: getattr(args, name) for name in MINI},
    )  # fmt: skip
    training = TargetTraining(**_given_fields(args, TargetTraining))
    with process_group(resolve_device(args.device)) as device:
        data, valid = _read_data(args, tokenizer)
        if ranks()[0] == 0:
            print(f"{data.epoch_tokens(args.seed):,} tokens an epoch, {training.steps} steps of "
                  f"{training.batch_size} x {training.seq_len} on {device}", file=sys.stderr)  # fmt: skip
        model = train_target(
            config,
            training,
            data,
            valid,
            out,
            device=device,
            resume=args.resume,
            progress=sys.stderr,
            stop=_stop(args),
        )
        if ranks()[0] == 0:
            copy_tokenizer(Path(args.tokenizer), out)
            finished = not (out / RESUMABLE).exists()  # weights that stand there may be an older run's
            _tell(out, model, finished)
    return 0


def copy_tokenizer(source: Path, out: Path) -> None:
    """The files of a tokenizer beside the weights that were trained with it."""
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)  # whatever the source's mode


def _train_drafter(args: argparse.Namespace) -> int:
    from specla.engine.llm import resolve_device
    from specla.models.loader import load_target
    from specla.tokenizer import load_tokenizer
    from specla.train.drafter import DrafterTraining, train_drafter
    from specla.train.objectives import Objective
    from specla.train.run import process_group, ranks

    training = DrafterTraining(
        **_given_fields(args, DrafterTraining), objective=Objective(**_given_fields(args, Objective))
    )
    if Path(args.out).resolve() == Path(args.target).resolve():
        raise ValueError(f"--out must be another directory than the target's, {args.target}")
    tokenizer = load_tokenizer(args.target)
    with process_group(resolve_device(args.device)) as device:
        first = ranks()[0] == 0
        target = load_target(args.target, device)
        config, (heads, head_dim) = target.config, _heads(target)
        shape = {
            "mixer": args.mixer,
            "layer_ids": _layer_ids(args.layer_ids, config.num_hidden_layers),
            "draft_vocab_size": min(args.draft_vocab_size, config.vocab_size),
            "num_heads": args.num_heads or heads,
            "head_dim": args.head_dim or head_dim,
            "intermediate_size": args.intermediate_size or config.mlp_dim,
            "sliding_window": args.sliding_window if args.mixer == "attention" else None,
            "rms_norm_eps": config.norm_eps,
        }
        data, valid = _read_data(args, tokenizer)
        if first:
            print(f"{training.steps} steps of {training.batch_size} x {training.length} tokens, "
                  f"{training.rows} texts at a time, on {device}", file=sys.stderr)  # fmt: skip
        network, finished = train_drafter(
            target, shape, training, data, valid, args.out, target_name=Path(args.target).name,
            standalone=not args.compact, resume=args.resume, progress=sys.stderr, stop=_stop(args),
        )  # fmt: skip
        if first:
            _tell(Path(args.out), network, finished)
    return 0


def _heads(target: LanguageModel) -> tuple[int, int]:
    """Number and size of a drafter's heads: those of the target's keys, where it recurs."""
    from specla.state import RecurrentSpec

    specs = [spec for spec in target.state_specs() if isinstance(spec, RecurrentSpec)]
    return (specs[0].num_heads, specs[0].head_dim) if specs else (max(1, target.config.hidden_size // 64), 64)


def _read_data(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[TokenDataset, TokenDataset | None]:
    """The corpus as tokens, and its held-out part if it has one; one process tokenises, the others wait for it."""
    from specla.train.cache import prepare_tokens
    from specla.train.corpus import corpus_files
    from specla.train.run import one_at_a_time

    cache = Path(args.cache) if args.cache else Path(args.out) / "tokens"
    files = corpus_files(args.data) + [file for extra in args.extra for file in corpus_files(extra, None)]
    has_valid = (Path(args.data) / "valid").is_dir()
    with one_at_a_time():
        data = prepare_tokens(files, tokenizer, cache / "train", weights=_weights(args.weight))
        valid = prepare_tokens(args.data, tokenizer, cache / "valid", split="valid") if has_valid else None
    return data, valid


def _stop(args: argparse.Namespace) -> Callable[[int], bool] | None:
    import time

    if args.max_seconds is None:
        return None
    until = time.monotonic() + args.max_seconds
    return lambda step: time.monotonic() > until


def _tell(out: Path, model: Module, finished: bool) -> None:
    size = sum(p.numel() for p in model.parameters())
    print(f"{out}: {size:,} parameters{'' if finished else ', not finished: go on with --resume'}")


def _layer_ids(text: str | None, layers: int) -> tuple[int, ...]:
    if text is None:
        return tuple(sorted({layers // 4, layers // 2, layers}))
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layer-ids takes numbers with commas between them, got {text!r}") from None


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
