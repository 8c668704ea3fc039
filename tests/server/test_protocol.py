"""A body is judged in a memory of its own size, however many mistakes are in it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specla.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MANY = 1000
TURN = {"role": "user", "content": "a"}
NAMES = {f"x{n}": 0 for n in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [""] * MANY}),
        (CompletionRequest, {"prompt": ["\ud800"] * MANY}),
        (CompletionRequest, {"prompt": [[-1]] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": ["\ud800"] * MANY}),
        (CompletionRequest, {"prompt": "a", "metadata": NAMES}),
        (CompletionRequest, {"prompt": "a", "stream": True, "stream_options": NAMES}),
        (CompletionRequest, {"prompt": "a", **NAMES}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{**TURN, "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{**TURN, "content": [{"type": "text", "text": "a", **NAMES}]}]}),
        (TokenizeRequest, {"messages": [{}] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
        (DetokenizeRequest, {"tokens": [], **NAMES}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:50],
)
def test_many_mistakes_are_told_as_few(kind: type[BaseModel], body: dict[str, Any]):
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body)
    assert refusal.value.error_count() <= 5  # one for each form that the field may have
