"""What the engine asks of a target, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from specla.state import StatePool
from specla.tree import Tree


class Tap(NamedTuple):
    """Shows residual streams of the target to a drafter.

    layer_ids: i names the stream that enters layer i; the number of layers, the one that leaves the last, unnormalised.
    read: called once a forward pass with these streams side by side, `[B, T, len(layer_ids) * hidden]`.
    """

    layer_ids: tuple[int, ...]
    read: Callable[[Tensor], None]


class Target(Protocol):
    """A language model that reads prompts into slots and verifies draft trees on them."""

    @property
    def config(self) -> Any:
        """Has at least vocab_size, hidden_size, num_hidden_layers, bos_token_id and eos_token_id."""

    def new_pool(self, num_slots: int, max_nodes: int) -> StatePool:
        """Slots for sequences of this target, with draft trees of up to `max_nodes` nodes."""

    def prefill(self, token_ids: Tensor, slot: int, pool: StatePool, tap: Tap | None = None) -> None:
        """Read tokens `[T]` into a slot's committed state, stretch by stretch."""

    def head(self, stream: Tensor) -> Tensor:
        """Logits `[T, vocab]` of residual streams `[T, hidden]` that have left the last layer."""

    def verify(
        self,
        tokens: Tensor,
        tree: Tree,
        slots: list[int],
        pool: StatePool,
        mode: str = "auto",
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits `[B, N, vocab]` at every node; commits what was pending and leaves the nodes' factors in the pool."""
