"""Lookup first: what a text repeats is drafted from the text, all else is left to another drafter as if alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st

from specla.drafters import Drafter, DraftRow, EagleDrafter, LookupFirst, NgramDrafter, NoDrafter, Proposal
from specla.drafters.base import TokenDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.gated_deltanet import GatedDeltaNet
from tests.drafters.eagles import make_eagle
from tests.drafters.test_eagle import features_of, make_drafter, trees
from tests.targets import ScriptedDrafter, build_target, make_config, prompt, run, same_bits

SIZE, LEAST = 12, 3  # drafts at most, and tokens that must have stood before

histories = st.lists(st.integers(0, 2), min_size=1, max_size=40)
batches = st.lists(st.tuples(histories, st.integers(0, 9), st.integers(0, 14)), min_size=1, max_size=4)


def rows_of(batch: list[tuple[list[int], int, int]]) -> list[DraftRow]:
    return [DraftRow(key, text, min(limit, room), room) for key, (text, limit, room) in enumerate(batch)]


def stood_before(text: list[int]) -> list[int]:
    """Where the last three tokens had stood and something followed."""
    end = text[-LEAST:]
    return [n for n in range(LEAST, len(text)) if text[n - LEAST : n] == end]


def row_of(proposal: Proposal, b: int) -> tuple[list[int], list[int]]:
    count = int(proposal.tree.num_nodes[b])
    return proposal.tokens[b, :count].tolist(), proposal.tree.parent[b, :count].tolist()


def is_lookup(text: list[int], tokens: list[int], parents: list[int]) -> bool:
    """Whether this is a chain of what once followed the end of the text."""
    chain = tokens[1:]
    places = stood_before(text)
    return (
        tokens[0] == text[-1]
        and parents == list(range(-1, len(chain)))
        and len(chain) > 0
        and any(text[n : n + len(chain)] == chain for n in places)
    )


class Watched(TokenDrafter):
    """Passes everything on to a prompt lookup of its own, and keeps what it was asked and told to forget."""

    name = "watched"

    def __init__(self) -> None:
        self.inner = NgramDrafter(SIZE, 8, 3)
        self.asked: list[list[DraftRow]] = []
        self.forgotten: list[int] = []

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        self.asked.append(list(rows))
        return self.inner.propose(rows)

    def forget(self, key: int) -> None:
        self.forgotten.append(key)
        self.inner.forget(key)


@given(batches)
def test_what_stood_before_is_drafted_by_lookup_whatever_its_limit_and_within_its_room(batch) -> None:
    rows = rows_of(batch)
    proposal = LookupFirst(NoDrafter(), SIZE).propose(rows)
    for b, row in enumerate(rows):
        tokens, parents = row_of(proposal, b)
        if row.room and len(row.tokens) > LEAST and stood_before(row.tokens):
            assert is_lookup(row.tokens, tokens, parents) and len(tokens) - 1 <= min(row.room, SIZE)
        else:
            assert (tokens, parents) == (row.tokens[-1:], [-1])


@given(batches)
def test_all_other_rows_get_what_the_other_drafter_proposes_for_them_alone(batch) -> None:
    rows = rows_of(batch)
    other = Watched()
    proposal = LookupFirst(other, SIZE).propose(rows)
    for b, row in enumerate(rows):
        if not (row.room and stood_before(row.tokens)):
            assert row_of(proposal, b) == row_of(NgramDrafter(SIZE, 8, 3).propose([row]), 0)
    for row, asked in zip(rows, other.asked[0] if other.asked else [], strict=False):
        by_lookup = row.room and stood_before(row.tokens)
        assert (asked.key, asked.tokens, asked.limit) == (row.key, row.tokens, 0 if by_lookup else row.limit)


@given(batches)
def test_limits_had_no_say_exactly_when_every_row_was_a_lookup(batch) -> None:
    rows = rows_of(batch)
    other = Watched()
    proposal = LookupFirst(other, SIZE).propose(rows)
    all_lookups = all(row.room and stood_before(row.tokens) for row in rows)
    assert proposal.budgeted == (not all_lookups)
    assert len(other.asked) == proposal.budgeted, "the other drafter is not run for nothing"


@cache
def repetitive_target() -> GatedDeltaNet:
    """With so few tokens three of them have often stood before."""
    return build_target(make_config(vocab_size=8))


@pytest.mark.parametrize("warm", [0.0, 30.0])
@pytest.mark.parametrize("kind", ["scripted", "ngram", "delta", "window"])
def test_drafts_change_nothing(kind: str, warm: float) -> None:
    target, chance = repetitive_target(), random.Random(f"{kind} {warm}")
    accepted = 0
    for batch in (1, 4):
        prompts = [
            [chance.randrange(chance.randint(2, 5)) for _ in range(chance.randint(1, 40))]
            for _ in range(batch)
        ]
        params = [
            SamplingParams(
                max_tokens=chance.randint(20, 40), temperature=chance.choice([0.0, warm]), seed=seed
            )
            for seed in range(batch)
        ]
        plain = run(target, None, prompts, params)
        other: Drafter = NgramDrafter(9, 8, 3)
        if kind == "scripted":
            other = ScriptedDrafter(batch, vocab=8)
            other.references = dict(enumerate(plain.tokens))
        elif kind != "ngram":
            other = EagleDrafter(make_eagle(target, kind, dtype=torch.float32, draft_vocab_size=6), 9, 4, 3)
        drafted = run(target, LookupFirst(other, 9), prompts, params, slots=4)
        assert drafted.outputs == plain.outputs
        assert all(map(same_bits, drafted.logits, plain.logits))
        accepted += sum(s.metrics.num_accepted_draft_tokens for s in drafted.sequences)
    assert accepted > 10


@pytest.mark.parametrize("kind", ["delta", "window"])
def test_the_other_drafter_sees_every_token_also_those_that_lookup_drafted(kind: str) -> None:
    chance = random.Random(5)
    stretch = [prompt(9, seed) for seed in range(4)]
    texts = [[t for n in order for t in stretch[n]] for order in ((0, 1, 0, 2, 1, 3), (3, 2, 0, 3, 3, 1))]
    streams = [features_of(text) for text in texts]
    both, shown, at = LookupFirst(make_drafter(kind), SIZE), [0, 0], [5, 9]
    lookups = others = 0
    while all(root < len(text) for root, text in zip(at, texts, strict=True)):
        fresh, rows = make_drafter(kind), []
        for key, (text, stream) in enumerate(zip(texts, streams, strict=True)):
            both.observe(key, stream[shown[key] : at[key]], text[shown[key] + 1 : at[key] + 1])
            fresh.observe(key, stream[: at[key]], text[1 : at[key] + 1])
            shown[key] = at[key]
            rows.append(DraftRow(key, text[: at[key] + 1], chance.choice([0, 3, 7]), 9))
        got, want = both.propose(rows), trees(fresh.propose(rows))
        for b, row in enumerate(rows):
            if is_lookup(row.tokens, *row_of(got, b)):
                lookups += 1
            else:
                assert trees(got)[b] == want[b]
                others += len(want[b]) > 1
            at[b] += chance.randint(1, 3)
    assert lookups > 5 and others > 10


def continue_against(drafter: LookupFirst, text: list[int], rounds: int, alphabet: int) -> tuple[int, int]:
    """Append, round after round, a token that never followed the end of the text before if it can, else the one that
    followed it longest ago: repeats never go on. How many rounds had a repeat, and how many a draft.
    """
    repeats = drafts = 0
    for _ in range(rounds):
        followed = {text[n]: n for n in stood_before(text)}
        repeats += bool(followed)
        drafts += int(drafter.propose([DraftRow(0, list(text), 0, 16)]).tree.num_nodes[0]) > 1
        latest = max(followed, key=followed.__getitem__, default=None)
        looked = NgramDrafter(1, 1, 1, 5, LEAST).propose([DraftRow(0, list(text), 1)])
        wrong = {latest, *looked.tokens[0, 1:].tolist()}
        text.append(min((t for t in range(alphabet) if t not in wrong), key=lambda t: followed.get(t, -1)))
    return repeats, drafts


def test_a_lookup_that_keeps_failing_is_given_up_and_comes_back_when_repeats_hold_again() -> None:
    drafter, text = LookupFirst(NoDrafter(), SIZE), prompt(6, vocab=4)
    repeats, drafts = continue_against(drafter, text, 500, alphabet=4)
    assert repeats > 400
    assert drafts <= 0.02 * repeats
    cycle, back = [0, 1, 2, 3, 3, 2, 1], 0
    for _ in range(5 * len(cycle)):
        text.append(cycle[len(text) % len(cycle)])
        back += int(drafter.propose([DraftRow(0, list(text), 0, 16)]).tree.num_nodes[0]) > 1
    assert back >= 2 * len(cycle)


def test_forgetting_drops_everything_and_a_new_owner_starts_afresh() -> None:
    other, text = Watched(), prompt(6, vocab=4)
    drafter = LookupFirst(other, SIZE)
    drafter.forget(7)  # a key that it never saw
    continue_against(drafter, text, 60, alphabet=4)
    drafter.forget(0)
    assert other.forgotten == [7, 0]
    again = prompt(8, 3) * 3
    fresh = LookupFirst(Watched(), SIZE)
    for end in range(4, len(again)):  # shorter than what the first owner had
        row = [DraftRow(0, again[:end], 0, 9)]
        assert row_of(drafter.propose(row), 0) == row_of(fresh.propose(row), 0)
    assert int(drafter.propose(row).tree.num_nodes[0]) > 1


def test_the_budget_learns_nothing_from_rounds_in_which_all_was_looked_up(monkeypatch) -> None:
    drafter = LookupFirst(NgramDrafter(16, 8, 4), 16)
    engine = Engine(repetitive_target(), drafter, SpeculativeConfig(), max_num_seqs=1)
    budgeted, learnt = [], []
    propose, observe = drafter.propose, engine.budget.observe

    def watched(rows: Sequence[DraftRow]) -> Proposal:
        proposal = propose(rows)
        budgeted.append(proposal.budgeted)
        return proposal

    monkeypatch.setattr(drafter, "propose", watched)
    monkeypatch.setattr(engine.budget, "observe", lambda *args: (learnt.append(args), observe(*args)))
    for seed in range(3):
        engine.add(prompt(12, seed, vocab=8), SamplingParams(max_tokens=60))
    while engine.has_work:
        engine.step()
    assert sum(budgeted) == len(learnt)
    assert 5 < len(learnt) < len(budgeted) - 5
