"""Errors as OpenAI's clients expect them, whatever went wrong."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

LONGEST = 500  # characters of a message, which may quote what was sent

logger = logging.getLogger("specla.server")


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON object of an error."""
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    message = message if len(message) <= LONGEST else message[:LONGEST] + " ..."
    message = message.encode(errors="backslashreplace").decode()  # it may quote half a surrogate pair
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_handlers(app: FastAPI) -> None:
    """Every error of the app in OpenAI's form."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return JSONResponse(error_body(400, f"the body is not JSON: {first['ctx']['error']}"), 400)
    # without the names that the forms of a field have among themselves, as "constrained-str"
    where = [str(part) for part in first["loc"][1:] if isinstance(part, int) or part.isidentifier()]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "refusal":
        where = [first["ctx"]["param"]]
    elif not where:
        message = f"the body must be a JSON object with content-type application/json: {message}"
    elif first["type"] != "value_error":
        message = f"{'.'.join(where)}: {message}"
        if first["type"] != "missing":
            message += f", got {first.get('input')!r}"
    return JSONResponse(error_body(400, message, where[0] if where else None), 400)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if isinstance(error.__cause__, UnicodeDecodeError):
        message = f"the body is not valid UTF-8: {error.__cause__}"
    elif error.__cause__ is not None:
        message = f"the body cannot be read: {error.__cause__}"
    elif error.status_code in (404, 405):
        message = f"{request.method} {request.url.path}: {message.lower()}"
    return JSONResponse(
        error_body(error.status_code, message), error.status_code, getattr(error, "headers", None)
    )
