"""What a request may ask for, and how to speculate: frozen, validated when made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from specla.modes import MODES

LEAST = 1e-6  # of what must not be 0, in float32 either
MOST_LOGPROBS = 20  # alternatives of a token that a request may ask for
DRAFTERS = (
    "mtp",
    "ngram",
    "none",
    "synthetic",
)  # by name; `drafting` makes them, and trained ones from directories


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Args:
        temperature: 0 takes the most likely token; above it, tokens are drawn with noise that depends on the seed and
            the position alone: drafting changes when a token arrives, not which one.
        top_p, top_k, min_p: keep the smallest set of tokens with this mass; this many (-1: all); those with at least
            this share of the best one's probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen before.
        max_tokens: at most this many new tokens.
        seed: of this request; None takes one from the engine's own seed.
        stop: strings that end the text, which then excludes them; stop_token_ids: tokens that end it.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: for each new token its log-probability, and those of this many of the likeliest tokens (0 to 20), in
            the target's own distribution: temperature 1, no penalty, nothing cut. prompt_logprobs: the same for the
            prompt. None leaves them out.
        num_speculative_tokens: drafts a round at most; None leaves it to the engine, 0 is plain decoding.

    Raises:
        ValueError: for a value outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 64
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, LEAST, 1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, LEAST, 100.0)
        check_integer("max_tokens", self.max_tokens, 1)
        if self.top_k != -1:
            check_integer("top_k", self.top_k, 1, 2**31 - 1, note=" or -1 (all)")
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        stop = self.stop
        if not (stop is None or isinstance(stop, (str, list, tuple))) or not all(
            isinstance(s, str) and s for s in self.stop_strings
        ):
            raise ValueError(f"stop must be one or several non-empty strings, got {stop!r}")
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MOST_LOGPROBS, note=" or None")
        if self.num_speculative_tokens is not None:
            check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, 255, note=" or None")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How much to draft and how to verify.

    Args:
        num_speculative_tokens: drafted nodes of a tree at most, the root excluded; 0 is plain decoding. "auto" lets the
            engine choose up to 16 a round from measured costs and recent acceptance, and drafts what the text repeats
            by lookup before it asks a trained drafter.
        num_steps: depth of a tree at most, lookups aside.
        topk: children of a node at most; 1 drafts a chain.
        prune_threshold: drop nodes whose log-probability lies more than this below the best path's (drafters that
            give probabilities); None keeps all.
        verify: one of the verification modes; "auto", "serial" and "hybrid" are exact.
        synthetic_acceptance_rate: for drafter="synthetic": chance that a draft is right, one number or one for each
            depth.

    Raises:
        ValueError: for a value outside its range.
    """

    num_speculative_tokens: int | str = "auto"
    num_steps: int = 8
    topk: int = 4
    prune_threshold: float | None = None
    verify: str = "auto"
    synthetic_acceptance_rate: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.num_speculative_tokens != "auto":
            check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, 255, note=' or "auto"')
        check_integer("num_steps", self.num_steps, 1, 255)
        check_integer("topk", self.topk, 1, 64)
        if self.prune_threshold is not None:
            check_number("prune_threshold", self.prune_threshold, 0.0, float("inf"))
        if self.verify not in MODES:
            raise ValueError(f"verify must be one of {', '.join(MODES)}, got {self.verify!r}")
        if self.synthetic_acceptance_rate is not None:
            rates = self.synthetic_acceptance_rate
            for rate in rates if isinstance(rates, (list, tuple)) else [rates]:
                check_number("synthetic_acceptance_rate", rate, 0.0, 1.0)

    @property
    def max_draft(self) -> int:
        """Drafted nodes of the largest tree."""
        return 16 if isinstance(self.num_speculative_tokens, str) else self.num_speculative_tokens

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> SpeculativeConfig:
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(raw) - set(known), key=str)
        if unknown:
            raise ValueError(f"unknown speculative_config keys {unknown}, allowed are {known}")
        return cls(**raw)


def check_sampling(params: SamplingParams | None) -> SamplingParams:
    """The parameters asked for, the defaults for None; ValueError for anything else."""
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
    return params or SamplingParams()


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """ValueError unless `value` is a number between `low` and `high`, both included."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")


def check_integer(name: str, value: Any, low: int, high: int | None = None, note: str = "") -> None:
    """ValueError unless `value` is an integer between `low` and `high`, both included."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be an integer {bound}{note}, got {value!r}")
