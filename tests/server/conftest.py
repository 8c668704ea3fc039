"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import Serving, save_model, serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Serving]:
    with serving(model) as made:
        yield made
