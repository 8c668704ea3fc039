"""The gated delta rule over a long text, chunk by chunk: differentiable, for training and for prefill.

Inside a chunk the corrected values solve `(I + A) D = beta (V - exp(G) S K)` (the UT transform); between chunks only
the state is carried, so the Python loop runs over chunks, never over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specla.ops.checks import require
from specla.ops.elementwise import l2norm


def chunk_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over T tokens.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`; g: log-decay `[B, T, HV]` or None; beta: `[B, T, HV]`.
        initial_state: `[B, HV, V, K]`, zero by default; its dtype (fp32 without it, fp64 for fp64 inputs) is that of
            the computation.
        chunk_size: a power of two.

    Returns:
        o `[B, T, HV, V]` in v's dtype and the state after the last token.
    """
    require(
        chunk_size > 0 and chunk_size & (chunk_size - 1) == 0,
        f"chunk_size must be a power of 2, got {chunk_size}",
    )
    require(
        q.dim() == 4 and k.shape == q.shape,
        f"q and k must be [B, T, H, K], got {list(q.shape)}, {list(k.shape)}",
    )
    require(
        v.dim() == 4 and v.shape[:2] == q.shape[:2] and v.shape[2] % q.shape[2] == 0,
        f"v must be [B, T, HV, V], got {list(v.shape)}",
    )
    require(beta.shape == v.shape[:3], f"beta must be {list(v.shape[:3])}, got {list(beta.shape)}")
    require(g is None or g.shape == v.shape[:3], f"g must be {list(v.shape[:3])}")
    named = {"q": q, "k": k, "beta": beta} | ({} if g is None else {"g": g})
    for name, x in (named | ({} if initial_state is None else {"initial_state": initial_state})).items():
        require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
        require(x.device == v.device, f"{name} is on {x.device}, v on {v.device}")
    require(
        initial_state is None or initial_state.dtype in (torch.float32, torch.float64),
        "initial_state must be float32 or float64",
    )
    batch, length, heads, value_dim = v.shape
    if initial_state is not None:
        work = initial_state.dtype
    else:
        work = torch.float64 if v.dtype == torch.float64 else torch.float32
    state = (
        v.new_zeros(batch, heads, value_dim, q.shape[-1], dtype=work)
        if initial_state is None
        else initial_state
    )
    require(
        state.shape == (batch, heads, value_dim, q.shape[-1]),
        f"initial_state must be {[batch, heads, value_dim, q.shape[-1]]}, got {list(state.shape)}",
    )
    q, k = q.to(work), k.to(work)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if heads != q.shape[2]:
        q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    size = min(chunk_size, 1 << max(length - 1, 0).bit_length())
    q, k, values, beta = (_split(x, size) for x in (q, k, v.to(work), beta.to(work)[..., None]))

    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    if g is None:
        between: Tensor | float = 1.0
        rise = fall = last = k.new_ones(())
    else:
        total = _split(g.to(work)[..., None], size).cumsum(-2)  # [B, HV, C, size, 1]
        between = (total - total.transpose(-1, -2)).masked_fill(~lower, -torch.inf).exp()
        rise, last = total.exp(), total[..., -1:, :].exp()
        fall = (total[..., -1:, :] - total).exp()
    k_beta = k * beta
    inverse = UnitLowerInverse.apply((k_beta @ k.transpose(-1, -2) * between).tril(-1))
    u, w = inverse @ (values * beta), inverse @ (k_beta * rise)
    reads, writes = q * rise, (k * fall).transpose(-1, -2)

    states, deltas = [], []
    state = state.transpose(-1, -2)  # [B, HV, K, V] inside the loop
    for c in range(q.shape[2]):
        states.append(state)
        delta = u[:, :, c] - w[:, :, c] @ state
        deltas.append(delta)
        state = state * (last[:, :, c] if last.dim() else last) + writes[:, :, c] @ delta
    attend = (q @ k.transpose(-1, -2) * between).tril()
    o = reads @ torch.stack(states, 2) + attend @ torch.stack(deltas, 2)
    o = o.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return o.to(v.dtype), state.transpose(-1, -2)


def _split(x: Tensor, size: int) -> Tensor:
    """`[B, T, H, D]` to `[B, H, C, size, D]`; zeros past the end leave the state as it is."""
    missing = -x.shape[1] % size
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
