"""Tokenising a corpus, once, into the files that `TokenDataset` reads."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specla.tokenizer import Tokenizer
from specla.train.corpus import END, CorpusFile, Document, Paths, corpus_files, read_documents
from specla.train.data import CACHE_FILES, DOCUMENTS, FORMAT, META, TOKENS, TokenDataset

DTYPES = ("auto", "uint16", "uint32")
_BATCH_BYTES = 4_000_000  # text tokenised at once: enough documents for all cores, little enough memory


def prepare_tokens(
    data: Paths,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    *,
    split: str | None = "train",
    dtype: str = "auto",
    weights: Mapping[str, float] | None = None,
) -> TokenDataset:
    """Tokenise a corpus on all cores into `cache_dir`, or reuse it when files and tokenizer are the same.

    data, split: as in `corpus_files`; weights: as in `TokenDataset`, not part of the cache. Markers of chats
    become special tokens where the vocabulary has them, else plain text; special tokens spelled out inside a
    document's text stay text. ValueError for an empty corpus, a tokenizer without EOS, or a vocabulary larger
    than `dtype` (auto, uint16, uint32) holds.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if dtype == "auto":
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    limit = np.iinfo(dtype).max + 1
    if tokenizer.vocab_size > limit:
        raise ValueError(
            f"the vocabulary has {tokenizer.vocab_size} tokens, {dtype} holds {limit}; use auto or uint32"
        )
    eos = tokenizer.eos_token_id
    if eos is None or eos >= tokenizer.vocab_size:
        raise ValueError(
            f"documents are separated by the end token, but the tokenizer's is {eos}: let eos_token in "
            f"tokenizer_config.json name a token of its vocabulary"
        )
    files = corpus_files(data, split)
    key = {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": eos,
        "tokenizer": tokenizer.fingerprint,
        "files": [[file.category, file.path.name, _sha256(file.path)] for file in files],
    }
    cache = Path(cache_dir)
    if not _same(cache / META, key):
        _write(cache, files, tokenizer, key)
    return TokenDataset(cache, weights)


def _write(cache: Path, files: Sequence[CorpusFile], tokenizer: Tokenizer, key: dict[str, Any]) -> None:
    """Write a cache beside `cache` and put it in its place when complete."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    if cache.exists() and (not cache.is_dir() or {path.name for path in cache.iterdir()} - set(CACHE_FILES)):
        raise ValueError(
            f"{cache} exists and is not a token cache; expected a new or an empty directory, or an old cache"
        )
    categories = sorted({file.category for file in files})
    counts = {name: {"documents": 0, "tokens": 0, "bytes": 0} for name in categories}
    eos = key["eos_token_id"]
    rows: list[tuple[int, int, int, int]] = []
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=cache.name + ".") as folder:
        new = Path(folder) / "cache"
        new.mkdir()
        with open(new / TOKENS, "wb") as out:
            out.write(np.array([eos], dtype=key["dtype"]).tobytes())
            position = 1
            for document, ids, size in _tokenised(read_documents(files), tokenizer):
                if not ids or ids[-1] != eos:
                    ids.append(eos)
                out.write(np.array(ids, dtype=key["dtype"]).tobytes())
                rows.append((position, position + len(ids), categories.index(document.category), size))
                position += len(ids)
                for name, amount in (("documents", 1), ("tokens", len(ids)), ("bytes", size)):
                    counts[document.category][name] += amount
        if not rows:
            raise ValueError(
                f"the corpus is empty: no document with text in {len(files)} files, {files[0].path} the first"
            )
        np.save(new / DOCUMENTS, np.array(rows, dtype=np.int64))
        meta = key | {"categories": counts, "tokens": position}
        (new / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        if cache.exists():
            shutil.rmtree(cache)
        new.rename(cache)


def _tokenised(
    documents: Iterator[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, list[int], int]]:
    """Each document with its ids and the UTF-8 bytes of its text (markers that are one token have none)."""
    pending: list[tuple[Document, list[str | int]]] = []
    size = 0
    for document in documents:
        pieces = _pieces(document, tokenizer)
        pending.append((document, pieces))
        size += sum(len(piece) for piece in pieces if isinstance(piece, str))
        if size >= _BATCH_BYTES:
            yield from _encode(pending, tokenizer)
            pending, size = [], 0
    yield from _encode(pending, tokenizer)


def _pieces(document: Document, tokenizer: Tokenizer) -> list[str | int]:
    """The document as texts and ready-made ids; markers that the vocabulary lacks join the text."""
    pieces: list[str | int] = []
    for marker, text in document.parts:
        token = tokenizer.eos_token_id if marker == END else tokenizer.token_id(marker) if marker else None
        if token is not None:
            pieces.append(token)
        elif marker:
            text = marker + text
        if text and pieces and isinstance(pieces[-1], str):
            pieces[-1] += text
        elif text:
            pieces.append(text)
    return pieces


def _encode(
    pending: list[tuple[Document, list[str | int]]], tokenizer: Tokenizer
) -> Iterator[tuple[Document, list[int], int]]:
    texts = [piece for _, pieces in pending for piece in pieces if isinstance(piece, str)]
    rows = iter(tokenizer.encode_batch(texts, add_special_tokens=False, parse_special_tokens=False))
    for document, pieces in pending:
        ids: list[int] = []
        size = 0
        for piece in pieces:
            if isinstance(piece, str):
                ids += next(rows)
                size += len(piece.encode())
            else:
                ids.append(piece)
        yield document, ids, size


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _same(path: Path, key: dict[str, Any]) -> bool:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(meta, dict) and all(meta.get(name) == value for name, value in key.items())
