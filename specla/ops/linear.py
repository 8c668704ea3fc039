"""Matrix products whose result for a row does not depend on how many rows there are, nor on which row it is.

A BLAS picks its kernel by shape, and another kernel sums in another order. On the CPU few rows are therefore always
multiplied in one of two fixed forms: padded up to `least_rows` and cut into blocks of `BLOCK`. How far to pad is
measured once for each shape, dtype and number of threads on the machine at hand.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 32
LEAST_BF16 = 4  # on the CPUs seen so far, fewer rows of bfloat16 take longer than four


def row_invariant_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for few rows `[..., in]`, each row's bits as if it were alone.

    `weight` is `[out, in]`, and x is rounded to its dtype; the result has x's. `weight @ x.T` is the faster
    orientation on a CPU and costs the same up to 16 rows.
    """
    if x.device.type != "cpu":
        return torch.nn.functional.linear(x.to(weight.dtype), weight).to(x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    least = least_rows(weight.shape[0], weight.shape[1], weight.dtype, torch.get_num_threads())
    if least == 0:
        out = torch.cat([weight @ row[:, None].to(weight.dtype) for row in flat], 1)
    elif rows < least:
        padded = flat.new_zeros(least, flat.shape[1], dtype=weight.dtype)
        padded[:rows] = flat
        out = (weight @ padded.t())[:, :rows]
    elif rows <= BLOCK:
        out = weight @ flat.to(weight.dtype).t()
    else:
        out = torch.cat([weight @ block.t() for block in _blocks(flat.to(weight.dtype), least)], 1)[:, :rows]
    whole = torch.empty(rows, weight.shape[0], dtype=x.dtype)  # rows side by side again, in x's dtype
    out = whole.copy_(out.t())
    return out.view(*x.shape[:-1], weight.shape[0])


def _blocks(x: Tensor, least: int) -> tuple[Tensor, ...]:
    """Blocks of BLOCK rows; the last is padded to `least` rows if it has fewer."""
    missing = least - x.shape[0] % BLOCK
    if least > missing > 0:
        x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
    return x.split(BLOCK)


@functools.cache
def least_rows(out_features: int, in_features: int, dtype: torch.dtype, threads: int) -> int:
    """The smallest number of rows from which this machine's product is row-invariant for the shape; 0 when it
    depends on the position of a row, so that rows must be multiplied one by one.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = (y.to(dtype) for y in _cancelling(out_features, in_features, generator))
    whole = (weight @ x.t()).t()
    shuffled = torch.randperm(BLOCK, generator=generator)
    if not torch.equal((weight @ x[shuffled].t()).t(), whole[shuffled]):
        return 0
    disagree = [n for n in range(1, BLOCK) if not torch.equal((weight @ x[:n].t()).t(), whole[:n])]
    return max([LEAST_BF16 if dtype == torch.bfloat16 else 1, *(n + 1 for n in disagree)])


def _cancelling(out_features: int, in_features: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A weight and `BLOCK` rows whose product is exactly zero.

    All that is left of it is the rounding of the sum's order, which an ordinary product hides when it is rounded to
    bfloat16: two orders then agree on thousands of entries and differ on the next.
    """
    half = in_features // 2
    order, mix = torch.randperm(half, generator=generator), torch.randperm(in_features, generator=generator)
    weight = torch.randn(out_features, half, generator=generator)
    x = torch.randn(BLOCK, half, generator=generator)
    x = x * 2.0 ** torch.randint(-8, 9, x.shape, generator=generator)
    weight = torch.cat([weight, weight[:, order], weight.new_ones(out_features, in_features % 2)], 1)
    x = torch.cat([x, -x[:, order], x.new_zeros(BLOCK, in_features % 2)], 1)
    return weight[:, mix].contiguous(), x[:, mix].contiguous()
