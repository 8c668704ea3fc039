"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import pytest

from tests.server.serving import TEMPLATE, Serving


@pytest.mark.parametrize("text", ["the cat sat", "naïve café für Zoë", "</s>a", "", "12 + 34 = 46\n "])
def test_texts_come_back(server: Serving, text: str):
    told = server.post("/tokenize", prompt=text, model="tiny").json()
    assert told["tokens"] == server.alone.tokenizer.encode(text)
    assert (told["count"], told["max_model_len"], told["token_strs"]) == (len(told["tokens"]), 2048, None)
    assert server.post("/detokenize", tokens=told["tokens"]).json() == {"prompt": text}
    named = server.post("/tokenize", prompt=text, return_token_strs=True).json()["token_strs"]
    assert named == [server.alone.tokenizer.token_str(token) for token in told["tokens"]]


def test_a_chat_is_tokenised_as_it_would_be_answered(server: Serving):
    messages = [{"role": "user", "content": "the dog"}]
    told = server.post("/tokenize", messages=messages).json()
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert told["count"] == answer["usage"]["prompt_tokens"]
    assert server.post("/detokenize", tokens=told["tokens"]).json()["prompt"] == "user: the dog\nassistant:"
    bare = server.post("/tokenize", messages=messages, add_generation_prompt=False).json()
    assert server.post("/detokenize", tokens=bare["tokens"]).json()["prompt"] == "user: the dog\n"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 3}]
)
def test_exactly_one_text_is_needed(server: Serving, body: dict[str, object]):
    assert server.post("/tokenize", **body).json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("tokens", [[-1], [10**6], ["a"], "text", None, [True]], ids=str)
def test_what_is_no_token_is_refused(server: Serving, tokens: object):
    response = server.post("/detokenize", tokens=tokens)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


def test_clients_learn_which_tokens_begin_and_end_a_text(server: Serving):
    told = server.client.get("/tokenizer_info").json()
    assert told == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    assert server.post("/tokenize", prompt=told["eos_token"]).json()["tokens"] == [1]
