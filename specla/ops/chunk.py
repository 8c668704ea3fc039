"""The gated delta rule over a long text, chunk by chunk: differentiable, for training and for prefill.

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
    total: Tensor | None  # [B, HV, C, size, 1] log-decay since the start of the chunk; None without decay
    states: Tensor  # [B, HV, C, K, V] at the start of each chunk
    last: Tensor  # [B, HV, V, K] after the last token

    def read(self, x: Tensor) -> Tensor:
        """`S_t x_t` for the state after each token t: x `[B, T, HV, R, K]` gives `[B, T, HV, R, V]`."""
        length, rows, size = x.shape[1], x.shape[3], self.k.shape[3]
        x = _split(x.flatten(3), size).unflatten(-1, (rows, -1))  # [B, HV, C, size, R, K]
        scores = x.flatten(3, 4) @ self.k.transpose(-1, -2)
        between, rise = _decays(self.total, size, x.device)
        scores = scores.unflatten(3, (size, rows)) * between[..., :, None, :]
        y = (x if rise is None else x * rise[..., None]).flatten(3, 4) @ self.states
        y = y + scores.flatten(3, 4) @ self.deltas
        return y.unflatten(3, (size, rows)).flatten(2, 3)[:, :, :length].transpose(1, 2)


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
        q.dim() == 4 and k.shape == q.shape and q.is_floating_point() and q.device == k.device,
        f"q and k must be floating point [B, T, H, K] on one device, got {list(q.shape)}, {list(k.shape)}",
    )
    text = chunk_text(
        k, v, g, beta, initial_state=initial_state, chunk_size=chunk_size, use_l2norm=use_qk_l2norm_in_kernel
    )
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
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    use_l2norm: bool = False,
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
    require(beta.shape == v.shape[:3], f"beta must be {list(v.shape[:3])}, got {list(beta.shape)}")
    require(g is None or g.shape == v.shape[:3], f"g must be {list(v.shape[:3])}")
    named = {"k": k, "beta": beta} | ({} if g is None else {"g": g})
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
        v.new_zeros(batch, heads, value_dim, k.shape[-1], dtype=work)
        if initial_state is None
        else initial_state
    )
    require(
        state.shape == (batch, heads, value_dim, k.shape[-1]),
        f"initial_state must be {[batch, heads, value_dim, k.shape[-1]]}, got {list(state.shape)}",
    )
    k = l2norm(k.to(work)) if use_l2norm else k.to(work)
    if heads != k.shape[2]:
        k = k.repeat_interleave(heads // k.shape[2], 2)
    # a text that goes on keeps its chunks whole: its bits must not depend on where it was cut
    size = chunk_size if initial_state is not None else min(chunk_size, 1 << max(length - 1, 0).bit_length())
    k, values, beta = (_split(x, size) for x in (k, v.to(work), beta.to(work)[..., None]))
    total = None if g is None else _split(g.to(work)[..., None], size).cumsum(-2)
    between, rise = _decays(total, size, v.device)
    k_beta = k * beta
    inverse = UnitLowerInverse.apply((k_beta @ k.transpose(-1, -2) * between).tril(-1))
    u, w = inverse @ (values * beta), inverse @ (k_beta if rise is None else k_beta * rise)
    writes = k if total is None else k * (total[..., -1:, :] - total).exp()
    last = None if total is None else total[..., -1:, :].exp()
    writes = writes.transpose(-1, -2)

    states, deltas = [], []
    state = state.transpose(-1, -2)  # [B, HV, K, V] inside the loop
    for c in range(k.shape[2]):
        states.append(state)
        delta = u[:, :, c] - w[:, :, c] @ state
        deltas.append(delta)
        state = (state if last is None else state * last[:, :, c]) + writes[:, :, c] @ delta
    return ChunkedText(k, torch.stack(deltas, 2), total, torch.stack(states, 2), state.transpose(-1, -2))


def _decays(total: Tensor | None, size: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Decay from token j to token i of a chunk `[..., size, size]`, 0 above the diagonal, and since its start."""
    lower = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if total is None:
        return lower, None
    return (total - total.transpose(-1, -2)).masked_fill(~lower, -torch.inf).exp(), total.exp()


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
