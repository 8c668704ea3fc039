"""Committed states of prompts that were read, for prompts that begin alike.

A state is copied out of a slot while a prompt is read, when nothing of it is pending, and copied into another slot
where a later prompt has the same tokens up to there. That the copy is what reading would have left is the law of
`reading`: its pauses change no bit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specla.engine.reading import Pauses
from specla.state import Snapshot

MOST_SEEN = 1 << 16  # blocks of earlier prompts that are remembered without a state
STRIDE, STRIDE_GPU = 128, 512  # tokens between copies


@dataclass(frozen=True)
class Kept:
    """What is to be copied into a slot: a target's state after `length` tokens, a drafter's memory of them."""

    length: int
    state: Snapshot
    memory: Any
    nbytes: int


@dataclass(frozen=True)
class Found:
    """For one prompt: the longest kept beginning, and the keys of further places that are worth keeping."""

    kept: Kept | None
    places: dict[int, bytes]

    def next_place(self, done: int, end: int) -> int:
        """Where reading is to pause for a copy."""
        return min((place for place in self.places if place > done), default=end)


class PrefixCache:
    """Copies of states within `limit` bytes, the least recently used of which go first.

    Worth keeping are the end of a prompt, its last whole block, every so many tokens on the way, and the place where it
    parts from the prompts before it.
    """

    def __init__(self, limit: int, pauses: Pauses, stride: int):
        self.limit, self.unit = limit, pauses.unit
        self.stride = max(stride // pauses.unit, 1) * pauses.unit
        self.nbytes = self.queries = self.hits = self.hit_tokens = 0
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def find(self, tokens: Sequence[int]) -> Found:
        """Look for the longest beginning of `tokens`, which are all that is to be read of a prompt."""
        self.queries += 1
        keys = self._keys(tokens)
        kept = None
        for key in reversed(keys.values()):
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                self.hits += 1
                self.hit_tokens += kept.length
                break
        done, end = 0 if kept is None else kept.length, len(tokens)
        parting = max((place for place, key in keys.items() if key in self._seen), default=0)
        worth = {end, end // self.unit * self.unit, parting}
        places = {
            place: key
            for place, key in keys.items()
            if place > done and (place in worth or place % self.stride == 0)
        }
        for key in keys.values():
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return Found(kept, places)

    def keep(self, key: bytes, kept: Kept) -> None:
        """Take a copy in, and let others go for it; one that is larger than the whole cache is left out."""
        old = self._kept.pop(key, None)
        self.nbytes -= 0 if old is None else old.nbytes
        if kept.nbytes > self.limit:
            return
        self._kept[key] = kept
        self.nbytes += kept.nbytes
        while self.nbytes > self.limit:
            _, oldest = self._kept.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def _keys(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """A name for each beginning that may be kept, by its length, ascending: a hash of all of its tokens."""
        digest, keys = hashlib.blake2b(digest_size=32), {}
        for start in range(0, len(tokens), self.unit):
            block = tokens[start : start + self.unit]
            digest.update(array("q", block).tobytes())
            keys[start + len(block)] = digest.copy().digest()
        return keys
