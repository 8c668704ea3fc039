"""The OpenAPI document is true: what it forbids is refused and what comes back is as it says, by schemathesis.

`python -m tests.server.test_schema 500` tries up to that many requests of each kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.serving import Serving, save_model, serving

LIMITS = {"max_model_len": 200, "max_tokens": 40}


def explore(server: Serving, examples: int, directory: Path) -> subprocess.CompletedProcess[str]:
    """Requests drawn from the document, good ones and bad ones, from a process of its own that leaves files."""
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json", "--seed", "1",
        "--max-examples", str(examples), "--checks", "all",
        # a document cannot say that a model is not there, that a context is too short, or what goes with what
        "--exclude-checks", "positive_data_acceptance",
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}
    )


def test_the_document_is_true(tmp_path: Path):
    with serving(save_model(tmp_path / "tiny"), **LIMITS) as server:
        done = explore(server, 4, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert server.engine.healthy
        server.idle()


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as made,
        serving(save_model(Path(made) / "tiny"), **LIMITS) as server,
    ):
        print(explore(server, int(sys.argv[1]), Path(made)).stdout)
        server.idle()
