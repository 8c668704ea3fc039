"""Deltas to OpenAI's JSON: one object at the end, or a chunk of a stream for each delta."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from specla.engine.sequence import TokenLogprobs
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
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0  # characters of the tokens whose logprobs were told


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
        first, delta = self._begin(choice, delta)
        if first is not None:
            choice.text.append(first[0])
            choice.logprobs += [] if first[1] is None else [first[1]]
        choice.text.append(delta.text)
        if delta.logprobs:
            choice.logprobs.append(self._logprobs(choice, delta.logprobs))

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = []
        for index, choice in enumerate(self.choices):
            logprobs = self._join(choice.logprobs) if choice.logprobs else None
            end = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
            choices.append({"index": index, **self._whole("".join(choice.text)), **end})
        return {**self._facts, "choices": choices, "usage": self.usage}

    def chunk(self, delta: Delta) -> str:
        """The events of a stream for a delta; nothing for one that brings nothing to tell."""
        choice = self.choices[delta.index]
        first, delta = self._begin(choice, delta)
        events = ""
        if first is not None:
            events = self._event(delta.index, self._part(True, first[0]), first[1])
        if delta.text or delta.finish_reason or delta.logprobs or delta.round is not None:
            logprobs = self._logprobs(choice, delta.logprobs) if delta.logprobs else None
            part = self._part(False, delta.text)
            events += self._event(delta.index, part, logprobs, delta.finish_reason, delta.round)
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

    def _begin(self, choice: Choice, delta: Delta) -> tuple[tuple[str, dict[str, Any] | None] | None, Delta]:
        """What goes before a choice's first delta, and what of the delta may be seen."""
        first = None if choice.begun else self._first(choice, delta)
        choice.begun = True
        delta = self._shown(choice, delta)
        choice.num_tokens += len(delta.token_ids)
        choice.num_cached = delta.num_cached
        choice.finish_reason = delta.finish_reason
        return first, delta

    def _event(
        self,
        index: int,
        part: tuple[str, str],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None = None,
        round: Round | None = None,
    ) -> str:
        """Written by hand but for what it quotes: there is one for every round of every stream."""
        told = "null" if logprobs is None else encode(logprobs)
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        more = "" if round is None else f',"specla":{encode(self._round(round))}'
        return (
            f'{self._head}{{"index":{index},"{part[0]}":{part[1]},"logprobs":{told},"finish_reason":{reason}}}'
            f"{self._tail}{more}}}\n\n"
        )

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

    def _shown(self, choice: Choice, delta: Delta) -> Delta:
        """What of a delta may be seen."""
        return delta

    def _first(self, choice: Choice, delta: Delta) -> tuple[str, dict[str, Any] | None] | None:
        """Text and logprobs that go before a choice's first delta, if there is to be such a chunk."""
        raise NotImplementedError

    def _logprobs(self, choice: Choice, entries: list[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    def _join(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """The logprobs of all chunks as one."""
        raise NotImplementedError

    def _part(self, first: bool, text: str) -> tuple[str, str]:
        """What holds the text of a chunk: its name, and itself as JSON."""
        raise NotImplementedError

    def _whole(self, text: str) -> dict[str, Any]:
        """What holds the text of an answer that is not streamed."""
        raise NotImplementedError


class Completion(Answer):
    """/v1/completions.

    echo: the text begins with the prompt; hidden: and ends there.
    """

    whole_kind = chunk_kind = "text_completion"
    echo = hidden = False

    def _shown(self, choice: Choice, delta: Delta) -> Delta:
        if self.hidden:
            delta = replace(delta, text="", token_ids=[], logprobs=[])
            delta.finish_reason = delta.finish_reason and "length"
        return delta

    def _first(self, choice: Choice, delta: Delta) -> tuple[str, dict[str, Any] | None] | None:
        if not self.echo:
            return None
        prompt, name = choice.prompt, self.tokenizer.token_str
        text = self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
        if not delta.prompt_logprobs:
            return text, None
        told = self._logprobs(choice, [entry for entry in delta.prompt_logprobs if entry is not None])
        start = name(prompt.token_ids[0])
        told["text_offset"] = [0, *(at + len(start) for at in told["text_offset"])]
        choice.offset += len(start)
        for key, value in (("tokens", start), ("token_logprobs", None), ("top_logprobs", None)):
            told[key].insert(0, value)
        return text, told

    def _logprobs(self, choice: Choice, entries: list[TokenLogprobs]) -> dict[str, Any]:
        """Offsets count from the start of the text, and tokens as they are spelled one by one."""
        names = [self.tokenizer.token_str(entry.token) for entry in entries]
        offsets = []
        for name in names:
            offsets.append(choice.offset)
            choice.offset += len(name)
        return {
            "text_offset": offsets,
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By spelling, the token itself included; of tokens that are spelled alike, the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
            name = self.tokenizer.token_str(token)
            top[name] = max(logprob, top.get(name, logprob))
        return top

    def _join(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: [value for part in parts for value in part[key]] for key in parts[0]}

    def _part(self, first: bool, text: str) -> tuple[str, str]:
        return "text", encode(text)

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}


class Chat(Answer):
    """/v1/chat/completions."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _first(self, choice: Choice, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        return "", None

    def _logprobs(self, choice: Choice, entries: list[TokenLogprobs]) -> dict[str, Any]:
        told = []
        for entry in entries:
            top = [self._token(token, logprob) for token, logprob in entry.top]
            told.append({**self._token(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": told, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _join(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}

    def _part(self, first: bool, text: str) -> tuple[str, str]:
        role = '"role":"assistant",' if first else ""
        return "delta", f'{{{role}"content":{encode(text)}}}'

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}
