"""The drafter that drafts nothing: every round is one step of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from specla.drafters.base import Draft, DraftRow, Proposal, TokenDrafter, pack


class NoDrafter(TokenDrafter):
    """Trees of the root alone."""

    name = "none"

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        return pack([Draft([row.tokens[-1]], [-1]) for row in rows])

    def forget(self, key: int) -> None:
        pass
