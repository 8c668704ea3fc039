"""What a benchmark generates from: a few built-in prompts, or a file of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BenchPrompt:
    """A text to continue; results are also given for each category."""

    id: str
    category: str
    prompt: str


BUILT_IN = tuple(
    BenchPrompt(f"{category}/{number}", category, prompt)
    for number, (category, prompt) in enumerate(
        [
            ("prose", "The rain had stopped an hour before, and the streets of the old town were quiet."),
            (
                "prose",
                "Once upon a time there was a clockmaker who lived at the edge of a great forest. Every",
            ),
            ("python", 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n'),
            (
                "python",
                "class Circle:\n    def __init__(self, radius):\n        self.radius = radius\n\n"
                "    def area(self):\n        return 3.14159 * self.radius ** 2\n\n\n"
                "class Square:\n    def __init__(self, side):\n",
            ),
            ("facts", "# The Moon\n\nThe Moon is the only natural satellite of the Earth. It"),
            ("facts", "Photosynthesis is the process by which plants"),
            (
                "records",
                '[\n  {"name": "Ada", "born": 1815, "field": "mathematics"},\n'
                '  {"name": "Marie", "born": 1867, "field": "physics"},\n  {"name": "Alan",',
            ),
            (
                "chat",
                "<|user|>\nWrite a short list of things to take on a walk in the mountains.<|assistant|>\n",
            ),
        ]
    )
)


def read_prompts(path: str | Path | None, limit: int | None = None) -> list[BenchPrompt]:
    """The prompts of a JSON-lines file (`id`, `category`, `prompt`; only `prompt` is needed), or the built-in ones.

    Args:
        limit: take this many, spread evenly over the file, so that every part of it has its share.

    Raises:
        ValueError: for a line that does not fit, naming it, or a file without prompts.
    """
    prompts = list(BUILT_IN) if path is None else _read_lines(Path(path))
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _read_lines(path: Path) -> list[BenchPrompt]:
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str) or not raw["prompt"]:
            raise ValueError(f'{path} line {number} must be an object with a non-empty string "prompt"')
        prompts.append(
            BenchPrompt(str(raw.get("id", number)), str(raw.get("category", "all")), raw["prompt"])
        )
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts
