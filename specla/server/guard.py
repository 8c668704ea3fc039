"""What stands before the app: request ids, the key, the size of bodies, and an answer when the app fails."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specla.server.errors import ApiError, error_body, logger

OPEN = frozenset({"/", "/health", "/metrics", "/openapi.json"})  # without a key
_ID = re.compile(r"[!-~]{1,128}")


class Guard:
    """ASGI middleware, outermost.

    Args:
        api_key: what the header `Authorization: Bearer` must bring, but for the paths in OPEN; None: nothing.
        max_body_bytes: a longer body is refused as soon as that is known.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int):
        self._app, self._max_body_bytes = app, max_body_bytes
        self._key = None if api_key is None else api_key.strip().encode()  # files end in a newline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begun = False

        async def tagged(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, self._limited(receive), tagged)
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, tagged)
        except Exception:
            logger.exception("request %s failed", request_id)
            if begun:
                raise
            body = error_body(500, f"the server failed over request {request_id}")
            await JSONResponse(body, 500)(scope, receive, tagged)

    def _check(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise ApiError(413, self._too_long, headers={"connection": "close"})
        if self._key is None or path in OPEN:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # as bytes, which is what headers are; compared in full whatever differs, so that the time tells nothing
        if not hmac.compare_digest(token.strip().encode("latin-1"), self._key) or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "a valid key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                raise HTTPException(413, self._too_long, {"connection": "close"})
            return message

        return counted

    @property
    def _too_long(self) -> str:
        return f"the body is longer than {self._max_body_bytes} bytes"
