"""A tokenised corpus on disk, and batches of it that are a pure function of the step.

tokens.bin holds one EOS and then every document followed by EOS, in the order of the files; documents.npy and
meta.json say where each begins, of which category it is and how many bytes of text it had. `prepare_tokens`
writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

FORMAT = 1
META, DOCUMENTS, TOKENS = CACHE_FILES = ("meta.json", "documents.npy", "tokens.bin")

Int64 = npt.NDArray[np.int64]


class TokenDataset:
    """The tokens that `prepare_tokens` left in a directory, memory-mapped.

    tokens [n]: document i is tokens[start[i]:end[i]], its EOS included; one more EOS stands before it.
    start, end, category, num_bytes [D]: int64, one entry a document; num_bytes counts the UTF-8 of its text.
    categories: the names that `category` indexes. meta: what meta.json says, with counts for each category.
    weights: how often an epoch visits the documents of a category (default 1): 2.5 means each document two or
    three times, and every document five times in two epochs; 0 leaves it out. It affects batches only.
    """

    def __init__(self, directory: str | Path, weights: Mapping[str, float] | None = None):
        path = Path(directory)
        try:
            meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
            documents: Int64 = np.load(path / DOCUMENTS, allow_pickle=False)
            self.tokens: npt.NDArray[Any] = np.memmap(path / TOKENS, dtype=meta["dtype"], mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} is not a token cache written by prepare_tokens: {error}") from error
        if meta.get("format") != FORMAT or len(documents) == 0 or documents[-1, 1] != len(self.tokens):
            raise ValueError(
                f"{path} is a token cache of another format or cut short; delete it and prepare it again"
            )
        self.meta = meta
        self.categories: tuple[str, ...] = tuple(meta["categories"])
        self.start, self.end, self.category, self.num_bytes = documents.T
        self.weights = self._checked(weights or {})
        # Each seed and epoch is laid out once; the caches hold no state that a result depends on.
        self._epoch = lru_cache(maxsize=2)(self._lay_out)
        self._windows = lru_cache(maxsize=2)(self._shuffle)
        self._num_tokens = lru_cache(maxsize=None)(self._count)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, EOS included, weights aside."""
        return len(self.tokens) - 1

    def epoch_tokens(self, seed: int = 0, epoch: int = 0) -> int:
        """Tokens that one epoch visits, with the weights."""
        return self._num_tokens(seed, epoch)

    def batch(self, step: int, batch_size: int, seq_len: int, *, seed: int = 0) -> torch.Tensor:
        """Batch number `step`: int64 [batch_size, seq_len + 1]; inputs are [:, :-1], targets [:, 1:].

        A function of its arguments only: training resumes at any step, and ranks can each take their rows.

        An epoch joins the documents in a random order, cuts them into windows of seq_len targets and shuffles
        those: every token is a target once an epoch, less a remainder below seq_len. A batch may begin in one
        epoch and end in the next. ValueError when an epoch has less than one window.
        """
        if batch_size <= 0 or seq_len <= 0 or step < 0:
            raise ValueError(
                f"batch_size is {batch_size}, seq_len {seq_len}, step {step}; "
                "expected batch_size > 0, seq_len > 0, step >= 0"
            )
        rows = np.empty((batch_size, seq_len + 1), dtype=np.int64)
        epoch, first = 0, step * batch_size
        filled = 0
        while filled < batch_size:
            windows = self.epoch_tokens(seed, epoch) // seq_len
            if windows == 0:
                raise ValueError(
                    f"the corpus is too small: epoch {epoch} has {self.epoch_tokens(seed, epoch)} tokens "
                    f"(weights included), expected at least seq_len = {seq_len}"
                )
            if first < windows:
                for window in self._windows(seed, epoch, seq_len)[first : first + batch_size - filled]:
                    self._read(seed, epoch, int(window) * seq_len, rows[filled])
                    filled += 1
            first = max(first - windows, 0)
            epoch += 1
        return torch.from_numpy(rows)

    def batches(self, seed: int, step: int, batch_size: int, seq_len: int) -> Iterator[torch.Tensor]:
        """`batch` of `step`, `step` + 1, and so on without end."""
        while True:
            yield self.batch(step, batch_size, seq_len, seed=seed)
            step += 1

    def _checked(self, weights: Mapping[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if name not in self.categories:
                raise ValueError(
                    f"weights names the category {name!r}; expected {', '.join(self.categories)}"
                )
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {name!r} is {weight}, expected a finite number >= 0")
        full = {name: float(weights.get(name, 1.0)) for name in self.categories}
        if not any(full.values()):
            raise ValueError("all weights are 0, expected one above 0")
        return full

    def _copies(self, seed: int, epoch: int) -> Int64:
        """How often each document occurs in the epoch [D]: over E epochs, E * weight rounded down or up."""
        copies = np.empty(len(self.category), dtype=np.int64)
        for c, name in enumerate(self.categories):
            (members,) = np.nonzero(self.category == c)
            rank = np.random.default_rng([seed, 0, c]).permutation(len(members))
            phase = (rank + 0.5) / len(members)
            weight = self.weights[name]
            copies[members] = np.floor((epoch + 1) * weight + phase) - np.floor(epoch * weight + phase)
        return copies

    def _count(self, seed: int, epoch: int) -> int:
        return int(((self.end - self.start) * self._copies(seed, epoch)).sum())

    def _lay_out(self, seed: int, epoch: int) -> tuple[Int64, Int64]:
        """The documents of an epoch in their order [M], and where each begins in the joined text [M + 1]."""
        order = np.repeat(np.arange(len(self.category)), self._copies(seed, epoch))
        order = np.random.default_rng([seed, 1, epoch]).permutation(order)
        return order, np.concatenate([[0], np.cumsum(self.end[order] - self.start[order])])

    def _shuffle(self, seed: int, epoch: int, seq_len: int) -> Int64:
        windows = self.epoch_tokens(seed, epoch) // seq_len
        return np.random.default_rng([seed, 2, epoch]).permutation(windows)

    def _read(self, seed: int, epoch: int, position: int, out: Int64) -> None:
        """Tokens from `position` - 1 of the joined text on (before its first token stands an EOS)."""
        order, begins = self._epoch(seed, epoch)
        filled = 0
        if position == 0:
            out[0] = self.meta["eos_token_id"]
            filled = 1
        else:
            position -= 1
        i = int(np.searchsorted(begins, position, side="right")) - 1
        while filled < len(out):
            begin = int(self.start[order[i]]) + position - int(begins[i])
            piece = self.tokens[begin : min(int(self.end[order[i]]), begin + len(out) - filled)]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            i += 1
            position = int(begins[i])
