"""How many drafts a round may verify: fixed, or chosen from what rounds have cost and brought."""

from __future__ import annotations

from collections.abc import Sequence

from specla.engine.params import SpeculativeConfig

CHOICES = (0, 4, 8, 16)
MEMORY = 0.9  # weight of the past in the running means, after a round with the same choice
FADING = 0.97  # and for each round without it
FIRST_WAIT, LONGEST_WAIT = 48, 384  # rounds between tries of a choice that loses; doubled each time it does


class Budget:
    """The number of drafts for the next round.

    With "auto", each choice keeps running means of tokens and seconds a round, and the one with the most
    tokens a second is taken. The others are tried now and then, and one that keeps losing ever more rarely,
    so that a hopeless drafter costs next to nothing.
    """

    def __init__(self, config: SpeculativeConfig, choices: Sequence[int] = CHOICES):
        chosen = config.num_speculative_tokens
        self.fixed = None if isinstance(chosen, str) else chosen
        self.choices = choices
        self._tokens = dict.fromkeys(choices, 0.0)
        self._seconds = dict.fromkeys(choices, 0.0)
        self._last = dict.fromkeys(choices, 0)
        self._wait = dict.fromkeys(choices, FIRST_WAIT)
        self._due = {choice: n for n, choice in enumerate(reversed(choices))}
        self._round = -1  # the first round warms up and does not count

    @property
    def sizes(self) -> Sequence[int]:
        """What `choose` may answer."""
        return self.choices if self.fixed is None else (self.fixed,)

    @property
    def best(self) -> int:
        """The choice with the most tokens a second so far; the largest before any is known."""
        return max(self.choices, key=self._rate) if any(self._seconds.values()) else self.choices[-1]

    def choose(self) -> int:
        """Drafts for the next round at most."""
        if self.fixed is not None:
            return self.fixed
        due = [choice for choice in self.choices if choice != self.best and self._due[choice] <= self._round]
        return due[-1] if due else self.best

    def observe(self, choice: int, tokens: float, seconds: float) -> None:
        """Record a round: its budget, tokens for each sequence, and how long it took."""
        self._round += 1
        if self.fixed is not None or self._round == 0:
            return
        was_best = choice == self.best
        old = MEMORY * FADING ** (self._round - self._last[choice] - 1) if self._seconds[choice] else 0.0
        self._last[choice] = self._round
        self._tokens[choice] = old * self._tokens[choice] + (1 - old) * tokens
        self._seconds[choice] = old * self._seconds[choice] + (1 - old) * seconds
        if choice == self.best:
            self._wait[choice] = FIRST_WAIT
        elif not was_best or self._due[choice] <= self._round:
            self._due[choice] = self._round + self._wait[choice]
            self._wait[choice] = min(2 * self._wait[choice], LONGEST_WAIT)

    def _rate(self, choice: int) -> float:
        return self._tokens[choice] / self._seconds[choice] if self._seconds[choice] else 0.0
