"""One training step as one graph: launched op by op, a small model waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Scalars = dict[str, Tensor]


def step_function(
    model: nn.Module,
    loss: Callable[..., Scalars],
    example: Sequence[Tensor],
    *,
    parts: int = 1,
    whole: bool = True,
) -> Callable[[Sequence[Tensor]], Scalars]:
    """A function that fills the model's gradients from a batch and returns what `loss` returned, detached.

    On a GPU it is compiled and captured: all batches have the shapes and dtypes of `example`, and may lie on the host.

    Args:
        loss: of a batch's tensors; scalars by name, "loss" is the one to minimise.
        example: a part of a batch. parts: how many of them a batch has, which take turns in memory.
        whole: compile `loss` here; otherwise what it calls has been compiled, or nothing is.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":

        def eager(batch: Sequence[Tensor]) -> Scalars:
            model.zero_grad(set_to_none=True)
            told = []
            for part in zip(*(x.chunk(parts) for x in batch), strict=True):
                told.append(loss(*part))
                (told[-1]["loss"] / parts).backward()
            return _mean([{name: value.detach() for name, value in scalars.items()} for scalars in told])

        return eager

    compiled = torch.compile(loss, dynamic=False) if whole else loss
    static = [torch.empty_like(x, device=device).copy_(x) for x in example]
    model.zero_grad(set_to_none=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            compiled(*static)["loss"].backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    sums = [weight for weight in model.parameters() if weight.requires_grad] if parts > 1 else []
    for weight in sums:
        weight.grad = torch.zeros_like(weight)
    graph = torch.cuda.CUDAGraph()
    # other threads, such as a process group's watchdog, may call CUDA meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        scalars = compiled(*static)
        (scalars["loss"] / parts).backward()
    grads = [weight.grad for weight in sums if weight.grad is not None]

    def replay(batch: Sequence[Tensor]) -> Scalars:
        if grads:
            torch._foreach_zero_(grads)
        told = []
        for part in zip(*(x.chunk(parts) for x in batch), strict=True):
            for kept, new in zip(static, part, strict=True):
                kept.copy_(new.pin_memory() if new.device.type == "cpu" else new, non_blocking=True)
            graph.replay()
            told.append(
                {
                    name: value.detach().clone() if parts > 1 else value.detach()
                    for name, value in scalars.items()
                }
            )
        return _mean(told)

    return replay


def _mean(told: Sequence[Scalars]) -> Scalars:
    if len(told) == 1:
        return told[0]
    return {name: torch.stack([scalars[name] for scalars in told]).mean() for name in told[0]}
