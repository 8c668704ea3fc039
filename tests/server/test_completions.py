"""/v1/completions: the text of the model alone, however it is asked for and however it is sent."""

from __future__ import annotations

from typing import Any

import pytest

from specla import SamplingParams
from tests.server.serving import Serving

TEXT = "the cat sat on"


def alone(server: Serving, prompt: Any, **params: Any) -> Any:
    return server.alone.generate(prompt, SamplingParams(**params))[0].outputs[0]


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 5},
                                   {"repetition_penalty": 1.3, "ignore_eos": True}, {"stop": ["t", "zz"]},
                                   {"stop_token_ids": [40, 41, 42, 43, 44]}], ids=str)  # fmt: skip
def test_the_text_is_that_of_the_model_alone_streamed_or_not(server: Serving, extra: dict[str, Any]):
    asked = {"temperature": 0.0, "max_tokens": 30, **extra}
    expected = alone(server, TEXT, **asked)
    answer = server.complete(prompt=TEXT, **asked)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    used = answer["usage"]
    assert used["completion_tokens"] == len(expected.token_ids)
    assert used["prompt_tokens"] == len(server.alone.tokenizer.encode(TEXT))
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]

    events = server.events("/v1/completions", prompt=TEXT, stream_options={"include_usage": True}, **asked)
    assert joined(events) == expected.text
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + [expected.finish_reason]
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert {**events[-1]["usage"], "prompt_tokens_details": None} == {**used, "prompt_tokens_details": None}
    assert events[-1]["choices"] == []
    assert len({event["id"] for event in events}) == 1


def test_prompts_may_be_texts_or_tokens_one_or_many(server: Serving):
    texts = [TEXT, "def add(first,"]
    ids = [server.alone.tokenizer.encode(text) for text in texts]
    asked = {"temperature": 0.0, "max_tokens": 12}
    expected = [alone(server, row, **asked).text for row in ids]
    for many in (texts, ids):
        choices = server.complete(prompt=many, **asked)["choices"]
        assert [(c["index"], c["text"]) for c in choices] == list(enumerate(expected))
        events = server.events("/v1/completions", prompt=many, **asked)
        assert [joined(events, index) for index in range(2)] == expected
        for index, one in enumerate(many):
            assert server.complete(prompt=one, **asked)["choices"][0]["text"] == expected[index]


def test_n_choices_of_a_seed_are_those_of_the_seeds_that_follow_it(server: Serving):
    asked = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    answer = server.complete(prompt=[TEXT, "12 + 34"], n=3, seed=7, **asked)
    expected = [alone(server, p, seed=7 + k, **asked).text for p in (TEXT, "12 + 34") for k in range(3)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert len(set(expected)) == 6
    one = server.complete(prompt=[TEXT, "12 + 34"], **asked)
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"] == 120


def test_without_a_temperature_tokens_are_drawn_and_sixteen_are_made(server: Serving):
    one, other = (server.complete(prompt=TEXT, ignore_eos=True) for _ in range(2))
    assert one["choices"][0]["text"] != other["choices"][0]["text"]
    assert one["usage"]["completion_tokens"] == 16


def test_drafts_change_no_token_and_zero_asks_for_none(server: Serving):
    again = ", ".join([TEXT] * 5)  # so that lookup has drafts
    asked = {"prompt": again, "temperature": 0.2, "seed": 3, "max_tokens": 40, "stream_rounds": True}
    rounds, texts = [], []
    for number in (0, 4, None):
        events = server.events("/v1/completions", num_speculative_tokens=number, **asked)
        texts.append(joined(events))
        assert [event["specla"]["round"] for event in events] == list(range(1, len(events) + 1))
        rounds.append([event["specla"] for event in events])
    assert texts[0] == texts[1] == texts[2]
    assert all(len(each["tree"]["tokens"]) == 1 and each["acceptance_length"] == 1 for each in rounds[0])
    assert max(len(each["tree"]["tokens"]) for each in rounds[1]) == 5
    for told in rounds[1]:
        tree = told["tree"]
        assert len(tree["tokens"]) == len(tree["parent"])
        assert [tree["parent"][node] for node in tree["path"]] == [-1, *tree["path"][:-1]]
        assert sum(piece["draft"] for piece in told["pieces"]) <= len(tree["path"]) - 1
    assert "".join(piece["text"] for told in rounds[1] for piece in told["pieces"]) == texts[0]


def test_echo_puts_the_prompt_first(server: Serving):
    asked = {"temperature": 0.0, "max_tokens": 8}
    plain = server.complete(prompt=TEXT, **asked)["choices"][0]["text"]
    ids = server.alone.tokenizer.encode(TEXT)
    for prompt in (TEXT, ids):
        assert server.complete(prompt=prompt, echo=True, **asked)["choices"][0]["text"] == TEXT + plain
        assert joined(server.events("/v1/completions", prompt=prompt, echo=True, **asked)) == TEXT + plain


def test_echo_without_new_tokens_scores_the_prompt_alone(server: Serving):
    asked = {"prompt": TEXT, "temperature": 0.0, "echo": True, "logprobs": 2}
    scored = server.complete(max_tokens=0, **asked)
    longer = server.complete(max_tokens=5, **asked)["choices"][0]["logprobs"]
    (choice,) = scored["choices"]
    count = scored["usage"]["prompt_tokens"]
    assert scored["usage"]["completion_tokens"] == 0
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert choice["logprobs"] == {key: values[:count] for key, values in longer.items()}
    assert len(longer["tokens"]) == count + 5
    assert joined(server.events("/v1/completions", max_tokens=0, **asked)) == TEXT


def test_logprobs_are_the_targets_own_and_the_same_in_a_stream(server: Serving):
    asked: dict[str, Any] = {"prompt": TEXT, "max_tokens": 20, "seed": 1, "temperature": 0.9, "logprobs": 3}
    whole = server.complete(echo=True, **asked)["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in server.events("/v1/completions", echo=True, **asked)]
    assert {key: [v for part in parts if part for v in part[key]] for key in whole} == whole
    assert whole["token_logprobs"][0] is whole["top_logprobs"][0] is None
    assert "".join(whole["tokens"]).startswith(TEXT)
    assert [
        whole["text_offset"][n] + len(whole["tokens"][n]) for n in range(len(whole["tokens"]) - 1)
    ] == whole["text_offset"][1:]
    for token, logprob, top in list(
        zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] >= logprob
        assert 3 <= len(top) <= 4
        assert max(top.values()) <= 0
    # what was generated scores as a prompt as it did when it came
    ids = server.alone.generate(TEXT, SamplingParams(0.9, max_tokens=20, seed=1))[0].outputs[0].token_ids
    prompt = server.alone.tokenizer.encode(TEXT) + ids
    again = server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=0, temperature=0)
    scores = again["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-4)


def test_a_prompt_that_begins_like_an_earlier_one_says_what_was_cached(server: Serving):
    prompt = list(range(2, 60)) * 10
    asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    first, second, third = (server.complete(**asked) for _ in range(3))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == third["choices"][0]["text"]
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] > 400


def test_a_client_that_leaves_ends_its_sequences(server: Serving):
    import httpx

    asked = {"prompt": [TEXT] * 6, "max_tokens": 1900, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        stream = response.iter_bytes()  # which closes the connection when it goes
        assert next(stream).startswith(b"data: {")
        assert server.engine.num_live == 6
    server.idle()
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=asked, timeout=0.3)
    server.idle()


def test_a_long_text_is_read_while_others_stream(server: Serving):
    long = "the cat sat on the mat, " * 200
    asked = {"max_tokens": 4, "temperature": 0}
    padded = {"metadata": {"note": "x" * 40_000}}  # makes the body long, and nothing else
    assert (
        server.complete(prompt=long, **asked, **padded)["choices"]
        == server.complete(prompt=long, **asked)["choices"]
    )
