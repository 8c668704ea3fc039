"""Tokenizers made on the spot: what is encoded comes back, at once and token by token."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specla.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")

SENTENCES = [
    "the cat sat on the mat, and the dog sat on the cat",
    "def add(first, second):\n    return first + second",
    "naïve café für Zoë, 12 + 34 = 46",
    "one thing after another  with  two spaces",
]
TEXTS = [*SENTENCES, "", " leading", "   three", "tail ", "日本語 🙂 text", "a\n\n\tb", "e\u0301", "\x00\x7f"]


def save_byte_level(path: Path, *, bos: bool = False) -> None:
    """A byte-level BPE tokenizer.json, <s> = 0 and </s> = 1."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))


def save_spaced(path: Path, *, strip: int = 1) -> None:
    """A tokenizer.json as Llama's: pieces with ▁ for spaces, bytes for what is not in the vocabulary."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    names += [chr(c) for c in range(ord("a"), ord("z") + 1)]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    vocabulary = {name: i for i, name in enumerate([*names, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    decoders: list[Any] = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    ]
    if strip:
        decoders.append(tokenizers.decoders.Strip(" ", strip, 0))
    tokenizer.decoder = tokenizers.decoders.Sequence(decoders)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))


def save_sentencepiece(path: Path, **options: Any) -> None:
    """A SentencePiece BPE model with byte fallback, Llama's settings unless `options` say otherwise."""
    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": 330,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, **(settings | options)
    )
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(model.getvalue())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte_level")
    save_byte_level(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("spaced")
    save_spaced(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("pieces")
    save_sentencepiece(path)
    return load_tokenizer(path)


@pytest.fixture(params=["byte_level", "spaced", "pieces"])
def any_kind(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_encoded_comes_back(any_kind: Tokenizer, spaced: Tokenizer, text: str) -> None:
    if any_kind is spaced:
        text = text.lstrip(" ")  # this kind gives no ▁ of its own to a text that begins with one
    ids = any_kind.encode(text)
    assert any_kind.decode(ids) == text
    assert all(0 <= i < any_kind.vocab_size for i in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_whole_characters_and_in_the_end_everything(any_kind: Tokenizer, text: str) -> None:
    stream = StreamDecoder(any_kind)
    ids = any_kind.encode(text)
    parts = [stream.push(i) for i in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + stream.finish() == any_kind.decode(ids)


def test_a_character_of_several_tokens_appears_with_its_last(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🙂")
    assert len(ids) == 4  # nothing like it was in the training text
    stream = StreamDecoder(byte_level)
    assert [stream.push(i) for i in ids] == ["", "", "", "🙂"]
    assert stream.finish() == ""


def test_a_broken_character_becomes_replacement_characters_in_place(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🙂b")
    del ids[3]
    assert byte_level.decode(ids) == "a\ufffdb"
    stream = StreamDecoder(byte_level)
    assert [stream.push(i) for i in ids] == ["a", "", "", "", "\ufffdb"]
    stream = StreamDecoder(byte_level)
    assert stream.push(ids[:3]) == "a"
    assert stream.finish() == "\ufffd"


@given(data=st.data())
def test_any_ids_cut_anywhere_decode_as_in_one_piece(
    byte_level: Tokenizer, spaced: Tokenizer, pieces: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([byte_level, spaced, pieces]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    options = {"skip_special_tokens": data.draw(st.booleans()), "continues": data.draw(st.booleans())}
    stream = StreamDecoder(tokenizer, **options)
    text, rest = "", list(ids)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += stream.push(rest[:size])
        rest = rest[size:]
    assert text + stream.finish() == tokenizer.decode(ids, **options)


def test_decoding_agrees_with_the_tokenizers_package(tmp_path: Path) -> None:
    for name, save in (("byte", save_byte_level), ("spaced", save_spaced)):
        save(tmp_path / name)
        ours = load_tokenizer(tmp_path / name)
        theirs = tokenizers.Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        draw = random.Random(0)
        letters = [i for i in range(ours.vocab_size) if b"<" not in ours.token_bytes(i)[:1]]
        for _ in range(200):
            ids = [draw.choice(letters) for _ in range(draw.randrange(12))]
            if "\ufffd" not in ours.decode(
                ids
            ):  # of broken characters the package makes what cannot be streamed
                assert ours.decode(ids) == theirs.decode(ids)
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": True}])
def test_decoding_agrees_with_the_sentencepiece_package(tmp_path: Path, options: dict[str, Any]) -> None:
    save_sentencepiece(tmp_path, **options)
    ours = load_tokenizer(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    draw = random.Random(0)
    usable = [i for i in range(ours.vocab_size) if not theirs.is_byte(i) and not theirs.is_unknown(i)]
    spaces = [i for i in usable if set(ours.token_bytes(i)) == {32}]
    for _ in range(300):
        ids = draw.choices(spaces, k=draw.randrange(3)) + draw.choices(usable, k=draw.randrange(8))
        stream = StreamDecoder(ours)
        assert "".join(map(stream.push, ids)) == ours.decode(ids) == theirs.decode(ids)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_continuation_keeps_its_leading_space(spaced: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (spaced, pieces):
        ids = tokenizer.encode("the the", add_special_tokens=False)
        cut = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]) == "the")
        assert tokenizer.decode(ids[cut:]) == "the"
        assert tokenizer.decode(ids[cut:], continues=True) == " the"


def test_special_tokens_are_skipped_on_demand_and_parsed_on_demand(byte_level: Tokenizer) -> None:
    assert byte_level.encode("a</s>", parse_special_tokens=True)[-1] == 1
    plain = byte_level.encode("a</s>", parse_special_tokens=False)
    assert 1 not in plain
    assert byte_level.decode(plain) == "a</s>"
    parsed = byte_level.encode("a</s>b")
    assert byte_level.decode(parsed) == "ab"
    assert byte_level.decode(parsed, skip_special_tokens=False) == "a</s>b"


def test_tokens_are_found_and_shown(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    assert byte_level.token_id("</s>") == 1
    assert byte_level.token_id("no such token") is None
    assert byte_level.token_str(1) == "</s>"
    assert pieces.token_id("</s>") == 2
    assert pieces.token_id("no such token") is None
    (the,) = byte_level.encode(" the")
    assert byte_level.token_str(the) == " the"
    assert byte_level.token_bytes(byte_level.vocab_size + 5) == b""
    with pytest.raises(ValueError, match="negative"):
        byte_level.decode([-1])


def test_bos_follows_the_settings_then_the_post_processor(tmp_path: Path) -> None:
    save_byte_level(tmp_path / "plain")
    save_byte_level(tmp_path / "template", bos=True)
    for name, expected in (("plain", []), ("template", [0])):
        tokenizer = load_tokenizer(tmp_path / name)
        body = tokenizer.encode("cat", add_special_tokens=False)
        assert tokenizer.encode("cat") == expected + body  # and never an EOS
        for add in (True, False):
            write_json(tmp_path / name / "tokenizer_config.json", {"add_bos_token": add, "bos_token": "<s>"})
            assert load_tokenizer(tmp_path / name).encode("cat") == [0] * add + body


def test_sentencepiece_alone_adds_bos(tmp_path: Path) -> None:
    save_sentencepiece(tmp_path)
    assert load_tokenizer(tmp_path).encode("cat")[0] == 1
    write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": False})
    assert load_tokenizer(tmp_path).encode("cat")[0] != 1


def test_where_bos_and_eos_come_from(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_ids == ()
    assert load_tokenizer(tmp_path).bos_token_id is None
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    assert (load_tokenizer(tmp_path).bos_token_id, load_tokenizer(tmp_path).eos_token_id) == (0, 1)
    write_json(tmp_path / "config.json", {"bos_token_id": 7, "eos_token_id": 8})
    assert (load_tokenizer(tmp_path).bos_token_id, load_tokenizer(tmp_path).eos_token_id) == (7, 8)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 6], "bos_token_id": None})
    assert load_tokenizer(tmp_path).eos_token_ids == (5, 6)
    assert load_tokenizer(tmp_path).eos_token_id == 5
    assert load_tokenizer(tmp_path).bos_token_id == 7


def test_a_limit_in_the_file_does_not_cut_a_prompt(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(SENTENCES[0])) == SENTENCES[0]
    assert 0 not in tokenizer.encode(SENTENCES[0])


def test_errors_name_the_file_and_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected tokenizer.json or tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="not a directory"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "tokenizer.model").write_bytes(b"nothing like it")
    with pytest.raises(ValueError, match=r"tokenizer.model is not a readable"):
        load_tokenizer(tmp_path)
    for content in ("{", "[]", "{}", '{"model": {"type": "Unheard"}}', "\x00"):
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=r"tokenizer.json"):
            load_tokenizer(tmp_path)


def test_what_is_not_supported_raises(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.decoder = tokenizers.decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"unsupported decoder \['WordPiece'\]"):
        load_tokenizer(tmp_path)

    save_byte_level(tmp_path)
    for settings, message in (
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"add_bos_token": True}, "no BOS token"),
        ({"eos_token": "<none>"}, "not in the vocabulary"),
    ):
        write_json(tmp_path / "tokenizer_config.json", settings)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {})
    write_json(tmp_path / "config.json", {"eos_token_id": "2"})
    with pytest.raises(ValueError, match="eos_token_id"):
        load_tokenizer(tmp_path)

    save_sentencepiece(tmp_path / "pieces")
    write_json(tmp_path / "pieces" / "added_tokens.json", {"<extra>": 5000})
    with pytest.raises(ValueError, match="5000"):
        load_tokenizer(tmp_path / "pieces")


def test_a_lone_surrogate_is_refused(any_kind: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        any_kind.encode("a\ud800")
