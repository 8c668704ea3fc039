"""A few seconds of what `soak` does for a minute."""

from __future__ import annotations

from tests.server.serving import Serving
from tests.server.soak import soak


def test_clients_of_all_kinds_leave_no_error_and_no_slot_behind(server: Serving):
    outcome = soak(server, 3, 60, seed=1)
    assert outcome.errors == []
    assert outcome.counts["failed"] == 0
    assert outcome.counts["left"] > 0
    assert outcome.counts["stream"] > 0
    server.idle()
    assert server.engine.healthy
    assert not server.engine._tracks
