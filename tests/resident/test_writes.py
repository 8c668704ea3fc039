"""Numbers that are written together arrive where each was sent, and nowhere else."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, strategies as st

from specla.resident.writes import BLOCK, STAGED, Writes, send
from tests.ops.strategies import same_bits
from tests.resident import DEVICE, GARBAGE

VALUES = {
    torch.int32: st.integers(-(2**31), 2**31 - 1),
    torch.int64: st.integers(-(2**63), 2**63 - 1),
    torch.float32: st.floats(width=32, allow_nan=False),
}


@given(st.data(), st.integers(1, 9))
def test_everything_arrives_and_the_rest_stays(data: st.DataObject, count: int) -> None:
    writes, expected = Writes(DEVICE), []
    for _ in range(count):
        dtype = data.draw(st.sampled_from(list(VALUES)))
        size = data.draw(st.integers(1, BLOCK))
        first = data.draw(st.integers(0, size - 1))
        numbers = data.draw(st.lists(VALUES[dtype], max_size=size - first))
        tensor = torch.full((size,), GARBAGE, dtype=dtype)
        expected.append((tensor.to(DEVICE, copy=True), tensor))
        tensor[first : first + len(numbers)] = torch.tensor(numbers, dtype=dtype)
        writes.put(expected[-1][0], first, *numbers)
    writes.make()
    for got, want in expected:
        assert same_bits(got.cpu(), want)
        got.fill_(GARBAGE)
    writes.make()
    assert all(bool((got == GARBAGE).all()) for got, _ in expected), "written a second time"


def test_what_has_no_room_is_refused() -> None:
    writes, grid = Writes(DEVICE), torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    for tensor, first, numbers in ((grid, 5, (1, 2)), (grid, -1, (1,)), (grid[:, :2], 0, (1,))):
        with pytest.raises(AssertionError):
            writes.put(tensor, first, *numbers)
    with pytest.raises(struct.error):
        writes.put(grid, 0, 2**31)
    writes.put(grid, 2, 7, 8)
    writes.make()
    assert grid.tolist() == [[0, 0, 7], [8, 0, 0]]


@pytest.mark.parametrize("size", [0, 1, STAGED // 4, STAGED // 4 + 1, 3 * STAGED])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_long_vectors_arrive_whole(size: int, dtype: torch.dtype) -> None:
    numbers, grid = (
        torch.arange(size, dtype=dtype),
        torch.full((3, size), GARBAGE, dtype=dtype, device=DEVICE),
    )
    send(numbers, grid[1])
    assert same_bits(grid[1].cpu(), numbers) and bool((grid[::2] == GARBAGE).all())
