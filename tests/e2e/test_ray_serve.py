"""Replicas of the server behind Ray Serve: one is killed under load, another's engine dies, and both come back."""

from __future__ import annotations

import http.client
import json
import os
import runpy
import secrets
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specla import LLM, SamplingParams

ray = pytest.importorskip("ray", reason="needs ray: pip install 'ray[serve]'")
serve = pytest.importorskip("ray.serve", reason="needs ray: pip install 'ray[serve]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
PROMPTS = ["The sea was calm.", "def area(width, height):", "Once upon a time", "1, 2, 3, 4,"]
ASKED = {"max_tokens": 60, "temperature": 0.8}
CLIENTS = 6
POISON = 8191  # a token of no text here


def app() -> Any:
    """The example's, but an engine that is to go on from POISON dies."""
    example = runpy.run_path(str(EXAMPLE))
    make_app, poison = example["make_app"], POISON

    def fragile(args: dict[str, Any]) -> Any:
        app = make_app(args)
        target = app.state.engine.llm.target
        verify = target.verify

        def refuse(tokens: Any, *more: Any) -> Any:
            if poison in tokens[:, 0]:
                raise RuntimeError("the device is gone")
            return verify(tokens, *more)

        target.verify = refuse
        return app

    return example["deploy"]({"replicas": 2}, fragile)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        token = tmp_path_factory.mktemp("ray") / "token"
        token.write_text(secrets.token_hex(32))  # else Ray leaves one in the home directory
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(), name="specla")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def complete(url: str, prompt: str | list[int], seed: int, stream: bool) -> str:
    """The continuation; an OSError or an HTTPException for an answer that is not whole."""
    body = json.dumps({"prompt": prompt, "seed": seed, "stream": stream, **ASKED}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        if not stream:
            return json.load(response)["choices"][0]["text"]
        events = [line[6:] for line in response.read().decode().splitlines() if line]
    if events[-1] != "[DONE]":
        raise http.client.IncompleteRead(b"")
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        raise http.client.HTTPException("the stream ended in an error")
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def replicas() -> dict[str, int]:
    status = serve.status().applications["specla"].deployments["specla"]
    return {str(state): count for state, count in status.replica_states.items()}


def processes() -> set[int]:
    """Of the replicas."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes().startswith(b"ray::ServeReplica:specla:"):
                found.add(int(entry.parent.name))
        except OSError:  # it has ended
            continue
    return found


def test_a_killed_replica_costs_a_retry_and_comes_back(url: str) -> None:
    llm = LLM()
    expected = {
        (prompt, seed): llm.generate(prompt, SamplingParams(**ASKED, seed=seed))[0].outputs[0].text
        for prompt in PROMPTS
        for seed in range(3)
    }
    over = threading.Event()
    answered, retried = [0] * CLIENTS, [0] * CLIENTS

    def client(number: int) -> None:
        while not over.is_set():
            for i, ((prompt, seed), text) in enumerate(expected.items()):
                for _ in range(20):
                    try:
                        got = complete(url, prompt, seed, stream=(i + number) % 2 == 0)
                        break
                    except (OSError, http.client.HTTPException) as error:
                        if isinstance(error, urllib.error.HTTPError):
                            assert error.code >= 500, error.read()
                        retried[number] += 1
                        time.sleep(0.2)
                else:
                    raise AssertionError("twenty attempts failed")
                assert got == text
                answered[number] += 1

    before = processes()
    assert replicas() == {"RUNNING": 2}
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            wait_until(lambda: min(answered) > 0)
            killed = min(before)
            os.kill(killed, signal.SIGKILL)
            at_kill = list(answered)
            wait_until(lambda: replicas() != {"RUNNING": 2})
            wait_until(lambda: replicas() == {"RUNNING": 2})
            back = list(answered)
            wait_until(lambda: all(now > then for now, then in zip(answered, back, strict=True)))
        finally:
            over.set()
        for each in clients:
            each.result()
    assert sum(retried) > 0, "nothing was under way when it was killed"
    assert killed not in processes()
    assert sum(back) > sum(at_kill), "the other replica went on meanwhile"


def test_a_replica_whose_engine_died_is_replaced(url: str) -> None:
    text = complete(url, "Once", 0, stream=False)
    before = processes()
    with pytest.raises(urllib.error.HTTPError, match="500"):
        complete(url, [POISON], 0, stream=False)
    wait_until(lambda: replicas() != {"RUNNING": 2})
    wait_until(lambda: replicas() == {"RUNNING": 2})
    assert len(before - processes()) == 1
    assert {complete(url, "Once", 0, stream=False) for _ in range(6)} == {text}


def wait_until(true: object, timeout: float = 120) -> None:
    assert callable(true)
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)
