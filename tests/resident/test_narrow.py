"""Laws of draws under top-k, top-p, min-p and penalties: those of `specla.sampling`, by a plan that is wide enough."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.engine.params import SamplingParams
from specla.engine.resident import plan_of
from specla.ops.triton.schedule import schedule_of
from specla.resident.narrow import Narrow, draw_narrow, new_narrow, remember
from specla.resident.slots import Slots
from specla.resident.walk import Outcome
from specla.sampling import Plan, Sampling, first_argmax, scores
from specla.tree import Tree
from tests.ops.strategies import SHAPES, random_parent, same_bits, tree_of
from tests.ops.triton import DEVICE, full_size
from tests.resident import GARBAGE, admit, garbage_slots, ints

SLOTS, VOCAB = 5, 40

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([-1, -1, 1, 2, 3, 5, 8, 9, 39, 40, 41, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 100.0]),
    seed=st.sampled_from([0, 1, 2**63 - 1, -(2**63)]),
)


def garbage_narrow() -> Narrow:
    narrow = new_narrow(SLOTS, VOCAB, DEVICE)
    for field in fields(narrow):
        getattr(narrow, field.name).fill_(GARBAGE)
    return narrow


def admitted(
    asked: list[SamplingParams], rng: torch.Generator, vocab: int = VOCAB
) -> tuple[Slots, Narrow, list[list[int]]]:
    """Slots and what narrows them, after texts of these parameters began there, and the texts."""
    slots, narrow = garbage_slots(SLOTS, 8, 20, 1), new_narrow(SLOTS, vocab, DEVICE)
    narrow.seen.fill_(True)  # whoever was there before
    texts = []
    for slot, p in enumerate(asked):
        texts.append(torch.randint(vocab, (1 + 4 * slot,), generator=rng).tolist())
        admit(slots, slot, texts[-1], remaining=9, temperature=p.temperature, seed=p.seed or 0)
        admit(
            narrow,
            slot,
            texts[-1],
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
        )
    return slots, narrow, texts


def sampling_of(asked: list[SamplingParams], texts: list[list[int]], vocab: int = VOCAB) -> Sampling:
    """What these requests ask for, with a plan of its own."""
    seen = torch.zeros(len(asked), vocab, dtype=torch.bool)
    for row, text in enumerate(texts):
        seen[row, text] = True
    return Sampling.of(
        len(asked), temperature=[p.temperature for p in asked], top_k=[p.top_k for p in asked],
        top_p=[p.top_p for p in asked], min_p=[p.min_p for p in asked],
        repetition_penalty=[p.repetition_penalty for p in asked], seed=[p.seed or 0 for p in asked],
        position=list(map(len, texts)), seen=seen.to(DEVICE), device=DEVICE,
    )  # fmt: skip


def drawn(
    logits: Tensor, tokens: Tensor, parents: list[list[int]], slots: Slots, narrow: Narrow, plan: Plan
) -> Tensor:
    """The draws, for trees with garbage where there is padding."""
    tree = tree_of(parents, tokens.shape[1]).to(DEVICE)
    parent = torch.where(tree.valid, tree.parent, GARBAGE)
    resident = Tree.resident(parent, tree.num_nodes)
    out = torch.full_like(tokens, GARBAGE, dtype=torch.int32)
    draw_narrow(logits, tokens.int(), resident, schedule_of(resident, 1), slots, narrow, plan, out)
    return out


@settings(max_examples=12)
@given(
    st.lists(params, min_size=1, max_size=SLOTS),
    st.integers(1, 7),
    st.sampled_from([0, 2]),
    st.integers(0, 2**31),
)
def test_draws_are_those_of_the_sampler(
    asked: list[SamplingParams], size: int, levels: int, seed: int
) -> None:
    """Under a plan for all of them, the one of their own parameters or a wider one."""
    rng = torch.Generator().manual_seed(seed)
    slots, narrow, texts = admitted(asked, rng)
    sampling = sampling_of(asked, texts)
    lengths = torch.randint(1, 1 + size, (len(asked),), generator=rng).tolist()
    parents = [random_parent(SHAPES[n % len(SHAPES)], count, rng) for n, count in enumerate(lengths)]
    tree = tree_of(parents, size).to(DEVICE)
    tokens = torch.randint(VOCAB, (len(asked), size), generator=rng).to(DEVICE)
    logits = 2 * torch.randn(len(asked), size, VOCAB, generator=rng)
    if levels:
        logits = (logits * levels).round()  # many equals
    logits[torch.rand(logits.shape, generator=rng) < 0.1] = -torch.inf
    logits[..., 3] = 0.0
    logits = torch.where(tree.valid[..., None], logits.to(DEVICE), torch.nan)
    want = first_argmax(scores(logits, tokens, tree, sampling))
    wider = plan_of([*asked, SamplingParams(temperature=1.0, top_k=20, min_p=0.1, repetition_penalty=2.0)])
    whole = wider._replace(ranks=-1)
    assert sampling.plan is not None
    for plan in (plan_of(asked), sampling.plan, wider, whole):
        got = drawn(logits, tokens, parents, slots, narrow, plan)
        assert torch.equal(got[tree.valid], want[tree.valid].int()), plan
        assert not got[~tree.valid].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "plan", [Plan(True, True, 8, True), Plan(True, False, -1, False), Plan(False, True, 0, False)]
)
def test_nodes_whose_logits_are_not_finite_draw_nothing(bad: float, plan: Plan) -> None:
    rng = torch.Generator().manual_seed(0)
    asked = [SamplingParams(temperature=1.0, top_k=5, min_p=0.1, repetition_penalty=1.2)] * 3
    slots, narrow, _ = admitted(asked, rng)
    tokens = torch.randint(VOCAB, (3, 4), generator=rng).to(DEVICE)
    logits = torch.randn(3, 4, VOCAB, generator=rng).to(DEVICE)
    parents = [[-1, 0, 1, 1], [-1, 0, 0, 2], [-1, 0]]
    clean = drawn(logits, tokens, parents, slots, narrow, plan)
    logits[1, 2, slice(None) if bad == -torch.inf else 7] = bad
    got = drawn(logits, tokens, parents, slots, narrow, plan)
    clean[1, 2] = -1
    assert torch.equal(got, clean)


@given(st.lists(params, min_size=1, max_size=6))
def test_a_plan_is_never_narrower_than_the_samplers_own(asked: list[SamplingParams]) -> None:
    own, plan = sampling_of(asked, [[0]] * len(asked)).plan, plan_of(asked)
    assert own is not None
    assert (plan.noise, plan.penalty, plan.min_p) == (own.noise, own.penalty, own.min_p)
    assert plan.ranks == own.ranks == -1 or plan.ranks >= own.ranks >= 0
    assert plan.ranks in (-1, 0) or plan.ranks & (plan.ranks - 1) == 0, "so that there are few"


def test_admission_fills_one_slot_and_forgets_who_was_there() -> None:
    narrow = garbage_narrow()
    before = replace(narrow, **{f.name: getattr(narrow, f.name).clone() for f in fields(narrow)})
    admit(narrow, 3, [7, 2, 7], top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    others = [slot for slot in range(SLOTS) if slot != 3]
    for field in fields(narrow):
        assert same_bits(
            getattr(narrow, field.name)[others].float(), getattr(before, field.name)[others].float()
        )
    told = [float(x[3]) for x in (narrow.top_k, narrow.top_p, narrow.min_p, narrow.repetition_penalty)]
    assert told == torch.tensor([4, 0.9, 0.1, 1.5]).tolist()
    assert narrow.seen[3].nonzero().flatten().tolist() == [2, 7]
    admit(narrow, 3, [5], top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    admit(narrow, 3, [VOCAB - 1, 0], top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=0.5)
    assert narrow.seen[3].nonzero().flatten().tolist() == [0, VOCAB - 1]


@given(st.integers(1, SLOTS), st.integers(1, 6), st.integers(0, 2**31))
def test_exactly_what_was_taken_is_remembered(batch: int, size: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    narrow = new_narrow(SLOTS, VOCAB, DEVICE)
    narrow.seen.copy_(torch.rand(SLOTS, VOCAB, generator=rng) < 0.2)
    want, taken = narrow.seen.clone(), torch.randint(0, size + 1, (batch,), generator=rng).tolist()
    packed = torch.zeros(batch, size + 4, dtype=torch.int32)
    for row, count in enumerate(taken):
        packed[row, :count] = torch.randint(VOCAB, (count,), generator=rng)
        packed[row, -4] = count
        want[row, packed[row, :count].long()] = True
    remember(Outcome(packed.to(DEVICE)), narrow)
    assert torch.equal(narrow.seen, want)


@full_size
def test_a_graph_draws_what_launches_draw() -> None:
    """At full size, with other logits, positions and texts at each replay."""
    vocab, size = 32000, 16
    asked = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(temperature=0.7, top_k=50, min_p=0.02, repetition_penalty=1.2, seed=2),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(temperature=1.5, seed=3),
    ]
    rng = torch.Generator().manual_seed(0)
    slots, narrow, texts = admitted(asked, rng, vocab)
    parents = [random_parent(SHAPES[n], size, rng) for n in range(4)]
    tree = tree_of(parents, size).to(DEVICE)
    tokens = torch.randint(vocab, (4, size), generator=rng).to(DEVICE)
    logits, out = torch.randn(4, size, vocab, device=DEVICE), ints([[GARBAGE] * size] * 4)
    for plan in (plan_of(asked), plan_of(asked[1:])):
        drawn(logits, tokens, parents, slots, narrow, plan)
        graph, resident = torch.cuda.CUDAGraph(), Tree.resident(tree.parent, tree.num_nodes)
        with torch.cuda.graph(graph):
            draw_narrow(logits, tokens.int(), resident, schedule_of(resident, 1), slots, narrow, plan, out)
        for turn in range(5):
            logits.copy_(2 * torch.randn(logits.shape, generator=rng))
            slots.position.add_(1)
            narrow.seen[:, turn::7] = True
            graph.replay()
            assert torch.equal(out, drawn(logits, tokens, parents, slots, narrow, plan))
    sampling = sampling_of(asked, texts, vocab).at(slots.position[:4], narrow.seen[:4])
    assert torch.equal(out[1:], first_argmax(scores(logits, tokens, tree, sampling))[1:].int())
