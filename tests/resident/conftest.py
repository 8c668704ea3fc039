"""Graphs for tests, without a GPU too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specla.resident.capture import Captures
from tests.resident import DEVICE


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is captured is played back, as by a graph."""

    def capture(self: Captures, work: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        warm_up()
        return Recorded(work).replay

    if DEVICE.type == "cpu":
        from tests.resident.recorded import Recorded

        monkeypatch.setattr(Captures, "capture", capture)
