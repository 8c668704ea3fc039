"""The app: OpenAI's routes around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse

from specla import __version__
from specla.server.answers import Answer, Chat, Completion
from specla.server.chat import load_chat_template
from specla.server.errors import ApiError, add_handlers
from specla.server.guard import Guard
from specla.server.jobs import JobMaker, Limits
from specla.server.metrics import Metrics, RequestMetrics
from specla.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    TokenizeRequest,
)
from specla.server.responses import Generated
from specla.server.runner import AsyncEngine, Job

MAX_BODY_BYTES = 4 << 20
LONG = 1 << 15  # bytes of a body
PAGE = Path(__file__).parent / "page.html"

P = ParamSpec("P")
T = TypeVar("T")


def create_app(
    engine: AsyncEngine,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
    metrics_prefix: str = "specla",
    max_model_len: int | None = None,
    max_tokens: int | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """An app that serves `engine`, which stays the caller's to drain and close.

    Args:
        model_name: what clients call the model; by default the name of its directory.
        api_key: what clients must show, None: nothing.
        max_model_len: tokens of prompt and answer together; by default the model's max_position_embeddings.
        max_tokens: of an answer at most; by default as far as the context reaches.

    Raises:
        ValueError: for a chat template that cannot be read, limits below 1, or an empty key.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key must not be empty")
    name = model_name or engine.llm.model_path.resolve().name
    limits = {"max_model_len": max_model_len, "max_tokens": max_tokens, "max_body_bytes": max_body_bytes}
    for option, value in limits.items():
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    context = max_model_len or engine.config.max_position_embeddings
    template = load_chat_template(engine.llm.model_path)
    jobs = JobMaker(
        engine.tokenizer,
        engine.config.vocab_size,
        template,
        Limits(context, engine.max_draft, engine.capacity, max_tokens),
    )
    metrics = Metrics(engine, name, metrics_prefix)
    started = int(time.time())

    app = FastAPI(
        title="specla",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses={
            status: {"model": ErrorResponse, "description": why}
            for status, why in (
                (400, "The request does not fit."),
                (401, "The key is missing or wrong."),
                (404, "There is no such model."),
                (413, "The body is too long."),
            )
        },
    )
    add_handlers(app)
    app.add_middleware(Guard, api_key=api_key, max_body_bytes=max_body_bytes)
    busy: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": why}
        for status, why in (
            (429, "Too many requests wait."),
            (500, "The request was begun and failed."),
            (503, "The engine has failed or the server shuts down."),
        )
    }

    def check_model(asked: str | None) -> None:
        if asked is not None and asked != name:
            raise ApiError(
                404, f"there is no model {asked!r}, only {name!r}", param="model", code="model_not_found"
            )

    def generated(answer: Answer, asked: CompletionRequest | ChatRequest, made: list[Job]) -> Generated:
        counts = RequestMetrics(metrics, made)
        return Generated(engine, made, answer, counts, bool(asked.stream))

    def facts(prefix: str, asked: CompletionRequest | ChatRequest, request: Request) -> dict[str, Any]:
        options = asked.stream_options
        return {
            "id": f"{prefix}-{request.state.request_id}",
            "created": int(time.time()),
            "model": name,
            "include_usage": bool(options is not None and options.include_usage),
        }

    events: dict[str, Any] = {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}}
    busy[200] = {"description": "The answer, or with stream its chunks as events.", "content": events}

    @app.post("/v1/completions", responses=busy)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        check_model(asked.model)
        prompts, made = await _away(request, jobs.completion, asked)
        answer = Completion(engine.tokenizer, prompts, asked.n or 1, **facts("cmpl", asked, request))
        answer.echo, answer.hidden = bool(asked.echo), asked.max_tokens == 0
        return generated(answer, asked, made)

    @app.post("/v1/chat/completions", responses=busy)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Answer in a chat."""
        check_model(asked.model)
        prompt, made = await _away(request, jobs.chat, asked)
        answer = Chat(engine.tokenizer, [prompt], asked.n or 1, **facts("chatcmpl", asked, request))
        return generated(answer, asked, made)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The one model, if it is called that."""
        check_model(model)
        return card()

    def card() -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": started, "owned_by": "specla", "max_model_len": context
        }  # fmt: skip

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Tokens of a text, or of a chat as its template writes it."""
        check_model(asked.model)
        special, param = asked.add_special_tokens, "messages" if asked.prompt is None else "prompt"
        if asked.prompt is not None:
            text, special = asked.prompt, special is None or special
        else:
            text = jobs.render(asked.messages or [], asked.add_generation_prompt)
        ids = await _away(request, jobs.encode, text, bool(special), param)
        names = [engine.tokenizer.token_str(token) for token in ids] if asked.return_token_strs else None
        return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """The text of tokens, special ones included."""
        check_model(asked.model)
        return {"prompt": await _away(request, jobs.decode, asked.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What a client needs to tokenise by the routes above."""
        ids = {"bos_token": engine.tokenizer.bos_token_id, "eos_token": engine.tokenizer.eos_token_id}
        names = {key: None if id is None else engine.tokenizer.token_str(id) for key, id in ids.items()}
        return {**names, "chat_template": None if template is None else template.source}

    @app.get("/health", responses={503: busy[503]})
    async def health() -> Response:
        """200 while requests are taken."""
        if engine.healthy and not engine.draining:
            return JSONResponse({"status": "ok"})
        raise ApiError(503, "the engine has failed" if not engine.healthy else "the server is shutting down")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """For Prometheus."""
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    if PAGE.is_file():

        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return FileResponse(PAGE)

    _tell_errors(app)
    return app


async def _away(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do what a long body makes long in a thread, so that the streams of others go on."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) < LONG:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _tell_errors(app: FastAPI) -> None:
    """FastAPI would document 422 and a form of its own for what is 400 and OpenAI's here."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
