"""The slots of running sequences: committed recurrent states, convolution windows, key/value rows, and what is pending.

Verification leaves compact factors in a slot's bank. Acceptance names the path to keep (`accept`), and the next
verification, or a `flush`, commits it. Nothing else is kept per draft node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.ops import Factors, Pending, PendingConv, conv_commit, gated_delta_commit


@dataclass(frozen=True)
class RecurrentSpec:
    """Shape of one gated delta layer's state."""

    num_heads: int
    value_heads: int
    head_dim: int
    head_v_dim: int
    conv_channels: int
    conv_size: int  # 1 when the layer has no convolution


@dataclass(frozen=True)
class AttentionSpec:
    """Shape of one attention layer's cache."""

    num_kv_heads: int
    head_dim: int
    window: int | None


class RecurrentState:
    """One gated delta layer of all slots."""

    def __init__(self, spec: RecurrentSpec, num_slots: int, max_nodes: int, dtype: torch.dtype, device: torch.device):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self.state = zeros(spec.value_heads, spec.head_v_dim, spec.head_dim)
        # [slots, D, W - 1] by name, one input after the other in memory: windows are then gathers of whole rows
        self.conv_state = zeros(spec.conv_size - 1, spec.conv_channels).transpose(1, 2)
        self.factors = Factors(
            zeros(max_nodes, spec.num_heads, spec.head_dim),
            zeros(max_nodes, spec.value_heads, spec.head_v_dim),
            zeros(max_nodes, spec.value_heads),
        )
        self.conv_inputs = zeros(max_nodes, spec.conv_channels if spec.conv_size > 1 else 0)

    def clear(self, slot: int) -> None:
        self.state[slot] = 0
        self.conv_state[slot] = 0

    def commit(self, index: Tensor, path: Tensor, count: Tensor, lengths: list[int]) -> None:
        factors = Factors(*(bank[index] for bank in self.factors))
        gated_delta_commit(self.state, factors, path, count - 1, state_indices=index)
        conv_commit(self.conv_state, self.conv_inputs[index], path, count - 1, state_indices=index)

    def committed_bytes(self) -> int:
        return self.state[0].nbytes + self.conv_state[0].nbytes

    def node_bytes(self) -> int:
        return sum(bank[0, 0].nbytes for bank in (*self.factors, self.conv_inputs))


class AttentionState:
    """One attention layer of all slots; the cache grows by doubling, a windowed one is a ring."""

    def __init__(self, spec: AttentionSpec, num_slots: int, max_nodes: int, dtype: torch.dtype, device: torch.device):
        row = (spec.num_kv_heads, spec.head_dim)
        self.window = spec.window
        self.cache = torch.zeros(2, num_slots, spec.window or 256, *row, dtype=dtype, device=device)
        self.nodes = torch.zeros(2, num_slots, max_nodes, *row, dtype=dtype, device=device)

    def clear(self, slot: int) -> None:
        self.cache[:, slot] = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` positions."""
        capacity = self.cache.shape[2]
        if self.window is None and length > capacity:
            grown = self.cache.new_zeros(2, self.cache.shape[1], max(length, 2 * capacity), *self.cache.shape[3:])
            grown[:, :, :capacity] = self.cache
            self.cache = grown

    def append(self, slot: int, length: int, rows: Tensor) -> None:
        """Write key and value rows `[2, T, HKV, D]` at positions `length ..`."""
        self.reserve(length + rows.shape[1])
        capacity = self.cache.shape[2]
        skip = max(0, rows.shape[1] - capacity)
        at = torch.arange(length + skip, length + rows.shape[1], device=rows.device) % capacity
        self.cache[:, slot, at] = rows[:, skip:].to(self.cache.dtype)

    def commit(self, index: Tensor, path: Tensor, count: Tensor, lengths: list[int]) -> None:
        for row, (slot, length) in enumerate(zip(index.tolist(), lengths, strict=True)):
            accepted = path[row, : int(count[row])].long()
            self.append(slot, length, self.nodes[:, slot, accepted])

    def committed_bytes(self) -> int:
        return self.cache[:, 0].nbytes

    def node_bytes(self) -> int:
        return self.nodes[:, 0, 0].nbytes


class StatePool:
    """`num_slots` sequences of one target.

    Args:
        specs: one for each layer of the target.
        max_nodes: envelope of a draft tree, the root included.
        dtype: of the recurrent state, float32 or float64.
    """

    def __init__(
        self,
        specs: Sequence[RecurrentSpec | AttentionSpec],
        num_slots: int,
        max_nodes: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.device = torch.device(device)
        self.max_nodes = max_nodes
        self.layers = [
            RecurrentState(spec, num_slots, max_nodes, dtype, self.device)
            if isinstance(spec, RecurrentSpec)
            else AttentionState(spec, num_slots, max_nodes, dtype, self.device)
            for spec in specs
        ]
        self.length = [0] * num_slots
        self.path = torch.zeros(num_slots, max_nodes, dtype=torch.long, device=self.device)
        self.count = torch.zeros(num_slots, dtype=torch.long, device=self.device)
        self._free = list(range(num_slots))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        """Take a slot with a zero state.

        Raises:
            RuntimeError: when all are taken.
        """
        if not self._free:
            raise RuntimeError(f"all {len(self.length)} slots are taken")
        slot = self._free.pop()
        for layer in self.layers:
            layer.clear(slot)
        self.length[slot] = 0
        self.count[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; what was pending there is dropped."""
        assert slot not in self._free, f"slot {slot} is free already"
        self.count[slot] = 0
        self._free.append(slot)

    def positions(self, slots: Sequence[int]) -> list[int]:
        """Position of the next token of each slot: committed and pending tokens."""
        return [self.length[slot] + int(self.count[slot]) for slot in slots]

    def accept(self, slots: Sequence[int], path: Tensor, num_accepted: Tensor) -> None:
        """Name the accepted nodes of the last verification: `path` `[B, D]`, `num_accepted` `[B]` drafts (-1: none).

        They stay pending until the next verification of the slot, or a flush.
        """
        index = torch.as_tensor(slots, device=self.device)
        assert bool((self.count[index] == 0).all()), "the last accepted path was not committed"
        self.path[index, : path.shape[1]] = path.long()
        self.count[index] = num_accepted.long() + 1

    def flush(self, slots: Sequence[int]) -> None:
        """Commit what is pending, so that the state alone describes the sequence."""
        slots = [slot for slot in slots if int(self.count[slot])]
        if not slots:
            return
        index = torch.tensor(slots, device=self.device)
        lengths = [self.length[slot] for slot in slots]
        for layer in self.layers:
            layer.commit(index, self.path[index], self.count[index], lengths)
        self.mark_committed(slots)

    def mark_committed(self, slots: Sequence[int]) -> None:
        """What was pending in these slots has been committed in every layer."""
        for slot in slots:
            self.length[slot] += int(self.count[slot])
            self.count[slot] = 0

    def pending(self, layer: RecurrentState, index: Tensor) -> tuple[Pending, PendingConv] | tuple[None, None]:
        """What the slots `index` have accepted but not committed in a layer; (None, None) for nothing."""
        count = self.count[index]
        if not bool((count > 0).any()):
            return None, None
        path = self.path[index]
        factors = Factors(*(bank[index] for bank in layer.factors))
        return Pending(factors, path, count), PendingConv(layer.conv_inputs[index], path, count)

    def bytes_per_sequence(self) -> int:
        """Committed state of one slot, drafts excluded."""
        return sum(layer.committed_bytes() for layer in self.layers)

    def bytes_per_node(self) -> int:
        """What one draft node adds: factors, raw convolution inputs, key/value rows."""
        return sum(layer.node_bytes() for layer in self.layers)
