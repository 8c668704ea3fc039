"""A drafter that knows the answer and is right as often as told: for benchmarks and forced rejections."""

from __future__ import annotations

from collections.abc import Sequence

from specla.drafters.base import Draft, DraftRow, Proposal, TokenDrafter, check_at_least_one, pack

_MASK = 2**64 - 1


class SyntheticDrafter(TokenDrafter):
    """Propose a spine, right with a given probability at each depth, among siblings that are wrong.

    Args:
        acceptance: probability that a draft is right if those above it are: one number, or one a depth.
        num_speculative_tokens: most nodes below the root; wrong siblings take what the spine leaves.
        num_steps: length of the spine. topk: siblings at each depth, the spine included.
        vocab_size: wrong tokens are drawn from it. seed: what is right depends on (seed, key, position) only; an engine
            numbers its requests, so the same requests in the same order meet the same drafts.

    Set `references[key]` to the tokens, prompt included, that plain decoding gives; drafts end where they do.

    Raises:
        ValueError: for sizes below 1, probabilities outside [0, 1] or fewer than steps, or a vocabulary
            without `topk` wrong tokens; in `propose` for a key without a reference.
    """

    name = "synthetic"

    def __init__(
        self,
        acceptance: float | Sequence[float],
        num_speculative_tokens: int,
        num_steps: int,
        topk: int,
        vocab_size: int,
        seed: int = 0,
    ):
        check_at_least_one(
            num_speculative_tokens=num_speculative_tokens,
            num_steps=num_steps,
            topk=topk,
            vocab_size=vocab_size,
        )
        rates = [float(acceptance)] * num_steps if isinstance(acceptance, (int, float)) else list(acceptance)
        if len(rates) < num_steps or not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(f"acceptance must be one number or {num_steps} in [0, 1], got {acceptance!r}")
        if vocab_size <= topk:
            raise ValueError(
                f"vocab_size must be > topk = {topk}, to hold so many wrong tokens, got {vocab_size}"
            )
        self.acceptance = rates
        self.num_speculative_tokens = num_speculative_tokens
        self.num_steps = num_steps
        self.topk = topk
        self.vocab_size = vocab_size
        self.seed = seed
        self.references: dict[int, list[int]] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """One tree a row: the spine and its wrong siblings."""
        return pack([self._draft(row) for row in rows])

    def forget(self, key: int) -> None:
        """Drop the reference of a sequence; unknown keys are fine."""
        self.references.pop(key, None)

    def _draft(self, row: DraftRow) -> Draft:
        draft = Draft([row.tokens[-1]], [-1])
        budget = min(self.num_speculative_tokens, row.limit)
        if budget <= 0:
            return draft
        if row.key not in self.references:
            raise ValueError(f"no reference for key {row.key!r}; known are {list(self.references)}")
        reference = self.references[row.key]
        first = len(row.tokens)
        steps = max(0, min(self.num_steps, budget, len(reference) - first))
        spare = budget - steps
        spine = 0
        for depth in range(steps):
            width = 1 + min(self.topk - 1, spare)
            spare -= width - 1
            noise = self._noise(row.key, first + depth)
            right = (noise >> 11) * 2.0**-53 < self.acceptance[depth]
            truth = reference[first + depth]
            shifts = [1 + (noise + i) % (self.vocab_size - 1) for i in range(width)]
            siblings = [(truth + shift) % self.vocab_size for shift in shifts]
            place = (noise >> 32) % width  # not always the first, so that ids on a path have gaps
            if right:
                siblings[place] = truth
            parent, spine = spine, len(draft.tokens) + place
            draft.tokens.extend(siblings)
            draft.parents.extend([parent] * width)
        return draft

    def _noise(self, key: int, position: int) -> int:
        return _mix(_mix(_mix(self.seed) ^ (key & _MASK)) ^ position)


def _mix(x: int) -> int:
    """One step of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
