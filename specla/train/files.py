"""Checkpoints of a run, which know the run that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


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


def _difference(part: str, stored: Any, value: Any) -> str:
    """The part, with the names of the entries that differ if it has names."""
    if not (isinstance(stored, dict) and isinstance(value, dict)):
        return part
    names = [name for name in value | stored if stored.get(name) != value.get(name)]
    return f"{part} ({', '.join(names)})"
