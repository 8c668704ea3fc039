"""Laws of whole rounds: whatever is drafted, tokens are those of plain decoding, and so is the state left behind."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

from specla.drafters import DraftRow, NoDrafter, SyntheticDrafter
from specla.drafters.base import Draft
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams
from specla.models.gated_deltanet import GatedDeltaNet
from specla.ops.triton import MAX_NODES
from specla.resident import rounds as module
from specla.resident.drafts import Drafts, new_drafts
from specla.resident.proposers import Lookup, Proposer, Synthetic, TokenProposer
from specla.resident.rounds import PATIENCE, Rounds
from specla.resident.slots import Slots
from specla.resident.walk import LENGTH, RUNNING, STOP
from specla.resident.writes import Writes
from specla.sampling import Plan
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE, full_size
from tests.resident import GARBAGE, ints
from tests.resident.test_forward import big, parts
from tests.targets import (
    VOCAB,
    ScriptedDrafter,
    build_target,
    committed,
    distance,
    make_config,
    prompt,
    read_one_by_one,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("recorded")

PROMPTS, SIZE, SEED = [prompt(4, 3) * 2, prompt(2, 2)], 4, 7
COLD, WARM = Plan(False, False, 0, False), Plan(True, False, 0, False)


@cache
def small(device: str = "cpu") -> GatedDeltaNet:
    config = make_config(hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    return build_target(config) if device == "cpu" else copy.deepcopy(small()).to(device)


@cache
def plain(heats: tuple[float, ...], lengths: tuple[int, ...]) -> list[list[int]]:
    """The whole texts of plain decoding in plain torch."""
    engine = Engine(small(), NoDrafter(), max_num_seqs=len(heats))
    sequences = [
        engine.add(p, SamplingParams(max_tokens=n, temperature=heat, seed=SEED))
        for p, heat, n in zip(PROMPTS, heats, lengths, strict=True)
    ]
    while engine.has_work:
        engine.step()
    return [sequence.tokens for sequence in sequences]


class Scripted(TokenProposer):
    """Proposes what the host has written to `next`."""

    def __init__(self, batch: int, size: int):
        super().__init__()
        self.next = new_drafts(batch, size, DEVICE)

    def chains(self, batch: int) -> bool:
        return False

    def write(self, drafts: dict[int, Draft]) -> None:
        """These trees by slot; parents of padding are garbage."""
        tokens, parent, num_nodes = self.next
        parent.fill_(GARBAGE)
        parent[:, 0], tokens[:, 0] = -1, 0
        num_nodes.fill_(1)
        for slot, draft in drafts.items():
            count = len(draft.tokens)
            tokens[slot] = 0
            tokens[slot, :count], parent[slot, :count] = ints(draft.tokens), ints(draft.parents)
            num_nodes[slot] = count

    def propose(
        self, rows: Tensor, slots: Slots, limit: Tensor, out: Drafts, noisy: bool, reading: int
    ) -> None:
        for x, new in zip(out, self.next, strict=True):
            x.copy_(new[: len(rows)])


@pytest.mark.parametrize(
    ("drafter", "heats"),
    [("none", (0.0, 0.9)), ("lookup", (0.0, 0.0)), ("synthetic", (1.0, 0.7)), ("scripted", (0.0, 0.8))],
)
def test_tokens_and_states_are_those_of_plain_decoding(drafter: str, heats: tuple[float, ...]) -> None:
    """Of a sequence that is stopped halfway and one that ends, beside a slot that nobody has and nobody touches."""
    target, lengths = small(str(DEVICE)), (8, 5)
    texts, size = plain(heats, lengths), 1 if drafter == "none" else SIZE
    pool, scripted = target.new_pool(3, 1), ScriptedDrafter(seed=3, right=0.8, idle=0.1)
    proposer: Proposer = Lookup()
    if drafter == "synthetic":
        made = SyntheticDrafter(0.7, SIZE - 1, 3, 2, VOCAB)
        made.references = dict(enumerate(texts))
        proposer = Synthetic(made, 3, module.HISTORY, DEVICE)
    elif drafter == "scripted":
        proposer = Scripted(3, SIZE)
        scripted.references = dict(enumerate(texts))
    rounds = Rounds(target, pool, proposer, SIZE)
    tokens = {slot: list(p) for slot, p in enumerate(PROMPTS)}
    for slot, text in tokens.items():
        assert pool.alloc() == slot
        target.prefill(torch.tensor(text[:-1], device=DEVICE), slot, pool)
        writes = Writes(rounds.device)
        rounds.slots.admit(writes, slot, text, remaining=lengths[slot], temperature=heats[slot], seed=SEED)
        proposer.admit(writes, slot, slot, rounds.size)
        rounds.begin(writes, slot, MAX_NODES)
        writes.make()
    for x in parts(rounds.layers):
        x[:, 2] = torch.nan
    nobody, running, accepted = [x[:, 2].clone() for x in parts(rounds.layers)], set(tokens), 0
    for _ in range(max(lengths)):
        if isinstance(proposer, Scripted):
            rows = {slot: DraftRow(slot, tokens[slot], SIZE - 1) for slot in running}
            proposer.write({slot: scripted._draft(row) for slot, row in rows.items()})
        out = rounds.launch(3, size, size - 1, WARM if any(heats) else COLD).wait()
        for slot in sorted(running):
            taken, got, drafted, reason = out.counts[slot].tolist()
            tokens[slot] += out.tokens[slot, :taken].tolist()
            accepted += got
            assert taken >= 1 and taken - 1 <= got <= taken and got <= drafted < size
            assert tokens[slot] == texts[slot][: len(tokens[slot])]
            assert reason == (LENGTH if len(tokens[slot]) == len(texts[slot]) else RUNNING)
            if reason == RUNNING and (slot == 1 or len(tokens[0]) < len(PROMPTS[0]) + 4):
                continue
            rounds.stop(slot)
            others = [x[:, [s for s in range(3) if s != slot]].clone() for x in parts(rounds.layers)]
            rounds.flush(slot, taken)
            for x, old in zip(parts(rounds.layers), others, strict=True):
                assert same_bits(x[:, [s for s in range(3) if s != slot]], old)
            read, one_by_one = small().new_pool(1, 1), small().new_pool(1, 1)
            small().prefill(torch.tensor(tokens[slot][:-1]), read.alloc(), read)
            read_one_by_one(small(), tokens[slot][:-1], one_by_one, one_by_one.alloc())
            left = [x.cpu() for x in committed(pool, slot)]
            assert max(distance(left, committed(twin, 0)) for twin in (read, one_by_one)) < 1e-4
            running.remove(slot)
        if not running:
            break
    assert not running and (rounds.rows == -1).all() and not rounds.slots.count[:2].any()
    assert all(same_bits(x[:, 2], old) for x, old in zip(parts(rounds.layers), nobody, strict=True))
    assert accepted > 2 if drafter in ("synthetic", "scripted") else drafter == "lookup" or accepted == 0


def test_a_slot_is_taken_up_again_with_nothing_pending() -> None:
    """Between two rounds a slot changes hands while another one goes on; a stop id ends the newcomer."""
    target, texts = small(str(DEVICE)), plain((0.0, 0.0), (8, 9))
    pool, made = target.new_pool(2, 1), SyntheticDrafter(1.0, SIZE - 1, 2, 1, VOCAB)
    made.references = dict(enumerate(texts))
    proposer = Synthetic(made, 2, 99, DEVICE)
    rounds = Rounds(target, pool, proposer, SIZE)
    got: list[list[int]] = []

    def begin(number: int, slot: int, stop_ids: tuple[int, ...] = ()) -> None:
        target.prefill(torch.tensor(PROMPTS[number][:-1], device=DEVICE), slot, pool)
        writes = Writes(rounds.device)
        rounds.slots.admit(writes, slot, PROMPTS[number], remaining=99, stop_ids=stop_ids)
        proposer.admit(writes, slot, number, rounds.size)
        rounds.begin(writes, slot, MAX_NODES)
        writes.make()
        got.append([])

    def launch(*owners: int) -> list[int]:
        out = rounds.launch(2, SIZE, 2, COLD).wait()
        for slot, owner in enumerate(owners):
            got[owner] += out.tokens[slot, : out.taken[slot]].tolist()
        return out.reason.tolist()

    begin(0, pool.alloc())
    begin(0, pool.alloc())
    assert launch(0, 1) == [RUNNING, RUNNING] and rounds.slots.count.tolist() == [3, 3]
    rounds.stop(1)
    pool.free(1)
    first, second = texts[0][len(PROMPTS[0]) :], texts[1][len(PROMPTS[1]) :]
    begin(1, pool.alloc(), stop_ids=(second[4],))
    reasons = launch(0, 2), launch(0, 2)
    assert reasons == ([RUNNING, RUNNING], [RUNNING, STOP]) and rounds.rows.tolist() == [0, -1]
    assert got[0][:8] == first and got[1] == first[:3]
    assert got[2] == second[: second.index(second[4]) + 1]


def test_a_graph_is_made_once_for_a_shape_and_none_for_a_short_dip(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(small(str(DEVICE)), small(str(DEVICE)).new_pool(12, 1), Lookup(), 4)
    made: list[tuple[int, int, int]] = []
    prepare = rounds._prepare
    monkeypatch.setattr(Rounds, "_round", lambda *_: None)
    monkeypatch.setattr(rounds, "_prepare", lambda s: made.append((s.batch, s.size, s.turn)) or prepare(s))

    def launched(batch: int, size: int = 4, times: int = 2, plan: Plan = COLD) -> list[tuple[int, int, int]]:
        del made[:]
        for _ in range(times):
            assert len(rounds.launch(batch, size, size - 1, plan).outcome.packed) >= batch
        return sorted(made)

    assert launched(5) == [(8, 4, 0), (8, 4, 1)] and launched(8) == []
    assert launched(9) == [(12, 4, 0), (12, 4, 1)], "no larger than the slots"
    assert launched(3, times=PATIENCE) == []
    assert launched(7) == [], "the patience with it begins anew"
    assert launched(3, times=PATIENCE) == []
    assert launched(3) == [(4, 4, 0), (4, 4, 1)]
    assert launched(3, size=1) == [(4, 1, 0), (4, 1, 1)] and launched(3, plan=WARM) == [(4, 4, 0), (4, 4, 1)]


def running(slots: int, size: int) -> Rounds:
    """Rounds of a larger target with every slot in use, prepared for trees of `size` nodes and of one."""
    target = big()
    pool = target.new_pool(slots, 1)
    rounds = Rounds(target, pool, Lookup(), size)
    for slot in range(slots):
        text = prompt(9, slot, 3000) * 2
        target.prefill(torch.tensor(text[:-1], device=DEVICE), pool.alloc(), pool)
        writes = Writes(rounds.device)
        rounds.slots.admit(writes, slot, text, remaining=10**6, temperature=slot % 2 * 0.9, seed=slot)
        rounds.begin(writes, slot, MAX_NODES)
        writes.make()
    for nodes in (size, 1):
        rounds.launch(slots, nodes, nodes - 1, WARM).wait()
    torch.cuda.synchronize()
    return rounds


@full_size
@torch.inference_mode()
def test_a_launch_allocates_nothing_once_its_shape_is_prepared() -> None:
    slots, size = 24, 8
    rounds = running(slots, size)
    before = torch.cuda.memory_stats()
    for turn in range(60):
        nodes = (size, 1)[turn // 3 % 2]
        flight = rounds.launch(slots, nodes, nodes - 1, WARM)
        if turn % 2:
            assert (flight.wait().taken >= 1).all()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for key in ("allocation.all.allocated", "allocated_bytes.all.current", "num_alloc_retries"):
        assert after[key] == before[key], key


@full_size
@torch.inference_mode()
def test_a_launch_writes_to_nothing_that_was_made_after_its_capture() -> None:
    """What a graph holds stays its own: memory that is asked for later, of any size, is somebody else's."""
    slots, size = 24, 8
    rounds = running(slots, size)
    sizes = [1, slots, slots * size, slots * (size + 4), 4 * slots * size, 1 << 14, 1 << 18, 1 << 20]
    others = [torch.full((n,), GARBAGE, dtype=torch.int32, device=DEVICE) for n in sizes for _ in range(64)]
    for turn in range(8):
        nodes = (size, 1)[turn // 2 % 2]
        rounds.launch(slots, nodes, nodes - 1, WARM)
    torch.cuda.synchronize()
    assert all(bool((x == GARBAGE).all()) for x in others)
