"""Cross-entropy in slices is torch's own, whatever the slices, and never has all logits at once."""

from __future__ import annotations

import pytest
import torch

from specla.train.cross_entropy import cross_entropy, token_losses
from specla.train.valid import IGNORE

T, D, VOCAB = 37, 12, 91


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=chance, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, D, generator=chance, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (T,), generator=chance)
    targets[::5] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("rows", [1, 8, T, 100])
def test_loss_and_gradients_are_torchs(rows: int) -> None:
    hidden, weight, targets = inputs()
    loss = cross_entropy(hidden, weight, targets, rows=rows)
    wanted = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    grads = torch.autograd.grad(3 * loss, (hidden, weight))
    theirs = torch.autograd.grad(3 * wanted, (hidden, weight))
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)  # summed in float32
    for ours, other in zip(grads, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)
    each = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(token_losses(hidden, weight, targets, rows=rows).double(), each)


def test_it_may_multiply_in_less_than_it_is_given() -> None:
    hidden, weight, targets = inputs()
    exact = float(cross_entropy(hidden, weight, targets).detach())
    rounded = float(cross_entropy(hidden.float(), weight.float(), targets, torch.bfloat16).detach())
    assert exact != rounded and rounded == pytest.approx(exact, rel=0.02)


def test_a_batch_of_nothing_counted_has_no_loss() -> None:
    hidden, weight, _ = inputs()
    loss = cross_entropy(hidden, weight, torch.full((T,), IGNORE))
    assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()


def test_no_tensor_has_all_logits() -> None:
    hidden, weight, targets = inputs()

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    with Largest() as largest:
        cross_entropy(hidden, weight, targets, rows=4).backward()
    assert largest.numel == VOCAB * D  # the gradient of the head
