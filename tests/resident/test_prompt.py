"""Prompts by graphs: the states, windows and streams of the target's own reading, whatever bucket a stretch lies on."""

from __future__ import annotations

import gc
import weakref
from functools import cache

import pytest
import torch
from torch import Tensor

from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.target import Tap
from specla.resident.capture import Captures
from specla.resident.forward import Layers
from specla.resident.prompt import Prompts
from specla.state import StatePool
from tests.ops.strategies import same_bits
from tests.resident import DEVICE
from tests.targets import build_target, make_config, prompt

pytestmark = pytest.mark.usefixtures("recorded")

VARIANTS = ("plain", "grouped_wide", "no_gate", "conv_2", "neg_eigval", "tied")
LENGTHS = (8, 32)
TEXTS = [[max(1, token) for token in prompt(n, n)] for n in (6, 8, 1, 5)]


@cache
def target_of(variant: str) -> GatedDeltaNet:
    """One whose embedding of the token that fills buckets is NaN."""
    config = make_config(variant, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    target = build_target(config).to(DEVICE)
    assert isinstance(target, GatedDeltaNet)
    if target.lm_head is not None:
        target.embeddings.weight[0] = torch.nan
    return target


class Reader:
    """Slots of a target, read through buckets of these lengths."""

    def __init__(self, variant: str, lengths: tuple[int, ...] = LENGTHS, num_slots: int = 5):
        target = target_of(variant)
        self.pool = target.new_pool(num_slots, 1)
        (group,) = self.pool.groups.values()
        self.layers = Layers.of(group, 4)
        for x in self.kept:
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
        self.prompts = Prompts(target, self.layers, Captures(DEVICE), lengths)
        self.layer_ids = tuple(range(target.config.num_hidden_layers + 1))

    @property
    def kept(self) -> list[Tensor]:
        return [self.layers.state, self.layers.conv_state]

    def clear(self, *slots: int) -> None:
        for x in self.kept:
            x[:, list(slots)] = 0

    @torch.inference_mode()
    def read(
        self, *stretches: tuple[int, list[int]], layer_ids: tuple[int, ...] | None = None
    ) -> list[Tensor]:
        ids = self.layer_ids if layer_ids is None else layer_ids
        return [rows.clone() for rows in self.prompts.read(stretches, ids)]

    def of(self, slot: int) -> list[Tensor]:
        return [x[:, slot].clone() for x in self.kept]


def by_the_target(variant: str, *texts: list[int]) -> tuple[StatePool, list[Tensor]]:
    """What the target makes of stretches of one text, in slot 0."""
    target, streams = target_of(variant), []
    pool = target.new_pool(1, 1)
    tap = Tap(tuple(range(target.config.num_hidden_layers + 1)), lambda rows: streams.append(rows[0]))
    for text in texts:
        target.prefill(torch.tensor(text, device=DEVICE), 0, pool, tap)
    return pool, streams


@pytest.mark.parametrize("variant", VARIANTS)
def test_stretches_one_after_another_are_read_as_the_target_reads_them(variant: str) -> None:
    reader, stretches = Reader(variant), [TEXTS[1] * 2 + TEXTS[3], TEXTS[2], TEXTS[1]]
    reader.clear(3)
    streams = [reader.read((3, ids))[0] for ids in stretches]
    pool, expected = by_the_target(variant, *stretches)
    for ours, theirs in zip(streams, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
    (group,) = pool.groups.values()
    for ours, theirs in zip(reader.of(3), (group.state[:, 0], group.conv_state[:, 0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("variant", ("grouped_wide", "conv_2"))
def test_bits_do_not_depend_on_bucket_row_or_company(variant: str) -> None:
    alone = {}
    for n, ids in enumerate(TEXTS):
        reader = Reader(variant, lengths=(8 if n % 2 else 32,))
        reader.clear(0)
        alone[n] = [*reader.read((0, ids)), *reader.of(0)]
    reader = Reader(variant)
    reader.clear(0, 1, 2, 4)
    before = reader.of(3)
    order = [2, 0, 3, 1]
    streams = reader.read(*((slot, TEXTS[n]) for slot, n in zip((4, 1, 0, 2), order, strict=True)))
    for slot, n, rows in zip((4, 1, 0, 2), order, streams, strict=True):
        got = [rows, *reader.of(slot)]
        assert all(same_bits(a, b) for a, b in zip(got, alone[n], strict=True)), f"text {n} in slot {slot}"
    assert all(same_bits(a, b) for a, b in zip(reader.of(3), before, strict=True)), "a slot of nobody changed"


def test_capturing_touches_no_slot_and_streams_may_be_any() -> None:
    reader = Reader("plain")
    before = [x.clone() for x in reader.kept]
    reader.prompts.prepare((0, 2))
    assert all(same_bits(a, b) for a, b in zip(reader.kept, before, strict=True))
    outcomes = []
    for layer_ids in ((), (2,), (0, 2), (2, 1, 2), (0, 1, 2)):
        reader.clear(1)
        outcomes.append((layer_ids, reader.read((1, TEXTS[0]), layer_ids=layer_ids)[0], reader.of(1)))
    _, whole, state = outcomes[-1]
    parts = whole.unflatten(1, (3, -1))
    for layer_ids, rows, kept in outcomes:
        assert all(same_bits(a, b) for a, b in zip(kept, state, strict=True))
        assert same_bits(rows, parts[:, list(layer_ids)].flatten(1))


def test_what_is_dropped_is_gone_at_once() -> None:
    """The states of an engine make room for those of the next, without a collection of cycles."""
    reader = Reader("plain")
    reader.read((0, TEXTS[0]), (1, TEXTS[1]))
    state = weakref.ref(reader.layers.state)
    gc.disable()
    try:
        del reader
        assert state() is None
    finally:
        gc.enable()


def test_room_is_that_of_the_longest_bucket() -> None:
    prompts = Prompts(target_of("plain"), Reader("plain").layers, Captures(DEVICE), (64, 128, 256, 512))
    lengths = (1, 64, 65, 128, 129, 256, 257, 512, 5000)
    assert [prompts.room(n) for n in lengths] == [8, 8, 4, 4, 2, 2, 1, 1, 1]
