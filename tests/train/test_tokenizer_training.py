"""Training a tokenizer on a tiny corpus: exact round trips, promised special tokens, line ends left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from specla.tokenizer import Tokenizer, load_tokenizer
from specla.train.corpus import CHAT_TEMPLATE, chat_parts, corpus_files
from specla.train.tokenizer import sample_texts, train_tokenizer

pytest.importorskip("tokenizers")

CODE = """\
def total(values):
    result = 0
    for value in values:
        result += value
    return result
"""
PROSE = "It was the best of times, it was the worst of times; it's said they'll come again in 1859.\n\n"


def write_corpus(root: Path) -> Path:
    """books (2 files), python, and chat, a few hundred bytes to a few thousand each."""
    train = root / "train"
    (train / "books").mkdir(parents=True)
    for i in range(2):
        (train / "books" / f"{i}.txt").write_text(PROSE * (i + 1), encoding="utf-8")
    records = [{"text": CODE.replace("value", f"value_{i}")} for i in range(30)]
    (train / "python.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It's me."}]}
    (train / "chat.jsonl").write_text(json.dumps(chat) + "\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    root = tmp_path_factory.mktemp("corpus")
    return train_tokenizer(write_corpus(root), 330, root / "out"), root / "out"


def test_special_tokens_have_the_promised_ids(trained: tuple[Tokenizer, Path]) -> None:
    tokenizer, _ = trained
    names = [
        "<|endoftext|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        *(f"<|reserved_{i}|>" for i in range(4)),
    ]
    assert [tokenizer.token_id(name) for name in names] == list(range(8))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 0, 330)
    assert tokenizer.encode("It")[0] != 0  # no BOS
    assert tokenizer.encode("<|user|>\nWho?<|assistant|>\n")[0] == 1
    assert all(tokenizer.is_special(i) for i in range(8))


@given(text=st.text(max_size=40))
def test_any_text_comes_back(trained: tuple[Tokenizer, Path], text: str) -> None:
    tokenizer, _ = trained
    assert tokenizer.decode(tokenizer.encode(text, parse_special_tokens=False)) == text


def test_digits_stand_alone_and_lines_end_with_their_token(trained: tuple[Tokenizer, Path]) -> None:
    tokenizer, _ = trained
    assert not [i for i in range(330) if len(tokenizer.token_str(i)) > 1 and tokenizer.token_str(i).isdigit()]
    lines = CODE.splitlines(keepends=True)
    for n in range(1, len(lines)):
        head, tail = "".join(lines[:n]), "".join(lines[n:])
        assert tokenizer.encode(head) + tokenizer.encode(tail) == tokenizer.encode(head + tail)


def test_indentation_is_one_token(trained: tuple[Tokenizer, Path]) -> None:
    tokenizer, _ = trained
    assert tokenizer.token_str(tokenizer.encode("        result")[0]) == " " * 7


def test_training_twice_gives_the_same_file(trained: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    _, out = trained
    train_tokenizer(write_corpus(tmp_path), 330, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_the_saved_directory_loads_alone(trained: tuple[Tokenizer, Path]) -> None:
    tokenizer, out = trained
    again = load_tokenizer(out)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.decode(again.encode(CODE)) == CODE


def test_the_chat_template_writes_what_training_reads(trained: tuple[Tokenizer, Path]) -> None:
    jinja2 = pytest.importorskip("jinja2")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Me."},
        {"role": "user", "content": "Why?"},
    ]
    _, out = trained
    saved = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    assert saved == CHAT_TEMPLATE
    text = jinja2.Template(saved).render(messages=messages, add_generation_prompt=True)
    assert text == "".join(marker + part for marker, part in chat_parts(messages)) + "<|assistant|>\n"
    assert text == (
        "<|system|>\nBe brief.<|user|>\nWho?<|assistant|>\nMe.<|endoftext|><|user|>\nWhy?<|assistant|>\n"
    )


def test_the_sample_is_even_over_the_categories(tmp_path: Path) -> None:
    for name, count in (("large", 400), ("middle", 100), ("small", 3)):
        (tmp_path / "train").mkdir(exist_ok=True)
        lines = [json.dumps({"text": f"{name} {i:03} " + "x" * 88}) for i in range(count)]
        (tmp_path / "train" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sample = sample_texts(corpus_files(tmp_path), 10_000, seed=0)
    counts = {name: sum(text.startswith(name) for text in sample) for name in ("large", "middle", "small")}
    assert counts["small"] == 3
    assert abs(counts["large"] - counts["middle"]) <= 2
    assert 95 <= sum(counts.values()) <= 105
    assert sample == sample_texts(corpus_files(tmp_path), 10_000, seed=0)
    assert sample != sample_texts(corpus_files(tmp_path), 10_000, seed=1)
    large = [text for text in sample if text.startswith("large")]
    assert large != sorted(large)  # not the first ones of the file


def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with pytest.raises(ValueError, match="at least 264"):
        train_tokenizer(tmp_path, 100, tmp_path / "out")
    with pytest.raises(ValueError, match="too small: it gives"):
        train_tokenizer(tmp_path, 5000, tmp_path / "out")
    with pytest.raises(ValueError, match="sample_bytes"):
        train_tokenizer(tmp_path, 330, tmp_path / "out", sample_bytes=0)
    with pytest.raises(ValueError, match="not a directory"):
        train_tokenizer(tmp_path / "missing", 330, tmp_path / "out")
    assert not (tmp_path / "out").exists()
