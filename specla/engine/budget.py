"""How many drafts a round may verify: fixed, or chosen from what rounds have cost and brought."""

from __future__ import annotations

from collections.abc import Sequence

from specla.engine.params import SpeculativeConfig

CHOICES = (0, 4, 8, 16)
MEMORY = 48.0  # sequences whose rounds the past weighs as much as, in the running means, at most
FADING = 0.97  # of what it weighs with each round
FEW_DRAFTS = 64  # drafts of all sequences up to which the largest choice is looked at first
LOOK = 4  # sequences whose rounds are a first look at a choice
SHARE = 0.01  # of all time, which looking at losing choices may lose
DULL = 0.02  # of its own time, which a look loses at least
FIRST = 4  # rounds of a new number of sequences, of which one may be slow for reasons of its own
TICK = 1e-9  # seconds that a round takes at least, whatever a coarse clock says


class Budget:
    """The number of drafts for the next round.

    With "auto", each choice keeps running means of tokens and seconds a round, and the one with the most tokens a
    second is taken. At first choices are looked at one after another until one loses: downwards for few sequences, to
    which drafts cost little, and upwards for many. When another choice has won, those beyond it are looked at in the
    same way. After that a losing choice is looked at when what this is expected to lose is a small share of the time
    since the last look, so that a hopeless drafter costs next to nothing. Seconds are those of a number of sequences;
    when it changes, all of them are scaled by the quickest of the first rounds of the new number.
    """

    def __init__(self, config: SpeculativeConfig, choices: Sequence[int] = CHOICES):
        chosen = config.num_speculative_tokens
        self.fixed = None if isinstance(chosen, str) else chosen
        self.choices = tuple(sorted(choices))
        self._tokens = dict.fromkeys(self.choices, 0.0)
        self._seconds = dict.fromkeys(self.choices, 0.0)
        self._weight = dict.fromkeys(self.choices, 0.0)
        self._saved = dict.fromkeys(self.choices, 0.0)  # seconds that looking at it may lose
        self._looking: int | None = None
        self._step, self._looked = 0, 0  # which way; sequences so far
        self._scale = 0  # of the number of sequences
        self._scaled_by = self.choices[0]  # the choice whose seconds set it
        self._first = 0  # rounds that may set it anew
        self._round = -1  # the first round warms up and does not count

    @property
    def sizes(self) -> Sequence[int]:
        """What `choose` may answer."""
        return self.choices if self.fixed is None else (self.fixed,)

    @property
    def best(self) -> int:
        """The choice with the most tokens a second so far; the smallest before any is known."""
        return max(self.choices, key=self._rate)

    def choose(self, sequences: int = 1) -> int:
        """Drafts for the next round of so many sequences at most."""
        if self.fixed is not None:
            return self.fixed
        if not self._step:
            few = sequences * self.choices[-1] <= FEW_DRAFTS
            self._looking, self._step = (self.choices[-1], -1) if few else (self.choices[0], 1)
        if self._looking is not None:
            return self._looking
        best = self.best
        due = [
            choice for choice in self.choices if choice != best and self._loss(choice) <= self._saved[choice]
        ]
        return due[0] if due else best

    def observe(self, choice: int, tokens: float, seconds: float, sequences: int = 1) -> None:
        """Record a round: its budget, tokens for each sequence, how long it took, and of how many sequences."""
        self._round += 1
        if self.fixed is not None or self._round == 0:
            return
        seconds = max(seconds, TICK)
        before = self.best
        self._rescale(choice, seconds, sequences)
        old = min(self._weight[choice], MEMORY)
        new = sequences / (old + sequences)
        self._tokens[choice] += new * (tokens - self._tokens[choice])
        self._seconds[choice] += new * (seconds - self._seconds[choice])
        self._weight[choice] = old + sequences
        for other in self.choices:
            self._weight[other] *= FADING
            self._saved[other] += SHARE * seconds / len(self.choices)
        self._saved[choice] = 0.0
        if choice == self._looking:
            self._looked += sequences
            if choice == 0 or self._looked >= LOOK:
                self._look_beyond(choice, won=choice == self.best)
        elif self._looking is None and self.best == choice != before:
            self._step = 1 if choice > before else -1
            self._look_beyond(choice, won=True)

    def _look_beyond(self, choice: int, *, won: bool) -> None:
        at = self.choices.index(choice) + self._step
        self._looking = self.choices[at] if won and 0 <= at < len(self.choices) else None
        self._looked = 0

    def _rescale(self, choice: int, seconds: float, sequences: int) -> None:
        scale, known = max(1, sequences).bit_length(), self._seconds[choice]
        new = scale != self._scale
        if new:
            self._scale, self._scaled_by, self._first = scale, choice, FIRST if known else 0
        quicker = self._first > 0 and choice == self._scaled_by and seconds < known
        self._first = max(0, self._first - 1)
        if known and (new or quicker):
            self._seconds = {other: seconds / known * its for other, its in self._seconds.items()}

    def _loss(self, choice: int) -> float:
        """Seconds that a round with this choice may lose: it brings no fewer tokens than smaller ones did."""
        seconds = self._seconds[choice]
        if not seconds:
            plain, most = self._seconds[self.choices[0]], max(c for c in self.choices if self._seconds[c])
            seconds = plain + (self._seconds[most] - plain) * choice / most if most else plain
        tokens = max(self._tokens[other] for other in self.choices if other <= choice)
        return max(seconds - tokens / self._rate(self.best), DULL * seconds)

    def _rate(self, choice: int) -> float:
        return self._tokens[choice] / self._seconds[choice] if self._seconds[choice] else 0.0
