"""Tokenised corpora in compact slices, each a fair sample of every category: what travels to another machine.

A slice is one .xz file: a line of JSON, the documents, and their tokens. Tokens compress better than the text that they
stand for.
"""

from __future__ import annotations

import json
import lzma
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specla.models.loader import replace_file
from specla.train.data import CACHE_FILES, DOCUMENTS, META, TOKENS, TokenDataset

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]  # for words of two bytes
KIND = "specla-token-slice"


class _Slice(NamedTuple):
    head: dict[str, Any]  # kind, number, of, and the cache's meta
    documents: npt.NDArray[np.int64]  # [D, 4] as in a cache, but positions count from the slice's first token
    tokens: npt.NDArray[Any]


def write_slice(data: TokenDataset, number: int, of: int, path: str | Path) -> int:
    """Write every `of`-th document of each category, from the `number`-th on, and return the bytes that it takes.

    Raises:
        ValueError: for a number outside of 0..of - 1.
        OSError: when it cannot be written.
    """
    if not 0 <= number < of:
        raise ValueError(f"the number of a slice must be in 0..{of - 1}, got {number}")
    chosen = np.concatenate(
        [np.nonzero(data.category == c)[0][number::of] for c in range(len(data.categories))]
    )
    lengths = data.end[chosen] - data.start[chosen]
    ends = np.cumsum(lengths)
    documents = np.stack([ends - lengths, ends, data.category[chosen], data.num_bytes[chosen]], 1).astype(
        "<i8"
    )
    kind = np.dtype(data.meta["dtype"]).newbyteorder("<")
    tokens = [np.asarray(data.tokens[data.start[i] : data.end[i]], dtype=kind) for i in chosen]
    head = {"kind": KIND, "number": number, "of": of, "documents": len(chosen), "meta": data.meta}

    def write(beside: Path) -> None:
        with lzma.open(beside, "wb", format=lzma.FORMAT_XZ, filters=FILTERS) as out:
            out.write(json.dumps(head).encode() + b"\n" + documents.tobytes())
            for piece in tokens:
                out.write(piece.tobytes())

    path = Path(path)
    replace_file(path, write)
    return path.stat().st_size


def join_slices(paths: Sequence[str | Path], cache: str | Path) -> TokenDataset:
    """A token cache of the documents of some slices of one corpus, in place of what `cache` held.

    Raises:
        ValueError: for a file that is no whole slice, for slices of different corpora, or for one given twice.
    """
    slices = sorted((_read(Path(path)) for path in paths), key=lambda part: part.head["number"])
    if not slices:
        raise ValueError("no slices were given, expected at least one")
    first, numbers = slices[0].head, [part.head["number"] for part in slices]
    for path, part in zip(sorted(map(str, paths)), slices, strict=True):
        if part.head["meta"] != first["meta"] or part.head["of"] != first["of"]:
            raise ValueError(f"slices of different corpora or cuts were given, {path} among them")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"a slice was given twice: {', '.join(map(str, numbers))}")
    meta = first["meta"] | {"files": [*first["meta"]["files"], ["slices", f"{numbers} of {first['of']}", ""]]}
    names = list(meta["categories"])
    counts = {name: {"documents": 0, "tokens": 0, "bytes": 0} for name in names}
    eos = np.array([meta["eos_token_id"]], dtype=meta["dtype"])
    position, rows = 1, []
    for part in slices:
        rows.append(part.documents + np.array([position, position, 0, 0]))
        position += len(part.tokens)
        for begin, end, category, size in part.documents.tolist():
            for name, amount in (("documents", 1), ("tokens", end - begin), ("bytes", size)):
                counts[names[category]][name] += amount
    cache = Path(cache)
    if cache.exists() and (not cache.is_dir() or {path.name for path in cache.iterdir()} - set(CACHE_FILES)):
        raise ValueError(f"{cache} exists and is not a token cache; expected a new or an empty directory")
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=cache.name + ".") as folder:
        new = Path(folder) / "cache"
        new.mkdir()
        with open(new / TOKENS, "wb") as out:
            for tokens in [eos, *(part.tokens for part in slices)]:
                out.write(tokens.astype(meta["dtype"]).tobytes())
        np.save(new / DOCUMENTS, np.concatenate(rows))
        text = json.dumps(meta | {"categories": counts, "tokens": position}, indent=1) + "\n"
        replace_file(new / META, partial(Path.write_text, data=text, encoding="utf-8"))
        if cache.exists():
            shutil.rmtree(cache)
        new.rename(cache)
    return TokenDataset(cache)


def _read(path: Path) -> _Slice:
    try:
        with lzma.open(path, "rb") as file:
            head = json.loads(file.readline())
            if not isinstance(head, dict) or head.get("kind") != KIND:
                raise ValueError("it is of another kind")
            documents = np.frombuffer(file.read(head["documents"] * 32), dtype="<i8").reshape(-1, 4)
            kind = np.dtype(head["meta"]["dtype"]).newbyteorder("<")
            tokens = np.frombuffer(file.read(), dtype=kind)
            if len(documents) != head["documents"] or len(tokens) != documents[-1, 1]:
                raise ValueError("it is cut short")
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path} is not a whole slice of a token cache: {error}") from error
    return _Slice(head, documents, tokens)
