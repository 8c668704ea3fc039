"""Checkpoints of a run that are whole or absent, and that know which run they belong to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside `path`, then put it in place at once; a failure leaves the old one.

    Raises:
        OSError: with the path in its message, on a full disk for instance.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({error}); the checkpoint before it is whole") from error


def load_checkpoint(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Load what `torch.save` wrote, tensors and plain data only, if it belongs to the run `identity` describes.

    Raises:
        ValueError: when it is damaged or of another run.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from None
    for part, value in identity.items():
        if state["identity"].get(part) != value:
            raise ValueError(
                f"{path} belongs to another run: its {part} differs; train into another directory"
            )
    return state
