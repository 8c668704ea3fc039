"""The slots of running sequences: committed recurrent states, convolution windows, key/value rows, and what is pending.

Verification leaves compact factors in a slot's bank. Acceptance names the path to keep (`accept`), and the next
verification, or a `flush`, commits it. Nothing else is kept per draft node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specla.ops import Factors, triton as kernels
from specla.ops.conv import launch_commit as launch_conv_commit, shift
from specla.ops.dplr import half_nodes
from specla.ops.torch import commit
from specla.ops.verify import launch_commit

Rows = slice | Tensor
ROWS = 256  # of a new cache of keys and values


def slot_indices(rows: Rows, device: torch.device) -> Tensor:
    """The slots by number, as kernels want them."""
    return rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop, device=device)


class Snapshot(NamedTuple):
    """All that a slot has committed: tokens, and copies of what each store holds of them."""

    length: int
    parts: list[tuple[Tensor, ...]]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.parts for part in parts)


@dataclass(frozen=True)
class RecurrentSpec:
    """Shape of the state of one recurrent layer."""

    num_heads: int
    value_heads: int
    head_dim: int
    head_v_dim: int
    conv_channels: int
    conv_size: int  # 1 when the layer has no convolution
    channel_decay: bool = False  # one decay for each key channel rather than for each value head
    halves: bool = False  # a node leaves two rank-one updates, as `dplr_verify` does


@dataclass(frozen=True)
class AttentionSpec:
    """Shape of one attention layer's cache."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    shared: bool = False  # values are the keys themselves, which are kept once


class RecurrentState:
    """Recurrent layers of one shape, for all slots. Layers lie side by side, so that they are committed together."""

    def __init__(
        self, spec: RecurrentSpec, num_layers: int, num_slots: int, max_nodes: int, dtype: torch.dtype,
        device: torch.device,
    ):  # fmt: skip
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_layers, num_slots, *shape, dtype=dtype, device=device)

        self.halves = spec.halves
        updates = 2 * max_nodes if spec.halves else max_nodes
        self.state = zeros(spec.value_heads, spec.head_v_dim, spec.head_dim)
        # [layers, slots, D, W - 1] by name, one input after the other in memory: windows are then rows
        self.conv_state = zeros(spec.conv_size - 1, spec.conv_channels).transpose(2, 3)
        self.factors = Factors(
            zeros(updates, spec.num_heads, spec.head_dim),
            zeros(updates, spec.value_heads, spec.head_v_dim),
            zeros(updates, spec.value_heads, *([spec.head_dim] if spec.channel_decay else [])),
        )
        self.conv_inputs = zeros(max_nodes, spec.conv_channels if spec.conv_size > 1 else 0)

    def layer(self, index: int) -> RecurrentLayer:
        """Views of one layer."""
        factors = Factors(*(bank[index] for bank in self.factors))
        return RecurrentLayer(self.state[index], self.conv_state[index], factors, self.conv_inputs[index])

    def clear(self, slot: int) -> None:
        self.state[:, slot] = 0
        self.conv_state[:, slot] = 0

    def commit(self, rows: Rows, path: Tensor, count: Tensor) -> None:
        """Commit the first `count` nodes of `path` in every layer."""
        slots = slot_indices(rows, path.device) if kernels.takes_heads(self.state) else None
        updates = (half_nodes(path), 2 * count) if self.halves else (path, count)
        if slots is not None:
            launch_commit(self.state, self.factors, *updates, slots, by_slot=True)
        else:
            factors = Factors(*(bank[:, rows] for bank in self.factors))
            state = commit(self.state[:, rows], factors, *updates)
            if not isinstance(rows, slice):
                self.state[:, rows] = state
        if slots is not None and self.conv_state.shape[-1] < kernels.MAX_TAPS:
            launch_conv_commit(self.conv_state, self.conv_inputs, path, count, slots, by_slot=True)
        elif self.conv_state.shape[-1]:
            self.conv_state[:, rows] = shift(self.conv_state[:, rows], self.conv_inputs[:, rows], path, count)

    def export(self, slot: int, length: int) -> tuple[Tensor, ...]:
        return self.state[:, slot].clone(), self.conv_state[:, slot].clone()

    def restore(self, slot: int, length: int, parts: tuple[Tensor, ...]) -> None:
        self.state[:, slot], self.conv_state[:, slot] = parts

    def committed_bytes(self) -> int:
        return self.state[:, 0].nbytes + self.conv_state[:, 0].nbytes

    def node_bytes(self) -> int:
        updates = sum(bank[:, 0, 0].nbytes for bank in self.factors)
        return (2 if self.halves else 1) * updates + self.conv_inputs[:, 0, 0].nbytes


class RecurrentLayer(NamedTuple):
    """One layer's part of a `RecurrentState`, without the leading dimension."""

    state: Tensor
    conv_state: Tensor
    factors: Factors
    conv_inputs: Tensor


class AttentionState:
    """One attention layer of all slots; the cache grows by doubling, a windowed one up to its window, a ring then."""

    def __init__(
        self, spec: AttentionSpec, num_slots: int, max_nodes: int, dtype: torch.dtype, device: torch.device
    ):
        row = (spec.num_kv_heads, spec.head_dim)
        self.window = spec.window
        kinds = 1 if spec.shared else 2  # keys and values
        rows = ROWS if spec.window is None else min(spec.window, ROWS)
        self.cache = torch.zeros(kinds, num_slots, rows, *row, dtype=dtype, device=device)
        self.nodes = torch.zeros(kinds, num_slots, max_nodes, *row, dtype=dtype, device=device)

    def clear(self, slot: int) -> None:
        self.cache[:, slot] = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` positions, or for the last of them that a window shows."""
        capacity = self.cache.shape[2]
        wanted, doubled = (n if self.window is None else min(n, self.window) for n in (length, 2 * capacity))
        if wanted > capacity:  # then no position lies in the row of another yet
            kinds, slots, _, *row = self.cache.shape
            shape = (kinds, slots, max(wanted, doubled), *row)
            with torch.inference_mode(False):  # a slot's later owners may write outside of that mode
                grown = self.cache.new_zeros(shape)
            grown[:, :, :capacity] = self.cache
            self.cache = grown

    def append(self, slot: int, length: int, rows: Tensor) -> None:
        """Write key and value rows `[2, T, HKV, D]` at positions `length ..`; of shared ones, `[1, T, HKV, D]`."""
        self.reserve(length + rows.shape[1])
        capacity = self.cache.shape[2]
        skip = max(0, rows.shape[1] - capacity)
        at = torch.arange(length + skip, length + rows.shape[1], device=rows.device) % capacity
        self.cache[:, slot, at] = rows[:, skip:].to(self.cache.dtype)

    def commit(self, slot: int, length: int, path: Tensor) -> None:
        """Append the rows of the nodes in `path` at position `length`."""
        self.append(slot, length, self.nodes[:, slot, path])

    def export(self, slot: int, length: int) -> tuple[Tensor, ...]:
        return (self.cache[:, slot, :length].clone(),)

    def restore(self, slot: int, length: int, parts: tuple[Tensor, ...]) -> None:
        self.reserve(length)
        self.cache[:, slot, : parts[0].shape[1]] = parts[0]

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

    @torch.inference_mode(False)  # a pool may outlive that mode, and is written to
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
        recurrent = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
        self.groups = {
            spec: RecurrentState(spec, recurrent.count(spec), num_slots, max_nodes, dtype, self.device)
            for spec in dict.fromkeys(recurrent)
        }
        if max_nodes > kernels.MAX_NODES and any(kernels.takes_heads(g.state) for g in self.groups.values()):
            raise ValueError(
                f"on a GPU a draft tree has at most {kernels.MAX_NODES - 1} drafts, got {max_nodes - 1}"
            )
        self.layers: list[RecurrentLayer | AttentionState] = []
        seen: Counter[RecurrentSpec] = Counter()
        for spec in specs:
            if isinstance(spec, RecurrentSpec):
                self.layers.append(self.groups[spec].layer(seen[spec]))
                seen[spec] += 1
            else:
                self.layers.append(AttentionState(spec, num_slots, max_nodes, dtype, self.device))
        self._stores: list[RecurrentState | AttentionState] = [*self.groups.values(), *self._attention()]
        self.length = [0] * num_slots  # committed tokens
        self.count = [0] * num_slots  # accepted nodes that are pending
        self.path = torch.zeros(num_slots, max_nodes, dtype=torch.long, device=self.device)
        self._free = set(range(num_slots))

    def _attention(self) -> list[AttentionState]:
        return [layer for layer in self.layers if isinstance(layer, AttentionState)]

    @property
    def takes_parallel(self) -> bool:
        """Whether mode parallel is there for every layer: the kernels have none for a decay by channel."""
        by_channel = [g for spec, g in self.groups.items() if spec.channel_decay and not spec.halves]
        return not any(kernels.takes_heads(group.state) for group in by_channel)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        """Take the lowest slot that is free, with a zero state.

        Raises:
            RuntimeError: when all are taken.
        """
        if not self._free:
            raise RuntimeError(f"all {len(self.length)} slots are taken")
        slot = min(self._free)
        self._free.remove(slot)
        for store in self._stores:
            store.clear(slot)
        self.length[slot] = 0
        self.count[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; what was pending there is dropped."""
        assert slot not in self._free, f"slot {slot} is free already"
        self.count[slot] = 0
        self._free.add(slot)

    def rows(self, slots: Sequence[int]) -> Rows:
        """How to index the slots: a slice, which gives views, when they follow one another."""
        if list(slots) == list(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[0] + len(slots))
        return torch.tensor(slots, device=self.device)

    def accept(self, slots: Sequence[int], path: Tensor, num_accepted: Sequence[int]) -> None:
        """Name the accepted nodes of the last verification: `path` `[B, D]`, drafts accepted in each row (-1: none).

        They stay pending until the next verification of the slot, or a flush.
        """
        assert all(self.count[slot] == 0 for slot in slots), "the last accepted path was not committed"
        self.path[self.rows(slots), : path.shape[1]] = path.long()
        for slot, accepted in zip(slots, num_accepted, strict=True):
            self.count[slot] = int(accepted) + 1

    def flush(self, slots: Sequence[int]) -> None:
        """Commit what is pending, so that the state alone describes the sequence."""
        slots = [slot for slot in slots if self.count[slot]]
        if not slots:
            return
        rows = self.rows(slots)
        counts = [self.count[slot] for slot in slots]
        path, count = self.path[rows, : max(counts)], torch.tensor(counts, device=self.device)
        for group in self.groups.values():
            group.commit(rows, path, count)
        for layer in self._attention():
            for slot, n in zip(slots, counts, strict=True):
                layer.commit(slot, self.length[slot], self.path[slot, :n])
        for slot in slots:
            self.length[slot] += self.count[slot]
            self.count[slot] = 0

    def export(self, slot: int) -> Snapshot:
        """A copy of what a slot has committed; nothing may be pending there."""
        assert self.count[slot] == 0, "flush the slot before a copy"
        length = self.length[slot]
        return Snapshot(length, [store.export(slot, length) for store in self._stores])

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Let a slot hold what was exported, from this or another slot."""
        assert self.count[slot] == 0, "something is pending in the slot"
        for store, parts in zip(self._stores, snapshot.parts, strict=True):
            store.restore(slot, snapshot.length, parts)
        self.length[slot] = snapshot.length

    def bytes_per_sequence(self) -> int:
        """Committed state of one slot, drafts excluded."""
        return sum(store.committed_bytes() for store in self._stores)

    def bytes_per_node(self) -> int:
        """What one draft node adds: factors, raw convolution inputs, key/value rows."""
        return sum(store.node_bytes() for store in self._stores)
