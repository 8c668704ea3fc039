"""From tokens to text as they arrive: complete characters only, and stop strings that may span tokens."""

from __future__ import annotations

from specla.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """The text of one output.

    `push` says whether a stop string has appeared; the text then ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._decoder = StreamDecoder(tokenizer, continues=True)
        self._stop = stop
        self.text = ""
        self.stopped = False
        self.pieces: list[str] = []  # what each token completed; their sum may run past a stop string

    def push(self, token: int) -> bool:
        """Take one token; True when it completes a stop string."""
        self.pieces.append("")
        self._append(self._decoder.push(token))
        return self.stopped

    def finish(self) -> None:
        """Take what an incomplete last character decodes to."""
        if not self.stopped:
            self._append(self._decoder.finish())

    @property
    def visible(self) -> str:
        """The text without a tail that may yet turn out to begin a stop string."""
        if self.stopped:
            return self.text
        held = max((n for s in self._stop for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        return self.text[: len(self.text) - held]

    def _append(self, piece: str) -> None:
        searched_from = max(0, len(self.text) - max(map(len, self._stop), default=0))
        self.text += piece
        hits = [at for s in self._stop if (at := self.text.find(s, searched_from)) >= 0]
        if hits:
            self.text, self.stopped = self.text[: min(hits)], True
        if self.pieces:
            self.pieces[-1] += piece
