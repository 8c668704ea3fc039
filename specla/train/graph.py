"""One training step as one graph: launched op by op, a small model waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Scalars = dict[str, Tensor]


class Step:
    """Fills a model's gradients from a batch and returns what `loss` returned, detached.

    On a GPU it is compiled and captured: all batches have the shapes and dtypes of `example`, and may lie on the host.

    Args:
        loss: of a batch's tensors; scalars by name, "loss" is the one to minimise.
        example: a part of a batch. parts: how many of them a batch has, which take turns in memory.
        whole: compile `loss` here; otherwise what it calls has been compiled, or nothing is.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Scalars], example: Sequence[Tensor], *, parts: int = 1,
        whole: bool = True,
    ):  # fmt: skip
        self.model, self.parts = model, parts
        self._captures = next(model.parameters()).device.type == "cuda"
        self._loss = torch.compile(loss, dynamic=False) if whole and self._captures else loss
        self._example = example
        self._graph: _Graph | None = None
        if self._captures:
            self._graph = _Graph(model, self._loss, example, parts)

    def __call__(self, batch: Sequence[Tensor]) -> Scalars:
        if not self._captures:
            return self._eager(batch)
        if self._graph is None:
            self._graph = _Graph(self.model, self._loss, self._example, self.parts)
        return self._graph.replay(batch)

    def release(self) -> None:
        """Give back the memory of a captured step, gradients included, for something else to use until the next one."""
        if self._graph is not None:
            self._graph = None
            self.model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    def _eager(self, batch: Sequence[Tensor]) -> Scalars:
        self.model.zero_grad(set_to_none=True)
        told = []
        for part in zip(*(x.chunk(self.parts) for x in batch), strict=True):
            told.append(self._loss(*part))
            (told[-1]["loss"] / self.parts).backward()
        return _mean([{name: value.detach() for name, value in scalars.items()} for scalars in told])


class _Graph:
    """A captured step and the tensors that it reads and writes."""

    def __init__(self, model: nn.Module, loss: Callable[..., Scalars], example: Sequence[Tensor], parts: int):
        device = next(model.parameters()).device
        self.parts = parts
        self._static = [torch.empty_like(x, device=device).copy_(x) for x in example]
        model.zero_grad(set_to_none=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                loss(*self._static)["loss"].backward()
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad(set_to_none=True)
        sums = [weight for weight in model.parameters() if weight.requires_grad] if parts > 1 else []
        for weight in sums:
            weight.grad = torch.zeros_like(weight)
        self._graph = torch.cuda.CUDAGraph()
        # other threads, such as a process group's watchdog, may call CUDA meanwhile
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._scalars = loss(*self._static)
            (self._scalars["loss"] / parts).backward()
        self._grads = [weight.grad for weight in sums if weight.grad is not None]

    def replay(self, batch: Sequence[Tensor]) -> Scalars:
        if self._grads:
            torch._foreach_zero_(self._grads)
        told = []
        for part in zip(*(x.chunk(self.parts) for x in batch), strict=True):
            for kept, new in zip(self._static, part, strict=True):
                kept.copy_(new.pin_memory() if new.device.type == "cpu" else new, non_blocking=True)
            self._graph.replay()
            scalars = {name: value.detach() for name, value in self._scalars.items()}
            told.append({name: x.clone() for name, x in scalars.items()} if self.parts > 1 else scalars)
        return _mean(told)


def _mean(told: Sequence[Scalars]) -> Scalars:
    if len(told) == 1:
        return told[0]
    return {name: torch.stack([scalars[name] for scalars in told]).mean() for name in told[0]}
