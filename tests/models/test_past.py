"""A text read whole, as a prompt in pieces, as draft trees, or token by token for rollouts: one and the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specla.models.past import FullText, Prefill, Rule, TargetPast, Verification
from specla.state import RecurrentSpec, StatePool
from specla.train.rollouts import _Stepwise
from specla.tree import Tree
from tests.ops.strategies import make_inputs
from tests.targets import take

LENGTH, HEADS, DIMS, CHANNELS = 13, (1, 2), (5, 3), 6
CPU = torch.device("cpu")
RULES = [Rule(), Rule(normalise=False, scale=0.7), Rule(delta=False), Rule(False, False, 1.0)]


def pool_of(decay: str = "mild", slots: int = 1, window: int = 2) -> StatePool:
    spec = RecurrentSpec(*HEADS, *DIMS, CHANNELS, window, decay.startswith("channel"))
    return StatePool([spec], slots, 8, dtype=torch.float64)


def inputs(decay: str = "mild", with_beta: bool = True) -> dict[str, Tensor | None]:
    made = make_inputs(torch.Generator().manual_seed(3), 1, LENGTH, HEADS, DIMS, decay, torch.float64)
    return made if with_beta else made | {"beta": None}


def ways(decay: str = "mild", window: int = 2) -> Iterator[tuple[TargetPast, slice, Any]]:
    """Pasts for the text's stretches in turn, and what to do after each."""
    pool = pool_of(decay, window=window)
    slot = pool.alloc()
    for first, last in ((0, 2), (2, 3), (3, 7)):
        past = Prefill(pool, slot, last - first)
        yield past, slice(first, last), past.close
    for first, last in ((7, 8), (8, 12), (12, 13)):
        tree = Tree.chain(last - first)
        yield (
            Verification(pool, [slot], tree, "serial"),
            slice(first, last),
            lambda n=last - first: take(pool, [slot], [list(range(n))]),
        )


def stepwise(decay: str = "mild", window: int = 2) -> Iterator[tuple[TargetPast, slice, Any]]:
    past = _Stepwise(pool_of(decay, window=window), torch.zeros(1, dtype=torch.long))
    for t in range(LENGTH):
        yield past, slice(t, t + 1), lambda: None


@pytest.mark.parametrize("way", [ways, stepwise])
@pytest.mark.parametrize("with_beta", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("decay", ["none", "mild", "channel-mild"])
def test_every_rule_by_every_way(decay: str, rule: Rule, with_beta: bool, way: Any):
    named = inputs(decay, with_beta)
    whole = FullText(1, LENGTH, CPU, chunk_size=4).delta(0, **named, rule=rule)  # type: ignore[arg-type]
    for past, part, after in way(decay):
        got = past.delta(0, **{n: None if x is None else x[:, part] for n, x in named.items()}, rule=rule)
        torch.testing.assert_close(got, whole[:, part], rtol=1e-9, atol=1e-9)
        after()


@pytest.mark.parametrize("way", [ways, stepwise])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolutions_with_and_without_an_activation(activation: str | None, way: Any):
    x, weight, bias = (
        torch.randn(1, LENGTH, CHANNELS).double(),
        torch.randn(CHANNELS, 3),
        torch.randn(CHANNELS),
    )
    whole = FullText(1, LENGTH, CPU).conv(0, x, weight, bias, activation)
    before = torch.nn.functional.pad(x, (0, 0, 2, 0))
    y = sum(before[:, w : w + LENGTH] * weight[:, w] for w in range(3)) + bias
    torch.testing.assert_close(whole, torch.nn.functional.silu(y) if activation else y)
    for past, part, after in way(window=3):
        torch.testing.assert_close(past.conv(0, x[:, part], weight, bias, activation), whole[:, part])
        after()


@pytest.mark.parametrize("way", [ways, stepwise])
def test_what_came_before_in_two_streams(way: Any):
    streams = torch.randn(2, 1, LENGTH, CHANNELS // 2).double()
    shifted = torch.nn.functional.pad(streams, (0, 0, 1, 0))[:, :, :-1]
    assert torch.equal(FullText(1, LENGTH, CPU).previous(0, streams[0]), shifted[0])
    for past, part, after in way():
        for stream, first in ((0, 0), (1, CHANNELS // 2)):
            assert torch.equal(past.previous(0, streams[stream][:, part], first), shifted[stream][:, part])
        after()


def test_what_came_before_on_a_tree():
    pool = pool_of(slots=2)
    slots = [pool.alloc(), pool.alloc()]
    x = torch.randn(2, 4, CHANNELS).double()
    tree = Tree([[-1, 0, 0, 1], [-1, 0, 1, -1]])
    assert not Verification(pool, slots, tree, "serial").previous(0, x)[:, 0].any()
    take(pool, slots, [[0, 2], [0]])
    got = Verification(pool, slots, tree, "serial").previous(0, x)
    assert torch.equal(got[0], torch.stack([x[0, 2], x[0, 0], x[0, 0], x[0, 1]]))
    assert torch.equal(got[1, :3], torch.stack([x[1, 0], x[1, 0], x[1, 1]]))
