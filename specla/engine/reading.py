"""Where the reading of a prompt may pause, so that its pauses change no bit of the state that it leaves."""

from __future__ import annotations

from typing import NamedTuple

from specla.state import AttentionState, StatePool

BLOCK = 64  # tokens that the delta rule takes together
GRID, GRID_GPU = 128, 512  # tokens that are read together where their number matters
STEP, STEP_GPU = 256, 2048  # prompt tokens of a step, unless told otherwise


class Pauses(NamedTuple):
    """The places of a prompt at which reading may pause, or must: every `unit` tokens.

    On a CPU recurrent layers compute block by block, and it does not matter how many blocks are read together; blocks
    begin where reading does, which may be anywhere in a text that goes on. Attention sums in an order that depends on
    it, and on a GPU a walk rounds by the largest value that it meets, so there the number is always the same.
    """

    unit: int
    must: bool

    @classmethod
    def of(cls, pool: StatePool) -> Pauses:
        if pool.device.type != "cpu":
            return cls(GRID_GPU, True)
        if any(isinstance(layer, AttentionState) for layer in pool.layers):
            return cls(GRID, True)
        return cls(BLOCK, False)

    def stretch(self, done: int, end: int, most: int) -> int:
        """Tokens to read now, at most `most`, of those from `done` to `end`; 0 when none can be."""
        if end - done <= most and (not self.must or end // self.unit == done // self.unit):
            return end - done
        count = self.unit - done % self.unit if self.must else most // self.unit * self.unit
        return count if count <= min(end - done, most) else 0


def default_step(pool: StatePool) -> int:
    """Prompt tokens of a step: few enough on a CPU that those who run hardly notice."""
    return STEP if pool.device.type == "cpu" else STEP_GPU
