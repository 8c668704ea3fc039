"""Cross-entropy over a large vocabulary, some rows of logits at a time.

Logits of all tokens of a batch, in float32 with their gradient, would take more memory than the model. The gradients
are hence made with the loss, slice by slice, and only they are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specla.train.valid import IGNORE

ROWS = 4096  # of logits in memory together


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype | None = None, rows: int = ROWS
) -> Tensor:
    """Mean of -ln p of `targets` `[T]`, those that are IGNORE aside; differentiable.

    Args:
        hidden: `[T, D]`. weight: `[vocab, D]` of the head.
        dtype: to multiply in; the weight's own by default.
    """
    return _CrossEntropy.apply(hidden, weight, targets, dtype or weight.dtype, rows)


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype | None = None, rows: int = ROWS
) -> Tensor:
    """-ln p of each target `[T]`, 0 where it is IGNORE; arguments as of `cross_entropy`."""
    return torch.cat(
        [losses for *_, losses in _slices(hidden, weight.to(dtype or weight.dtype), targets, rows)]
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, rows: int
    ) -> Tensor:
        head = weight.to(dtype)
        counted = (targets != IGNORE).sum().clamp(min=1)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden, to_weight = [], torch.zeros_like(weight)
        for x, y, log_p, losses in _slices(hidden, head, targets, rows):
            total = total + losses.sum()
            known = (y != IGNORE)[:, None]
            slope = log_p.exp_().scatter_add_(
                1, y.clamp(min=0)[:, None], torch.full_like(known, -1, dtype=log_p.dtype)
            )
            slope = (slope * known).to(dtype)
            to_hidden.append((slope @ head).to(hidden.dtype))
            to_weight += (slope.T @ x).to(weight.dtype)
        ctx.save_for_backward(torch.cat(to_hidden), to_weight, counted)
        return total / counted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight, counted = ctx.saved_tensors
        scale = grads[0] / counted
        return to_hidden * scale, to_weight * scale, None, None, None


def _slices(
    hidden: Tensor, head: Tensor, targets: Tensor, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each slice its rows, targets, log-probabilities `[rows, vocab]`, and losses `[rows]`."""
    for x, y in zip(hidden.split(rows), targets.split(rows), strict=True):
        x = x.to(head.dtype)
        log_p = (x @ head.T).float().log_softmax(-1)
        losses = -log_p.gather(-1, y.clamp(min=0)[:, None])[:, 0]
        yield x, y, log_p, losses * (y != IGNORE)
