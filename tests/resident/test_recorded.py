"""The stand-in for graphs keeps the rules of graphs."""

from __future__ import annotations

import pytest
import torch

from tests.resident import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has graphs of its own")

if DEVICE.type == "cpu":
    from specla.ops.triton.norm import add_norm
    from tests.resident.recorded import Recorded


def test_recording_does_nothing_and_a_replay_reads_what_is_there_then() -> None:
    x, out = torch.arange(4.0), torch.zeros(4)

    def work() -> None:
        doubled = x.view(2, 2) * 2
        out.copy_(doubled.flatten() + torch.ones(4))
        x.add_(1)

    graph = Recorded(work)
    assert x.tolist() == [0, 1, 2, 3] and not out.any()
    graph.replay()
    assert out.tolist() == [1, 3, 5, 7] and x.tolist() == [1, 2, 3, 4]
    x.fill_(10)
    graph.replay()
    assert out.tolist() == [21] * 4 and x.tolist() == [11] * 4


def test_what_the_host_decides_is_decided_once() -> None:
    counts, out = [1], torch.zeros(1)
    graph = Recorded(lambda: out.add_(counts[0]))
    counts[0] = 5
    graph.replay()
    assert out.item() == 1


def test_kernels_are_played_back_too() -> None:
    stream, weight = torch.randn(3, 16), torch.ones(16)
    added, out = torch.zeros(1, 3, 16), torch.zeros(3, 16)

    def work() -> None:
        out.copy_(add_norm(stream, added, weight, 1e-6, torch.float32))

    graph = Recorded(work)
    assert not out.any()
    stream.copy_(torch.randn(3, 16))
    graph.replay()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(stream, (16,), weight, 1e-6))


def test_memory_of_the_work_is_nobodys_afterwards() -> None:
    x, made = torch.ones(2), []
    graph = Recorded(lambda: made.append(x + 1))
    assert made[0].isnan().all()
    graph.replay()
    assert made[0].isnan().all()


def test_looking_at_a_value_within_the_work_fails() -> None:
    x = torch.ones(2)
    looks = (
        lambda: x.sum().item(), lambda: x[x > 0], lambda: bool(x[0] == 1), lambda: x.tolist(), lambda: x.numpy(),
    )  # fmt: skip
    for look in looks:
        with pytest.raises(AssertionError, match="waits for the device"):
            Recorded(look)
