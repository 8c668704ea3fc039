"""Reading a training corpus: files of text or chats become documents, each with a category.

A document is a sequence of parts (marker, text). Plain text has one part without a marker; a chat has a part
for each message, led by the marker of its role, and <|endoftext|> after each reply of the assistant:
`<|user|>\\n{content}<|assistant|>\\n{content}<|endoftext|>`.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

END = "<|endoftext|>"
ROLE_MARKERS = {"user": "<|user|>", "assistant": "<|assistant|>", "system": "<|system|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SUFFIXES = (".jsonl", ".jsonl.xz", ".txt")


class CorpusFile(NamedTuple):
    """One file and the category of all its documents."""

    path: Path
    category: str


Paths = str | Path | Sequence[str | Path | CorpusFile]


class Document(NamedTuple):
    """One document: (marker, text) parts, marker "" for none."""

    category: str
    parts: tuple[tuple[str, str], ...]


def corpus_files(data: Paths, split: str | None = "train") -> list[CorpusFile]:
    """The files of a corpus, sorted by path.

    data: a corpus directory, whose folder `split` is read recursively (None: the directory itself), or a list
    of files, those of earlier calls among them. A file's category is its folder below the split, or, directly
    in the split, its name without suffix: train/books.jsonl.xz and train/books/a.txt are both "books".
    ValueError for missing files and other suffixes.
    """
    if isinstance(data, str | Path):
        root = Path(data) if split is None else Path(data) / split
        if not root.is_dir():
            raise ValueError(
                f"{root} is not a directory; expected a corpus directory with a folder for each split"
            )
        found = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        files = [CorpusFile(path, _category(path.relative_to(root))) for path in found]
    else:
        root = Path("the given list")
        files = [
            file if isinstance(file, CorpusFile) else CorpusFile(Path(file), _category(Path(Path(file).name)))
            for file in data
        ]
    if not files:
        raise ValueError(f"{root} holds no files; expected {', '.join(SUFFIXES)}")
    for file in files:
        if _suffix(file.path) is None:
            raise ValueError(f"{file.path} is not a corpus file; expected {', '.join(SUFFIXES)}")
        if not file.path.is_file():
            raise ValueError(f"{file.path} does not exist")
    return files


def read_documents(files: Sequence[CorpusFile]) -> Iterator[Document]:
    """The documents of `files` in order; a .txt file is one document, a .jsonl line one document each.

    A record has "text" (a string) or "messages" (a list of {"role", "content"}). Empty documents are left
    out. ValueError, naming file and line, for anything that is not UTF-8 or not such a record.
    """
    for file in files:
        for document in _read_file(file):
            if any(text for _, text in document.parts):
                yield document


def chat_parts(messages: Sequence[dict[str, str]]) -> tuple[tuple[str, str], ...]:
    """The parts of a chat, in the format of the module's docstring. ValueError for malformed messages."""
    parts: list[tuple[str, str]] = []
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if role not in ROLE_MARKERS or not isinstance(content, str):
            roles = ", ".join(ROLE_MARKERS)
            raise ValueError(
                f"expected messages with a string 'content' and a 'role' of {roles}; got {message!r:.80}"
            )
        parts.append((ROLE_MARKERS[role], "\n" + content))
        if role == "assistant":
            parts.append((END, ""))
    return tuple(parts)


def _suffix(path: Path) -> str | None:
    return next(
        (suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if path.name.endswith(suffix)), None
    )


def _category(relative: Path) -> str:
    if len(relative.parts) > 1:
        return relative.parts[0]
    suffix = _suffix(relative)
    return relative.name[: -len(suffix)] if suffix else relative.name


def _read_file(file: CorpusFile) -> Iterator[Document]:
    suffix = _suffix(file.path)
    try:
        if suffix == ".txt":
            yield Document(file.category, (("", file.path.read_text(encoding="utf-8")),))
            return
        opened: IO[str]
        with (lzma.open if suffix == ".jsonl.xz" else open)(file.path, "rt", encoding="utf-8") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield Document(file.category, _parts(line, f"{file.path}, line {number}"))
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{file.path} is not a complete .xz file: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.path} is not UTF-8 text: {error}") from error


def _parts(line: str, where: str) -> tuple[tuple[str, str], ...]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("text"), str):
            return (("", record["text"]),)
        if isinstance(record, dict) and isinstance(record.get("messages"), list):
            return chat_parts(record["messages"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    raise ValueError(f'{where}: expected {{"text": string}} or {{"messages": [{{"role", "content"}}, ...]}}')
