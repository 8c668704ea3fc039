"""One request on its way: its tokens, its slot, why it ended, and what speculation did for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from specla.engine.params import SamplingParams

NOT_FINITE = "the target's logits are not finite"


@dataclass
class SequenceMetrics:
    """Counts over the rounds of one sequence."""

    num_spec_steps: int = 0  # rounds
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_tokens: int = 0
    accepted_per_round: Counter[int] = field(default_factory=Counter)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, the bonus token included."""
        return self.num_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry n: rounds in which n drafts were accepted."""
        return [self.accepted_per_round[n] for n in range(max(self.accepted_per_round, default=-1) + 1)]


class RoundError(RuntimeError):
    """A round failed that a sequence shared with others; the cause is what was raised."""


class TokenLogprobs(NamedTuple):
    """What the target thought of a token: its log-probability, and the likeliest tokens with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class RoundTrace(NamedTuple):
    """The tree of a round, node by node, the root first.

    parent: -1 for the root. scores: log-probability that the drafter gave each node's path; None where it gives none,
    and of rounds that never leave a GPU.
    path: ids of the nodes that were accepted, from the root down.
    """

    tokens: list[int]
    parent: list[int]
    scores: list[float] | None
    path: list[int]


@dataclass(eq=False)
class Sequence:
    """`tokens` are prompt and output; the last one is the root of the next tree, not yet read by the target.

    num_cached: tokens of the prompt whose state came from the prefix cache. failure: what ended it with the reason
    "error". logprobs: one for each new token, prompt_logprobs: one for each of the prompt, None for its first; both
    empty unless asked for. last_round: of a traced sequence that has had a round.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    should_stop: Callable[[int], bool] | None = None  # asked after each new token
    keep_slot: bool = False
    trace: bool = False
    key: int = field(kw_only=True)  # its number within its engine, by which drafters know it
    slot: int | None = None
    num_prefilled: int = 0  # tokens that the target has read, or holds as pending
    num_cached: int = 0
    finish_reason: str | None = None
    failure: BaseException | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    last_round: RoundTrace | None = None
    from_draft: list[bool] = field(default_factory=list)  # for each new token
    metrics: SequenceMetrics = field(default_factory=SequenceMetrics)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def error(self) -> str | None:
        """Why it ended with the reason "error", in one line."""
        return None if self.failure is None else one_line(self.failure)

    @property
    def draft_limit(self) -> int:
        """Drafts that could still be of use: the bonus token fills the last place."""
        return self.params.max_tokens - (len(self.tokens) - self.prompt_length) - 1

    @property
    def is_read(self) -> bool:
        """Whether the target has read all but the last of its tokens."""
        return self.num_prefilled == len(self.tokens) - 1

    def fail(self, failure: BaseException) -> None:
        """End it by what went wrong."""
        self.finish_reason, self.failure = "error", failure

    def extend(self, drafts: list[int], bonus: int, proposed: int) -> int:
        """Take accepted drafts and the bonus token, up to the first that ends the sequence.

        Returns:
            how many tokens were taken, at least one.
        """
        taken = 0
        for token, is_draft in [*((t, True) for t in drafts), (bonus, False)]:
            self.tokens.append(token)
            self.from_draft.append(is_draft)
            taken += 1
            try:
                if token in self.stop_ids or (self.should_stop is not None and self.should_stop(token)):
                    self.finish_reason = "stop"
            except Exception as error:  # the caller's, and no fault of those that share the round
                self.fail(error)
            if not self.finish_reason and len(self.tokens) - self.prompt_length >= self.params.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        self.num_prefilled += taken
        accepted = min(taken, len(drafts))
        self.metrics.num_spec_steps += 1
        self.metrics.num_draft_tokens += proposed
        self.metrics.num_accepted_draft_tokens += accepted
        self.metrics.num_tokens += taken
        self.metrics.accepted_per_round[accepted] += 1
        return taken


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
