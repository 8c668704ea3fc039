"""A stand-in for CUDA graphs where there is no GPU: work is recorded, undone, and from then on played back.

As on a GPU, every replay runs the same operations on the same memory, whatever the host has decided since; a look at a
value from within the work fails; and what the work allocates belongs to all graphs in turn, so nothing of it lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

_LOOKS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "numpy", "tolist"}


class Recorded(TorchDispatchMode):
    """What `work` does, to be played back; it has not been done yet."""

    def __init__(self, work: Callable[[], None]):
        super().__init__()
        self._steps: list[Callable[[], Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # memory that was there, and what it held
        self._made: dict[int, Tensor] = {}
        launch = InterpretedFunction.run

        def run(kernel: Any, *args: Any, **options: Any) -> None:
            with _disable_current_modes():
                self._meet([args, options])
                self._steps.append(lambda: launch(kernel, *args, **options))
                self._steps[-1]()

        with pytest.MonkeyPatch.context() as patch, self, _Watch():
            patch.setattr(InterpretedFunction, "run", run)
            work()
        for memory, held in self._before.values():
            memory.copy_(held)
        self._spoil()

    def replay(self) -> None:
        for step in self._steps:
            step()
        self._spoil()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        _check(op.overloadpacket.__name__)
        if op.overloadpacket.__name__ == "index" and any(x.dtype == torch.bool for x in _tensors(args[1])):
            _check("nonzero")  # which is how many elements there are
        self._meet([args, options])
        known = {_key(x) for x in _tensors([args, options])}
        outcome = op(*args, **options)
        fresh = [x for x in _tensors(outcome) if _key(x) not in known]
        self._made |= {_key(x): x for x in fresh}
        if op._schema.is_mutable:
            self._steps.append(lambda: op(*args, **options))
        elif fresh:

            def again() -> None:
                made = _tensors(op(*args, **options))
                for x, y in zip(_tensors(outcome), made, strict=True):
                    x.copy_(y)

            self._steps.append(again)
        return outcome

    def _meet(self, args: Any) -> None:
        """Keep what memory from outside holds before the work touches it."""
        for x in _tensors(args):
            key = _key(x)
            if key not in self._made and key not in self._before:
                memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self._before[key] = memory, memory.clone()

    def _spoil(self) -> None:
        for x in self._made.values():
            x.fill_(torch.nan if x.is_floating_point() else 0x7F)


class _Watch(TorchFunctionMode):
    """For what goes past the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _check(name: str) -> None:
    assert name not in _LOOKS, f"{name} waits for the device within a graph"


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _key(x: Tensor) -> int:
    """The same for all tensors of one memory."""
    return x.untyped_storage()._cdata
