"""Speculative decoding, one round at a time: propose, verify, accept, commit."""

from __future__ import annotations

from torch import Tensor

from specla.accept import accept
from specla.drafters.base import Drafter, DraftRow, Proposal
from specla.engine.logprobs import token_logprobs
from specla.engine.sampling import batch_sampling
from specla.engine.sequence import NOT_FINITE, RoundTrace, Sequence
from specla.models.target import Tap, Target
from specla.state import StatePool


def run_round(
    sequences: list[Sequence], target: Target, drafter: Drafter, pool: StatePool, budget: int, mode: str
) -> bool:
    """Advance every sequence by at least one token, but for those whose logits are not finite: they fail.

    The drafter proposes a tree for each, the target verifies all of them in one pass, the walk from the roots says
    what is accepted, and exactly what a sequence took is left pending in its slot.

    Args:
        budget: drafts for each tree at most; 0 decodes plainly. Of a sequence that is alone, drafts that cost nothing
            may be more.

    Returns:
        whether the budget had a say.
    """
    slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
    assert len(slots) == len(sequences), "a running sequence has a slot"

    # beside others, drafts are never for nothing: all wait until all are verified
    most = pool.max_nodes - 1 if len(sequences) == 1 else budget
    rows = [_draft_row(sequence, budget, most) for sequence in sequences]
    proposal = drafter.propose(rows)
    tokens, tree = proposal.tokens.to(pool.device), proposal.tree.to(pool.device)

    features: list[Tensor] = []
    tap = Tap(drafter.layer_ids, features.append) if drafter.layer_ids else None
    logits = target.verify(tokens, tree, slots, pool, mode, tap)

    path, num_accepted, bonus = accept(logits, tokens, tree, batch_sampling(sequences, logits), check=False)

    taken = []
    path = path.clamp(min=0)
    drafted, drawn = tokens.gather(1, path.long()).tolist(), bonus.tolist()
    proposed = (tree.num_nodes - 1).tolist()
    for b, (sequence, count) in enumerate(zip(sequences, num_accepted.tolist(), strict=True)):
        if count < 0:
            sequence.fail(FloatingPointError(NOT_FINITE))
            taken.append(0)
            continue
        taken.append(sequence.extend(drafted[b][1 : 1 + count], drawn[b], proposed[b]))
        if sequence.params.logprobs is not None:
            nodes = logits[b, path[b, : taken[b]]]
            sequence.logprobs += token_logprobs(nodes, sequence.tokens[-taken[b] :], sequence.params.logprobs)
        if sequence.trace:
            sequence.last_round = _trace(proposal, b, path[b, : 1 + min(count, taken[b])].tolist())

    # the last token taken is the next root: it and what lies beyond stay out of the state
    pool.accept(slots, path, [count - 1 for count in taken])
    if tap is not None:
        for b, (sequence, count) in enumerate(zip(sequences, taken, strict=True)):
            if count:
                drafter.observe(sequence.key, features[0][b, path[b, :count]], sequence.tokens[-count:])
    return proposal.budgeted and all(s.params.num_speculative_tokens is None for s in sequences)


def _draft_row(sequence: Sequence, budget: int, most: int) -> DraftRow:
    params = sequence.params
    if params.num_speculative_tokens is not None:
        most = min(most, params.num_speculative_tokens)
    limit, room = (max(0, min(size, most, sequence.draft_limit)) for size in (budget, most))
    return DraftRow(sequence.key, sequence.tokens, limit, room, params.temperature, sequence.seed)


def _trace(proposal: Proposal, b: int, path: list[int]) -> RoundTrace:
    count = int(proposal.tree.num_nodes[b])
    scores = None if proposal.scores is None else proposal.scores[b, :count].tolist()
    if scores is not None and any(score != score for score in scores):
        scores = None  # of a row whose drafts have none
    return RoundTrace(
        proposal.tokens[b, :count].tolist(), proposal.tree.parent[b, :count].tolist(), scores, path
    )
