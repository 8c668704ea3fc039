"""How many drafts a round may verify: fixed, or chosen from what rounds have cost and brought."""

from __future__ import annotations

from collections.abc import Sequence

from specla.engine.params import SpeculativeConfig

CHOICES: Sequence[int] = (0, 4, 8, 16)
MEMORY = 0.9  # weight of the past in the running means
PROBE_EVERY = 24  # rounds between tries of a choice other than the best, doubled when it keeps losing
LONGEST_WAIT = 384


class Budget:
    """The number of drafts for the next round.

    With "auto", each choice keeps running means of seconds and tokens a round, and the one with the most tokens a
    second is taken. Now and then a neighbour of it is tried; a choice that keeps losing is tried ever more rarely, so
    that a hopeless drafter costs next to nothing.
    """

    def __init__(self, config: SpeculativeConfig):
        self.fixed = config.num_speculative_tokens if isinstance(config.num_speculative_tokens, int) else None
        self._seconds = dict.fromkeys(CHOICES, 0.0)
        self._tokens = dict.fromkeys(CHOICES, 0.0)
        self._weight = dict.fromkeys(CHOICES, 0.0)
        self._wait = dict.fromkeys(CHOICES, PROBE_EVERY)
        self._due = {choice: 4 * n for n, choice in enumerate(reversed(CHOICES))}  # the largest first
        self._round = 0

    def choose(self) -> int:
        if self.fixed is not None:
            return self.fixed
        due = [choice for choice in CHOICES if self._due[choice] <= self._round and choice != self.best]
        return due[-1] if due else self.best

    @property
    def best(self) -> int:
        """The choice with the most tokens a second so far."""
        tried = [choice for choice in CHOICES if self._weight[choice] > 0]
        return max(tried, key=self.rate, default=CHOICES[-1])

    def rate(self, choice: int) -> float:
        return self._tokens[choice] / max(self._seconds[choice], 1e-9)

    def observe(self, choice: int, nodes: int, tokens: float, seconds: float) -> None:
        """Record a round: its budget, the nodes verified, tokens for each sequence, and how long it took."""
        self._round += 1
        if self.fixed is not None:
            return
        for means, value in ((self._seconds, seconds), (self._tokens, tokens), (self._weight, 1.0)):
            means[choice] = MEMORY * means[choice] + (1 - MEMORY) * value
        if choice == self.best:
            self._wait[choice] = PROBE_EVERY
        elif self._due[choice] <= self._round:
            self._due[choice] = self._round + self._wait[choice]
            self._wait[choice] = min(2 * self._wait[choice], LONGEST_WAIT)
