"""One step of all beams as a recorded program: the same calls, without Python between them.

A step of a small drafter is some hundred calls of a few microseconds each, and on a CPU half of its time is Python's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, ...]]
MOST_PROGRAMS, MOST_ROWS = 64, 32  # larger batches gain little


class Traced:
    """Calls `step` on tensors, from the second call with the same shapes on as a program recorded then.

    `step` must do the same for all tensors of given shapes and dtypes. What cannot be recorded runs as it is.
    """

    def __init__(self, step: Step):
        self._step = step
        self._programs: dict[tuple[torch.Size, ...], Step | None] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if tensors[0].device.type != "cpu" or tensors[0].numel() > MOST_ROWS:
            return self._step(*tensors)
        shapes = tuple(x.shape for x in tensors)
        if shapes not in self._programs:
            if len(self._programs) == MOST_PROGRAMS:
                self._programs.clear()
            self._programs[shapes] = None
            return self._step(*tensors)
        program = self._programs[shapes]
        if program is None:
            program = self._programs[shapes] = self._record(tensors)
        return program(*tensors)

    def _record(self, tensors: tuple[Tensor, ...]) -> Step:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shapes become constants, as they should
            try:
                return torch.jit.trace(self._step, tuple(x.clone() for x in tensors), check_trace=False)
            except RuntimeError:  # a Python too new for TorchScript
                return self._step
