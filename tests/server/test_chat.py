"""/v1/chat/completions: what the template writes, continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specla import SamplingParams
from specla.engine.llm import BUNDLED_MODEL
from specla.server.chat import ChatTemplate, load_chat_template
from tests.server.serving import Serving, save_model, serving

MESSAGES = [{"role": "system", "content": "the mat"}, {"role": "user", "content": "add the dog"}]
WRITTEN = "system: the mat\nuser: add the dog\nassistant:"


def test_an_answer_continues_what_the_template_writes(server: Serving):
    asked = {"temperature": 0.6, "seed": 4, "max_tokens": 25}
    ids = server.alone.tokenizer.encode(WRITTEN, add_special_tokens=False)
    expected = server.alone.generate(ids, SamplingParams(**asked))[0].outputs[0]
    answer = server.post("/v1/chat/completions", messages=MESSAGES, **asked).json()
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(ids)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, expected.finish_reason)

    events = server.events("/v1/chat/completions", messages=MESSAGES, **asked)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == expected.text
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_parts_of_text_are_joined_and_n_choices_have_an_index_each(server: Serving):
    parts = [{"type": "text", "text": "add "}, {"type": "text", "text": "the dog"}]
    cut = [MESSAGES[0], {"role": "user", "content": parts}]
    asked: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 2,
        "max_completion_tokens": 9,
        "n": 3,
        "ignore_eos": True,
    }
    whole, same = (server.post("/v1/chat/completions", messages=m, **asked).json() for m in (MESSAGES, cut))
    assert whole["choices"] == same["choices"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 27
    events = server.events("/v1/chat/completions", messages=MESSAGES, **asked)
    for index, choice in enumerate(whole["choices"]):
        mine = [c["delta"]["content"] for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(mine) == choice["message"]["content"]


def test_logprobs_of_a_chat_name_bytes_and_alternatives(server: Serving):
    asked: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "logprobs": True}
    told = server.post("/v1/chat/completions", top_logprobs=2, **asked).json()["choices"][0]["logprobs"][
        "content"
    ]
    parts = [
        e["choices"][0]["logprobs"] for e in server.events("/v1/chat/completions", top_logprobs=2, **asked)
    ]
    assert [entry for part in parts if part for entry in part["content"]] == told
    for entry in told:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        best, second = entry["top_logprobs"]
        assert best["logprob"] == entry["logprob"] >= second["logprob"]  # greedy
    bare = server.post("/v1/chat/completions", **asked).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * len(told)


def test_without_a_limit_an_answer_may_fill_the_context(tmp_path: Path):
    with serving(save_model(tmp_path / "m"), max_model_len=60) as server:
        answer = server.post("/v1/chat/completions", messages=MESSAGES, ignore_eos=True).json()
        assert answer["usage"]["total_tokens"] == 60
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_model_without_a_template_cannot_chat_but_complete(tmp_path: Path):
    with serving(save_model(tmp_path / "m", template=None)) as server:
        refused = server.post("/v1/chat/completions", messages=MESSAGES)
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]["message"]
        assert server.post("/tokenize", messages=MESSAGES).status_code == 400
        assert server.complete(prompt="the", max_tokens=2)["choices"]


def test_the_bundled_template_is_found():
    template = load_chat_template(BUNDLED_MODEL)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|user|>\nhi<|assistant|>\n"


def test_a_file_of_its_own_comes_before_the_settings_and_default_before_other_names(tmp_path: Path):
    def settle(template: object) -> None:
        settings = {"chat_template": template, "bos_token": {"content": "<s>"}, "pad_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    def render() -> str:
        template = load_chat_template(tmp_path)
        assert template is not None
        return template.render([])

    assert load_chat_template(tmp_path) is None
    settle("{{ bos_token }}settings")
    assert render() == "<s>settings"
    settle([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}])
    assert render() == "default"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert render() == "<s>file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="not valid Jinja"):
        load_chat_template(tmp_path)
    settle(3)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat_template"):
        load_chat_template(tmp_path)


def test_templates_have_what_transformers_gives_them():
    source = (
        "{%- for m in messages -%}\n"
        "    {%- if loop.index0 == 2 %}{% break %}{% endif %}\n"
        "    {% if m.role == 'tool' %}\n"
        "{{ m | tojson }}\n"
        "    {% endif %}\n"
        "{%- endfor %}\n"
        "{{ tools is none }}|{{ strftime_now('%Y') | length }}|{{ flag }}"
    )
    messages = [{"role": "tool", "content": "é<"}, {"role": "user", "content": ""}] * 2
    written = ChatTemplate(source, {}).render(messages, more={"flag": 1})
    assert written == '{"role": "tool", "content": "é<"}\nTrue|4|1'


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('roles must alternate') }}",
     "{{ cycler.__init__.__globals__ }}", "{{ messages[9].content }}", "{{ range(10**9) | list }}"],
)  # fmt: skip
def test_templates_reach_nothing_outside_and_fail_in_one_line(source: str):
    with pytest.raises(ValueError, match="the chat template does not take these messages"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
