"""`specla serve` as a process: what it prints, how it ends, and the mistakes in its flags."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.test_cli import fails, run

LONG = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@contextmanager
def served(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "specla", "serve", str(model), "--port", "0", "--threads", "1", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith(f"specla: serving {model.name} at http://127.0.0.1:"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


def ask(url: str, answers: list[Any], body: dict[str, Any]) -> threading.Thread:
    """Ask in a thread, once the server has the request; what comes is in `answers`."""

    def work() -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=120
        ) as response:
            for line in response.iter_lines():
                if line:
                    answers.append(line.removeprefix("data: "))

    thread = threading.Thread(target=work)
    thread.start()
    while not answers:
        time.sleep(0.01)
    return thread


def test_a_signal_lets_what_runs_end_and_refuses_what_is_new(model: Path):
    with served(model, "--served-model-name", "mine", "--metrics-prefix", "vllm") as (process, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
        assert "vllm:num_requests_running{" in httpx.get(f"{url}/metrics").text
        answers: list[Any] = []
        thread = ask(url, answers, LONG)
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health").status_code != 503:
            pass
        assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
        thread.join()
        assert answers[-1] == "[DONE]"
        assert json.loads(answers[-2])["choices"][0]["finish_reason"] == "length"
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_second_signal_ends_what_runs_and_tells_it(model: Path):
    with served(model) as (process, url):
        answers: list[Any] = []
        thread = ask(url, answers, {**LONG, "n": 16})
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health").status_code != 503:
            pass
        process.send_signal(signal.SIGINT)
        thread.join()
        assert answers[-1] == "[DONE]"
        assert "shutting down" in json.loads(answers[-2])["error"]["message"]
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None
        assert "before their end" in process.stderr.read()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "--port must be in 0..65535"),
        (["--max-waiting", "-1"], "--max-waiting"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--prefix-cache-bytes", "-1"], "prefix_cache_bytes"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--drafter", "synthetic", "--synthetic-acceptance-rate", "0.5"], "synthetic"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen at no.such.host.invalid"),
        (["--metrics-prefix", "a b"], "--metrics-prefix"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], model: Path, flags: list[str], says: str):
    port = [] if "--port" in flags else ["--port", "0"]
    assert says in fails(capsys, "serve", str(model), *port, *flags)


def test_a_missing_extra_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("specla.server.cli.find_spec", lambda name: None if name == "uvicorn" else object())
    assert "serve needs uvicorn: pip install -e '.[server]'" in fails(capsys, "serve")


def test_help_names_routes_and_limits(capsys: pytest.CaptureFixture[str]):
    assert run("serve", "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    for word in ("/v1/chat/completions", "--api-key", "--max-model-len", "--prefix-cache-bytes", "SIGTERM"):
        assert word in told
