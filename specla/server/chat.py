"""The chat template of a checkpoint: Jinja in a sandbox, rendered as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """Turns messages into the text that a chat model continues. Made by `load_chat_template`."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from None
        self.source, self._special_tokens = source, special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The text; `more` are further variables. ValueError for messages that the template does not take."""
        given = {
            **self._special_tokens, "tools": None, "documents": None, **(more or {}),
            "messages": messages, "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        try:
            return self._template.render(given)
        except Exception as error:  # a template's code may raise anything, most often over a field it misses
            raise ValueError(f"the chat template does not take these messages: {error}") from None


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """chat_template.jinja of a checkpoint, else tokenizer_config.json's; None where there is none.

    Raises:
        ValueError: for one that cannot be read.
    """
    settings: dict[str, Any] = {}
    if (directory / "tokenizer_config.json").is_file():
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    source = settings.get("chat_template")
    if (directory / "chat_template.jinja").is_file():
        source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(source, list):  # several by name
        source = {each.get("name"): each.get("template") for each in source}.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"chat_template in {directory / 'tokenizer_config.json'} is no text")
    return ChatTemplate(source, _special_tokens(settings))


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
