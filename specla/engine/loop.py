"""Speculative decoding, one round at a time: propose, verify, accept, commit."""

from __future__ import annotations

from specla.accept import accept
from specla.drafters.base import Drafter, DraftRow
from specla.engine.sampling import batch_sampling
from specla.engine.sequence import Sequence
from specla.models.target import Target
from specla.state import StatePool


def run_round(
    sequences: list[Sequence], target: Target, drafter: Drafter, pool: StatePool, budget: int, mode: str
) -> None:
    """Advance every sequence by at least one token.

    The drafter proposes a tree for each, the target verifies all of them in one pass, the walk from the roots says
    what is accepted, and exactly what a sequence took is left pending in its slot.

    Args:
        budget: drafts for each tree at most; 0 decodes plainly.
    """
    slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
    assert len(slots) == len(sequences), "a running sequence has a slot"

    rows = [DraftRow(s.key, s.tokens, max(0, min(budget, s.draft_limit))) for s in sequences]
    proposal = drafter.propose(rows)
    tokens, tree = proposal.tokens.to(pool.device), proposal.tree.to(pool.device)

    logits = target.verify(tokens, tree, slots, pool, mode)

    path, num_accepted, bonus = accept(logits, tokens, tree, batch_sampling(sequences, logits))

    taken = []
    drafted = tokens.gather(1, path.long().clamp(min=0)).tolist()
    proposed = (tree.num_nodes - 1).tolist()
    for b, (sequence, count) in enumerate(zip(sequences, num_accepted.tolist(), strict=True)):
        taken.append(sequence.extend(drafted[b][1 : 1 + count], int(bonus[b]), proposed[b]))

    # the last token taken is the next root: it and what lies beyond stay out of the state
    pool.accept(slots, path.clamp(min=0), [count - 1 for count in taken])
