"""Runs a request's sequences and sends what comes of them; a client that goes away ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specla.server.answers import DONE, Answer, encode
from specla.server.errors import ApiError, error_body
from specla.server.metrics import RequestMetrics
from specla.server.runner import AsyncEngine, Job, QueueFullError, Stream, UnavailableError


class Generated(Response):
    """The response to a request that generates: JSON, or events as rounds bring them."""

    def __init__(
        self,
        engine: AsyncEngine,
        jobs: Sequence[Job],
        answer: Answer,
        metrics: RequestMetrics,
        stream: bool,
    ):
        super().__init__()
        self._engine, self._jobs, self._answer, self._metrics = engine, jobs, answer, metrics
        self._streaming = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
        if not work.cancelled():
            work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            stream = await self._submit()
        except asyncio.CancelledError:  # gone before the engine's thread had heard of it
            self._metrics.end()
            raise
        try:
            if self._streaming:
                await self._stream(stream, send)
            else:
                async for deltas in stream:
                    for delta in deltas:
                        if delta.error is not None:
                            raise ApiError(500, delta.error)
                        self._answer.take(delta)
                    self._metrics.observe(deltas)
                await JSONResponse(self._answer.whole())(scope, receive, send)
        finally:
            stream.close()
            self._metrics.end()

    async def _submit(self) -> Stream:
        try:
            return await self._engine.submit(self._jobs)
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"}) from None
        except UnavailableError as error:
            raise ApiError(503, str(error), headers={"retry-after": "5"}) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    async def _stream(self, stream: Stream, send: Send) -> None:
        """An error before the first event is an answer of its own, a later one an event."""
        answer, begun = self._answer, False
        async for deltas in stream:
            error = next((delta.error for delta in deltas if delta.error is not None), None)
            if error is not None and not begun:
                raise ApiError(500, error)
            events = "".join(answer.chunk(delta) for delta in deltas if delta.error is None)
            if events and not begun:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                begun = True
            if events:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            self._metrics.observe(deltas)
            if error is not None:
                body = f"data: {encode(error_body(500, error))}\n\n".encode() + DONE
                await send({"type": "http.response.body", "body": body})
                return
        await send({"type": "http.response.body", "body": answer.last_event().encode() + DONE})


EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies are to pass events on at once
]


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
