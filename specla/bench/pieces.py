"""A table of figures that is measured piece by piece, in a file that a later run goes on with."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from specla.models.loader import replace_file

FORMAT = 2


class Table:
    """The figures so far, in a file that is rewritten after each piece.

    Args:
        path: of the JSON document; the tokens of plain decoding are kept beside it, in `*.plain.json`.
        identity: what a file must agree on to be gone on with.

    Raises:
        ValueError: when the file is damaged or of another measurement.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.beside = path, path.with_suffix(".plain.json")
        self.made: dict[str, Any] = {
            "benchmark": "table",
            "format": FORMAT,
            "identity": identity,
            "rows": [],
            "parts": [],
            "curve": [],
            "skipped": [],
        }
        self.plain: dict[str, Any] = {}
        if path.exists():
            try:
                made, plain = (json.loads(p.read_text(encoding="utf-8")) for p in (path, self.beside))
                known = made["identity"], made["rows"], made["curve"], made["skipped"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a table to go on with: {error}") from None
            if known[0] != json.loads(json.dumps(identity)):
                parts = [
                    name for name in identity if known[0].get(name) != json.loads(json.dumps(identity[name]))
                ]
                raise ValueError(
                    f"{path} is of another measurement ({', '.join(parts)}); measure into another file"
                )
            self.made, self.plain = made, plain

    def has(self, part: str, /, **key: Any) -> bool:
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.made[part])

    def settled(self, part: str, /, **piece: Any) -> bool:
        """Whether a piece has figures, or has failed: it might do so again, and take the process with it."""
        return self.has(part, **piece) or self.has("skipped", part=part, failed=True, **piece)

    def skip(self, part: str, piece: dict[str, Any], why: str, *, failed: bool) -> None:
        """Tell why a piece has no figures."""
        self.unskip(part, piece)
        self.add("skipped", [{"part": part, **piece, "why": why, "failed": failed}])

    def unskip(self, part: str, piece: dict[str, Any]) -> None:
        """Forget that: the next `add` brings figures."""
        known = {"part": part, **piece}
        self.made["skipped"] = [each for each in self.made["skipped"] if {**each, **known} != each]

    def add(self, part: str, rows: list[dict[str, Any]]) -> None:
        """Keep the rows, and whatever `plain` has by now."""
        self.made[part] += rows
        for path, content in ((self.beside, self.plain), (self.path, self.made)):
            replace_file(
                path, partial(Path.write_text, data=json.dumps(content, indent=1) + "\n", encoding="utf-8")
            )
