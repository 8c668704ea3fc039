"""What comes before and after a body, bounded, where uvicorn's faster parser would keep headers without end."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LONGEST_HEAD = 1 << 16  # bytes, as of uvicorn's other parser; what comes in one piece is not counted


class BoundedProtocol(HttpToolsProtocol):
    """Refuses who sends more than LONGEST_HEAD bytes of a request that are neither a whole head nor of a body."""

    _held = 0  # bytes that the parser has kept to itself

    def data_received(self, data: bytes) -> None:
        self._held += len(data)
        super().data_received(data)
        if self._held > LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The headers are longer than {LONGEST_HEAD} bytes.")

    def on_message_begin(self) -> None:
        self._held = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._held = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)
