"""Counters by which the programs of one launch wait for one another: zero before and after it."""

from __future__ import annotations

import torch
from torch import Tensor


def counters(number: int, device: torch.device) -> Tensor:
    """int32 zeros for one launch at a time: launches that use them on several streams of a device must take turns.

    Raises:
        RuntimeError: when a CUDA graph is captured that needs more than any launch before it. Counters made there would
            be zeroed with every replay, under the launches outside of it: run once what is to be captured.
    """
    made = _made.setdefault(device, [])
    if not made or made[-1].numel() < number:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("launch the kernels once before capturing them in a CUDA graph")
        size = max(1 << 14, 1 << (number - 1).bit_length())
        made.append(torch.zeros(size, dtype=torch.int32, device=device))
    return made[-1]


_made: dict[
    torch.device, list[Tensor]
] = {}  # all of them: a graph captured before may hold those of its time
