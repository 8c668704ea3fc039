"""Small writes to the device, collected on the host and made by one launch.

`tensor[index] = number` copies four bytes from the host, and torch then waits for all that the device is doing: a
sequence that began with twenty of them would have the rounds of all others stand still.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
STAGED = 1 << 16  # bytes that CUDA takes from the host's memory at once; with more it may wait for the stream
_CODES = {torch.int32: "i", torch.int64: "q", torch.float32: "f"}


class Writes:
    """Numbers on their way to tensors of one device, which must be there until `make`; none to a place twice."""

    def __init__(self, device: torch.device):
        self.device = device
        self._places: list[int] = []
        self._words: list[int] = []

    def put(self, tensor: Tensor, first: int, *numbers: float) -> None:
        """Set the elements from number `first` on of a contiguous int32, int64 or fp32 tensor."""
        assert tensor.is_contiguous() and 0 <= first <= tensor.numel() - len(numbers)
        assert tensor.device.type == self.device.type
        packed = struct.pack(f"{len(numbers)}{_CODES[tensor.dtype]}", *numbers)
        place = tensor.data_ptr() + first * tensor.element_size()
        self._places += range(place, place + len(packed), 4)
        self._words += memoryview(packed).cast("i").tolist()

    def make(self) -> None:
        """Do all of it, in the order of the device's other work."""
        count = len(self._words)
        if not count:
            return
        packed = torch.tensor([*self._places, *self._words], dtype=torch.int64)
        packed = packed.to(self.device, non_blocking=True)
        with torch.cuda.device_of(packed):
            write_kernel[(triton.cdiv(count, BLOCK),)](packed, count, BLOCK=BLOCK, num_warps=1)
        self._places, self._words = [], []


def send(numbers: Tensor, place: Tensor) -> None:
    """Copy a vector of the host to one of its size and dtype, with nothing of the device's work waited for."""
    size = STAGED // numbers.element_size()
    for part, there in zip(numbers.split(size), place.split(size), strict=True):
        there.copy_(part, non_blocking=True)


@triton.jit(do_not_specialize=["count"])
def write_kernel(packed, count, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(packed + n, n < count, other=0)
    word = tl.load(packed + count + n, n < count, other=0)
    tl.store(place.to(tl.pointer_type(tl.int32)), word.to(tl.int32), n < count)
