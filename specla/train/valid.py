"""Validation: every document of a dataset once, in windows of one shape, scored in bits per byte of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from specla.train.data import TokenDataset

IGNORE = -100  # target that does not count, as torch's cross_entropy has it


class ValidBatch(NamedTuple):
    """inputs, targets: int64 [B, T], targets IGNORE where nothing is scored; category: int64 [B]."""

    inputs: torch.Tensor
    targets: torch.Tensor
    category: torch.Tensor


class ValidWindows:
    """The documents of a dataset cut into windows of `seq_len` targets, each document from its own beginning.

    A document's first token is predicted from EOS alone, and its EOS is a target too, so the sum of the
    losses is the length of a code for the documents. overlap: targets that a window repeats from the one
    before as context, unscored.
    max_documents: at most so many of each category, evenly spaced. num_bytes: [C] bytes of text scored, by
    category.
    """

    def __init__(
        self, dataset: TokenDataset, seq_len: int, *, overlap: int = 0, max_documents: int | None = None
    ):
        if seq_len <= 0 or not 0 <= overlap < seq_len:
            raise ValueError(
                f"seq_len is {seq_len}, overlap {overlap}; expected seq_len > 0 and 0 <= overlap < seq_len"
            )
        if max_documents is not None and max_documents <= 0:
            raise ValueError(f"max_documents is {max_documents}, expected a number > 0 or None")
        self.dataset, self.seq_len, self.overlap = dataset, seq_len, overlap
        self.categories = dataset.categories
        self.num_bytes = [0] * len(self.categories)
        self._windows: list[tuple[int, int]] = []  # document, first target counted from its start
        for c in range(len(self.categories)):
            (members,) = np.nonzero(dataset.category == c)
            if max_documents is not None and len(members) > max_documents:
                members = members[np.linspace(0, len(members) - 1, max_documents).astype(np.int64)]
            self.num_bytes[c] = int(dataset.num_bytes[members].sum())
            for i in members:
                beyond_first = max(0, int(dataset.end[i] - dataset.start[i]) - seq_len)
                stride = seq_len - overlap
                self._windows += [(int(i), w * stride) for w in range(1 + -(-beyond_first // stride))]

    def batches(self, batch_size: int) -> Iterator[ValidBatch]:
        """All windows; the last batch is filled up with rows of which nothing is scored."""
        data, eos = self.dataset, self.dataset.meta["eos_token_id"]
        for first in range(0, len(self._windows), batch_size):
            inputs = np.full((batch_size, self.seq_len), eos, dtype=np.int64)
            targets = np.full((batch_size, self.seq_len), IGNORE, dtype=np.int64)
            category = np.zeros(batch_size, dtype=np.int64)
            for row, (i, offset) in enumerate(self._windows[first : first + batch_size]):
                begin, end = int(data.start[i]) + offset, int(data.end[i])
                length = min(self.seq_len, end - begin)
                skipped = self.overlap if offset else 0
                inputs[row, :length] = data.tokens[begin - 1 : begin - 1 + length]
                targets[row, skipped:length] = data.tokens[begin + skipped : begin + length]
                category[row] = data.category[i]
            yield ValidBatch(*map(torch.from_numpy, (inputs, targets, category)))

    def bits_per_byte(self, nll: torch.Tensor) -> dict[str, float]:
        """Bits per byte by category, and of "all" together.

        nll: [C], the sum over a category's targets of -ln p, of all batches.
        """
        if nll.shape != (len(self.categories),):
            raise ValueError(
                f"nll has shape {list(nll.shape)}, expected [{len(self.categories)}], one sum a category"
            )
        bits = [value / math.log(2) for value in nll.tolist()]
        rates = {name: b / n for name, b, n in zip(self.categories, bits, self.num_bytes, strict=True) if n}
        return rates | {"all": sum(bits) / sum(self.num_bytes)}
