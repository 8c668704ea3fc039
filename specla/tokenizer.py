"""Text to token ids and back, for one checkpoint directory (tokenizer.json or SentencePiece tokenizer.model).

Every token is a fixed string of bytes, so decoding is concatenation, whether it is done at once or as tokens
arrive. Files are only parsed as data: chat templates, `auto_map` and custom classes in a checkpoint are never
executed.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

LARGEST = 1 << 24  # tokens: beyond it an id is a mistake, and a table of all ids would not fit
SPACE = "▁"  # how SentencePiece spells a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ALL_SPACES = 1 << 30


@dataclass(frozen=True)
class _Vocabulary:
    """What decoding needs: each token's bytes, which are special, how many leading spaces a text drops."""

    pieces: list[bytes]
    special: frozenset[int]
    leading_spaces: int


class _Backend(Protocol):
    vocabulary: _Vocabulary
    prefix: list[int]  # ids put before every text
    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, texts: Sequence[str], parse_special_tokens: bool) -> list[list[int]]: ...
    def token_id(self, token: str) -> int | None: ...


class Tokenizer:
    """The tokenizer of a checkpoint; made by `load_tokenizer`.

    vocab_size: ids run from 0 to vocab_size - 1. The model's own vocabulary may be padded beyond it.
    bos_token_id, eos_token_id: int or None; eos_token_ids: every id that ends a text (generation_config may
    list several).
    fingerprint: sha256 of the tokenizer file, hexadecimal.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        bos: int | None,
        eos: tuple[int, ...],
        add_bos: bool | None,
        fingerprint: str,
    ):
        self._backend = backend
        self._vocabulary = backend.vocabulary
        self.vocab_size = len(backend.vocabulary.pieces)
        self.bos_token_id = backend.bos_token_id if bos is None else bos
        default_eos = () if backend.eos_token_id is None else (backend.eos_token_id,)
        self.eos_token_ids = eos or default_eos
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        self.fingerprint = fingerprint
        for name, token in (("bos", self.bos_token_id), *(("eos", token) for token in self.eos_token_ids)):
            if token is not None and token < 0:
                raise ValueError(f"{name}_token_id is {token}, expected a token id >= 0")
        if add_bos and self.bos_token_id is None:
            raise ValueError(
                "tokenizer_config.json sets add_bos_token, but the checkpoint names no BOS token"
            )
        if add_bos is None:
            self._prefix = list(backend.prefix)
        else:
            self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: put BOS first where the checkpoint asks for it (EOS is never added: a prompt is to
        be continued).
        parse_special_tokens: special tokens spelled out in the text become their ids; False treats them as
        plain text, which is right for text that a user or a document brought. SentencePiece never parses
        them.
        """
        return self.encode_batch(
            [text], add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
        )[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` of each text, on all cores where the backend can."""
        for text in texts:
            _check_unicode(text)
        rows = self._backend.encode(texts, parse_special_tokens)
        return [self._prefix + ids for ids in rows] if add_special_tokens and self._prefix else rows

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, continues: bool = False) -> str:
        """Text of `ids`; what is not UTF-8 becomes U+FFFD, ids beyond the vocabulary (padding rows) nothing.

        continues: the ids go on from earlier text, so a leading space is real and is kept.
        """
        stream = StreamDecoder(self, skip_special_tokens=skip_special_tokens, continues=continues)
        return stream.push(ids) + stream.finish()

    def token_id(self, token: str) -> int | None:
        """The id of the token that the vocabulary spells `token`, special or not; None when there is none."""
        return self._backend.token_id(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; a special token's are its name. ValueError when negative."""
        if token < 0:
            raise ValueError(f"token id {token} is negative; ids run from 0 to {self.vocab_size - 1}")
        return self._vocabulary.pieces[token] if token < self.vocab_size else b""

    def token_str(self, token: int) -> str:
        """`token_bytes` as text, for showing one token; pieces of a character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether `decode` leaves the token out by default."""
        return token in self._vocabulary.special

    @property
    def leading_spaces(self) -> int:
        """How many spaces at the very start of a decoded text are the tokenizer's own and are dropped."""
        return self._vocabulary.leading_spaces


class StreamDecoder:
    """Turns ids into text as they come, never half a character.

    The pushes and `finish`, joined, equal `Tokenizer.decode` of all ids, however they were cut.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces_to_drop = 0 if continues else tokenizer.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that became complete with `ids`, one or several; a character still missing bytes waits."""
        tokenizer = self._tokenizer
        ids = (ids,) if isinstance(ids, int) else ids
        skipped = tokenizer.is_special if self._skip else lambda _: False
        data = b"".join(tokenizer.token_bytes(int(i)) for i in ids if not skipped(int(i)))
        if data and self._spaces_to_drop:
            kept = data.lstrip(b" ")
            dropped = min(len(data) - len(kept), self._spaces_to_drop)
            data = data[dropped:]
            self._spaces_to_drop = 0 if data else self._spaces_to_drop - dropped
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD when the ids stopped inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory; tokenizer.json is taken where both kinds are present.

    BOS and EOS ids come from generation_config.json, else config.json, else tokenizer_config.json, else the
    model file. BOS is prepended as tokenizer_config.json's add_bos_token says, else as tokenizer.json's
    post-processor does; a tokenizer.model without either prepends it, as Llama does. ValueError for missing,
    broken or unsupported files.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a directory; expected a checkpoint with tokenizer.json or tokenizer.model"
        )
    settings = _read_json(path / "tokenizer_config.json")
    ids = [_read_json(path / "generation_config.json"), _read_json(path / "config.json")]
    backend: _Backend
    if (path / "tokenizer.json").is_file():
        file = path / "tokenizer.json"
        backend = _JsonBackend(file)
    elif (path / "tokenizer.model").is_file():
        file = path / "tokenizer.model"
        backend = _SentencePieceBackend(file)
        _refuse_added_tokens(path, settings, len(backend.vocabulary.pieces))
    else:
        raise ValueError(
            f"no tokenizer files in {path}: expected tokenizer.json or tokenizer.model; "
            "save_pretrained of transformers' fast tokenizers writes the former"
        )
    add_bos = settings.get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        raise ValueError(
            f"add_bos_token in {path / 'tokenizer_config.json'} is {add_bos!r}, expected true or false"
        )
    bos = _config_ids(path, "bos", ids) or _named_id(path, "bos", settings, backend)
    eos = _config_ids(path, "eos", ids) or _named_id(path, "eos", settings, backend)
    fingerprint = hashlib.sha256(file.read_bytes()).hexdigest()
    return Tokenizer(backend, bos=bos[0] if bos else None, eos=eos, add_bos=add_bos, fingerprint=fingerprint)


class _JsonBackend:
    """tokenizer.json through the `tokenizers` package."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, path: Path):
        spec = _read_json(path)
        try:
            from tokenizers import Tokenizer as JsonTokenizer
        except ImportError as error:
            raise ValueError(
                f"reading {path} needs the package tokenizers: pip install tokenizers"
            ) from error
        try:
            # Two copies: parsing special tokens is a switch on the object, and callers may be many threads.
            self._parsing, self._plain = (JsonTokenizer.from_file(str(path)) for _ in range(2))
        except Exception as error:  # the package raises bare Exception for every defect of the file
            raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
        for tokenizer in (self._parsing, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True
        self.vocabulary = _json_vocabulary(path, spec, self._parsing.get_vocab(with_added_tokens=True))
        bare, dressed = (self._parsing.encode("a", add_special_tokens=add).ids for add in (False, True))
        start = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
        self.prefix: list[int] = dressed[:start]

    def encode(self, texts: Sequence[str], parse_special_tokens: bool) -> list[list[int]]:
        tokenizer = self._parsing if parse_special_tokens else self._plain
        return [row.ids for row in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_id(self, token: str) -> int | None:
        found: int | None = self._parsing.token_to_id(token)
        return found


class _SentencePieceBackend:
    """tokenizer.model through the `sentencepiece` package."""

    def __init__(self, path: Path):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ValueError(
                f"reading {path} needs the package sentencepiece: pip install sentencepiece"
            ) from error
        try:
            self._model: Any = SentencePieceProcessor(model_file=str(path))
            size = self._model.get_piece_size()
        except Exception as error:
            raise ValueError(f"{path} is not a readable SentencePiece model: {error}") from error
        if size == 0:
            raise ValueError(f"{path} is not a readable SentencePiece model: its vocabulary is empty")
        model = self._model
        pieces = []
        for i in range(size):
            name = model.id_to_piece(i)
            byte = _BYTE_PIECE.fullmatch(name) if model.is_byte(i) else None
            text = " ⁇ " if model.is_unknown(i) else name.replace(SPACE, " ")
            pieces.append(bytes([int(byte[1], 16)]) if byte else text.encode())
        # The model's normaliser settings are not exposed, so ask what it does to a text.
        leading_spaces = 1 if model.encode("x", out_type=str)[0].startswith(SPACE) else 0
        if model.encode("  x") == model.encode("x"):
            leading_spaces = _ALL_SPACES
        self.vocabulary = _Vocabulary(
            pieces, frozenset(i for i in range(size) if model.is_control(i)), leading_spaces
        )
        self.bos_token_id = model.bos_id() if model.bos_id() >= 0 else None
        self.eos_token_id = model.eos_id() if model.eos_id() >= 0 else None
        self.prefix = [] if self.bos_token_id is None else [self.bos_token_id]

    def encode(self, texts: Sequence[str], parse_special_tokens: bool) -> list[list[int]]:
        rows: list[list[int]] = self._model.encode(list(texts))
        return rows

    def token_id(self, token: str) -> int | None:
        found = self._model.piece_to_id(token)
        return found if self._model.id_to_piece(found) == token else None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid Unicode: lone surrogate at character {error.start}"
        ) from None


def _json_vocabulary(path: Path, spec: dict[str, Any], ids: dict[str, int]) -> _Vocabulary:
    """Bytes of each token, as the file's decoder would give them."""
    decoder = spec.get("decoder") or {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    spaced = [step for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    sentencepiece_like = (
        len(spaced) == 1
        and spaced[0]["pattern"] == {"String": SPACE}
        and spaced[0]["content"] == " "
        and kinds == [kind for kind in ("Replace", "ByteFallback", "Fuse", "Strip") if kind in kinds]
        and ("Fuse" in kinds or not strips)
        and all(step["content"] == " " and step["stop"] == 0 for step in strips)
    )
    if kinds != ["ByteLevel"] and not sentencepiece_like:
        raise ValueError(
            f"{path} has an unsupported decoder {[kind for kind in kinds if kind] or None}; "
            "expected ByteLevel, or SentencePiece's Replace, ByteFallback, Fuse, Strip"
        )
    leading_spaces = sum(step["start"] for step in strips)
    if max(ids.values(), default=0) >= LARGEST:
        raise ValueError(f"{path} gives a token the id {max(ids.values())}, expected ids below {LARGEST}")
    pieces = [b""] * (max(ids.values(), default=-1) + 1)
    for name, i in ids.items():
        pieces[i] = (
            _spaced_bytes(name, "ByteFallback" in kinds) if sentencepiece_like else _byte_level_bytes(name)
        )
    special = frozenset(token["id"] for token in spec.get("added_tokens", ()) if token["special"])
    return _Vocabulary(pieces, special, leading_spaces)


def _spaced_bytes(name: str, byte_fallback: bool) -> bytes:
    byte = _BYTE_PIECE.fullmatch(name) if byte_fallback else None
    return bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(name: str) -> bytes:
    # A character outside the alphabet marks an added token, which is plain text (ASCII is the same in both).
    return bytes(_BYTE_OF[c] for c in name) if all(c in _BYTE_OF for c in name) else name.encode()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _config_ids(path: Path, which: str, configs: list[dict[str, Any]]) -> tuple[int, ...]:
    for config in configs:
        value = config.get(f"{which}_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in values):
            raise ValueError(
                f"{which}_token_id in the config of {path} is {value!r}, expected an integer or a list"
            )
        if values:
            return tuple(values)
    return ()


def _named_id(path: Path, which: str, settings: dict[str, Any], backend: _Backend) -> tuple[int, ...]:
    name = settings.get(f"{which}_token")
    if isinstance(name, dict):
        name = name.get("content")
    if name is None:
        return ()
    found = backend.token_id(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"{which}_token in {path / 'tokenizer_config.json'} is {name!r}, which is not in the vocabulary"
        )
    return (found,)


def _refuse_added_tokens(path: Path, settings: dict[str, Any], size: int) -> None:
    added = _read_json(path / "added_tokens.json")
    extra = [i for i in map(int, settings.get("added_tokens_decoder", {})) if i >= size]
    extra += [i for i in added.values() if isinstance(i, int) and i >= size]
    if extra:
        raise ValueError(
            f"{path} adds tokens {sorted(set(extra))} beyond the {size} of its tokenizer.model; "
            "that is supported with a tokenizer.json only"
        )
