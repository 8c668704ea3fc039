"""A server for the page whose answers are written by the test, and the chunks that such answers are made of."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import specla

PAGE = Path(specla.__file__).parent / "server" / "page.html"
DONE = b"data: [DONE]\n\n"
Answer = tuple[int, Iterable[bytes]]


class Backend:
    """`answer` gets the body of a completion and gives a status and the bytes of the response, one write each.

    key: what /v1/models and completions ask for, None for nothing. requests: all bodies so far.
    left: set when a client has gone before its answer was over.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]):
        self.answer = answer
        self.key: str | None = None
        self.requests: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.url = ""

    def respond(self, request: BaseHTTPRequestHandler) -> Answer:
        if request.path == "/":
            return 200, [PAGE.read_bytes()]
        if self.key and request.headers["Authorization"] != f"Bearer {self.key}":
            return 401, [error("no such key")]
        if request.command == "GET":
            return 200, [json.dumps({"data": [{"id": "specla-mini"}]}).encode()]
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self.requests.append(body | {"path": request.path})
        return self.answer(body)


def chunk(pieces: list[tuple[str, bool]], tree: dict[str, Any] | None = None, **more: Any) -> bytes:
    """One event of the stream: the tokens of a round, each with whether it was drafted."""
    round_ = {
        "round": 1,
        "pieces": [{"text": text, "draft": draft} for text, draft in pieces],
        "tree": tree,
        "acceptance_length": 2.5,
        "tokens_per_second": 100.0,
    }
    choice = {"index": 0, "text": "".join(text for text, _ in pieces), "finish_reason": None} | more
    return f"data: {json.dumps({'choices': [choice], 'specla': round_}, ensure_ascii=False)}\n\n".encode()


def error(message: str) -> bytes:
    """The body of a refusal in OpenAI's form."""
    return json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()


@contextmanager
def serving(backend: Backend) -> Iterator[None]:
    """`backend.url` answers while this lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, parts = backend.respond(self)
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if self.path == "/" else "text/event-stream")
            self.end_headers()
            try:
                for part in parts:
                    self.wfile.write(part)
            except OSError:
                backend.left.set()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    backend.url = f"http://127.0.0.1:{server.server_port}/"
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
