"""Matrix products of few rows whose result for a row does not depend on how many rows there are, nor on which it is.

A BLAS picks its kernel by shape, and another kernel sums in another order. On the CPU few rows are therefore padded
to a `Form` whose bits are those of a fixed reference, and more are cut into blocks. Which forms have these bits is
found with probes that leave nothing of a product but the order of its sums, and which of them is the fastest by the
clock: once for each shape, dtype and number of threads on the machine at hand. So the form of a product may differ
from one run to the next, its bits may not. On a GPU a kernel of our own multiplies.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import torch
from torch import Tensor

from specla.ops import triton as kernels

BLOCK = 32
SIZES = (1, 2, 4, 8, 12, 16, 24, BLOCK)
ALIGNMENT = 64  # bytes; a BLAS may sum in another order when a matrix starts elsewhere
TIMED_ENTRIES, TIMED_SECONDS = 2 << 20, 0.1
CACHES = 64 << 20  # bytes that do not fit any cache
LARGE = 4 << 20  # entries of a weight from which one probe has to do
SMALL = 1 << 10  # up to which one probe leaves few traces
PROMPT = (
    1 << 18
)  # rows beyond which a GPU multiplies as is fastest: no round has so many, 4096 trees of 64 nodes


class Form(NamedTuple):
    """One way to multiply up to `rows` rows: zero rows are added up to that number."""

    rows: int
    weight_first: bool  # weight @ x.T rather than x @ weight.T


FORMS = tuple(Form(rows, weight_first) for rows in SIZES for weight_first in (True, False))
REFERENCES = (Form(BLOCK, True), Form(BLOCK, False))
Plan = tuple[Form | None, ...]  # by number of rows; None: one by one


def row_invariant_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for few rows `[..., in]`, each row's bits as if it were alone.

    `weight` is `[out, in]`, and x is rounded to its dtype; the result has x's.
    """
    if x.device.type != "cpu" or kernels.use_kernels(weight):
        return _on_device(x, weight)
    weight = weight.contiguous()
    plan = _plan_for(weight)
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] <= BLOCK:  # without the calls that a split needs: each takes long in a step
        out = _multiply(flat, weight, plan[flat.shape[0]])
    else:
        out = torch.cat([_multiply(block, weight, plan[block.shape[0]]) for block in flat.split(BLOCK)])
    return out.view(*x.shape[:-1], weight.shape[0])


def _on_device(x: Tensor, weight: Tensor) -> Tensor:
    rounded = x.to(weight.dtype)
    if (
        not kernels.use_kernels(weight)
        or kernels.wants_gradient(x, weight)
        or x.numel() > PROMPT * x.shape[-1]
    ):
        return torch.nn.functional.linear(rounded, weight).to(x.dtype)
    from specla.ops.triton.linear import linear

    with torch.cuda.device_of(weight):
        out = linear(kernels.dense(rounded.reshape(-1, x.shape[-1])), kernels.dense(weight))
    return out.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)


def measure(weight: Tensor) -> None:
    """Find out how to multiply by `weight` now rather than at its first product."""
    if weight.device.type == "cpu":
        _plan_for(weight)


def _plan_for(weight: Tensor) -> Plan:
    offset = weight.data_ptr() % ALIGNMENT
    return _plan(*weight.shape, weight.dtype, offset, torch.get_num_threads())


def _multiply(x: Tensor, weight: Tensor, form: Form | None) -> Tensor:
    """`x @ weight.T`, row after row in memory, in x's dtype."""
    dtype, rows = x.dtype, x.shape[0]
    if dtype != weight.dtype:
        x = x.to(weight.dtype)
    if form is None:
        out = torch.stack([torch.mv(weight, row.clone()) for row in x])
    else:
        if rows < form.rows or x.data_ptr() % ALIGNMENT or not x.is_contiguous():
            x = torch.cat([x, _zeros(form.rows - rows, x.shape[1], x.dtype)])
        if form.weight_first:
            out = torch.mm(weight, x.t()).t()[:rows]
            return torch.empty(out.shape, dtype=dtype).copy_(out)
        out = torch.mm(x, weight.t())[:rows]
    return out if dtype == weight.dtype else out.to(dtype)


@functools.lru_cache(maxsize=256)
def _zeros(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(rows, size, dtype=dtype)


@functools.cache
@torch.no_grad()
def _plan(out_features: int, in_features: int, dtype: torch.dtype, offset: int, threads: int) -> Plan:
    """The fastest form for each number of rows up to `BLOCK` that has the reference's bits, for a weight `offset`
    bytes off.
    """
    size = out_features * in_features
    seeds = range(1 if size > LARGE else 3 if size > SMALL else 16)
    probes = [_Probe(out_features, in_features, dtype, offset, seed) for seed in seeds]
    agrees = functools.cache(lambda form, reference: all(p.agree(form, reference) for p in probes))
    reference = next((form for form in REFERENCES if agrees(form, form)), None)
    if reference is None:
        return (None,) * (BLOCK + 1)
    forms = _fastest_first(out_features, in_features, dtype)
    return tuple(
        next(form for form in forms if form.rows >= rows and agrees(form, reference))
        for rows in range(BLOCK + 1)
    )


def _fastest_first(out_features: int, in_features: int, dtype: torch.dtype) -> list[Form]:
    """All forms by the time that they take with a weight that no cache holds; a part stands for a large one.

    Where the clock hardly tells them apart, as on a busy machine, `weight @ x.T` is taken.
    """
    out_features = min(out_features, max(BLOCK, TIMED_ENTRIES // in_features))
    copies = max(1, min(64, CACHES // (out_features * in_features * dtype.itemsize)))
    weights = torch.ones(copies, out_features, in_features, dtype=dtype)
    x = torch.ones(BLOCK, in_features, dtype=dtype)
    best = dict.fromkeys(FORMS, float("inf"))
    end = time.perf_counter() + TIMED_SECONDS
    for turn in range(20):
        if turn > 3 and time.perf_counter() > end:
            break
        for n, form in enumerate(FORMS, turn * len(FORMS)):
            start = time.perf_counter()
            _multiply(x[: form.rows], weights[n % copies], form)
            best[form] = min(best[form], time.perf_counter() - start)
    return sorted(FORMS, key=lambda form: best[form] * (1 if form.weight_first else 1.1))


class _Probe:
    """A weight and `BLOCK` rows whose product is exactly zero, with an odd seed only nearly.

    All that is left of it is the rounding of the sum's order, which an ordinary product hides when it is rounded to
    bfloat16: two orders then agree on thousands of entries and differ on the next.
    """

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, offset: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        half, odd = divmod(in_features, 2)
        order, mix = (torch.randperm(n, generator=generator) for n in (half, in_features))
        weight = torch.randn(min(out_features, 1024), half, generator=generator)
        x = torch.randn(BLOCK, half, generator=generator)
        x = x * 2.0 ** torch.randint(-8, 9, x.shape, generator=generator)
        weight = torch.cat([weight, weight[:, order], weight.new_ones(weight.shape[0], odd)], 1)[:, mix]
        x = torch.cat([x, -x[:, order], x.new_zeros(BLOCK, odd)], 1)[:, mix]
        if seed % 2:
            weight += 2.0**-10 * torch.randn(weight.shape, generator=generator)
            x = torch.where(x == 0, 2.0**-10 * torch.randn(x.shape, generator=generator), x)  # the odd one
        self.x, self.order = x.to(dtype).contiguous(), torch.randperm(BLOCK, generator=generator)
        room = torch.empty(out_features * in_features + ALIGNMENT, dtype=dtype)
        first = (offset - room.data_ptr()) % ALIGNMENT // room.element_size()
        self.weight = room[first : first + out_features * in_features].view(out_features, in_features)
        for part in self.weight.split(1024):
            part.copy_(weight[: part.shape[0]])
        self.whole = functools.cache(lambda form: _multiply(self.x, self.weight, form))

    def agree(self, form: Form, reference: Form) -> bool:
        """Whether shuffled rows have in `form` the bits that each has at its place in `reference`."""
        rows = self.order[: form.rows]
        return torch.equal(_multiply(self.x[rows], self.weight, form), self.whole(reference)[rows])
