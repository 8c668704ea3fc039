"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from specla.engine.sequence import SequenceMetrics, TokenLogprobs


@dataclass
class CompletionOutput:
    """One continuation: its text (stop string and special tokens excluded), its tokens (end token included).

    finish_reason: None while it grows, then "stop" (an end token, a stop token or a stop string), "length"
    (max_tokens are there), "error" (its round failed; what raised says why) or "abort" (ended from outside).
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    from_draft: list[bool] = field(default_factory=list)  # for each token: was it an accepted draft?
    pieces: list[str] = field(default_factory=list)  # for each token: the text that it completed
    logprobs: list[TokenLogprobs] | None = None  # for each token, when asked for


@dataclass
class RequestOutput:
    """A request's continuation so far and what speculation did for it."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SequenceMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # for each token of the prompt, when asked for

    @property
    def finished(self) -> bool:
        return self.outputs[0].finish_reason is not None
