"""The gated delta rule and its relatives over a long text, chunk by chunk: differentiable, for training and prefill.

Inside a chunk the corrected values solve `(I + A) D = beta (V - exp(G) S K)` (the UT transform); between chunks only
the state is carried, so the Python loop runs over chunks, never over tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.ops import triton as kernels
from specla.ops.checks import require
from specla.ops.elementwise import l2norm

SUB = 16  # tokens whose decays by channel are taken pair by pair


def takes(state: Tensor, *inputs: Tensor | None) -> bool:
    """Whether a kernel may read a prompt into this state `[B, HV, V, K]`."""
    if not (state.is_cuda and kernels.use_kernels(state)) or kernels.wants_gradient(state, *inputs):
        return False
    from specla.ops.triton.chunk import largest_head

    return max(state.shape[-2:]) <= largest_head(state.device)


def launch(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor) -> Tensor:
    """Outputs of `chunk_gated_delta` by kernels, keys and queries normalised; the state becomes the last one."""
    from specla.ops.triton.chunk import chunk_prefill

    with torch.cuda.device_of(state):
        q, k, v = (kernels.dense(x) for x in (q, k, v))
        return chunk_prefill(q, k, v, g, beta, state=state)


class ChunkedText(NamedTuple):
    """What the rule left behind at every token of a text, for `read` at any of them."""

    k: Tensor  # [B, HV, C, size, K] in C chunks
    deltas: Tensor  # [B, HV, C, size, V] corrected values
    total: (
        Tensor | None
    )  # [B, HV, C, size, 1 or K] log-decay since the start of the chunk; None without decay
    states: Tensor  # [B, HV, C, K, V] at the start of each chunk
    last: Tensor  # [B, HV, V, K] after the last token

    def read(self, x: Tensor) -> Tensor:
        """`S_t x_t` for the state after each token t: x `[B, T, HV, R, K]` gives `[B, T, HV, R, V]`."""
        length, rows, size = x.shape[1], x.shape[3], self.k.shape[3]
        x = _split(x.flatten(3), size).unflatten(-1, (rows, -1))  # [B, HV, C, size, R, K]
        scores = _scores(x, self.k, self.total)
        y = (x if self.total is None else x * self.total.exp()[..., None, :]).flatten(3, 4) @ self.states
        y = y + scores.flatten(3, 4) @ self.deltas
        return y.unflatten(3, (size, rows)).flatten(2, 3)[:, :, :length].transpose(1, 2)


def chunk_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    delta: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule, or a relative of it, over T tokens.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`; beta: `[B, T, HV]` or None for 1.
        g: log-decay `[B, T, HV]`, one for each key channel `[B, T, HV, K]`, or None for no decay.
        initial_state: `[B, HV, V, K]`, zero by default; its dtype (fp32 without it, fp64 for fp64 inputs) is that of
            the computation.
        chunk_size: a power of two.
        delta: False writes `beta v`, whatever the state holds.

    Returns:
        o `[B, T, HV, V]` in v's dtype and the state after the last token.
    """
    require(
        q.dim() == 4 and k.shape == q.shape and q.is_floating_point() and q.device == k.device,
        f"q and k must be floating point [B, T, H, K] on one device, got {list(q.shape)}, {list(k.shape)}",
    )
    text = chunk_text(
        k, v, g, beta, initial_state=initial_state, chunk_size=chunk_size, use_l2norm=use_qk_l2norm_in_kernel,
        delta=delta,
    )  # fmt: skip
    q = q.to(text.last.dtype)
    q = l2norm(q) if use_qk_l2norm_in_kernel else q
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    groups = v.shape[2] // q.shape[2]
    q = q.repeat_interleave(groups, 2) if groups > 1 else q
    return text.read(q[..., None, :])[..., 0, :].to(v.dtype), text.last


def chunk_text(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    use_l2norm: bool = False,
    delta: bool = True,
) -> ChunkedText:
    """The rule without its outputs: arguments as `chunk_gated_delta`."""
    require(
        chunk_size > 0 and chunk_size & (chunk_size - 1) == 0,
        f"chunk_size must be a power of 2, got {chunk_size}",
    )
    require(
        v.dim() == 4 and k.dim() == 4 and v.shape[:2] == k.shape[:2] and v.shape[2] % k.shape[2] == 0,
        f"v must be [B, T, HV, V], got {list(v.shape)}",
    )
    heads, channels = list(v.shape[:3]), [*v.shape[:3], k.shape[-1]]
    require(beta is None or list(beta.shape) == heads, f"beta must be None or {heads}")
    require(g is None or list(g.shape) in (heads, channels), f"g must be None, {heads} or {channels}")
    for name, x in {"k": k, "beta": beta, "g": g, "initial_state": initial_state}.items():
        if x is not None:
            require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
            require(x.device == v.device, f"{name} is on {x.device}, v on {v.device}")
    require(
        initial_state is None or initial_state.dtype in (torch.float32, torch.float64),
        "initial_state must be float32 or float64",
    )
    batch, length, num_heads, value_dim = v.shape
    if initial_state is not None:
        work = initial_state.dtype
    else:
        work = torch.float64 if v.dtype == torch.float64 else torch.float32
    state = (
        v.new_zeros(batch, num_heads, value_dim, k.shape[-1], dtype=work)
        if initial_state is None
        else initial_state
    )
    require(
        state.shape == (batch, num_heads, value_dim, k.shape[-1]),
        f"initial_state must be {[batch, num_heads, value_dim, k.shape[-1]]}, got {list(state.shape)}",
    )
    k = l2norm(k.to(work)) if use_l2norm else k.to(work)
    if num_heads != k.shape[2]:
        k = k.repeat_interleave(num_heads // k.shape[2], 2)
    # a text that goes on keeps its chunks whole: its bits must not depend on where it was cut
    size = chunk_size if initial_state is not None else min(chunk_size, 1 << max(length - 1, 0).bit_length())
    k, values = (_split(x, size) for x in (k, v.to(work)))
    total = None
    if g is not None:
        total = _split(g.to(work) if g.dim() == v.dim() else g.to(work)[..., None], size).cumsum(-2)
    k_beta = k
    if beta is not None:
        strength = _split(beta.to(work)[..., None], size)
        k_beta, values = k * strength, values * strength
    if delta:
        within = _scores(k_beta[..., None, :], k, total)[..., 0, :].tril(-1)
        inverse = UnitLowerInverse.apply(within)
        u, w = inverse @ values, inverse @ (k_beta if total is None else k_beta * total.exp())
    writes = k if total is None else k * (total[..., -1:, :] - total).exp()
    last = None if total is None else total[..., -1, :, None].exp()  # [B, HV, C, 1 or K, 1]
    writes = writes.transpose(-1, -2)

    states, deltas = [], []
    state = state.transpose(-1, -2)  # [B, HV, K, V] inside the loop
    for c in range(k.shape[2]):
        states.append(state)
        change = u[:, :, c] - w[:, :, c] @ state if delta else values[:, :, c]
        deltas.append(change)
        state = (state if last is None else state * last[:, :, c]) + writes[:, :, c] @ change
    return ChunkedText(k, torch.stack(deltas, 2), total, torch.stack(states, 2), state.transpose(-1, -2))


def _scores(x: Tensor, k: Tensor, total: Tensor | None) -> Tensor:
    """How token i of a chunk sees what token j wrote: x `[.., size, R, K]`, k `[.., size, K]`, total
    `[.., size, 1 or K]` give `[.., size, R, size]`, 0 where j comes after i.
    """
    size, rows = x.shape[-3:-1]
    if total is not None and total.shape[-1] > 1:
        return _channel_scores(x, k, total)
    scores = (x.flatten(-3, -2) @ k.transpose(-1, -2)).unflatten(-2, (size, rows))
    lower = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    if total is None:
        return scores * lower[:, None]
    between = (total - total.transpose(-1, -2)).masked_fill(~lower, -torch.inf).exp()
    return scores * between[..., :, None, :]


def _channel_scores(x: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """`_scores` where every key channel decays in its own way.

    A product of two matrices would need `exp(-total)`, which overflows where a channel forgets fast. Rows are taken
    `SUB` at a time: what lies before them decays to their start, and they from there; pairs among them one by one.
    Source: the secondary chunks of Gated Linear Attention (arXiv 2312.06635).
    """
    size, parts = x.shape[-3], []
    for first in range(0, size, SUB):
        end = min(first + SUB, size)
        own, reads, keys = total[..., first:end, :], x[..., first:end, :, :], k[..., first:end, :]
        lower = torch.ones(end - first, end - first, dtype=torch.bool, device=x.device).tril()
        gap = (own[..., :, None, :] - own[..., None, :, :]).masked_fill(~lower[..., None], -torch.inf)
        near = (gap.exp() * keys[..., None, :, :]) @ reads.transpose(-1, -2)  # [.., i, j, R]
        part = torch.nn.functional.pad(near.transpose(-1, -2), (0, size - end))
        if first:
            start = total[..., first - 1 : first, :]
            reads = reads * (own - start).exp()[..., None, :]
            before = k[..., :first, :] * (start - total[..., :first, :]).exp()
            far = reads.flatten(-3, -2) @ before.transpose(-1, -2)
            part = torch.cat([far.unflatten(-2, reads.shape[-3:-1]), part], -1)
        parts.append(part)
    return torch.cat(parts, -3)


def _split(x: Tensor, size: int) -> Tensor:
    """`[B, T, H, D]` to `[B, H, C, size, D]`; zeros past the end leave the state as it is.

    There is never one block alone: a batch of one product is computed in another way, to other bits.
    """
    alone = x.shape[0] * x.shape[2] == 1 and 0 < x.shape[1] <= size
    missing = -x.shape[1] % size + size * alone
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
    return x.transpose(1, 2).unflatten(2, (-1, size))


class UnitLowerInverse(torch.autograd.Function):
    """`(I + A)^-1` for strictly lower triangular A `[..., C, C]`, C a power of two.

    Blocks of doubling size are inverted as `[[X, 0], [-Z B X, Z]]`, which is as stable as forward substitution and
    is made of matrix products alone. Backward: `dA = -X^T dX X^T`.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower).contiguous()
        half = 1
        while half < size:
            own, given = (_diagonal_blocks(x, 2 * half) for x in (inverse, lower))
            right, below, left = own[..., half:, half:], given[..., half:, :half], own[..., :half, :half]
            own[..., half:, :half] = -(right @ below @ left)
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """A view `[..., C / size, size, size]` of the blocks on the diagonal of `[..., C, C]`."""
    blocks = x.shape[-1] // size
    return x.unflatten(-1, (blocks, size)).unflatten(-3, (blocks, size)).diagonal(0, -4, -2).movedim(-1, -3)
