"""What the prefix cache gives back is what reading would have left, bit by bit, in the target and in the drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specla.drafters import Drafter, EagleDrafter, NoDrafter
from specla.drafters.base import Exported
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.prefix import Kept, PrefixCache
from specla.engine.reading import BLOCK, Pauses
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import Sequence
from specla.state import Snapshot
from specla.tree import Tree
from tests.drafters.eagles import make_eagle
from tests.resident import DEVICE
from tests.resident.test_eagle import make_network
from tests.targets import VOCAB, committed, distance, equal, make_target, prompt, read_one_by_one

ROOM = 1 << 26
PARAMS = SamplingParams(max_tokens=9)
SPECULATION = SpeculativeConfig(num_speculative_tokens=6, num_steps=4, topk=2)


def new_engine(variant: str, drafter: str, kind: Any = Engine, **how: Any) -> Any:
    target = make_target(variant)
    made: Drafter = NoDrafter()
    if drafter == "twin":
        made = EagleDrafter(make_network(), 6, 4, 2, max_num_seqs=3)
    elif drafter != "none":
        made = EagleDrafter(
            make_eagle(target, drafter, dtype=torch.float32, draft_vocab_size=VOCAB), 6, 4, 2, max_num_seqs=3
        )
    return kind(target, made, SPECULATION, 3, **{"prefix_cache_bytes": ROOM} | how)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def after_reading(engine: Engine, text: list[int]) -> tuple[Sequence, list[torch.Tensor], Exported | None]:
    """A request that is read to the end of its prompt, and what is known of it then."""
    sequence = engine.add(text, PARAMS)
    engine.admit()
    assert sequence.slot is not None and engine.running == [sequence]
    return sequence, committed(engine.pool, sequence.slot), engine.drafter.export(sequence.key)


BASE = prompt(301, 1)
LATER = {
    "the same": BASE,
    "another last token": [*BASE[:-1], (BASE[-1] + 1) % VOCAB],
    "a longer one": BASE + prompt(90, 2),
    "parting within": BASE[:170] + prompt(60, 3),
    "parting at a block": BASE[:192] + prompt(1, 3) + BASE[193:],
    "a shorter one": BASE[:131],
}


@pytest.mark.parametrize(
    ("variant", "drafter"),
    [("plain", "none"), ("plain", "delta"), ("plain", "window"), ("conv_2", "delta"), ("no_conv", "none"),
     ("hybrid_global", "delta"), ("hybrid_window", "none"), ("hybrid_two_kinds", "window"),
     ("gla_conv", "delta"), ("retnet_hybrid", "window"),
     ("mamba2", "delta"), ("kda", "window"), ("kimi", "delta")],
)  # fmt: skip
@pytest.mark.parametrize("later", LATER)
def test_a_hit_leaves_what_reading_would_have_left(variant: str, drafter: str, later: str) -> None:
    engine, text = new_engine(variant, drafter), LATER[later]
    engine.add(BASE, PARAMS)
    finish(engine)
    fresh = new_engine(variant, drafter, prefix_cache_bytes=0)
    got, state, memory = after_reading(engine, text)
    want, wanted_state, wanted_memory = after_reading(fresh, text)
    assert want.num_cached == 0 < got.num_cached <= len(text) - 1
    shared = next((n for n, (a, b) in enumerate(zip(text, BASE, strict=False)) if a != b), len(text) - 1)
    unit = engine.pauses.unit
    assert (
        got.num_cached == 300
        if later in ("the same", "another last token")
        else got.num_cached >= min(shared // 128 * 128, 256)
    )
    assert got.num_cached % unit == 0 or got.num_cached == len(text) - 1
    assert equal(state, wanted_state)
    assert (memory is None) == (wanted_memory is None) == (drafter == "none")
    if memory is not None and wanted_memory is not None:
        assert memory.following == wanted_memory.following
        assert equal(list(memory.tensors), list(wanted_memory.tensors))
    finish(engine)
    finish(fresh)
    assert got.output == want.output and got.metrics == want.metrics
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (2, 1) and stats.prefix_hit_tokens == got.num_cached


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU prompts pause elsewhere")
def test_the_drafter_of_rounds_on_a_gpu_remembers_too() -> None:
    left = []
    for room in (0, ROOM):
        engine = new_engine("plain", "twin", ResidentEngine, prefix_cache_bytes=room)
        for text in (BASE[:140], [*BASE[:139], 7], [*BASE[:128], *BASE[:50]]):
            sequence = engine.add(text, PARAMS)
            engine.admit()
        assert sequence.num_cached == (128 if room else 0) and len(engine.running) == 3
        (group,) = engine.rounds.proposer.pool.groups.values()
        backlog = engine.rounds.proposer.backlog
        assert backlog.num_tokens.tolist() == [1, 1, 1]
        assert backlog.following[:, 0].tolist() == [BASE[139], 7, BASE[49]]
        left.append([group.state.clone(), group.conv_state.clone(), backlog.features[:, :].clone()])
    assert distance(left[1], left[0]) < 1e-5 and bool(left[0][0].any(-1).any(-1).any(-1).all())


def test_the_place_where_prompts_part_is_kept() -> None:
    """Of three prompts with one beginning, the third finds all whole blocks of it."""
    engine = new_engine("plain", "none")
    engine.prefixes.stride = 10**6  # only what is kept for a reason
    shared, found = prompt(230, 5), []
    for n in range(3):
        sequence = engine.add(shared + prompt(70, 10 + n), PARAMS)
        finish(engine)
        found.append(sequence.num_cached)
    assert found == [0, 0, 192]


def test_what_asks_for_its_prompt_is_read_whole() -> None:
    engine = new_engine("plain", "none")
    engine.add(BASE, PARAMS)
    finish(engine)
    sequence = engine.add(BASE, SamplingParams(max_tokens=2, prompt_logprobs=0))
    finish(engine)
    assert sequence.num_cached == 0 and len(sequence.prompt_logprobs) == len(BASE)
    assert engine.stats().prefix_queries == 1


def test_a_session_that_goes_on_neither_looks_nor_keeps() -> None:
    """Its state comes from decoding, whose last bits are not those of reading."""
    engine = new_engine("plain", "none")
    sequence = engine.add(BASE, PARAMS, keep_slot=True)
    finish(engine)
    before = engine.stats()
    engine.resume(sequence, BASE, PARAMS)
    finish(engine)
    assert engine.stats() == before and sequence.num_cached == 0


def test_a_state_with_something_pending_is_not_copied() -> None:
    target = make_target("plain")
    pool = target.new_pool(2, 4)
    read_one_by_one(target, prompt(5), pool, pool.alloc())
    copied = pool.export(0)
    target.verify(torch.tensor([[1, 2]]), Tree.chain(2), [0], pool)
    pool.accept([0], torch.tensor([[0, 1]]), [1])
    for refused in (lambda: pool.export(0), lambda: pool.restore(0, copied)):
        with pytest.raises(AssertionError, match=r"pending|flush"):
            refused()
    slot = pool.alloc()
    pool.restore(slot, copied)
    assert pool.length == [5, 5] and copied.nbytes == pool.bytes_per_sequence()


def kept(length: int, nbytes: int) -> Kept:
    return Kept(length, Snapshot(length, []), None, nbytes)


def fill(cache: PrefixCache, text: list[int], nbytes: int = 10) -> int:
    """Read a prompt; how much of it was there."""
    found = cache.find(text)
    for place, key in found.places.items():
        cache.keep(key, kept(place, nbytes))
    return 0 if found.kept is None else found.kept.length


def test_the_least_recently_used_go_first_and_bytes_stay_within_bounds() -> None:
    cache = PrefixCache(30, Pauses(BLOCK, False), 10**6)
    texts = [prompt(40, n) for n in range(4)]
    assert [fill(cache, text) for text in texts[:3]] == [0, 0, 0] and cache.nbytes == 30
    assert fill(cache, texts[0]) == 40  # used again
    assert fill(cache, texts[3]) == 0
    assert [fill(cache, text) for text in (texts[0], texts[2], texts[3])] == [40, 40, 40]
    assert fill(cache, texts[1]) == 0 and cache.nbytes == 30
    assert (cache.queries, cache.hits, cache.hit_tokens) == (9, 4, 160)


def test_what_is_larger_than_the_cache_is_left_out() -> None:
    cache = PrefixCache(30, Pauses(BLOCK, False), 10**6)
    fill(cache, prompt(40))
    assert fill(cache, prompt(41), 31) == 0 and fill(cache, prompt(40)) == 40 and cache.nbytes == 10


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 2)), max_size=12), st.integers(1, 60))
def test_what_is_found_is_a_beginning_and_nothing_else(asks: list[tuple[int, int]], limit: int) -> None:
    cache, held = PrefixCache(limit, Pauses(16, False), 32), set[tuple[int, ...]]()
    for length, seed in asks:
        text = prompt(200, seed)[:length]
        found = cache.find(text)
        if found.kept is not None:
            assert tuple(text[: found.kept.length]) in held
            assert found.kept.length % 16 == 0 or found.kept.length == length
        for place, key in found.places.items():
            cache.keep(key, kept(place, 7))
            held.add(tuple(text[:place]))
        assert cache.nbytes <= limit and cache.nbytes == 7 * len(cache._kept)


@pytest.mark.parametrize("room", [-1, 1.5, "1"])
def test_a_room_that_cannot_be_is_refused(room: Any) -> None:
    with pytest.raises(ValueError, match="prefix_cache_bytes"):
        new_engine("plain", "none", prefix_cache_bytes=room)
