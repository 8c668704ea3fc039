"""RMS norms of a residual stream and of a layer's outputs, each row by a program of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.triton.overlap import launch_options


def embed_norm(
    tokens: Tensor, table: Tensor, weight: Tensor, eps: float, tap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The stream of a text's tokens, and its norm for the first layer.

    Args:
        tokens: int32 `[M]`; table: embeddings `[vocab, D]`; weight: of the norm `[D]`.
        tap: as in `add_norm`.

    Returns:
        stream fp32 `[M, D]`, and the norm `[M, D]` in the table's dtype.
    """
    stream = torch.empty(tokens.numel(), table.shape[1], dtype=torch.float32, device=table.device)
    return stream, _norm(stream, table, tokens, weight, eps, table.dtype, tap)


def add_norm(
    stream: Tensor, parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, tap: Tensor | None = None
) -> Tensor:
    """`stream += parts[0] + parts[1] + ..` in place, and its RMS norm times `weight` in `dtype`: `[M, D]`.

    Args:
        stream: fp32 `[M, D]` contiguous; parts: fp32 `[P, M, D]` contiguous, as `linear_parts` makes them.
        tap: a view `[M, D]`, any row stride, that gets the stream as well.
    """
    return _norm(stream, parts, None, weight, eps, dtype, tap)


def _norm(
    stream: Tensor, source: Tensor, tokens: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype,
    tap: Tensor | None,
) -> Tensor:  # fmt: skip
    rows, size = stream.shape
    out = torch.empty(rows, size, dtype=dtype, device=stream.device)
    if rows:
        block = triton.next_power_of_2(size)
        norm_kernel[(rows,)](
            stream, source, tokens, weight, out, tap, eps, 0 if tap is None else tap.stride(0),
            M=rows if tokens is None else 1, D=size, BD=block, PARTS=0 if tokens is not None else source.shape[0],
            num_warps=min(8, max(1, block // 256)), **launch_options(stream.device),
        )  # fmt: skip
    return out


def gated_norm(
    o: Tensor, gate: Tensor | None, weight: Tensor, eps: float, sigmoid: bool, dtype: torch.dtype
) -> Tensor:
    """RMS norm of each head of o `[G, N, H, V]` times `weight` `[V]`, times silu or sigmoid of `gate`.

    Args:
        o: heads contiguous, any other strides. gate: `[G, N, H * V]`, any strides but the last, or None.

    Returns:
        `[G * N, H * V]` in `dtype`.
    """
    groups, each, heads, size = o.shape
    rows = groups * each
    out = torch.empty(rows, heads * size, dtype=dtype, device=o.device)
    if rows:
        block = triton.next_power_of_2(size)
        gated_norm_kernel[(rows, heads)](
            o, gate, weight, out, eps, each, *o.stride()[:2], *((0, 0) if gate is None else gate.stride()[:2]),
            V=size, BV=block, SIGMOID=sigmoid, num_warps=min(4, max(1, block // 128)), **launch_options(o.device),
        )  # fmt: skip
    return out


@triton.jit
def norm_kernel(
    stream, source, tokens, weight, out, tap, eps, s_tap,
    M, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_w = tl.load(weight + o_d, m_d, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if tokens is not None:
        token = tl.load(tokens + row).to(tl.int64)
        b_x = tl.load(source + token * D + o_d, m_d, other=0.0).to(tl.float32)
    else:
        b_y = tl.load(source + row * D + o_d, m_d, other=0.0)
        for i in tl.static_range(1, PARTS):
            b_y += tl.load(source + (i * M + row) * D + o_d, m_d, other=0.0)
        b_x = tl.load(stream + row * D + o_d, m_d, other=0.0) + b_y
    tl.store(stream + row * D + o_d, b_x, m_d)
    if tap is not None:
        tl.store(tap + row * s_tap + o_d, b_x.to(tap.dtype.element_ty), m_d)
    scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / D + eps)
    tl.store(out + row * D + o_d, (b_x * scale * b_w).to(out.dtype.element_ty), m_d)


@triton.jit
def gated_norm_kernel(
    o, gate, weight, out, eps, each, s_og, s_on, s_gg, s_gn,
    V: tl.constexpr, BV: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    b_w = tl.load(weight + o_v, m_v, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    group, node = row // each, row % each
    b_o = tl.load(o + group * s_og + node * s_on + head * V + o_v, m_v, other=0.0).to(tl.float32)
    b_o *= 1.0 / tl.sqrt(tl.sum(b_o * b_o, 0) / V + eps) * b_w
    if gate is not None:
        p_g = gate + group * s_gg + node * s_gn + head * V
        b_g = tl.load(p_g + o_v, m_v, other=0.0).to(tl.float32)
        b_o *= tl.sigmoid(b_g) if SIGMOID else b_g * tl.sigmoid(b_g)
    tl.store(out + (row * tl.num_programs(1) + head) * V + o_v, b_o.to(out.dtype.element_ty), m_v)
