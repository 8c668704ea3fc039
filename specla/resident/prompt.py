"""Prompts, read on a GPU: a stretch of one goes through all layers as one CUDA graph, padded to one of a few lengths.

Launched one by one, the kernels of a short prompt wait for the host: 41 ms a prompt of 64 tokens at 1.3 B parameters,
where a step of decoding takes 1.2 ms (docs/results.md). Padding leaves no trace, so bits do not depend on the graph
that a stretch goes through, nor on its company there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.layers import DeltaMixer
from specla.ops.gate import Gate
from specla.ops.triton.chunk import chunk_prefill
from specla.ops.triton.conv import conv_commit, tree_conv
from specla.resident.capture import Captures
from specla.resident.forward import Layers, run_layers

LENGTHS = (64, 128, 256, 384, 512)  # of stretches, a graph for each; the last is `reading.GRID_GPU`

LayerIds = tuple[int, ...]


class Stretch(NamedTuple):
    """The next tokens of B slots, T of each at most: what is beyond a row's length is padding."""

    tokens: Tensor  # int32 [B, T]
    rows: Tensor  # int32 [B] the slot of each, -1 for none
    lengths: Tensor  # int32 [B]
    places: Tensor  # int32 [B, 1 + T]: -1, 0, 1, ..


class Bucket:
    """Where stretches lie for a graph to read: their slots, their lengths, their tokens."""

    def __init__(self, rows: int, length: int, device: torch.device):
        # each part begins at a multiple of 16 bytes, for which kernels are compiled
        self._head = 4 * -(-rows // 4)
        packed = torch.zeros(2 * self._head + rows * length, dtype=torch.int32, device=device)
        self._packed, self.rows, self.length = packed, rows, length
        slots, lengths, tokens = packed.split([self._head, self._head, rows * length])
        places = torch.arange(-1, length, dtype=torch.int32, device=device).expand(rows, -1)
        self.stretch = Stretch(tokens.view(rows, length), slots[:rows].fill_(-1), lengths[:rows], places)

    def fill(self, stretches: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Put a slot and its next tokens into each of the first rows."""
        assert len(stretches) <= self.rows, f"a bucket has room for {self.rows} stretches"
        slots, lengths = [-1] * self._head, [0] * self._head
        tokens: list[int] = []
        for n, (slot, ids) in enumerate(stretches):
            slots[n], lengths[n] = slot, len(ids)
            tokens += [*ids, *[0] * (self.length - len(ids))]
        packed = torch.tensor([*slots, *lengths, *tokens], dtype=torch.int32)
        self._packed[: len(packed)].copy_(packed, non_blocking=True)

    def blank(self) -> Stretch:
        """Stretches of the same shape that belong to no slot."""
        return self.stretch._replace(rows=torch.full_like(self.stretch.rows, -1))


Work = Callable[[Stretch], None]
Make = Callable[[LayerIds, int, int], tuple[Tensor, Work]]


class Buckets:
    """A bucket, and a graph of what is done with it, for each number of rows, their length, and a choice of streams."""

    def __init__(self, captures: Captures, lengths: Sequence[int]):
        self._captures, self.lengths = captures, lengths
        self._known: dict[tuple[LayerIds, int, int], tuple[Bucket, Tensor, Callable[[], None]]] = {}

    def room(self, length: int) -> int:
        """How many stretches of so many tokens share a bucket: together as many as the longest at most."""
        return max(1, self.lengths[-1] // next((n for n in self.lengths if n >= length), self.lengths[-1]))

    def of(
        self, make: Make, layer_ids: LayerIds, length: int, rows: int = 1
    ) -> tuple[Bucket, Tensor, Callable[[], None]]:
        """Bucket, tensor and graph for one stretch of up to `length` tokens, or for as many as there is room for.

        make: given the choice, rows and length, a tensor `[rows * length, F]` that goes with the bucket, and the work.
            Always the same, and not kept: its owner owns the buckets, whose memory is to go when it goes.
        """
        length = next(n for n in self.lengths if n >= length)
        rows = 1 if rows == 1 else self.room(length)
        known = self._known.get((layer_ids, rows, length))
        if known is None:
            bucket = Bucket(rows, length, self._captures.device)
            tensor, work = make(layer_ids, rows, length)
            run = self._captures.capture(partial(work, bucket.stretch), partial(work, bucket.blank()))
            known = self._known[layer_ids, rows, length] = bucket, tensor, run
        return known


class Prompts:
    """Reads prompts of one target into the committed states of slots."""

    def __init__(
        self, target: GatedDeltaNet, layers: Layers, captures: Captures, lengths: Sequence[int] = LENGTHS
    ):
        self.target, self.layers = target, layers
        self._buckets = Buckets(captures, lengths)
        self.room = self._buckets.room

    def prepare(self, layer_ids: LayerIds) -> None:
        """Compile and capture what prompts of any length need."""
        for length in self._buckets.lengths:
            for rows in {1, self.room(length)}:
                self._buckets.of(self._work, layer_ids, length, rows)

    def read(self, stretches: Sequence[tuple[int, Sequence[int]]], layer_ids: LayerIds = ()) -> list[Tensor]:
        """Read the next tokens of slots, which are as many as `room` allows, none twice.

        Returns:
            of each the residual streams that enter the layers `layer_ids`, side by side, fp32 `[T, F]`; the next call
            overwrites them.
        """
        once = tuple(dict.fromkeys(layer_ids))
        longest = max(len(ids) for _, ids in stretches)
        bucket, streams, run = self._buckets.of(self._work, once, longest, len(stretches))
        bucket.fill(stretches)
        run()
        if once != layer_ids:
            parts = streams.chunk(len(once), 1)
            streams = torch.cat([parts[once.index(index)] for index in layer_ids], 1)
        rows = streams.unflatten(0, (bucket.rows, bucket.length))
        return [row[: len(ids)] for row, (_, ids) in zip(rows, stretches, strict=False)]

    def _work(self, layer_ids: LayerIds, rows: int, length: int) -> tuple[Tensor, Work]:
        width = self.target.config.hidden_size
        streams = torch.zeros(rows * length, len(layer_ids) * width, device=self.layers.state.device)
        taps = {index: streams[:, n * width : (n + 1) * width] for n, index in enumerate(layer_ids)}
        return streams, lambda stretch: read_prompts(self.target, self.layers, stretch, taps)


def read_prompts(target: GatedDeltaNet, layers: Layers, stretch: Stretch, taps: dict[int, Tensor]) -> None:
    """Take stretches into the states and windows of their slots, where nothing may be pending.

    Args:
        taps: views `[B * T, hidden]` that get the residual stream which enters a layer, by its number.
    """

    def recurrence(index: int, mixer: DeltaMixer, projected: Tensor) -> Tensor:
        return absorb(mixer, projected, layers.layer(index), stretch)

    run_layers(target, stretch.tokens, recurrence, taps, states_only=True)


def absorb(mixer: DeltaMixer, projected: Tensor, layer: Layers, stretch: Stretch) -> Tensor:
    """Convolution and recurrence of projections `[B, T, P]`, whose ends become a layer's windows and states.

    Returns:
        `[B, T, HV, V]`, zero at padding.
    """
    config, (_, rows, lengths, places) = mixer.config, stretch
    assert mixer.conv_weight is not None
    raw, a, b, _ = projected.split(mixer.splits, -1)
    above = places[:, :-1]  # a text is a tree of one branch
    qkv = tree_conv(raw, above, lengths, mixer.conv_weight, mixer.conv_bias, layer.conv_state, rows)
    conv_commit(layer.conv_state, raw, places[:, 1:], lengths, rows)
    q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], -1)
    return chunk_prefill(
        q.unflatten(-1, (config.num_heads, config.head_dim)), k.unflatten(-1, (config.num_heads, config.head_dim)),
        v.unflatten(-1, (config.value_heads, config.head_v_dim)), a, b, state=layer.state, state_indices=rows,
        lengths=lengths, gate=Gate(mixer.A_log, mixer.dt_bias, 2.0 if config.allow_neg_eigval else 1.0),
    )  # fmt: skip
