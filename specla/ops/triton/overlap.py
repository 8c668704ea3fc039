"""Launches that overlap: a kernel may start, and fetch what never changes, before the one ahead of it has ended.

CUDA calls it programmatic dependent launch (Hopper and later). A kernel that takes part waits for its predecessor
before it touches anything that a kernel may have written, so the order of all reads and writes is that of ordinary
launches. It lets its successor start at once, or near its end where that has few and long programs (after `conv`,
`exact` and `parallel`): programs that start early are packed on the few multiprocessors that are free.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether the device can, and kernels are compiled rather than interpreted."""
    return (
        device.type == "cuda"
        and not triton.knobs.runtime.interpret
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel takes PDL."""
    return {"PDL": True, "launch_pdl": True} if overlaps(device) else {"PDL": False}
