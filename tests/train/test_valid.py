"""Validation windows: every token scored once, in the right context, and bits per byte that add up."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st

from specla.tokenizer import Tokenizer
from specla.train.cache import prepare_tokens
from specla.train.data import TokenDataset
from specla.train.valid import IGNORE, ValidWindows


class Counting:
    """Gives every character of the corpus an id of its own, from 1 on; EOS is 0."""

    vocab_size = 5000
    eos_token_id = 0
    fingerprint = "counting"

    def encode_batch(self, texts: list[str], **options: Any) -> list[list[int]]:
        ids = iter(range(1, 1 + sum(map(len, texts))))
        return [[next(ids) for _ in text] for text in texts]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Documents of category a: 3, 20, 7 and 41 letters; b: two of 11 two-byte letters."""
    root = tmp_path_factory.mktemp("valid")
    (root / "valid").mkdir()
    for name, texts in (("a", ["x" * n for n in (3, 20, 7, 41)]), ("b", ["é" * 11] * 2)):
        lines = [json.dumps({"text": text}) for text in texts]
        (root / "valid" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return prepare_tokens(root, cast(Tokenizer, Counting()), root / "cache", split="valid")


@given(seq_len=st.integers(1, 50), overlap=st.integers(0, 49), batch_size=st.integers(1, 7))
def test_every_token_is_scored_once_in_its_context(
    data: TokenDataset, seq_len: int, overlap: int, batch_size: int
) -> None:
    overlap %= seq_len
    tokens = data.tokens.tolist()
    place = {token: i for i, token in enumerate(tokens) if token}
    seen: Counter[int] = Counter()
    ends = 0
    for batch in ValidWindows(data, seq_len, overlap=overlap).batches(batch_size):
        assert batch.inputs.shape == batch.targets.shape == (batch_size, seq_len)
        for inputs, targets, category in zip(*(x.tolist() for x in batch), strict=True):
            scored = [t for t, target in enumerate(targets) if target != IGNORE]
            seen.update(targets[t] for t in scored if targets[t])
            ends += sum(targets[t] == 0 for t in scored)
            for t in scored:
                last = place[targets[t]] if targets[t] else place[inputs[t]] + 1
                first = max(start for start in data.start.tolist() if start <= last) - 1  # an EOS
                assert inputs[: t + 1] == tokens[last - t - 1 : last]
                assert last - t - 1 >= first
                assert last - t - 1 == first or t >= overlap
                assert data.categories[category] == ("a" if last < data.end[3] else "b")
    assert seen == Counter(list(place))
    assert ends == 6


def test_bits_per_byte_is_the_code_length_over_the_text(data: TokenDataset) -> None:
    windows = ValidWindows(data, 8, overlap=3)
    nll = torch.zeros(2, dtype=torch.float64)
    for batch in windows.batches(5):
        scored = (batch.targets != IGNORE).sum(1).double()
        nll.index_add_(0, batch.category, scored * math.log(2))  # a model that needs one bit a token
    rates = windows.bits_per_byte(nll)
    assert rates == pytest.approx({"a": 75 / 71, "b": 24 / 44, "all": 99 / 115})
    with pytest.raises(ValueError, match=r"expected \[2\]"):
        windows.bits_per_byte(torch.zeros(3))


def test_a_part_of_the_documents_counts_its_own_bytes(data: TokenDataset) -> None:
    windows = ValidWindows(data, 64, max_documents=2)
    assert windows.num_bytes == [3 + 41, 44]
    (batch,) = windows.batches(4)
    assert (batch.targets != IGNORE).sum(1).tolist() == [4, 42, 12, 12]


@pytest.mark.parametrize("options", [{"seq_len": 0}, {"overlap": 8}, {"overlap": -1}, {"max_documents": 0}])
def test_wrong_sizes_are_refused(data: TokenDataset, options: dict[str, int]) -> None:
    sizes: dict[str, int] = {"seq_len": 8} | options
    with pytest.raises(ValueError, match="expected"):
        ValidWindows(data, sizes.pop("seq_len"), **sizes)


def test_validation_does_not_depend_on_weights(data: TokenDataset) -> None:
    weighted = TokenDataset(Path(data.tokens.filename).parent, {"a": 0.0})  # type: ignore[attr-defined]
    first, second = (list(ValidWindows(d, 16).batches(32)) for d in (data, weighted))
    assert all(
        torch.equal(a, b)
        for one, two in zip(first, second, strict=True)
        for a, b in zip(one, two, strict=True)
    )
