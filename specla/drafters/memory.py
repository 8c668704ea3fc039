"""What a drafter's one layer remembers of each sequence, and how it reads on and branches from there.

A delta layer remembers a state of fixed size, an attention layer the keys and values of a window (or of everything,
where a checkpoint asks for that). What is read is part of the text for good; what is drafted leaves no trace: beams
carry their own continuation of the memory, as in a beam search, and are dropped with the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from specla.drafters.network import EagleConfig
from specla.models.past import Past
from specla.ops.chunk import chunk_gated_delta
from specla.ops.conv import causal_convolve
from specla.ops.elementwise import silu
from specla.ops.torch import commit
from specla.ops.verify import verify
from specla.tree import Tree

READ = 64  # tokens that are read together at most
CHAIN = 16  # so many are read one after another sooner than as a chunk


class Beams(Past, Protocol):
    """Continuations `[B, W]` of some slots, each one token longer after a forward pass."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that they consist of, for `beams_of`."""

    def follow(self, beams: Tensor) -> None:
        """Let beam w of row b go on from what was beam `beams[b, w]` (at first: from the slot, beam 0)."""


class Memory(Protocol):
    """The memory of `num_slots` sequences."""

    def clear(self, slot: int) -> None:
        """Forget everything in a slot."""

    def reading(self, slots: list[int], lengths: list[int]) -> Past:
        """The past of `lengths[b]` (at most READ) further tokens of each slot, which become part of the memory."""

    def beams(self, slots: list[int]) -> Beams:
        """The past of drafts that go on from the slots."""

    def export(self, slot: int) -> tuple[Tensor, ...]:
        """Copies of all that a slot holds."""

    def restore(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Let a slot hold what was exported."""


def new_memory(config: EagleConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> Memory:
    kind = DeltaMemory if config.mixer == "delta" else WindowMemory
    return kind(config, num_slots, dtype, device)


def beams_of(config: EagleConfig, tensors: Sequence[Tensor]) -> Beams:
    """The beams that consist of these tensors."""
    return DeltaBeams(*tensors) if config.mixer == "delta" else WindowBeams(*tensors)


class DeltaMemory:
    """A state `[HV, V, K]` and the convolution's window `[W - 1, D]` for each slot."""

    def __init__(self, config: EagleConfig, num_slots: int, dtype: torch.dtype, device: torch.device):
        heads, size = config.num_heads, config.head_dim
        self.state = torch.zeros(num_slots, heads, size, size, dtype=dtype, device=device)
        self.window = torch.zeros(
            num_slots, config.conv_size - 1, 3 * heads * size, dtype=dtype, device=device
        )

    def clear(self, slot: int) -> None:
        self.state[slot] = 0
        self.window[slot] = 0

    def reading(self, slots: list[int], lengths: list[int]) -> _DeltaReading:
        device = self.state.device
        return _DeltaReading(self, torch.tensor(slots, device=device), torch.tensor(lengths, device=device))

    def beams(self, slots: list[int]) -> DeltaBeams:
        rows = torch.tensor(slots, device=self.state.device)
        return DeltaBeams(self.state[rows][:, None], self.window[rows][:, None])

    def export(self, slot: int) -> tuple[Tensor, ...]:
        return self.state[slot].clone(), self.window[slot].clone()

    def restore(self, slot: int, tensors: Sequence[Tensor]) -> None:
        self.state[slot], self.window[slot] = tensors


class _NotAsked:
    """What a layer of the other kind would ask for."""

    @property
    def positions(self) -> Tensor:
        raise NotImplementedError

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        raise NotImplementedError


class _DeltaReading(_NotAsked):
    def __init__(self, memory: DeltaMemory, slots: Tensor, lengths: Tensor):
        self.memory, self.slots, self.lengths = memory, slots, lengths

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        window = self.memory.window
        joined = torch.cat([window[self.slots], x.to(window.dtype)], 1)
        last = self.lengths[:, None] + torch.arange(window.shape[1], device=x.device)
        window[self.slots] = joined[torch.arange(len(last), device=x.device)[:, None], last]
        return causal_convolve(joined, weight, bias)

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        if q.shape[1] > 1:  # past a row's end, neither decay nor writing: that leaves its state as it is
            idle = torch.arange(q.shape[1], device=q.device) >= self.lengths[:, None]
            g, beta = (x.masked_fill(idle[..., None], 0) for x in (g, beta))
        batch, length = q.shape[:2]
        before = self.memory.state[self.slots]
        if length <= CHAIN:
            o, factors = verify(q, k, v, g, beta, _chain(length, batch), before, None, "hybrid", True)
            path = torch.arange(length, device=q.device).expand(batch, -1)
            after = commit(before, factors, path, torch.full((batch,), length))
        else:
            o, after = chunk_gated_delta(q, k, v, g, beta, initial_state=before, use_qk_l2norm_in_kernel=True)
        self.memory.state[self.slots] = after
        return o


class DeltaBeams(_NotAsked):
    def __init__(self, state: Tensor, window: Tensor):
        self.state, self.window = state, window  # [B, W, HV, V, K] and [B, W, conv_size - 1, D]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.window

    def follow(self, beams: Tensor) -> None:
        batch, width = self.state.shape[:2]
        if width == beams.shape[1] == 1:
            return  # a chain follows itself
        rows = beams + torch.arange(0, batch * width, width, device=beams.device)[:, None]
        self.state, self.window = (x.flatten(0, 1)[rows] for x in (self.state, self.window))

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        joined = torch.cat([self.window, x[:, :, None].to(self.window.dtype)], 2)
        self.window = joined[:, :, 1:]
        y = (joined * weight.t()).sum(2)
        return silu(y if bias is None else y + bias)

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (x.flatten(0, 1)[:, None] for x in (q, k, v, g, beta))
        before = self.state.flatten(0, 1)
        o, factors = verify(q, k, v, g, beta, _chain(1, before.shape[0]), before, None, "hybrid", True)
        decay, change = factors.g[:, 0].exp(), factors.d[:, 0, :, :, None] * factors.k[:, 0, :, None]
        self.state = torch.addcmul(change, decay[..., None, None], before).view_as(self.state)
        return o.view_as(self.state[..., 0])


@lru_cache(maxsize=256)
def _chain(length: int, batch: int) -> Tree:
    return Tree.chain(length, int(batch))


class WindowMemory:
    """Keys and values of the latest positions of each slot, in a ring; without a window the ring grows by doubling."""

    def __init__(self, config: EagleConfig, num_slots: int, dtype: torch.dtype, device: torch.device):
        self.window = config.sliding_window
        capacity = READ + (READ if self.window is None else self.window)
        row = (config.key_value_heads, config.head_dim)
        self.cache = torch.zeros(2, num_slots, capacity, *row, dtype=dtype, device=device)
        self.length = [0] * num_slots

    def clear(self, slot: int) -> None:
        self.length[slot] = 0

    def reading(self, slots: list[int], lengths: list[int]) -> _WindowReading:
        if self.window is None:
            self._reserve(max(self.length[slot] for slot in slots) + max(lengths))
        return _WindowReading(self, slots, lengths)

    def beams(self, slots: list[int]) -> WindowBeams:
        lengths = torch.tensor([self.length[slot] for slot in slots], device=self.cache.device)
        keys, values = self.cache[:, torch.tensor(slots, device=lengths.device)]
        own = keys.new_zeros(2, len(slots), 1, 0, *keys.shape[2:])
        return WindowBeams(keys, values, self.held(lengths), lengths, own)

    def export(self, slot: int) -> tuple[Tensor, ...]:
        length = self.length[slot]
        return self.cache[:, slot, :length].clone(), torch.tensor(length)

    def restore(self, slot: int, tensors: Sequence[Tensor]) -> None:
        rows, length = tensors
        self.length[slot] = int(length)
        if self.window is None:
            self._reserve(self.length[slot])
        self.cache[:, slot, : rows.shape[1]] = rows

    def held(self, lengths: Tensor) -> Tensor:
        """The position in each row of the ring when `lengths` `[B]` were written: `[B, capacity]`, below 0 for none."""
        last = lengths[:, None] - 1
        return last - (last - torch.arange(self.cache.shape[2], device=last.device)) % self.cache.shape[2]

    def _reserve(self, length: int) -> None:
        capacity = self.cache.shape[2]
        if length > capacity:
            grown = self.cache.new_zeros(
                *self.cache.shape[:2], max(length, 2 * capacity), *self.cache.shape[3:]
            )
            grown[:, :, :capacity] = self.cache
            self.cache = grown


class _WindowReading(_NotAsked):
    def __init__(self, memory: WindowMemory, slots: list[int], lengths: list[int]):
        self.memory, self.slots, self.lengths = memory, slots, lengths
        self.start = torch.tensor([memory.length[slot] for slot in slots], device=memory.cache.device)

    @property
    def positions(self) -> Tensor:
        return self.start[:, None] + torch.arange(max(self.lengths), device=self.start.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        memory = self.memory
        capacity = memory.cache.shape[2]
        for b, (slot, count) in enumerate(zip(self.slots, self.lengths, strict=True)):
            rows = self.positions[b, :count] % capacity
            memory.cache[:, slot, rows] = torch.stack([k[b, :count], v[b, :count]]).to(memory.cache.dtype)
            memory.length[slot] += count
        added = torch.tensor(self.lengths, device=q.device)
        held = memory.held(self.start + added)[:, None]  # [B, 1, capacity]
        at = torch.minimum(self.positions, (self.start + added)[:, None] - 1)[
            ..., None
        ]  # padding sees something
        visible = (held >= 0) & (held <= at)
        if window is not None:
            visible &= held > at - window
        keys, values = memory.cache[:, torch.tensor(self.slots, device=q.device)]
        return weigh([scores(q, keys).masked_fill(~visible[:, :, None], -torch.inf)], [values], q)


class WindowBeams(_NotAsked):
    def __init__(self, keys: Tensor, values: Tensor, held: Tensor, start: Tensor, own: Tensor):
        self.keys, self.values = keys, values  # [B, capacity, HKV, D]
        self.held, self.start = held, start  # the position in each row of the ring; that of the first draft
        self.own = own  # [2, B, W, depth, HKV, D]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.held, self.start, self.own

    @property
    def positions(self) -> Tensor:
        batch, width, depth = self.own.shape[1:4]
        return (self.start + depth)[:, None].expand(batch, width)

    def follow(self, beams: Tensor) -> None:
        rows = torch.arange(beams.shape[0], device=beams.device)[:, None]
        self.own = self.own[:, rows, beams]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        depth = self.own.shape[3]
        self.own = torch.cat([self.own, torch.stack([k, v])[:, :, :, None].to(self.own.dtype)], 3)
        visible = self.held >= 0
        own = self.own
        if window is not None:
            visible = visible & (self.held > (self.start + depth - window)[:, None])
            own = own[:, :, :, max(0, depth + 1 - window) :]
        before = scores(q, self.keys).masked_fill(~visible[:, None, None], -torch.inf)
        return weigh([before, own_scores(q, own[0])], [self.values, own[1]], q)


def scores(q: Tensor, keys: Tensor) -> Tensor:
    """q `[B, T, H, D]` against keys `[B, C, HKV, D]`: `[B, T, H, C]`."""
    q = q.unflatten(2, (keys.shape[2], -1)).to(keys.dtype) * q.shape[-1] ** -0.5
    return torch.einsum("btgrd,bcgd->btgrc", q, keys).flatten(2, 3)


def own_scores(q: Tensor, keys: Tensor) -> Tensor:
    """q `[B, W, H, D]`, each against its own keys `[B, W, C, HKV, D]`: `[B, W, H, C]`."""
    q = q.unflatten(2, (keys.shape[3], -1)).to(keys.dtype) * q.shape[-1] ** -0.5
    return torch.einsum("bwgrd,bwcgd->bwgrc", q, keys).flatten(2, 3)


def weigh(scores: list[Tensor], values: list[Tensor], q: Tensor) -> Tensor:
    """Softmax over all scores together, and the values' mean by it: `[B, T, H, D]`."""
    parts = torch.cat(scores, -1).softmax(-1).split([s.shape[-1] for s in scores], -1)
    total = torch.zeros_like(q)
    for part, value in zip(parts, values, strict=True):
        part = part.unflatten(2, (value.shape[-2], -1))
        shared = value.dim() == 4
        total = total + torch.einsum(
            "btgrc,bcgd->btgrd" if shared else "btgrc,btcgd->btgrd", part, value
        ).flatten(2, 3).to(q.dtype)
    return total
