"""Corpus files to tokens to batches: nothing lost, nothing repeated, every batch a function of its step."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specla.tokenizer import Tokenizer
from specla.train.cache import prepare_tokens
from specla.train.corpus import CorpusFile, corpus_files, read_documents
from specla.train.data import TokenDataset

MARKERS = {"<|endoftext|>": 0, "<|user|>": 1, "<|assistant|>": 2, "<|system|>": 3}


class Letters:
    """A tokenizer in a few lines: UTF-8 bytes + 4, and the special tokens of chats."""

    vocab_size = 260
    eos_token_id: int | None = 0
    fingerprint = "letters"

    def __init__(self, markers: dict[str, int] | None = None):
        self.markers = MARKERS if markers is None else markers
        self.calls = 0

    def token_id(self, token: str) -> int | None:
        return self.markers.get(token)

    def encode_batch(self, texts: list[str], **options: bool) -> list[list[int]]:
        assert options == {"add_special_tokens": False, "parse_special_tokens": False}
        self.calls += 1
        return [[byte + 4 for byte in text.encode()] for text in texts]


def write_lines(path: Path, records: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())


def prepare(root: Path, tokenizer: Any = None, **options: Any) -> TokenDataset:
    return prepare_tokens(root, tokenizer or cast(Tokenizer, Letters()), root / "cache", **options)


def numbered(root: Path, sizes: dict[str, list[int]]) -> Path:
    """A corpus of documents with these lengths; with `Counting` every token of it shows where it stood."""
    for name, lengths in sizes.items():
        write_lines(root / "train" / f"{name}.jsonl", [{"text": "x" * n} for n in lengths])
    return root


class Counting(Letters):
    """Gives every token of the corpus an id of its own, from 1 on."""

    vocab_size = 100_000

    def encode_batch(self, texts: list[str], **options: bool) -> list[list[int]]:
        ids = iter(range(1, 1 + sum(map(len, texts))))
        return [[next(ids) for _ in text] for text in texts]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    root = numbered(tmp_path_factory.mktemp("counted"), {"a": [5, 17, 1, 40], "b": [9] * 12, "c": [130]})
    return prepare(root, Counting())


def test_files_of_all_kinds_become_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "train" / "books.jsonl.xz", [{"text": "one", "source": "s"}, {"text": "two"}])
    write_lines(tmp_path / "train" / "python" / "deep" / "x.jsonl", [{"text": "three"}, {"text": ""}])
    (tmp_path / "train" / "python" / "y.txt").write_text("four\n\nfive", encoding="utf-8")
    (tmp_path / "train" / ".hidden").write_text("no", encoding="utf-8")
    (tmp_path / "valid").mkdir()
    found = [(d.category, d.parts) for d in read_documents(corpus_files(tmp_path, "train"))]
    assert found == [
        ("books", (("", "one"),)),
        ("books", (("", "two"),)),
        ("python", (("", "three"),)),
        ("python", (("", "four\n\nfive"),)),
    ]
    listed = corpus_files([tmp_path / "train" / "books.jsonl.xz"])
    assert listed == [CorpusFile(tmp_path / "train" / "books.jsonl.xz", "books")]
    assert corpus_files(corpus_files(tmp_path)) == corpus_files(tmp_path)


def test_tokens_are_documents_between_eos(tmp_path: Path) -> None:
    write_lines(tmp_path / "train" / "books.jsonl", [{"text": "ab"}, {"text": "é"}])
    data = prepare(tmp_path)
    assert data.tokens.tolist() == [0, 101, 102, 0, 0xC3 + 4, 0xA9 + 4, 0]
    assert data.tokens.dtype == np.uint16
    assert data.start.tolist() == [1, 4]
    assert data.end.tolist() == [4, 7]
    assert data.num_bytes.tolist() == [2, 2]
    assert data.meta["categories"] == {"books": {"documents": 2, "tokens": 6, "bytes": 4}}


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<|user|>"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "!"},
]


def test_a_chat_has_markers_as_tokens_and_its_text_as_text(tmp_path: Path) -> None:
    write_lines(tmp_path / "train" / "chat.jsonl", [{"messages": CHAT}])
    data = prepare(tmp_path)

    def letters(text: str) -> list[int]:
        return [byte + 4 for byte in text.encode()]

    first = [1, *letters("\nhi"), 2, *letters("\n<|user|>"), 0]
    assert data.tokens.tolist() == [0, *first, 1, *letters("\n?"), 2, *letters("\n!"), 0]
    assert data.num_bytes.tolist() == [len("\nhi\n<|user|>\n?\n!")]


def test_markers_outside_the_vocabulary_are_text(tmp_path: Path) -> None:
    write_lines(tmp_path / "train" / "chat.jsonl", [{"messages": CHAT[:1]}])
    data = prepare(tmp_path, Letters(markers={}))
    assert bytes(i - 4 for i in data.tokens.tolist()[1:-1]) == b"<|user|>\nhi"
    assert data.num_bytes.tolist() == [len("<|user|>\nhi")]


def test_the_cache_is_reused_until_a_file_or_the_tokenizer_changes(tmp_path: Path) -> None:
    write_lines(tmp_path / "train" / "books.jsonl", [{"text": "ab"}])
    tokenizer = Letters()
    prepare(tmp_path, tokenizer)
    calls = tokenizer.calls
    prepare(tmp_path, tokenizer, weights={"books": 2.0})
    assert tokenizer.calls == calls
    write_lines(tmp_path / "train" / "books.jsonl", [{"text": "abc"}])
    assert prepare(tmp_path, tokenizer).num_tokens == 4
    other = Letters()
    other.fingerprint = "other"
    prepare(tmp_path, other)
    assert other.calls > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "train"]  # no leftovers


def test_a_failure_leaves_the_old_cache(tmp_path: Path) -> None:
    write_lines(tmp_path / "train" / "books.jsonl", [{"text": "ab"}])
    prepare(tmp_path)
    (tmp_path / "train" / "books.jsonl").write_text('{"text": "ab"}\n{"text": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"books.jsonl, line 2"):
        prepare(tmp_path)
    assert TokenDataset(tmp_path / "cache").num_tokens == 3


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    numbered(tmp_path, {"a": [3]})
    assert prepare(tmp_path, Counting()).tokens.dtype == np.uint32
    with pytest.raises(ValueError, match="100000 tokens, uint16 holds 65536"):
        prepare(tmp_path, Counting(), dtype="uint16")
    with pytest.raises(ValueError, match="expected one of auto, uint16, uint32"):
        prepare(tmp_path, dtype="int8")


def targets(data: TokenDataset, epoch_steps: int, batch_size: int, seq_len: int, seed: int) -> Counter[int]:
    rows = [data.batch(step, batch_size, seq_len, seed=seed)[:, 1:] for step in range(epoch_steps)]
    return Counter(torch.cat(rows).flatten().tolist())


@pytest.mark.parametrize("seq_len", [1, 7, 50])
def test_every_token_is_a_target_once_an_epoch(counted: TokenDataset, seq_len: int) -> None:
    windows = counted.num_tokens // seq_len
    seen = targets(counted, windows, 1, seq_len, seed=3)
    assert seen.total() == windows * seq_len
    del seen[0]  # EOS
    assert set(seen.values()) == {1}
    assert len(seen) > counted.num_tokens - len(counted.start) - seq_len


def test_inputs_are_what_stood_before_the_targets(counted: TokenDataset) -> None:
    follows = {int(a): int(b) for a, b in zip(counted.tokens[1:], counted.tokens[2:], strict=False) if a}
    first = {int(counted.tokens[i]) for i in counted.start}
    for step in range(40):
        row = counted.batch(step, 1, 7, seed=1)[0].tolist()
        for before, after in pairwise(row):
            assert after in first if before == 0 else after == follows[before]


@given(
    step=st.integers(0, 60), batch_size=st.integers(1, 9), seq_len=st.integers(1, 60), seed=st.integers(0, 5)
)
def test_a_batch_depends_on_its_step_alone(
    counted: TokenDataset, step: int, batch_size: int, seq_len: int, seed: int
) -> None:
    fresh = TokenDataset(Path(counted.tokens.filename).parent)  # type: ignore[attr-defined]
    batch = fresh.batch(step, batch_size, seq_len, seed=seed)
    assert batch.shape == (batch_size, seq_len + 1)
    assert batch.dtype == torch.int64
    going = counted.batches(seed, max(0, step - 2), batch_size, seq_len)
    for _ in range(max(0, step - 2), step):
        next(going)
    assert torch.equal(next(going), batch)
    # the rows are those of single steps, so a batch may cross from one epoch into the next
    singles = [fresh.batch(step * batch_size + i, 1, seq_len, seed=seed) for i in range(batch_size)]
    assert torch.equal(torch.cat(singles), batch)


def test_seeds_and_epochs_differ(counted: TokenDataset) -> None:
    steps = counted.num_tokens // 7
    epochs = [torch.cat([counted.batch(step + e * steps, 1, 7) for step in range(steps)]) for e in range(2)]
    first, second = ({tuple(row) for row in epoch.tolist()} for epoch in epochs)
    assert len(first & second) < steps / 2  # documents stand in another order, not only windows
    assert epochs[0].tolist() != sorted(epochs[0].tolist())
    assert not torch.equal(counted.batch(0, 8, 7, seed=0), counted.batch(0, 8, 7, seed=1))


@given(weight=st.floats(0, 3.5), epochs=st.integers(1, 6))
def test_weights_repeat_documents_evenly(counted: TokenDataset, weight: float, epochs: int) -> None:
    data = TokenDataset(Path(counted.tokens.filename).parent, {"b": weight})  # type: ignore[attr-defined]
    first = {int(data.tokens[start]): int(c) for start, c in zip(data.start, data.category, strict=True)}
    total: Counter[int] = Counter()
    windows = sum(data.epoch_tokens(0, epoch) for epoch in range(epochs))
    seen = targets(data, 1, windows, 1, seed=0)
    total.update({token: seen[token] for token in first})
    for token, category in first.items():
        expected = weight * epochs if data.categories[category] == "b" else epochs
        assert abs(total[token] - expected) < 1 + 1e-6
    of_b = sum(count for token, count in total.items() if data.categories[first[token]] == "b")
    assert abs(of_b - 12 * weight * epochs) <= 1


def test_weights_are_checked(counted: TokenDataset) -> None:
    path = Path(counted.tokens.filename).parent  # type: ignore[attr-defined]
    for weights, message in (
        ({"d": 1.0}, "expected a, b, c"),
        ({"a": -1.0}, "expected a finite number >= 0"),
        ({"a": float("nan")}, "expected a finite number >= 0"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, "all weights are 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenDataset(path, weights)


def test_a_corpus_without_enough_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"holds no files; expected .jsonl, .jsonl.xz, .txt"):
        prepare(tmp_path)
    write_lines(tmp_path / "train" / "a.jsonl", [{"text": ""}])
    with pytest.raises(ValueError, match="the corpus is empty"):
        prepare(tmp_path)
    write_lines(tmp_path / "train" / "a.jsonl", [{"text": "abc"}])
    data = prepare(tmp_path)
    assert data.batch(0, 2, 4).shape == (2, 5)
    with pytest.raises(ValueError, match="too small: epoch 0 has 4 tokens"):
        data.batch(0, 2, 5)
    with pytest.raises(ValueError, match="seq_len > 0"):
        data.batch(0, 2, 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"x", r"a.tsv is not a corpus file; expected .jsonl, .jsonl.xz, .txt"),
        ("a.jsonl", b'{"text": "a"}\nplain text\n', "a.jsonl, line 2"),
        ("a.jsonl", b'["text"]\n', 'a.jsonl, line 1: expected {"text"'),
        ("a.jsonl", b'{"messages": [{"role": "bot", "content": ""}]}\n', "user, assistant, system"),
        ("a.jsonl", b'{"messages": ["hi"]}\n', "user, assistant, system"),
        ("a.jsonl", b"\xff\n", "a.jsonl is not UTF-8"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8"),
        ("a.jsonl.xz", b"not xz", "a.jsonl.xz is not a complete .xz file"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "a"}\n')[:-8], "a.jsonl.xz is not a complete .xz file"),
    ],
)
def test_a_file_that_is_no_corpus_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path)


def test_a_missing_file_or_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        corpus_files([tmp_path / "a.txt"])
    with pytest.raises(ValueError, match="train is not a directory"):
        corpus_files(tmp_path)


def test_other_directories_are_not_touched(tmp_path: Path) -> None:
    numbered(tmp_path, {"a": [3]})
    precious = tmp_path / "cache" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("keep", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a token cache"):
        prepare(tmp_path)
    assert precious.read_text(encoding="utf-8") == "keep"
    with pytest.raises(ValueError, match="not a token cache"):
        TokenDataset(tmp_path / "train")


def test_a_cache_cut_short_is_refused(tmp_path: Path) -> None:
    numbered(tmp_path, {"a": [30]})
    prepare(tmp_path)
    tokens = tmp_path / "cache" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-10])
    with pytest.raises(ValueError, match="cut short"):
        TokenDataset(tmp_path / "cache")


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    numbered(tmp_path, {"a": [3]})
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="let eos_token in"):
        prepare(tmp_path, tokenizer)
