"""Triton kernels for what `specla.ops` computes on a GPU; every one has a twin in plain torch or Python.

Triton is an extra, and is not imported before a kernel is to run: the ops ask here whether one shall.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

MAX_DIM = 512  # of K and V
MAX_NODES = 64  # of a tree: a lineage is one integer of 64 bits
MAX_ROWS = 65535  # of a batch: what a launch takes along its second axis
MAX_TAPS = 4  # of the short convolution, the newest input included: every tap is a vector of its own
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs


def use_kernels(state: Tensor) -> bool:
    """Whether kernels work on this state or convolution window: on a GPU, not in float64, with Triton installed."""
    return state.is_cuda and state.dtype != torch.float64 and _installed()


def takes_heads(state: Tensor) -> bool:
    """`use_kernels`, for states `[.., V, K]` whose K and V the kernels can hold."""
    return use_kernels(state) and max(state.shape[-2:]) <= MAX_DIM


def wants_gradient(*inputs: Tensor | None) -> bool:
    """Whether a gradient is to be found, which no kernel does."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def dense(x: Tensor) -> Tensor:
    """x, or a copy of it, with neighbours along the last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def integers(x: Tensor, device: torch.device) -> Tensor:
    """Integers of any kind as ones that kernels count with, where the kernels run."""
    return dense((x if x.dtype in (torch.int32, torch.int64) else x.int()).to(device))
