"""`specla bench serve`: both do the same work, and one JSON document is the last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specla.bench import serve
from tests.checkpoints import save_checkpoint
from tests.test_cli import fails, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    save_checkpoint(directory)
    return str(directory)


def test_the_server_gives_what_the_engine_alone_gives(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
):
    output = tmp_path / "report.json"
    flags = [
        "--streams",
        "3",
        "--max-tokens",
        "8",
        "--repeat",
        "2",
        "--threads",
        "1",
        "--output",
        str(output),
    ]
    assert run("bench", "serve", model, *flags) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(output.read_text())
    assert (report["requests"], report["failed"], report["different"]) == (9, 0, 0)
    for side in ("engine", "server"):
        assert report[side]["tokens_per_s"] > 0
        assert len(report[side]["seconds"]) == 2
    overhead = 1 - report["server"]["tokens_per_s"] / report["engine"]["tokens_per_s"]
    assert report["overhead"] == pytest.approx(overhead, abs=0.01)


def chunked(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": 1}', '{"error": 1}'),
        (chunked(b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n'), "gone"),
        (chunked(b"data: {}\n\n"), "the stream broke off"),
        (chunked(b"data: [DONE]\n\n")[:25], "the stream broke off"),
        (b"", "the stream broke off"),
    ],
)
def test_what_is_no_whole_stream_is_a_failure(answer: bytes, error: str):
    streamed = serve.Streamed(bytearray(answer))
    serve._read(streamed)
    assert streamed.error == error


def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
):
    assert "--streams must be in" in fails(capsys, "bench", "serve", "--streams", "0")
    monkeypatch.setattr(serve.sys, "executable", "/bin/false")
    assert "the server did not start" in fails(capsys, "bench", "serve", model, "--streams", "1")
