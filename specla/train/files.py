"""What a run leaves on disk until it ends: checkpoints, which know the run that they belong to, and a log."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specla.models.loader import replace_file


def load_checkpoint(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Load what `torch.save` wrote, tensors and plain data only, if it belongs to the run `identity` describes.

    Raises:
        ValueError: when it is damaged, no checkpoint of a run, or of another run; names what differs.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from None
    stored = state.get("identity") if isinstance(state, dict) else None
    if not isinstance(stored, dict):
        raise ValueError(f"{path} is not a checkpoint of a training run: it has no identity")
    for part, value in identity.items():
        if stored.get(part) != value:
            raise ValueError(
                f"{path} belongs to another run, not of the same {_difference(part, stored.get(part), value)}; "
                "train into another directory"
            )
    return state


def cut_log(path: Path, step: int) -> None:
    """Leave in a log the rows up to `step`: a killed run wrote more than its checkpoint knows, the last row in part."""
    kept = []
    if step and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except ValueError:
                break
    replace_file(path, partial(Path.write_text, data="".join(kept), encoding="utf-8"))


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add one row to a log.

    Raises:
        OSError: with the path in its message, on a full disk for instance.
    """
    try:
        with path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
    except OSError as error:
        raise OSError(f"{path} could not be written ({error})") from error


def _difference(part: str, stored: Any, value: Any) -> str:
    """The part, with the names of the entries that differ if it has names."""
    if not (isinstance(stored, dict) and isinstance(value, dict)):
        return part
    names = [name for name in value | stored if stored.get(name) != value.get(name)]
    return f"{part} ({', '.join(names)})"
