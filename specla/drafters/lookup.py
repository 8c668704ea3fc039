"""Lookup first: what a text repeats is drafted from the text itself, all else by another drafter.

Where the last few tokens stood before, what followed them is as good a draft as a trained one, costs nothing, and goes
on for as long as the repetition does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specla.drafters.base import Draft, Drafter, DraftRow, Exported, Proposal, pack
from specla.drafters.ngram import NgramDrafter

SHORTEST, LONGEST = 3, 5  # matches that are looked for, in tokens; two that agree say too little
HOPE, LEAST = 3.0, 1.0  # accepted drafts expected of a new sequence, and below which lookups are left out
NEWEST = 0.3  # weight of the latest lookup in the running mean


@dataclass
class _Record:
    """How lookups have fared in one sequence, or would have: a running mean of accepted drafts."""

    trust: float = HOPE
    at: int = 0  # tokens before the last draft
    draft: list[int] = field(default_factory=list)

    def settle(self, tokens: list[int]) -> None:
        """Judge the last draft by what the text has become, once that is known."""
        came = tokens[self.at : self.at + len(self.draft)]
        right = [a == b for a, b in zip(came, self.draft, strict=False)]
        accepted = right.index(False) if False in right else len(right)
        if self.draft and (accepted < len(came) or len(came) == len(self.draft)):
            self.trust += NEWEST * (accepted - self.trust)
            self.draft = []

    @property
    def length(self) -> int:
        return 2 + 2 * round(self.trust)


class LookupFirst:
    """Drafts by lookup where it finds something and has fared well of late, by `other` elsewhere.

    Lookups draft a chain of at most `num_speculative_tokens` within a row's `room`, whatever its `limit` is and however
    deep the other drafter may go.
    """

    def __init__(self, other: Drafter, num_speculative_tokens: int):
        self.other = other
        self.name = f"{other.name}+ngram"
        self.layer_ids = other.layer_ids
        size = num_speculative_tokens
        self._lookup = NgramDrafter(size, size, 1, max_ngram=LONGEST, min_ngram=SHORTEST)
        self._records: dict[int, _Record] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """One tree a row."""
        found = [self._find(row) for row in rows]
        if all(draft is not None for draft in found):
            alone = len(rows) == 1  # else its room is no more than its limit
            return replace(pack([draft for draft in found if draft is not None]), budgeted=not alone)
        proposal = self.other.propose(
            [row if draft is None else replace(row, limit=0) for row, draft in zip(rows, found, strict=True)]
        )
        if not any(found):
            return proposal
        packed = pack([_row(proposal, b) if draft is None else draft for b, draft in enumerate(found)])
        if proposal.scores is None:
            return packed
        scores = proposal.scores.new_full(packed.tokens.shape, torch.nan)
        rest = [b for b, draft in enumerate(found) if draft is None]
        width = min(scores.shape[1], proposal.scores.shape[1])
        scores[rest, :width] = proposal.scores[rest, :width]
        return replace(packed, scores=scores)

    def observe(self, key: int, features: Tensor, following: Sequence[int]) -> None:
        self.other.observe(key, features, following)

    def export(self, key: int) -> Exported | None:
        return self.other.export(key)

    def restore(self, key: int, exported: Exported, following: int) -> None:
        self.other.restore(key, exported, following)

    def forget(self, key: int) -> None:
        """Drop a sequence; unknown keys are fine."""
        self._records.pop(key, None)
        self._lookup.forget(key)
        self.other.forget(key)

    def _find(self, row: DraftRow) -> Draft | None:
        record = self._records.setdefault(row.key, _Record())
        record.settle(row.tokens)
        (draft,) = self._lookup.drafts([replace(row, limit=min(row.room, record.length))])
        if len(draft.tokens) == 1:
            return None
        if not record.draft:  # what is not offered is judged as well, which costs nothing
            record.at, record.draft = len(row.tokens), draft.tokens[1:]
        return draft if record.trust >= LEAST else None


def _row(proposal: Proposal, b: int) -> Draft:
    count = int(proposal.tree.num_nodes[b])
    return Draft(proposal.tokens[b, :count].tolist(), proposal.tree.parent[b, :count].tolist())
