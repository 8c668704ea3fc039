"""Stopping criteria, asked after every token of a whole batch as `generate` does, though some rows run ahead."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor


class Batch:
    """The output so far, column after column.

    Args:
        prompt: `[B, L]`, padding included; criteria see it before the output, on its device.
        criteria: of transformers. pad: what rows hold that have ended; None leaves them running, as `generate` does
            where no criterion knows an end token.

    `unfinished` tells for each row whether it goes on.
    """

    def __init__(self, prompt: Tensor, criteria: Items[Any], pad: int | None):
        from transformers.generation import stopping_criteria as library

        self.prompt, self.pad = prompt, pad
        self.unfinished = [True] * prompt.shape[0]
        self.columns: list[list[int]] = []
        self.limits = [c.max_length for c in criteria if type(c) is library.MaxLengthCriteria]
        self.times = [
            c.initial_timestamp + c.max_time for c in criteria if type(c) is library.MaxTimeCriteria
        ]
        eos = [c for c in criteria if type(c) is library.EosTokenCriteria]
        self.end_ids = {token for c in eos for token in c.eos_token_id.tolist()}
        told = (library.MaxLengthCriteria, library.MaxTimeCriteria, library.EosTokenCriteria)
        self.others = [c for c in criteria if type(c) not in told]
        self._ids = prompt

    def next_column(self, outputs: Items[Items[int]]) -> list[int] | None:
        """The next token of every row, taken into account, or None while a row that goes on has none."""
        at = len(self.columns)
        column = []
        for output, goes_on in zip(outputs, self.unfinished, strict=True):
            if not goes_on and self.pad is not None:
                column.append(self.pad)
            elif len(output) > at:
                column.append(output[at])
            else:
                return None
        self.columns.append(column)
        done = self._done(column)
        self.unfinished = [a and not b for a, b in zip(self.unfinished, done, strict=True)]
        return column

    @property
    def sequences(self) -> Tensor:
        """`[B, L + T]`, prompt and output."""
        new = torch.tensor(self.columns, dtype=self.prompt.dtype, device=self.prompt.device)
        return torch.cat([self.prompt, new.view(-1, len(self.unfinished)).t()], 1)

    def _done(self, column: list[int]) -> list[bool]:
        length = self.prompt.shape[1] + len(self.columns)
        now = time.time()
        all_done = any(length >= limit for limit in self.limits) or any(now > end for end in self.times)
        done = [all_done or token in self.end_ids for token in column]
        if self.others:
            last = torch.tensor(column, dtype=self.prompt.dtype, device=self.prompt.device)
            self._ids = torch.cat([self._ids, last[:, None]], 1)
            told = torch.tensor(done, device=self.prompt.device)
            for criterion in self.others:
                said = criterion(self._ids, None)
                told = told | said
                if told.shape != (len(column),):
                    raise ValueError(
                        f"{type(criterion).__name__} must say yes or no for each of {len(column)} rows, "
                        f"and gave shape {list(said.shape)}"
                    )
            done = told.tolist()
        return done
