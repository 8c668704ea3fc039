"""What `generate` was called with, which transformers does not hand on to a callable: the streamer above all."""

from __future__ import annotations

import sys
from typing import Any


def arguments_of_generate(model: Any) -> dict[str, Any]:
    """The arguments of the innermost `model.generate(...)` that is running.

    Raises:
        ValueError: when none is.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals
        if frame.f_code.co_name == "generate" and "custom_generate" in found and found.get("self") is model:
            return dict(found)
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError(
        "speculative is for model.generate(..., custom_generate=speculative), not to be called alone"
    )
