"""Products of few rows with weights of eight bits: what a product of few rows waits for is its weights.

For drafters on a CPU, whose bits nobody compares: a draft that comes out differently is refused at worst.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FEW = 12  # more rows take longer than with the weights as they are (AVX2, 2 threads)
VECTOR = 32  # torch reads rows in whole vectors, past their end where it has to


class Int8Weight(NamedTuple):
    """`values * scale[:, None]` is nearly the weight."""

    values: Tensor  # int8 [out, in]
    scale: Tensor  # bfloat16 [out]


def quantize(weight: Tensor) -> Int8Weight | None:
    """The weight `[out, in]` in eight bits, a scale for each row; None where torch cannot multiply by it (or not
    safely: rows that are no whole vectors), and for float64, which asks for exactness.
    """
    able = weight.device.type == "cpu" and hasattr(torch.ops.aten, "_weight_int8pack_mm")
    if not able or weight.shape[1] % VECTOR or weight.dtype == torch.float64:
        return None
    scale = (weight.abs().amax(1).float() / 127).clamp(min=1e-12).bfloat16()
    values = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8Weight(values.contiguous(), scale)


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`x @ weight.T` for x `[..., in]`, which is rounded to bfloat16; the result has its dtype."""
    flat = x.reshape(-1, x.shape[-1])
    # a copy in any case: torch would crash on rows that start anywhere else in memory
    flat = flat.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
    out = torch.ops.aten._weight_int8pack_mm(flat, weight.values, weight.scale)
    return out.to(x.dtype).view(*x.shape[:-1], -1)
