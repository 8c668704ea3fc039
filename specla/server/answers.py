"""Deltas to OpenAI's JSON: one object at the end, or a chunk of a stream for each delta."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from specla.server.jobs import Prompt
from specla.server.runner import Delta, Round
from specla.tokenizer import Tokenizer

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """What has come of one sequence."""

    prompt: Prompt
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int = 0
    num_cached: int = 0
    begun: bool = False


class Answer:
    """The answer to one request; `Completion` and `Chat` say how a choice looks.

    Args:
        prompts: of each choice.
        streaming: `chunk` will be asked, not `whole`.
    """

    whole_kind: str
    chunk_kind: str

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: list[Prompt],
        n: int,
        *,
        id: str,
        created: int,
        model: str,
        include_usage: bool = False,
    ):
        self.tokenizer, self.prompts = tokenizer, prompts
        self.choices = [Choice(prompt) for prompt in prompts for _ in range(n)]
        self.include_usage = include_usage
        self._facts = {"id": id, "object": self.whole_kind, "created": created, "model": model}
        head = encode({**self._facts, "object": self.chunk_kind})
        self._head = f'data: {head[:-1]},"choices":['
        self._tail = '],"usage":null' if include_usage else "]"

    def take(self, delta: Delta) -> None:
        """Remember a delta for `whole`."""
        choice = self.choices[delta.index]
        choice.text.append(delta.text)
        self._count(choice, delta)

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._facts, "choices": choices, "usage": self.usage}

    def chunk(self, delta: Delta) -> str:
        """The events of a stream for a delta; nothing for one that brings nothing to tell."""
        choice = self.choices[delta.index]
        self._count(choice, delta)
        events = self._first_event(choice, delta.index)
        if delta.text or delta.finish_reason or delta.logprobs or delta.round is not None:
            events += self._event(self._chunk_choice(choice, delta), delta.round)
        return events

    def last_event(self) -> str:
        """The usage, if it was asked for."""
        return f'{self._head}],"usage":{encode(self.usage)}}}\n\n' if self.include_usage else ""

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(len(p.token_ids) for p in self.prompts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.num_cached for choice in self.choices[:: len(self.choices) // len(self.prompts)])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _count(self, choice: Choice, delta: Delta) -> None:
        choice.num_tokens += len(delta.token_ids)
        choice.num_cached = choice.num_cached or delta.num_cached
        choice.finish_reason = delta.finish_reason

    def _event(self, choice: str, round: Round | None = None) -> str:
        more = "" if round is None else f',"specla":{encode(self._round(round))}'
        return f"{self._head}{choice}{self._tail}{more}}}\n\n"

    def _round(self, round: Round) -> dict[str, Any]:
        trace, name = round.trace, self.tokenizer.token_str
        tree = None if trace is None else {
            "tokens": [name(token) for token in trace.tokens],
            "parent": trace.parent,
            "scores": trace.scores,
            "path": trace.path,
        }  # fmt: skip
        return {
            "round": round.number,
            "pieces": [{"text": text, "draft": draft} for text, draft in round.pieces],
            "tree": tree,
            "acceptance_length": round.acceptance_length,
            "tokens_per_second": round.tokens_per_second,
        }

    def _first_event(self, choice: Choice, index: int) -> str:
        return ""

    def _chunk_choice(self, choice: Choice, delta: Delta) -> str:
        raise NotImplementedError

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class Completion(Answer):
    """/v1/completions; with `echo`, the text begins with the prompt."""

    whole_kind = chunk_kind = "text_completion"
    echo = False

    def _first_event(self, choice: Choice, index: int) -> str:
        if choice.begun or not self.echo:
            return ""
        choice.begun = True
        return self._event(
            encode(
                {"index": index, "text": self._prompt_text(choice), "logprobs": None, "finish_reason": None}
            )
        )

    def _chunk_choice(self, choice: Choice, delta: Delta) -> str:
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        return (
            f'{{"index":{delta.index},"text":{encode(delta.text)},"logprobs":null,"finish_reason":{reason}}}'
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        if self.echo:
            text = self._prompt_text(choice) + text
        return {"index": index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}

    def _prompt_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        return self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


class Chat(Answer):
    """/v1/chat/completions."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _first_event(self, choice: Choice, index: int) -> str:
        if choice.begun:
            return ""
        choice.begun = True
        role = {"role": "assistant", "content": ""}
        return self._event(encode({"index": index, "delta": role, "logprobs": None, "finish_reason": None}))

    def _chunk_choice(self, choice: Choice, delta: Delta) -> str:
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        content = f'{{"content":{encode(delta.text)}}}'
        return f'{{"index":{delta.index},"delta":{content},"logprobs":null,"finish_reason":{reason}}}'

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}
