"""Which tensors of a checkpoint a parameter is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

HEAD = "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]
Join = Callable[[list[Tensor]], Tensor]


class Source(NamedTuple):
    """A parameter's tensors in a checkpoint, with their shapes, and what becomes of them."""

    shapes: Shapes
    join: Join = torch.cat
