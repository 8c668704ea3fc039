"""Flags that several commands share: which model, on what, and how to speculate. Needs no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specla.engine.params import DRAFTERS, SpeculativeConfig
from specla.modes import MODES

if TYPE_CHECKING:
    from specla.engine.llm import LLM

FIELDS = ("num_speculative_tokens", "num_steps", "topk", "prune_threshold", "synthetic_acceptance_rate")


def add_model(p: argparse.ArgumentParser, what: str = "checkpoint directory") -> None:
    """MODEL, --device and --dtype."""
    p.add_argument("model", nargs="?", metavar="MODEL", help=f"{what} (default: the bundled specla-mini)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 or float64")


def add_speculation(p: argparse._ActionsContainer, drafter: str, told: bool = True) -> None:
    """--drafter, --verify and the sizes of a tree; `drafter` says what runs when none is named, `told` whether the
    drafter that knows the answer may.
    """
    default = SpeculativeConfig()
    names = ", ".join(name for name in DRAFTERS if told or name != "synthetic")
    p.add_argument("--drafter", metavar="NAME", help=f"a directory, {names}; default: {drafter}")
    p.add_argument("--verify", choices=MODES, default=default.verify, help="default: %(default)s")
    p.add_argument(
        "--num-speculative-tokens",
        type=int_or_auto,
        metavar="N",
        help=f"drafted nodes of a tree; auto: what pays; default: {default.num_speculative_tokens}",
    )
    p.add_argument(
        "--num-steps", type=int, metavar="N", help=f"depth of a tree; default: {default.num_steps}"
    )
    p.add_argument(
        "--topk",
        type=int,
        metavar="K",
        help=f"children of a node of the tree, 1: a chain; default: {default.topk}",
    )
    p.add_argument("--prune-threshold", type=float, metavar="X", help="for drafters that give probabilities")
    if told:
        p.add_argument("--synthetic-acceptance-rate", type=float, metavar="P", help="of drafter synthetic")
    else:
        p.set_defaults(synthetic_acceptance_rate=None)


def given(args: argparse.Namespace) -> list[str]:
    """The flags of `add_speculation` that say how the drafter drafts and that the user gave."""
    return [f"--{name.replace('_', '-')}" for name in FIELDS if getattr(args, name) is not None]


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig:
    """What the flags of `add_speculation` ask for, with the defaults of SpeculativeConfig for the rest."""
    asked = {name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None}
    return SpeculativeConfig(verify=args.verify, **asked)


def load_llm(args: argparse.Namespace, **overrides: Any) -> LLM:
    """The LLM that the flags of `add_model` and `add_speculation` describe."""
    options = {
        "drafter": args.drafter,
        "speculative_config": speculative_config(args),
        "device": args.device,
        "dtype": args.dtype,
    }

    from specla.engine.llm import LLM  # after the checks that need no torch

    return LLM(args.model, **(options | overrides))


def int_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be an integer or "auto", got {text!r}') from None
