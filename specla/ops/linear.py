"""Matrix products whose result for a row does not depend on how many rows there are, nor on which row it is.

A BLAS picks its kernel by shape, and another kernel sums in another order. On the CPU few rows are therefore always
multiplied in one of two fixed forms: padded up to `_least_rows` and cut into blocks of `BLOCK`. How far to pad is
measured once per (dtype, shape) on the machine at hand.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 32
LEAST_BF16 = 4  # fewer rows of bfloat16 take longer than four


def row_invariant_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for few rows `[..., in]`, each row's bits as if it were alone.

    `weight` is `[out, in]`; `weight @ x.T` is the faster orientation on a CPU and costs the same up to 16 rows.
    """
    if x.device.type != "cpu":
        return torch.nn.functional.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    least = least_rows(weight.shape[0], weight.shape[1], weight.dtype)
    if flat.shape[0] <= BLOCK:
        out = _fixed(flat, weight, least)
    else:
        out = torch.cat([_fixed(block, weight, least) for block in flat.split(BLOCK)])
    return out.view(*x.shape[:-1], weight.shape[0])


def _fixed(x: Tensor, weight: Tensor, least: int) -> Tensor:
    rows = x.shape[0]
    if rows >= least:
        return (weight @ x.t()).t().contiguous()
    x = torch.nn.functional.pad(x, (0, 0, 0, least - rows))
    return (weight @ x.t()).t()[:rows].contiguous()


@functools.cache
def least_rows(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """The smallest number of rows from which this machine's product is row-invariant for the shape.

    Raises:
        RuntimeError: when not even full blocks are, so that bit-exact verification is impossible here.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    x = torch.randn(BLOCK, in_features, generator=generator).to(dtype)
    whole = _fixed(x, weight, BLOCK)

    def agrees(rows: int, least: int) -> bool:
        return torch.equal(_fixed(x[:rows], weight, least), whole[:rows])

    shuffled = torch.randperm(BLOCK, generator=generator)
    if not torch.equal(_fixed(x[shuffled], weight, BLOCK), whole[shuffled]):
        raise RuntimeError(
            f"this machine's {dtype} product [{out_features}, {in_features}] depends on the position of a row: "
            "bit-exact verification is impossible with it, try another dtype"
        )
    disagree = [rows for rows in range(1, BLOCK) if not agrees(rows, 1)]
    return max([rows + 1 for rows in disagree], default=LEAST_BF16 if dtype == torch.bfloat16 else 1)
