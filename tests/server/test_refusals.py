"""Whatever a client does wrong is answered in OpenAI's form, and the server goes on."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from specla.server.app import create_app
from specla.server.protocol import UNSUPPORTED
from tests.server.serving import MAX_DRAFT, Serving, save_model, serving

MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def goes_on(server: Serving) -> Iterator[None]:
    yield
    server.idle()
    assert server.complete(prompt="the", max_tokens=1)["usage"]["completion_tokens"] == 1


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(body["error"]["message"]) < 600
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 2001}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": MAX_DRAFT + 1}, "num_speculative_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_rounds": True}, "stream_rounds"),
        ({"user": 3}, "user"),
        ({"beam_width": 3}, "beam_width"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_values_that_do_not_fit_are_named(
    server: Serving, path: str, wrong: dict[str, Any], param: str | None
):
    text: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "the"}
    error = refused(server.post(path, **text, **wrong))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [[], "a"], ["a", 3], ["a", ""], [[3], [-1]], [1, "a"], [1.0], [True],
               [[1], [2.0]], [-1], [10**6], {}, 7, "\ud800"]
)  # fmt: skip
def test_prompts_of_no_known_form_are_refused(server: Serving, prompt: Any):
    body = json.dumps({"prompt": prompt})
    error = refused(server.client.post("/v1/completions", content=body, headers=JSON))
    assert "prompt" in error["message"] or "Unicode" in error["message"]
    assert "constrained" not in error["message"]  # the validator's own words


@pytest.mark.parametrize(
    "messages", [None, [], "hi", [{}], [{"role": "user"}], [{"role": 1, "content": ""}],
                 [{"role": "user", "content": None}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]
)  # fmt: skip
def test_messages_of_no_known_form_are_refused(server: Serving, messages: Any):
    assert refused(server.post("/v1/chat/completions", messages=messages))["param"] == "messages"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_variables_of_a_template_leave_its_fields_alone(server: Serving, name: str):
    error = refused(server.post("/v1/chat/completions", messages=MESSAGES, chat_template_kwargs={name: 1}))
    assert error["param"] == "chat_template_kwargs"
    assert name in error["message"]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_options_that_cannot_be_honoured_are_refused_by_name(server: Serving, name: str):
    error = refused(server.post("/v1/completions", prompt="the", **{name: {"something": 1}}))
    assert error["message"] == f"{name} is not supported"
    assert error["param"] == name
    for harmless in (None, *UNSUPPORTED[name]):
        assert server.complete(prompt="the", max_tokens=1, **{name: harmless})


def test_options_without_effect_are_accepted(server: Serving):
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "n": None,
        "stop": None,
    }
    assert server.complete(prompt="the", max_tokens=1, **harmless)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_not_found(server: Serving, path: str):
    needed = {
        "/v1/completions": {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [3]},
    }
    error = refused(server.post(path, model="gpt-9", **needed.get(path, {"messages": MESSAGES})), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'tiny'" in error["message"]
    refused(server.client.get("/v1/models/gpt-9"), 404)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"", "body"),
        (b"[1]", "object"),
        (b'"text"', "object"),
        (b"null", "body"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "body"),
        (b"[" * 100_000, "body"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "\\ud800": 3}', "ud800"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bodies_that_cannot_be_read_are_refused(server: Serving, body: bytes, says: str):
    for path in ("/v1/completions", "/tokenize"):
        error = refused(server.client.post(path, content=body, headers=JSON))
        assert error["type"] == "invalid_request_error"
    assert says in refused(server.client.post("/v1/completions", content=body, headers=JSON))["message"]


def test_other_content_types_are_refused(server: Serving):
    refused(server.client.post("/v1/completions", data={"prompt": "the"}))
    refused(
        server.client.post(
            "/v1/completions", content=b'{"prompt": "the"}', headers={"content-type": "text/plain"}
        )
    )


def test_a_context_that_is_too_short_is_said_in_numbers(server: Serving):
    many = list(range(2, 50)) * 50
    for asked in (
        {"prompt": many},
        {"prompt": "the", "max_tokens": 2048},
        {"prompt": [[3], many], "max_tokens": 1},
    ):
        error = refused(server.post("/v1/completions", **asked))
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    long = [{"role": "user", "content": "the cat " * 2000}]
    assert refused(server.post("/v1/chat/completions", messages=long))["code"] == "context_length_exceeded"
    fits = server.complete(prompt=many[:2040], max_tokens=8, ignore_eos=True)
    assert fits["usage"]["total_tokens"] == 2048


def test_unknown_paths_and_methods(server: Serving):
    refused(server.client.get("/v1/nothing"), 404)
    refused(server.client.post("/v1/embeddings", json={}), 404)
    for path in ("/v1/completions", "/tokenize"):
        response = server.client.get(path)
        refused(response, 405)
        assert response.headers["allow"] == "POST"
    refused(server.client.delete("/v1/models"), 405)


def test_request_ids_come_back_or_are_made(server: Serving):
    given = server.client.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = [server.client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    answer = server.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine-2"})
    assert answer.json()["id"] == "cmpl-mine-2"
    strange = server.client.get("/health", headers={"x-request-id": "a b" * 100})
    assert strange.headers["x-request-id"].isalnum()


class TestBodies:
    def test_a_long_body_is_refused_before_it_was_read(self, server: Serving):
        """The length alone is enough: no byte of it is ever sent."""
        where = urlsplit(server.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", str(10 << 20))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert json.load(response)["error"]["type"] == "invalid_request_error"
        connection.close()

    def test_a_client_that_sends_all_of_it_sees_why(self, server: Serving):
        error = refused(server.post("/v1/completions", prompt="a" * (10 << 20)), 413)
        assert "4194304 bytes" in error["message"]

    def test_a_body_of_unsaid_length_is_refused_when_it_is_too_long(self, server: Serving):
        """Chunks without end: the answer comes while they are being sent."""
        where = urlsplit(server.url)
        sent, block = 0, b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=20) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            try:
                while sent < 64 << 20:
                    connection.sendall(block)
                    sent += len(block)
            except ConnectionError:
                pass
            answer = connection.recv(100)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert sent < 32 << 20

    @pytest.mark.parametrize(
        ("begin", "block"),
        [
            (b"GET /", b"a" * (1 << 16)),
            (b"GET /health HTTP/1.1\r\nx: ", b"a" * (1 << 16)),
            (b"GET /health HTTP/1.1\r\n", b"x: y\r\n" * (1 << 13)),
            (b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * (1 << 16)),
        ],
        ids=["path", "header", "headers", "chunk"],
    )
    def test_what_never_comes_to_its_end_is_refused(self, server: Serving, begin: bytes, block: bytes):
        where, sent = urlsplit(server.url), 0
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=20) as connection:
            connection.sendall(begin)
            try:
                while sent < 64 << 20:
                    connection.sendall(block)
                    sent += len(block)
            except ConnectionError:
                pass
        assert sent < 32 << 20

    def test_heads_that_fit_are_read(self, server: Serving):
        """However slowly they come."""
        where = urlsplit(server.url)
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=20) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n")
            for _ in range(5):
                connection.sendall(b"x: " + b"y" * 10_000 + b"\r\n")
                time.sleep(0.01)
            connection.sendall(b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")

    def test_chunks_that_fit_are_read(self, server: Serving):
        parts = iter([b'{"prompt": ', b'"the cat", ', b'"max_tokens": 1}'])
        assert server.client.post("/v1/completions", content=parts, headers=JSON).status_code == 200


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = save_model(tmp_path_factory.mktemp("guarded"))
    options = {"model_name": "mine", "api_key": "secret", "max_tokens": 40, "max_body_bytes": 2000}
    with serving(model, max_waiting=2, **options) as made:
        yield made


@pytest.mark.parametrize("header", [None, "", "secret", "Bearer", "Bearer wrong", "Bearer secrets",
                                    "Basic secret",
                                    "Bearer s\xe9cret"], ids=str)  # fmt: skip
def test_without_the_key_nothing_is_served(guarded: Serving, header: str | None):
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/x"),
    ):
        response = httpx.request(method, guarded.url + path, headers=headers)
        assert refused(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert httpx.get(guarded.url + "/health", headers=headers).status_code == 200


def test_with_the_key_the_model_has_the_name_it_was_given(guarded: Serving):
    for scheme in ("Bearer", "bearer"):
        response = httpx.get(guarded.url + "/v1/models", headers={"authorization": f"{scheme} secret"})
        assert [card["id"] for card in response.json()["data"]] == ["mine"]
    assert guarded.client.get("/v1/models/mine").json()["id"] == "mine"
    assert guarded.complete(prompt="a", model="mine", max_tokens=1)["model"] == "mine"


@pytest.mark.parametrize("key", ["clé ☃", "two words", "from-a-file\n"])
def test_any_key_is_one(guarded: Serving, key: str):
    app = create_app(guarded.engine, api_key=key)
    with TestClient(app) as client:
        for sent, status in (
            (key.strip(), 200),
            (key.strip()[:-1], 401),
            (key.strip() + "x", 401),
            ("", 401),
        ):
            headers = {"authorization": b"Bearer " + sent.encode()}
            assert client.get("/v1/models", headers=headers).status_code == status, sent
    for nothing in ("", " \n"):
        with pytest.raises(ValueError, match="api_key"):
            create_app(guarded.engine, api_key=nothing)


def test_limits_of_length_hold_where_they_are_set(guarded: Serving):
    assert refused(guarded.post("/v1/completions", prompt="a", max_tokens=41))["param"] == "max_tokens"
    refused(guarded.post("/v1/completions", prompt="a" * 2000), 413)
    chat = guarded.post("/v1/chat/completions", messages=MESSAGES, ignore_eos=True).json()
    assert chat["usage"]["completion_tokens"] == 40


def test_a_full_queue_is_429_and_a_request_that_never_fits_400(guarded: Serving):
    """4 run and 2 wait at most."""
    refused(guarded.post("/v1/completions", prompt="a", n=7))
    long = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True, "n": 6}
    with guarded.client.stream("POST", "/v1/completions", json=long) as response:
        events = response.iter_lines()
        next(events)
        refusal = guarded.post("/v1/completions", prompt="a", n=6)
        assert refused(refusal, 429)["code"] == "queue_full"
        assert int(refusal.headers["retry-after"]) >= 1
        assert [line for line in events if line][-1] == "data: [DONE]"
    guarded.idle()
    assert guarded.complete(prompt="a", n=6, max_tokens=1)


def test_limits_below_one_are_the_callers_mistake(guarded: Serving):
    for option in ("max_model_len", "max_tokens", "max_body_bytes"):
        with pytest.raises(ValueError, match=option):
            create_app(guarded.engine, **{option: 0})  # type: ignore[arg-type]


class TestDying:
    @pytest.fixture
    def dying(self, tmp_path: Path) -> Iterator[Serving]:
        with serving(save_model(tmp_path / "m")) as made:
            yield made

    @staticmethod
    def kill(dying: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(dying.engine.llm.target, "verify", broken)

    def test_a_dead_engine_is_503_and_says_so_at_health(
        self, dying: Serving, monkeypatch: pytest.MonkeyPatch
    ):
        assert dying.client.get("/health").json() == {"status": "ok"}
        self.kill(dying, monkeypatch)
        assert "the device is gone" in refused(dying.post("/v1/completions", prompt="a"), 500)["message"]
        assert refused(dying.client.get("/health"), 503)["type"] == "server_error"
        response = dying.post("/v1/completions", prompt="a", stream=True)
        refused(response, 503)
        assert response.headers["retry-after"]
        assert dying.client.get("/metrics").status_code == dying.client.get("/v1/models").status_code == 200

    def test_a_death_in_the_middle_of_a_stream_is_an_event(
        self, dying: Serving, monkeypatch: pytest.MonkeyPatch
    ):
        asked = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with dying.client.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()
            next(lines)
            self.kill(dying, monkeypatch)
            *_, last, end = [line for line in lines if line]
        assert end == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "the device is gone" in error["message"]

    def test_a_fault_of_the_app_itself_is_500_in_the_same_form(
        self, dying: Serving, monkeypatch: pytest.MonkeyPatch
    ):
        def broken() -> None:
            raise KeyError("oops")

        monkeypatch.setattr(dying.engine, "stats", broken)
        error = refused(dying.client.get("/metrics", headers={"x-request-id": "r-1"}), 500)
        assert error["message"] == "the server failed over request r-1"
        monkeypatch.undo()
        assert dying.client.get("/metrics").status_code == 200

    def test_while_draining_requests_are_refused_with_503(self, dying: Serving):
        dying.engine.draining = True
        for path in ("/v1/completions", "/v1/chat/completions"):
            text: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
            response = dying.post(path, **text)
            assert "shutting down" in refused(response, 503)["message"]
        refused(dying.client.get("/health"), 503)
