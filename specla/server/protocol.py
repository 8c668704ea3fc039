"""What clients may send, in OpenAI's words and some of vLLM's; whatever is not supported is refused by name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from specla.engine.params import LEAST

MOST_CHOICES = 128
MOST_METADATA = 16  # OpenAI's own limit
LONGEST_NAME = 80

Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0)]
# lists end at their first mistake: a list of all of them would be a thousand times as large as the body
Texts = Annotated[list[Text], Field(fail_fast=True)]
TokenList = Annotated[list[Token], Field(fail_fast=True)]
Tokens = Annotated[TokenList, Field(min_length=1)]
Prompt = (
    Text
    | Annotated[Texts, Field(min_length=1)]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
)
PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists"

# options of OpenAI's that cannot be honoured, and the values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "moderation": (),
}


def refusal(param: str, message: str) -> PydanticCustomError:
    """What a validator of a whole request raises about one of its fields."""
    return PydanticCustomError("refusal", "{message}", {"message": message, "param": param})


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        """The first that is unknown is enough, as with lists."""
        names = values if isinstance(values, dict) else ()
        unknown = next(
            (ascii(name)[1:-1][:LONGEST_NAME] for name in names if name not in cls.model_fields), None
        )
        if unknown is not None:
            raise refusal(unknown, f"{unknown} is not known here")
        return values


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted and of no effect.")


class _Generation(_Strict):
    """What completions and chats have in common."""

    model: str | None = Field(None, description="One of /v1/models; by default the model that is served.")
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy. Default: 1.")
    top_p: float | None = Field(None, ge=LEAST, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="-1 or 0: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=LEAST, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1 - MOST_CHOICES)
    stop: Text | Texts | None = Field(None, description="The text ends before the first of these.")
    stop_token_ids: TokenList | None = None
    ignore_eos: bool | None = None
    num_speculative_tokens: int | None = Field(
        None, ge=0, description="Drafts a round at most; 0 decodes plainly."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_rounds: bool | None = Field(
        None, description="With stream: every chunk tells what its round of speculation did."
    )
    user: str | None = Field(None, description="Accepted and of no effect, as the next ones.")
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, harmless in UNSUPPORTED.items():
            value = values.get(name)
            if name in values and value is not None and value not in harmless:
                raise refusal(name, f"{name} is not supported")
        return {name: value for name, value in values.items() if name not in UNSUPPORTED}

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        some = [value] if isinstance(value, str) else value
        if value is not None and not (isinstance(some, list) and all(isinstance(s, str) and s for s in some)):
            raise ValueError("stop must be a non-empty string or a list of such")
        return value

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_metadata(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_METADATA:
            raise ValueError(f"metadata must have at most {MOST_METADATA} entries, got {len(value)}")
        return value

    @model_validator(mode="after")
    def _check_stream(self) -> Any:
        for name in ("stream_options", "stream_rounds"):
            if getattr(self, name) and not self.stream:
                raise refusal(name, f"{name} needs stream: true")
        return self


class CompletionRequest(_Generation):
    prompt: Prompt = Field(description=f"Text to continue: {PROMPT}.")
    max_tokens: int | None = Field(None, ge=0, description="Default: 16. 0 only with echo.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives for each token.")
    echo: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and value:
            kinds = {type(item) for item in value}
            if kinds == {str} and all(value):
                return value
            rows = [value] if kinds == {int} else value if kinds == {list} else []
            if rows and all(row and {type(item) for item in row} == {int} for row in rows):
                least = min(map(min, rows))
                if least < 0:
                    raise ValueError(f"prompt: token ids must be at least 0, got {least}")
                return value
        raise ValueError(f"prompt must be {PROMPT}, none of them empty")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _check_length(self) -> Any:
        if self.max_tokens == 0 and not self.echo:
            raise refusal("max_tokens", "max_tokens must be at least 1, or echo true")
        return self


class TextPart(_Strict):
    type: str = Field(pattern="^text$")
    text: str


class Message(BaseModel):
    """One turn; what else a turn brings is shown to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(min_length=1)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def as_dict(self) -> dict[str, Any]:
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        return {**(self.model_extra or {}), "role": self.role, "content": text}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatRequest(_Generation):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, description="Default: as far as the context reaches.")
    max_completion_tokens: int | None = Field(None, ge=1, description="As max_tokens, which it overrides.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted({"messages", "add_generation_prompt"} & set(value or ()))
        if taken:
            raise ValueError(f"chat_template_kwargs must leave {taken[0]} to the field of that name")
        return value

    @model_validator(mode="after")
    def _check_logprobs(self) -> Any:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs needs logprobs: true")
        return self


class TokenizeRequest(_Strict):
    """Either a prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for a chat.")
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "exactly one of prompt and messages is needed")
        return self


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: TokenList


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Every answer other than 200."""

    error: ErrorDetail
