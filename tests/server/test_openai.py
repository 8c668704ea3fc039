"""OpenAI's own client, synchronous and asynchronous, streaming and not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from specla import SamplingParams
from tests.server.serving import Serving, save_model, serving

TEXT = "the cat sat on"
MESSAGES = [{"role": "user", "content": "add the dog"}]
KEY = "sk-test"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(save_model(tmp_path_factory.mktemp("openai") / "tiny"), api_key=KEY) as made:
        yield made


@pytest.fixture
def client(keyed: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specla"


def test_completions(keyed: Serving, client: openai.OpenAI):
    expected = keyed.alone.generate(TEXT, SamplingParams(0.8, seed=3, max_tokens=24))[0].outputs[0]
    asked = {"model": "tiny", "prompt": TEXT, "temperature": 0.8, "seed": 3, "max_tokens": 24}
    whole = client.completions.create(**asked, logprobs=2)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.token_logprobs or []) == len(expected.token_ids)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(expected.token_ids)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert client.completions.with_raw_response.create(**asked).headers["x-request-id"]


def test_chats(client: openai.OpenAI):
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    assert len((whole.choices[0].logprobs.content or [])[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.content == text


def test_extensions_go_in_the_extra_body(client: openai.OpenAI):
    extra = {"top_k": 5, "num_speculative_tokens": 3, "stream_rounds": True}
    stream = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, stream=True, extra_body=extra)
    for chunk in stream:
        assert chunk.model_extra is not None
        assert chunk.model_extra["specla"]["tree"]["tokens"]


def test_mistakes_raise_what_the_client_has_for_them(keyed: Serving, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="gpt-9") as unknown:
        client.completions.create(model="gpt-9", prompt=TEXT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as negative:
        client.completions.create(model="tiny", prompt=TEXT, max_tokens=-1)
    assert negative.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[tool])
    with (
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_failure_in_a_stream_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    with serving(save_model(tmp_path / "m")) as dying:
        client = openai.OpenAI(base_url=f"{dying.url}/v1", api_key="none", max_retries=0)
        extra = {"ignore_eos": True}
        stream = client.completions.create(
            model="m", prompt=TEXT, max_tokens=2000, stream=True, extra_body=extra
        )
        next(iter(stream))
        monkeypatch.setattr(dying.engine.llm.target, "verify", broken)
        with pytest.raises(openai.APIError, match="the device is gone"):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="m", prompt=TEXT)


def test_many_at_once_of_whom_some_leave(keyed: Serving):
    expected = {
        seed: keyed.alone.generate(TEXT, SamplingParams(1.0, seed=seed, max_tokens=40))[0].outputs[0].text
        for seed in range(12)
    }

    async def one(client: openai.AsyncOpenAI, seed: int) -> None:
        stream = await client.completions.create(
            model="tiny", prompt=TEXT, seed=seed, max_tokens=40, temperature=1, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if seed % 3 == 0:
                await stream.close()
                return
        assert text == expected[seed]
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=seed, max_tokens=5
        )
        assert answer.choices[0].finish_reason

    async def everyone() -> None:
        async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0) as client:
            await asyncio.gather(*(one(client, seed) for seed in range(12)))

    asyncio.run(everyone())
    keyed.idle()
