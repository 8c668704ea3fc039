"""Slices of a token cache: together they are the cache, alone a fair sample, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specla.train.cache import prepare_tokens
from specla.train.data import TokenDataset
from specla.train.slices import join_slices, write_slice
from specla.train.tokenizer import train_tokenizer

WORDS = "one two three four five six seven eight nine ten eleven twelve".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    root = tmp_path_factory.mktemp("corpus")
    (root / "train").mkdir()
    chance = np.random.default_rng(0)
    for category, documents in (("a", 9), ("b", 4)):
        lines = [json.dumps({"text": " ".join(chance.choice(WORDS, 30))}) for _ in range(documents)]
        (root / "train" / f"{category}.jsonl").write_text("\n".join(lines))
    return prepare_tokens(root, train_tokenizer(root, 280, root / "tokenizer"), root / "cache")


def documents(data: TokenDataset) -> list[tuple[int, int, list[int]]]:
    each = zip(data.start, data.end, data.category, data.num_bytes, strict=True)
    return sorted((int(c), int(n), data.tokens[b:e].tolist()) for b, e, c, n in each)


def test_all_slices_together_are_the_cache(data: TokenDataset, tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.xz" for n in range(3)]
    sizes = [write_slice(data, n, 3, path) for n, path in enumerate(paths)]
    assert sizes == [path.stat().st_size for path in paths]
    joined = join_slices(paths[::-1], tmp_path / "cache")
    assert documents(joined) == documents(data) and joined.num_tokens == data.num_tokens
    assert joined.tokens[0] == data.meta["eos_token_id"] and joined.tokens.dtype == data.tokens.dtype
    assert joined.meta["categories"] == data.meta["categories"]
    assert joined.batch(1, 2, 16).shape == (2, 17)
    again = join_slices(paths, tmp_path / "cache")  # in place of the one before
    assert np.array_equal(again.tokens, joined.tokens)


def test_a_slice_has_its_share_of_every_category(data: TokenDataset, tmp_path: Path) -> None:
    write_slice(data, 1, 3, tmp_path / "1.xz")
    part = join_slices([tmp_path / "1.xz"], tmp_path / "cache")
    counts = {name: each["documents"] for name, each in part.meta["categories"].items()}
    assert counts == {"a": 3, "b": 1} and part.meta["files"] != data.meta["files"]
    whole = documents(data)
    assert all(document in whole for document in documents(part))


def test_mistakes_are_named(data: TokenDataset, tmp_path: Path) -> None:
    one, other, twelve = (tmp_path / f"{name}.xz" for name in ("one", "other", "twelve"))
    write_slice(data, 0, 3, one)
    write_slice(data, 0, 2, other)
    with pytest.raises(ValueError, match=r"number of a slice must be in 0\.\.2, got 3"):
        write_slice(data, 3, 3, one)
    with pytest.raises(ValueError, match="given twice: 0, 0"):
        join_slices([one, one], tmp_path / "cache")
    with pytest.raises(ValueError, match="different corpora or cuts"):
        join_slices([one, other], tmp_path / "cache")
    with pytest.raises(ValueError, match="no slices were given"):
        join_slices([], tmp_path / "cache")
    twelve.write_bytes(one.read_bytes()[:-12])
    (tmp_path / "text.xz").write_text("text")
    for bad in (twelve, tmp_path / "text.xz", tmp_path / "none.xz"):
        with pytest.raises(ValueError, match=rf"{bad.name} is not a whole slice"):
            join_slices([bad], tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a token cache"):
        join_slices([one], tmp_path / "cache")
