"""One training step as one graph: launched op by op, a small model waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Scalars = dict[str, Tensor]


def step_function(
    model: nn.Module, loss: Callable[..., Scalars], example: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], Scalars]:
    """A function that fills the model's gradients from a batch and returns what `loss` returned, detached.

    On a GPU it is compiled and captured: all batches have the shapes and dtypes of `example`, and may lie on the host.

    Args:
        loss: of a batch's tensors; scalars by name, "loss" is the one to minimise.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":

        def eager(batch: Sequence[Tensor]) -> Scalars:
            model.zero_grad(set_to_none=True)
            scalars = loss(*batch)
            scalars["loss"].backward()
            return {name: value.detach() for name, value in scalars.items()}

        return eager

    compiled = torch.compile(loss, dynamic=False)
    static = [torch.empty_like(x, device=device).copy_(x) for x in example]
    model.zero_grad(set_to_none=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            compiled(*static)["loss"].backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in model.parameters():
            weight.grad = None
        scalars = compiled(*static)
        scalars["loss"].backward()

    def replay(batch: Sequence[Tensor]) -> Scalars:
        for kept, new in zip(static, batch, strict=True):
            kept.copy_(new.pin_memory() if new.device.type == "cpu" else new, non_blocking=True)
        graph.replay()
        return {name: value.detach() for name, value in scalars.items()}

    return replay
