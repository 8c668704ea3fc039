"""The drafter's memory is that of the accepted text, whatever was drafted and refused before."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from specla.drafters.base import DraftRow, Proposal
from specla.drafters.eagle import EagleDrafter
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.target import Tap
from specla.sampling import gumbel_noise
from tests.drafters.eagles import KINDS, make_eagle
from tests.targets import VOCAB, make_target, prompt


def target() -> GatedDeltaNet:
    return make_target("plain", torch.float64)


def features_of(tokens: list[int]) -> Tensor:
    """The target's streams at every token of a text."""
    seen: list[Tensor] = []
    with torch.no_grad():
        target()(torch.tensor([tokens]), tap=Tap((0, 1, 2), seen.append))
    return seen[0][0]


def make_drafter(kind: str, **changes) -> EagleDrafter:
    sizes = {"num_speculative_tokens": 12, "num_steps": 4, "topk": 3, "max_num_seqs": 4} | changes
    return EagleDrafter(make_eagle(target(), kind), **sizes)


def trees(proposal: Proposal) -> list[set[tuple[int, ...]]]:
    """The paths of every row, as tokens below the root."""
    rows = []
    for b in range(proposal.tree.batch):
        paths: list[tuple[int, ...]] = [()]
        for i in range(1, int(proposal.tree.num_nodes[b])):
            paths.append((*paths[int(proposal.tree.parent[b, i])], int(proposal.tokens[b, i])))
        rows.append(set(paths))
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_after_any_history_are_those_of_a_drafter_that_read_the_text_afresh(kind: str) -> None:
    chance = random.Random(0)
    texts = [prompt(length, seed) for seed, length in enumerate((90, 150, 40))]
    streams = [features_of(text) for text in texts]
    used = make_drafter(kind)
    done, at = [0, 0, 0], [70, 1, 9]  # tokens shown, the root
    checked = 0
    while any(root < len(text) for root, text in zip(at, texts, strict=True)):
        live = [key for key in range(3) if at[key] < len(texts[key])]
        rows = []
        for key in live:
            used.observe(key, streams[key][done[key] : at[key]], texts[key][done[key] + 1 : at[key] + 1])
            done[key] = at[key]
            limit = chance.choice(
                [0, 0, 2, 7, 12]
            )  # 0: the round decodes plainly and the drafter only listens
            rows.append(DraftRow(key, texts[key][: at[key] + 1], limit))
        got = trees(used.propose(rows))
        fresh = make_drafter(kind)
        for key in live:
            fresh.observe(key, streams[key][: at[key]], texts[key][1 : at[key] + 1])
        want = trees(fresh.propose(rows))
        assert got == want
        checked += sum(len(tree) > 1 for tree in want)
        for key in live:
            at[key] += chance.randint(1, 6)
    assert checked > 20


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_see_each_other(kind: str) -> None:
    texts = [prompt(length, 7) for length in (5, 20, 66)]
    together, alone = make_drafter(kind), make_drafter(kind)
    rows = [DraftRow(key, text, 4 * (key + 1)) for key, text in enumerate(texts)]
    for drafter in (together, alone):
        for key, text in enumerate(texts):
            drafter.observe(key, features_of(text)[:-1], text[1:])
    assert trees(together.propose(rows)) == [trees(alone.propose([row]))[0] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_forgets_its_last_owner(kind: str) -> None:
    drafter, fresh = (make_drafter(kind, max_num_seqs=1) for _ in range(2))
    first, second = prompt(80, 1), prompt(6, 2)
    drafter.observe(0, features_of(first)[:-1], first[1:])
    drafter.propose([DraftRow(0, first, 9)])
    drafter.forget(0)
    drafter.forget(0)  # again is fine
    for each in (drafter, fresh):
        each.observe(5, features_of(second)[:-1], second[1:])
    row = [DraftRow(5, second, 9)]
    assert trees(drafter.propose(row)) == trees(fresh.propose(row))


def test_nothing_is_drafted_without_features_or_for_a_limit_of_none() -> None:
    drafter = make_drafter("delta")
    text = prompt(8)
    drafter.observe(1, features_of(text)[:-1], text[1:])
    rows = [DraftRow(0, [3], 9), DraftRow(1, text, 5), DraftRow(2, text, 0)]
    proposal = drafter.propose(rows)
    assert proposal.tree.num_nodes.tolist() == [1, 6, 1]
    assert proposal.tokens[:, 0].tolist() == [3, text[-1], text[-1]]


def test_trees_keep_to_depth_width_and_size() -> None:
    drafter = make_drafter("delta", num_speculative_tokens=9, num_steps=3, topk=2)
    text = prompt(8)
    drafter.observe(1, features_of(text)[:-1], text[1:])
    tree = drafter.propose([DraftRow(1, text, 99)]).tree
    assert tree.num_nodes.tolist() == [9 + 1] and int(tree.depth.max()) <= 3
    assert max(torch.bincount(tree.parent[0, 1:])) <= 2


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_limit_is_not_drafted_beyond(kind: str, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is that of a drafter that may go deeper, for no more steps than one as deep as the limit takes."""
    network, text, calls = make_eagle(target(), kind), prompt(8), []
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda *args: calls.append(1) or forward(*args))
    for limit in range(1, 7):
        made = []
        for num_steps in (6, limit):
            drafter = EagleDrafter(network, 12, num_steps, topk, max_num_seqs=1)
            drafter.observe(1, features_of(text)[:-1], text[1:])
            calls.clear()
            made.append(trees(drafter.propose([DraftRow(1, text, limit)])))
            assert len(calls) == limit if topk == 1 else len(calls) <= limit  # one of them reads
        assert made[0] == made[1]


def test_drafts_are_bent_by_the_noise_that_the_target_will_add() -> None:
    """At a high temperature the noise decides nearly alone, and it is known beforehand."""
    network = make_eagle(target(), "delta", draft_vocab_size=VOCAB)
    drafter = EagleDrafter(network, 4, 4, 1)
    text = prompt(8)
    drafter.observe(1, features_of(text)[:-1], text[1:])
    chain = drafter.propose([DraftRow(1, text, 4, temperature=1e5, seed=17)]).tokens[0, 1:]
    places = torch.arange(len(text), len(text) + 4)
    assert chain.tolist() == gumbel_noise(torch.full((4,), 17), places, VOCAB).argmax(-1).tolist()


def test_a_mixed_batch_bends_only_the_warm_rows() -> None:
    text = prompt(8)
    cold, warm = DraftRow(1, text, 9), DraftRow(2, text, 9, temperature=2.0, seed=5)
    results = []
    for rows in ([cold, warm], [cold], [warm]):
        drafter = make_drafter("delta")
        for row in rows:
            drafter.observe(row.key, features_of(text)[:-1], text[1:])
        results.append(trees(drafter.propose(rows)))
    assert results[0] == [results[1][0], results[2][0]] and results[1] != results[2]


def test_a_long_plain_stretch_is_read_on_the_way() -> None:
    """A drafter that only listens keeps a bounded number of features."""
    drafter = make_drafter("delta")
    text = prompt(300)
    streams = features_of(text)
    for at in range(299):
        drafter.observe(1, streams[at : at + 1], [text[at + 1]])
        assert sum(map(len, drafter._readers[1].features)) <= 65
