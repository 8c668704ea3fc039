"""Prompt lookup that proposes trees: what followed earlier occurrences of the history's last few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from specla.drafters.base import Draft, DraftRow, Proposal, TokenDrafter, check_at_least_one, pack

_MAX_MATCHES = 16  # occurrences a proposal looks at
_LONGER = 4.0  # how much more an occurrence counts for every further token it shares
_DOUBT = 0.25  # weight of "something else follows", in units of the latest one-token occurrence


class NgramIndex:
    """Where each n-gram of one history was continued; grows with the history and never rescans it."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        # n-gram -> places of the token after it, ascending
        self.starts: dict[tuple[int, ...], list[int]] = {}
        self.length = 0

    def extend(self, tokens: list[int]) -> None:
        """Read what was appended to `tokens` since the last call."""
        assert len(tokens) >= self.length, "a history only grows until it is forgotten"
        for start in range(max(self.length, 1), len(tokens)):
            for n in self.sizes:
                if n <= start:
                    self.starts.setdefault(tuple(tokens[start - n : start]), []).append(start)
        self.length = len(tokens)

    def matches(self, tokens: list[int]) -> list[tuple[int, float]]:
        """Up to 16 places whose past looks like the end of `tokens`, weighted: longest first, then latest."""
        weights: dict[int, float] = {}
        for n in self.sizes:
            if n > len(tokens):
                continue
            for start in reversed(self.starts.get(tuple(tokens[-n:]), ())):
                if len(weights) == _MAX_MATCHES:
                    return list(weights.items())
                if start not in weights:
                    weights[start] = _LONGER ** (n - 1) / (1 + len(weights))
        return list(weights.items())


class NgramDrafter(TokenDrafter):
    """Propose continuations that the history has already seen, merged into one tree and picked best first.

    Args:
        num_speculative_tokens: most nodes below the root. num_steps: greatest depth. topk: most siblings.
        max_ngram, min_ngram: lengths of the suffix to look up.

    Raises:
        ValueError: for sizes below 1 or max_ngram < min_ngram.
    """

    name = "ngram"

    def __init__(
        self,
        num_speculative_tokens: int = 16,
        num_steps: int = 8,
        topk: int = 4,
        max_ngram: int = 4,
        min_ngram: int = 1,
    ):
        check_at_least_one(
            num_speculative_tokens=num_speculative_tokens, num_steps=num_steps, topk=topk, min_ngram=min_ngram
        )
        if max_ngram < min_ngram:
            raise ValueError(f"max_ngram must be >= min_ngram = {min_ngram}, got {max_ngram}")
        self.num_speculative_tokens = num_speculative_tokens
        self.num_steps = num_steps
        self.topk = topk
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """One tree a row; a row without a match, or with limit 0, is its root alone."""
        return pack(self.drafts(rows))

    def drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """The same before they are packed."""
        return [self._draft(row) for row in rows]

    def forget(self, key: int) -> None:
        """Drop the index of a sequence; unknown keys are fine."""
        self._indexes.pop(key, None)

    def _draft(self, row: DraftRow) -> Draft:
        tokens = row.tokens
        draft = Draft([tokens[-1]], [-1])
        budget = min(self.num_speculative_tokens, row.limit)
        if budget <= 0:
            return draft
        index = self._indexes.get(row.key)
        if index is None:
            index = self._indexes[row.key] = NgramIndex(self.min_ngram, self.max_ngram)
        index.extend(tokens)

        # A node is the set of occurrences that agree so far. Its chance falls along every path, so best first
        # keeps parents before children.
        heap: list[tuple[float, int, int, int, list[tuple[int, float]]]] = []
        order = 0

        def grow(node: int, depth: int, chance: float, places: list[tuple[int, float]]) -> None:
            nonlocal order
            branches: dict[int, list[tuple[int, float]]] = {}
            for place, weight in places:
                if place + depth < len(tokens):
                    branches.setdefault(tokens[place + depth], []).append((place, weight))
            weights = [sum(weight for _, weight in branch) for branch in branches.values()]
            total = sum(weights) + _DOUBT
            ranked = sorted(zip(weights, branches.values(), strict=True), key=lambda pair: -pair[0])
            for weight, branch in ranked[: self.topk]:
                heappush(heap, (-chance * weight / total, order, node, depth + 1, branch))
                order += 1

        grow(0, 0, 1.0, index.matches(tokens))
        while heap and len(draft.tokens) <= budget:
            score, _, parent, depth, places = heappop(heap)
            draft.tokens.append(tokens[places[0][0] + depth - 1])
            draft.parents.append(parent)
            if depth < self.num_steps:
                grow(len(draft.tokens) - 1, depth, -score, places)
        return draft
