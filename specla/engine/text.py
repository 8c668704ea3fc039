"""Prompts to tokens, and tokens to text as they arrive: whole characters, and stop strings that may span tokens."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from specla.engine.outputs import CompletionOutput, RequestOutput
from specla.engine.params import SamplingParams
from specla.engine.sequence import Sequence
from specla.tokenizer import StreamDecoder, Tokenizer

Prompt = str | list[int]


class TextStream:
    """The text of one output.

    `push` says whether a stop string has appeared; the text then ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._decoder = StreamDecoder(tokenizer, continues=True)
        self._stop = stop
        self.text = ""
        self.stopped = False
        self.pieces: list[str] = []  # what each token completed; their sum may run past a stop string

    def push(self, token: int) -> bool:
        """Take one token; True when it completes a stop string."""
        self.pieces.append("")
        self._append(self._decoder.push(token))
        return self.stopped

    def finish(self) -> None:
        """Take what an incomplete last character decodes to."""
        if not self.stopped:
            self._append(self._decoder.finish())

    @property
    def visible(self) -> str:
        """The text without a tail that may yet turn out to begin a stop string."""
        if self.stopped:
            return self.text
        held = max((n for s in self._stop for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        return self.text[: len(self.text) - held]

    def _append(self, piece: str) -> None:
        searched_from = max(0, len(self.text) - max(map(len, self._stop), default=0))
        self.text += piece
        hits = [at for s in self._stop if (at := self.text.find(s, searched_from)) >= 0]
        if hits:
            self.text, self.stopped = self.text[: min(hits)], True
        if self.pieces:
            self.pieces[-1] += piece


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> tuple[str | None, list[int]]:
    """The text, if it is one, and its tokens; ValueError for a text without tokens, or neither text nor a list."""
    if not isinstance(prompt, str):
        return None, check_token_list(prompt)
    if not prompt:
        raise ValueError("the prompt is empty")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError(
            f"the prompt is empty to this model's tokenizer: it has no tokens for {prompt[:40]!r}"
        )
    return prompt, ids


def check_token_list(prompt: Any) -> list[int]:
    """A copy of a list of token ids; ValueError for anything else."""
    if not isinstance(prompt, list):
        raise ValueError(f"a prompt must be a str or a list of token ids, got {type(prompt).__name__}")
    return list(prompt)


def with_end_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """generation_config.json may name more tokens that end a text than config.json, which the engine knows."""
    if params.ignore_eos:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, *tokenizer.eos_token_ids))


def make_output(prompt: str | None, sequence: Sequence, stream: TextStream) -> RequestOutput:
    """What the caller sees of a sequence now: a snapshot."""
    if sequence.finish_reason:
        stream.finish()
    text = stream.text if sequence.finish_reason else stream.visible
    params = sequence.params
    completion = CompletionOutput(
        text, sequence.output, sequence.finish_reason, list(sequence.from_draft), list(stream.pieces),
        None if params.logprobs is None else list(sequence.logprobs),
    )  # fmt: skip
    return RequestOutput(
        prompt, sequence.tokens[: sequence.prompt_length], [completion], copy.deepcopy(sequence.metrics),
        None if params.prompt_logprobs is None else list(sequence.prompt_logprobs),
    )  # fmt: skip
