"""Requests to sequences: prompts to tokens, options to sampling parameters, and the limits on both."""

from __future__ import annotations

from dataclasses import dataclass

from specla.engine.params import SamplingParams
from specla.engine.text import encode_prompt
from specla.server.chat import ChatTemplate
from specla.server.errors import ApiError
from specla.server.protocol import ChatRequest, CompletionRequest, Message
from specla.server.runner import Job
from specla.tokenizer import Tokenizer

MAX_TOKENS = 16  # of a completion that does not say
MOST_STOPS, LONGEST_STOPS = (
    64,
    2000,
)  # strings, and their characters together: each round looks for their beginnings


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    max_model_len: tokens of prompt and answer together; max_tokens: of an answer, None: as far as the context reaches.
    max_draft: drafts a round; max_sequences: prompts times n.
    """

    max_model_len: int
    max_draft: int
    max_sequences: int
    max_tokens: int | None = None


@dataclass(frozen=True)
class Prompt:
    text: str | None  # None: it came as tokens
    token_ids: list[int]


class JobMaker:
    """Makes the sequences of requests to one model; ApiError for what does not fit."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, template: ChatTemplate | None, limits: Limits):
        self.tokenizer, self.vocab_size, self.template, self.limits = tokenizer, vocab_size, template, limits

    def completion(self, request: CompletionRequest) -> tuple[list[Prompt], list[Job]]:
        """The prompts, and n jobs for each."""
        asked = request.prompt
        rows = [asked] if isinstance(asked, str) or isinstance(asked[0], int) else asked
        self._check_count(len(rows), request.n or 1)
        prompts = [self._prompt(row) for row in rows]
        jobs = []
        for prompt in prompts:
            length = self._length(prompt, MAX_TOKENS if request.max_tokens is None else request.max_tokens)
            jobs += self._jobs(request, prompt, max(length, 1))
        return prompts, jobs

    def chat(self, request: ChatRequest) -> tuple[Prompt, list[Job]]:
        """The rendered messages, and n jobs for them."""
        self._check_count(1, request.n or 1)
        text = self.render(request.messages, request.add_generation_prompt, request.chat_template_kwargs)
        prompt = Prompt(text, self.encode(text, add_special_tokens=False, param="messages"))
        if not prompt.token_ids:
            raise ApiError(400, "the messages have no tokens", param="messages")
        asked = request.max_completion_tokens or request.max_tokens
        return prompt, self._jobs(request, prompt, self._length(prompt, asked))

    def render(
        self, messages: list[Message], add_generation_prompt: bool, more: dict[str, object] | None = None
    ) -> str:
        if self.template is None:
            raise ApiError(
                400,
                "this model has no chat template, so it cannot chat: use /v1/completions",
                param="messages",
            )
        try:
            return self.template.render([m.as_dict for m in messages], add_generation_prompt, more)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None

    def decode(self, token_ids: list[int]) -> str:
        self.check_tokens(token_ids, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None

    def check_tokens(self, token_ids: list[int], name: str = "prompt") -> None:
        wrong = next((t for t in token_ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ApiError(
                400, f"{name}: token ids must be in 0..{self.vocab_size - 1}, got {wrong}", param=name
            )

    def _prompt(self, row: str | list[int]) -> Prompt:
        if not isinstance(row, str):
            self.check_tokens(row)
            return Prompt(None, row)
        try:
            return Prompt(*encode_prompt(self.tokenizer, row))
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None

    def _length(self, prompt: Prompt, asked: int | None) -> int:
        """How many tokens the answer may have."""
        limits, room = self.limits, self.limits.max_model_len - len(prompt.token_ids)
        if room < (1 if asked is None else asked):
            raise ApiError(
                400,
                f"the context is {limits.max_model_len} tokens; the prompt has {len(prompt.token_ids)} and "
                f"max_tokens asks for {1 if asked is None else asked}",
                param="prompt" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        if asked is None:
            return room if limits.max_tokens is None else min(room, limits.max_tokens)
        if limits.max_tokens is not None and asked > limits.max_tokens:
            raise ApiError(
                400, f"max_tokens must be at most {limits.max_tokens}, got {asked}", param="max_tokens"
            )
        return asked

    def _check_count(self, prompts: int, n: int) -> None:
        most = self.limits.max_sequences
        if prompts * n > most:
            raise ApiError(400, f"prompts times n must be at most {most}, got {prompts} x {n}", param="n")

    def _jobs(self, request: CompletionRequest | ChatRequest, prompt: Prompt, max_tokens: int) -> list[Job]:
        """n of them; a seed counts up, so that they differ."""
        self.check_tokens(request.stop_token_ids or [], "stop_token_ids")
        alternatives = request.num_logprobs
        echoes = isinstance(request, CompletionRequest) and request.echo
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stops) > MOST_STOPS or sum(map(len, stops)) > LONGEST_STOPS:
            allowed = f"at most {MOST_STOPS} strings of {LONGEST_STOPS} characters together"
            raise ApiError(400, f"stop must be {allowed}", param="stop")
        drafts, most = request.num_speculative_tokens, self.limits.max_draft
        if drafts is not None and drafts > most:
            name = "num_speculative_tokens"
            raise ApiError(400, f"{name} must be at most {most} here, got {drafts}", param=name)
        jobs = []
        for number in range(request.n or 1):
            try:
                params = SamplingParams(
                    temperature=1.0 if request.temperature is None else request.temperature,
                    top_p=1.0 if request.top_p is None else request.top_p,
                    top_k=request.top_k or -1,
                    min_p=request.min_p or 0.0,
                    repetition_penalty=request.repetition_penalty or 1.0,
                    max_tokens=max_tokens,
                    seed=None if request.seed is None else request.seed + number,
                    stop=stops,
                    stop_token_ids=request.stop_token_ids or (),
                    ignore_eos=bool(request.ignore_eos),
                    logprobs=alternatives,
                    prompt_logprobs=alternatives if echoes else None,
                    num_speculative_tokens=drafts,
                )
            except ValueError as error:
                raise ApiError(400, str(error), param=str(error).split()[0]) from None
            jobs.append(Job(prompt.token_ids, params, bool(request.stream_rounds)))
        return jobs
