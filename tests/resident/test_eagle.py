"""The trained drafter inside rounds drafts what the one on the host drafts, and its memory is that of the text."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import cycle

import pytest
import torch

from specla.drafters import Drafter, EagleDrafter, LookupFirst, NoDrafter
from specla.drafters.network import Eagle, EagleConfig
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import SequenceMetrics
from specla.models.past import Prefill
from specla.resident.drafts import new_drafts
from specla.resident.eagle import EagleProposer, supports
from tests.resident import DEVICE, admit, garbage_slots, ints
from tests.resident.test_extend import extended
from tests.targets import VOCAB, make_target

PROMPTS = ([1, 2, 3, 4, 5], [7, 8], [4])
SPECULATION = SpeculativeConfig(num_speculative_tokens=6, num_steps=4, topk=2)


def make_network(**changes: object) -> Eagle:
    """Random weights with the target's embeddings and part of its head, so that some drafts are right."""
    target, generator = make_target("plain"), torch.Generator().manual_seed(1)
    shape = {"hidden_size": 32, "vocab_size": VOCAB, "draft_vocab_size": 40, "layer_ids": (0, 1, 2), "num_heads": 2,
             "head_dim": 8, "intermediate_size": 24}  # fmt: skip
    network = Eagle(EagleConfig(**{**shape, **changes}))
    network.reset_parameters(generator)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2 and "conv" not in name:
                weight.normal_(0, 0.2, generator=generator)
        network.embeddings.weight.copy_(target.embeddings.weight)
        network.lm_head.weight.copy_(target.lm_head.weight[5:45])
    network.token_ids = torch.arange(40) + 5
    return network.requires_grad_(False)


def decode(
    kind: type[Engine], drafter: Drafter, params: list[SamplingParams], most_beams: int | None = None
) -> list[tuple[list[int], SequenceMetrics]]:
    engine = kind(make_target("plain"), drafter, SPECULATION, max_num_seqs=2)
    if isinstance(engine, ResidentEngine) and isinstance(engine.rounds.proposer, EagleProposer):
        engine.rounds.proposer.most_beams = most_beams
    sequences = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    while engine.has_work:
        engine.step()
    return [(sequence.output, sequence.metrics) for sequence in sequences]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compares with the host's arithmetic")
@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True, "use_gate": False, "conv_size": 2}])
def test_drafts_are_those_of_the_drafter_on_the_host(changes: dict[str, object]) -> None:
    network = make_network(**changes)
    params = [SamplingParams(max_tokens=6, temperature=t, seed=3) for t in (0.0, 1.0, 0.7)]
    plain = decode(Engine, NoDrafter(), params)
    host, device = (
        decode(kind, EagleDrafter(network, 6, 4, 2, max_num_seqs=2), params)
        for kind in (Engine, ResidentEngine)
    )
    assert [tokens for tokens, _ in device] == [tokens for tokens, _ in plain]
    for (_, a), (_, b) in zip(host, device, strict=True):
        assert (a.num_spec_steps, a.num_draft_tokens) == (b.num_spec_steps, b.num_draft_tokens)
        assert a.accepted_per_round == b.accepted_per_round
    assert changes or sum(m.num_accepted_draft_tokens for _, m in device) > 0


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compares with the host's arithmetic")
def test_trees_that_must_be_narrow_are_those_of_a_narrow_drafter() -> None:
    network, params = make_network(), [SamplingParams(max_tokens=7)] * 3
    host = decode(Engine, EagleDrafter(network, 6, 4, 1, max_num_seqs=2), params)
    device = decode(ResidentEngine, EagleDrafter(network, 6, 4, 2, max_num_seqs=2), params, most_beams=1)
    for (text, a), (same, b) in zip(host, device, strict=True):
        assert text == same and a.num_draft_tokens == b.num_draft_tokens
        assert a.accepted_per_round == b.accepted_per_round


def test_auto_grows_narrower_trees_for_more_rows_and_flatter_ones_for_fewer_nodes() -> None:
    network = make_network().to(DEVICE)
    for config, widths, flat in (
        (SpeculativeConfig(topk=4), [4, 4, 4, 2, 1, 1], [1, 3, 4, 8]),
        (SpeculativeConfig(7, topk=4), [4] * 6, [1, 3, 7, 8]),
    ):
        drafter = EagleDrafter(network, config.max_draft, config.num_steps, config.topk, max_num_seqs=1)
        proposer = ResidentEngine(
            copy.deepcopy(make_target("plain")).to(DEVICE), drafter, config, 1
        ).rounds.proposer
        assert isinstance(proposer, EagleProposer)
        assert [proposer.width(batch) for batch in (1, 4, 8, 16, 32, 128)] == widths
        assert [proposer.chains(batch) for batch in (1, 128)] == [False, widths[-1] == 1]
        assert [proposer.depth(1, size) for size in (2, 4, 8, 16)] == flat
        assert [proposer.depth(32, size) for size in (2, 4, 8, 16)] == [1, 3, 7, 8]


def test_what_has_no_kernels_stays_on_the_host() -> None:
    assert supports(make_network(), 4, 2)
    for changes, steps, topk in (
        ({"mixer": "attention"}, 4, 2), ({"conv_size": 1}, 4, 2), ({"norm_output": True}, 4, 2),
        ({"feature_norm": "each"}, 4, 2), ({}, 1, 2), ({}, 4, 9), ({}, 16, 8),
    ):  # fmt: skip
        assert not supports(make_network(**changes), steps, topk)


@pytest.mark.usefixtures("recorded")
@torch.inference_mode()
def test_pairs_of_a_prompt_are_read_by_a_graph_as_by_the_network() -> None:
    network = make_network(norm_before_residual=True).to(DEVICE)
    ours, theirs = (EagleProposer(network, 3, 5, 4, 2, None) for _ in range(2))
    features = torch.randn(9, 96, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    (group,) = ours.pool.groups.values()
    for first, end in ((0, 5), (5, 6), (6, 9)):
        ours.absorb_pairs(1, features[first:end], tokens[first:end])
    past = Prefill(theirs.pool, 1, 9, network.fc.weight.dtype)
    network(torch.tensor(tokens, device=DEVICE)[None], network.fuse(features[None]), past)
    (expected,) = theirs.pool.groups.values()
    assert bool(group.state[:, 1].any())
    torch.testing.assert_close(group.state, expected.state, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(group.conv_state, expected.conv_state, rtol=2e-4, atol=2e-4)
    memory = weakref.ref(group.state)
    gc.disable()
    try:
        del ours, group
        assert memory() is None, "what is dropped is gone at once"
    finally:
        gc.enable()


@pytest.mark.usefixtures("recorded")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="compares with the host's arithmetic")
def test_rounds_without_drafts_are_read_like_all_others() -> None:
    """Sizes change from round to round; what is drafted after a plain round tells what was read in it."""
    network, texts, counts = make_network(), [], []
    for kind in (Engine, ResidentEngine):
        engine = kind(make_target("plain"), EagleDrafter(network, 6, 4, 2, max_num_seqs=1), SPECULATION, 1)
        budgets = cycle([6, 0, 3, 0, 0, 6])
        engine.budget.choose = lambda sequences, budgets=budgets: next(budgets)
        sequence = engine.add(PROMPTS[0], SamplingParams(max_tokens=9, temperature=1.0, seed=3))
        while engine.has_work:
            engine.step()
        texts.append(sequence.output)
        counts.append((sequence.metrics.num_draft_tokens, sequence.metrics.accepted_per_round))
    assert texts[0] == texts[1] and counts[0] == counts[1]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="graphs call nothing that could be counted")
def test_no_level_is_drafted_that_a_round_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    propose, level = EagleProposer.propose, EagleProposer._level

    def counted_propose(self: EagleProposer, *args: object) -> None:
        levels.append(0)
        propose(self, *args)

    def counted_level(self: EagleProposer, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        levels[-1] += 1
        return level(self, *args)

    monkeypatch.setattr(EagleProposer, "propose", counted_propose)
    monkeypatch.setattr(EagleProposer, "_level", counted_level)
    engine = ResidentEngine(
        make_target("plain"), EagleDrafter(make_network(), 6, 4, 2, max_num_seqs=1), SPECULATION, 1
    )
    budgets = [6, 3, 2, 1, 0]
    chosen = cycle(budgets)
    engine.budget.choose = lambda sequences: next(chosen)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=64, ignore_eos=True))
    for _ in budgets:
        engine.step()
    assert levels[: len(budgets)] == [3, 2, 1, 0, 0]


@torch.inference_mode()
def test_where_a_text_repeats_itself_the_tree_goes_on_as_it_did() -> None:
    """Half of the room is the network's then; elsewhere all of it."""
    network, size = make_network().to(DEVICE), 9
    five_again, four_again = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 1, 2, 3, 4]
    texts = [five_again, four_again]
    features = torch.randn(len(texts), 96, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found: dict[tuple[bool, int], list[tuple[list[int], list[int]]]] = {}
    for repeats, most in ((True, 8), (False, 8), (False, 4)):
        slots, out = garbage_slots(2, size, 32, 1), new_drafts(2, size, DEVICE)
        proposer = EagleProposer(network, 2, size, 4, 2, None, repeats=repeats)
        for slot, text in enumerate(texts):
            admit(slots, slot, text, remaining=99)
            proposer.read(slot, features[slot : slot + 1], text[-1:])
            admit(proposer, slot, slot, size)
        proposer.propose(ints([0, 1]), slots, ints([most] * 2), out, False, size)
        counts = out.num_nodes.tolist()
        found[repeats, most] = [
            (out.tokens[b, :count].tolist(), out.parent[b, :count].tolist()) for b, count in enumerate(counts)
        ]
    assert len(found[False, 8][0][0]) == 9 and len(found[False, 4][0][0]) == 5
    chain = [5, 6, 7, 8, 1, 2, 3, 4, 5]
    assert found[True, 8] == [extended(*found[False, 4][0], chain, 8, True), found[False, 8][1]]
    assert len(found[True, 8][0][0]) == 9, "all of the room is used"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compares with the host's engine")
def test_auto_looks_up_what_a_text_repeats() -> None:
    drafter = LookupFirst(EagleDrafter(make_network(), 6, 4, 2, max_num_seqs=2), 6)
    engine = ResidentEngine(make_target("plain"), drafter, SPECULATION, max_num_seqs=1)
    assert isinstance(engine.rounds.proposer, EagleProposer) and engine.rounds.proposer.repeats
    host = Engine(make_target("plain"), NoDrafter(), SPECULATION, max_num_seqs=1)
    outputs = []
    for each in (host, engine):
        sequence = each.add([*PROMPTS[0] * 3], SamplingParams(max_tokens=6, temperature=0.7, seed=1))
        while each.has_work:
            each.step()
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1] and sequence.metrics.num_draft_tokens > 0
