"""Slots: what is committed equals sequential decoding bit by bit, and nothing leaks between nodes, rounds or owners."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.state import AttentionState, StatePool
from specla.tree import Tree
from tests.targets import (
    VARIANTS,
    VOCAB,
    build_target,
    committed,
    distance,
    equal,
    make_config,
    make_target,
    prompt,
    reach,
    read_one_by_one,
    take,
)  # fmt: skip

ALL = list(VARIANTS)
SOME = [
    "plain",
    "grouped_wide",
    "conv_2",
    "no_conv",
    "hybrid_global",
    "hybrid_window",
    "hybrid_narrow",
    "qwen_next",
]


def poison(pool: StatePool, slots: list[int], value: float = torch.nan) -> None:
    """Fill everything that these slots hold, pending factors included."""
    for layer in pool.layers:
        if isinstance(layer, AttentionState):
            layer.cache[:, slots], layer.nodes[:, slots] = value, value
        else:
            for tensor in (layer.state, layer.conv_state, layer.conv_inputs, *layer.factors):
                tensor[slots] = value


def everything(pool: StatePool, slot: int) -> list[Tensor]:
    kept = []
    for layer in pool.layers:
        if isinstance(layer, AttentionState):
            kept += [layer.cache[:, slot].clone(), layer.nodes[:, slot].clone()]
        else:
            tensors = (layer.state, layer.conv_state, layer.conv_inputs, *layer.factors)
            kept += [tensor[slot].clone() for tensor in tensors]
    return kept


def random_tree(rng: random.Random, text: list[int], size: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens and parents of a tree of `size` nodes around `text`, and the ids of the nodes that carry it."""
    decoys = size - len(text)
    steps = ["text"] * (len(text) - 1) + ["decoy"] * decoys
    rng.shuffle(steps)
    tokens, parents, path = [text[0]], [-1], [0]
    for step in steps:
        if step == "text":
            parents.append(path[-1])
            path.append(len(tokens))
            tokens.append(text[len(path) - 1])
        else:
            parents.append(rng.randrange(len(tokens)))
            tokens.append(rng.randrange(VOCAB))
    return tokens, parents, path


@pytest.mark.parametrize("mode", ["serial", "hybrid"])
@pytest.mark.parametrize("variant", ALL)
def test_forward_of_n_equals_n_times_forward_of_1(variant: str, mode: str) -> None:
    """Outputs and state, to the bit, from a state that is not zero."""
    target = make_target(variant)
    pool = target.new_pool(4, 24)
    texts = [prompt(20, n) for n in range(2)]
    for slot, before in ((0, 9), (1, 3), (2, 9), (3, 3)):
        target.prefill(torch.tensor(prompt(before, before)), slot, pool)
    logits = target.verify(torch.tensor(texts), Tree.chain(20, 2), [0, 1], pool, mode)
    take(pool, [0, 1], [list(range(20))] * 2)
    pool.flush([0, 1])
    for slot, text in enumerate(texts):
        assert torch.equal(read_one_by_one(target, text, pool, slot + 2), logits[slot])
        assert equal(committed(pool, slot), committed(pool, slot + 2))
        assert pool.length[slot] == pool.length[slot + 2] == 20 + (9, 3)[slot]


def test_forward_carries_the_state_on() -> None:
    """The multi-token pass that forgets what came before would give the same logits on both slots."""
    target = make_target("plain")
    pool = target.new_pool(2, 8)
    target.prefill(torch.tensor(prompt(9)), 0, pool)
    text = torch.tensor([prompt(8, 1)] * 2)
    logits = target.verify(text, Tree.chain(8, 2), [0, 1], pool)
    assert not torch.allclose(logits[0, -1], logits[1, -1], atol=0.1)


@given(
    seed=st.integers(0, 2**32),
    variant=st.sampled_from(SOME),
    mode=st.sampled_from(["serial", "hybrid", "auto"]),
)
def test_logits_of_a_fixed_text_do_not_depend_on_what_was_drafted(seed: int, variant: str, mode: str) -> None:
    rng = random.Random(seed)
    target = make_target(variant)
    pool = target.new_pool(3, 16)
    text = prompt(40, seed % 7)
    want = read_one_by_one(target, text, pool, 2)
    done = [0, 0]  # two rows read the same text among different decoys
    got: list[list[Tensor]] = [[], []]
    while min(done) < len(text):
        slots = [slot for slot in (0, 1) if done[slot] < len(text)]
        drafts, paths = [], []
        for slot in slots:
            part = text[done[slot] : done[slot] + rng.randint(1, 6)]
            tokens, parents, path = random_tree(rng, part, rng.randint(len(part), 16))
            drafts.append((tokens, parents))
            paths.append(path)
        size = max(len(tokens) for tokens, _ in drafts)
        tokens = torch.tensor([t + [0] * (size - len(t)) for t, _ in drafts])
        tree = Tree([p + [-1] * (size - len(p)) for _, p in drafts])
        logits = target.verify(tokens, tree, slots, pool, mode)
        taken = [path[: rng.randint(1, len(path))] for path in paths]
        take(pool, slots, taken)
        for row, (slot, path) in enumerate(zip(slots, taken, strict=True)):
            got[slot] += list(logits[row, path])
            done[slot] += len(path)
        if rng.random() < 0.2:
            pool.flush([rng.choice(slots)])
    pool.flush([0, 1])
    for slot in (0, 1):
        assert torch.equal(torch.stack(got[slot]), want)
        assert equal(committed(pool, slot), committed(pool, 2))


def test_the_state_after_1000_rounds_equals_sequential_decoding_to_the_bit() -> None:
    rng = random.Random(7)
    target = make_target("hybrid_narrow")  # one recurrent layer, one of windowed attention
    pool = target.new_pool(2, 8)
    text: list[int] = []
    for _ in range(1000):
        part = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 1, 1, 3]))]
        tokens, parents, path = random_tree(rng, part, rng.randint(len(part), 8))
        target.verify(torch.tensor([tokens]), Tree([parents]), [0], pool, "hybrid")
        take(pool, [0], [path])
        text += part
    pool.flush([0])
    read_one_by_one(target, text, pool, 1)
    assert pool.length[0] == pool.length[1] == len(text) > 1300
    assert equal(committed(pool, 0), committed(pool, 1))
    assert all(bool(tensor.isfinite().all()) and bool((tensor != 0).any()) for tensor in committed(pool, 0))


@pytest.mark.parametrize("variant", SOME)
def test_a_flush_leaves_the_state_of_sequential_decoding(variant: str) -> None:
    target = make_target(variant)
    pool = target.new_pool(2, 8)
    text = prompt(11)
    tokens, parents, path = random_tree(random.Random(3), text[:4], 8)
    target.verify(torch.tensor([tokens]), Tree([parents]), [0], pool)
    take(pool, [0], [path])
    assert reach(pool, 0) == 4 and pool.length[0] == 0  # pending
    before = committed(pool, 0)
    pool.flush([0])
    assert reach(pool, 0) == 4 and pool.length[0] == 4
    read_one_by_one(target, text[:4], pool, 1)
    after = committed(pool, 0)
    assert equal(after, committed(pool, 1)) and not equal(after, before)
    pool.flush([0])
    pool.flush([0, 1])
    assert equal(committed(pool, 0), after)
    # flushed or not, the next round sees the same past
    assert torch.equal(read_one_by_one(target, text[4:], pool, 0), read_one_by_one(target, text[4:], pool, 1))


def test_a_verification_that_is_not_accepted_leaves_no_trace() -> None:
    target = make_target("hybrid_global")
    pool = target.new_pool(2, 8)
    for slot in (0, 1):
        target.prefill(torch.tensor(prompt(5)), slot, pool)
    before = committed(pool, 0)
    target.verify(torch.tensor([prompt(8, 3)]), Tree.chain(8), [0], pool)
    take(pool, [0], [[]])
    pool.flush([0])
    assert equal(committed(pool, 0), before) and pool.length[0] == 5
    target.verify(torch.tensor([prompt(8, 4)]), Tree.chain(8), [0], pool)  # never accepted either
    assert torch.equal(
        read_one_by_one(target, prompt(4, 5), pool, 0), read_one_by_one(target, prompt(4, 5), pool, 1)
    )


@pytest.mark.parametrize("variant", SOME)
def test_slots_that_take_no_part_stay_bit_equal(variant: str) -> None:
    target = make_target(variant)
    pool = target.new_pool(5, 8)
    rng = random.Random(1)
    for slot in range(5):
        read_one_by_one(target, prompt(3, slot), pool, slot)
    poison(pool, [1], 7.5)  # a free slot
    target.verify(torch.tensor([prompt(4, 9)]), Tree.chain(4), [3], pool)
    take(pool, [3], [[0, 1, 2]])  # stays pending meanwhile
    untouched = {slot: everything(pool, slot) for slot in (1, 3)}
    for slots in ([4, 2], [0], [2, 0, 4]):
        drafts = [random_tree(rng, prompt(3, slot), 7) for slot in slots]
        tokens = torch.tensor([tokens for tokens, _, _ in drafts])
        target.verify(tokens, Tree([parents for _, parents, _ in drafts]), slots, pool)
        take(pool, slots, [path[: 1 + n] for n, (_, _, path) in enumerate(drafts)])
        pool.flush(slots[:1])
        target.prefill(torch.tensor(prompt(6)), slots[-1], pool)
        for slot, kept in untouched.items():
            assert equal(everything(pool, slot), kept)
    assert reach(pool, 3) == 6 and pool.length[3] == 3


def test_padding_nodes_change_no_row() -> None:
    """A short tree beside a long one: its padding holds tokens too, and they must not matter."""
    target = make_target("hybrid_window")
    pool = target.new_pool(3, 12)
    for slot in range(3):
        target.prefill(torch.tensor(prompt(6)), slot, pool)
    tokens = torch.tensor([prompt(12, 1), prompt(12, 2)])
    tree = Tree([list(range(-1, 11)), [-1, 0, 0, *[-1] * 9]])
    logits = target.verify(tokens, tree, [0, 1], pool)
    alone = target.verify(tokens[1:, :3], Tree([[-1, 0, 0]]), [2], pool)
    assert torch.equal(logits[1, :3], alone[0])
    take(pool, [0, 1], [list(range(12)), [0, 2]])
    take(pool, [2], [[0, 2]])
    pool.flush([0, 1, 2])
    assert equal(committed(pool, 1), committed(pool, 2))


@pytest.mark.parametrize("variant", SOME)
def test_the_next_owner_of_a_slot_is_not_affected_by_the_last(variant: str) -> None:
    """Freed with factors pending, or between verify and accept; even NaN in the old factors must not show."""
    target = make_target(variant)
    fresh = target.new_pool(1, 8)
    want = read_one_by_one(target, prompt(12), fresh, fresh.alloc())
    pool = target.new_pool(2, 8)
    for end in ("pending", "unaccepted", "poisoned"):
        slot = pool.alloc()
        target.prefill(torch.tensor(prompt(30, 5)), slot, pool)
        target.verify(torch.tensor([prompt(8, 6)]), Tree.chain(8), [slot], pool)
        if end == "pending":
            take(pool, [slot], [[0, 1, 2, 3]])
        if end == "poisoned":
            poison(pool, [slot])
        pool.free(slot)
        assert pool.alloc() == slot
        assert reach(pool, slot) == 0
        assert torch.equal(read_one_by_one(target, prompt(12), pool, slot), want)
        assert equal(committed(pool, slot), committed(fresh, 0))
        pool.free(slot)


def test_slots_run_out_with_an_error_and_are_not_freed_twice() -> None:
    pool = make_target("plain").new_pool(2, 4)
    assert {pool.alloc(), pool.alloc()} == {0, 1}
    with pytest.raises(RuntimeError, match="all 2 slots"):
        pool.alloc()
    pool.free(1)
    with pytest.raises(AssertionError):
        pool.free(1)
    assert pool.num_free == 1 and pool.alloc() == 1


def test_a_second_acceptance_before_the_commit_is_refused() -> None:
    target = make_target("plain")
    pool = target.new_pool(1, 4)
    target.verify(torch.tensor([prompt(3)]), Tree.chain(3), [0], pool)
    take(pool, [0], [[0, 1]])
    with pytest.raises(AssertionError):
        take(pool, [0], [[0]])


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"]
)
def test_the_state_is_kept_in_fp32_or_wider(variant: str, dtype: torch.dtype) -> None:
    target = make_target(variant, dtype)
    pool = target.new_pool(1, 3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    read_one_by_one(target, prompt(3), pool, 0)
    assert {tensor.dtype for tensor in (*committed(pool, 0), *everything(pool, 0))} == {wide}


@pytest.mark.parametrize("variant", ALL)
def test_a_draft_node_costs_its_factors_not_a_snapshot(variant: str) -> None:
    config = make_config(variant)
    channels = 2 * config.key_dim + config.value_dim if config.window > 1 else 0
    factors = config.key_dim + config.value_heads * config.head_v_dim + config.value_heads + channels
    want = 0
    for layer in range(config.num_hidden_layers):
        attention = config.attention(layer)
        rows = (
            0 if attention is None else 2 * attention.num_kv_heads * config.hidden_size // attention.num_heads
        )
        want += 4 * (rows or factors)
    pools = [make_target(variant).new_pool(3, nodes) for nodes in (4, 9)]
    assert pools[0].bytes_per_node() == pools[1].bytes_per_node() == want
    # and that is what a larger envelope really takes, but for the path's node id
    small, large = (sum(t.nbytes for slot in range(3) for t in everything(pool, slot)) for pool in pools)
    assert large - small == 3 * 5 * want
    if not config.attn:
        snapshot = 4 * config.num_hidden_layers * config.value_heads * config.head_v_dim * config.head_dim
        window = 4 * config.num_hidden_layers * channels * (config.window - 1)
        assert pools[0].bytes_per_sequence() == snapshot + window


@pytest.mark.parametrize("variant", ["plain", "hybrid_global"])
def test_a_prefill_keeps_no_factors(variant: str) -> None:
    target = make_target(variant)
    pool = target.new_pool(2, 8)
    banks = [
        bank
        for layer in pool.layers
        for bank in (
            [layer.nodes] if isinstance(layer, AttentionState) else [layer.conv_inputs, *layer.factors]
        )
    ]
    for bank in banks:
        bank.fill_(3.25)
    target.prefill(torch.tensor(prompt(200)), 0, pool)
    assert all(bool((bank == 3.25).all()) for bank in banks)
    assert pool.length == [200, 0] and reach(pool, 0) == 200
    assert distance(committed(pool, 0), [torch.zeros_like(x) for x in committed(pool, 0)]) > 0


@pytest.mark.parametrize("grown", [False, True])
def test_an_attention_cache_grows_and_a_windowed_one_does_not(grown: bool) -> None:
    """Both texts cross the 256 rows that there are at first; a cache that had room before gives the same."""
    target, text = make_target("hybrid_two_kinds"), prompt(30, 4)
    pools = [target.new_pool(2, 4), target.new_pool(2, 4)]
    if grown:
        slot = pools[1].alloc()
        target.prefill(torch.tensor(prompt(600, 7)), slot, pools[1])
        pools[1].free(slot)
    logits = []
    for pool in pools:
        slots = [pool.alloc(), pool.alloc()]
        for seed, slot in enumerate(slots):
            target.prefill(torch.tensor(prompt(250, seed)), slot, pool)
        logits.append([read_one_by_one(target, text, pool, slot) for slot in slots])
        rows = [layer.cache.shape[2] for layer in pool.layers if isinstance(layer, AttentionState)]
        assert rows[0] >= 280 and rows[1] == 5
    assert equal(*logits)
    assert not torch.equal(*logits[0])


@pytest.mark.parametrize("length", [250, 280, 600])
def test_a_windowed_cache_grows_to_its_window_and_says_the_same_all_along(length: int) -> None:
    """A cache that has had all its rows before is the ring that the other becomes."""
    attn = {"num_heads": 4, "num_kv_heads": 2, "layers": [1], "window_size": 300}
    target, logits = build_target(make_config(attn=attn)), []
    for read_before in (0, 700):
        pool = target.new_pool(2, 4)
        (cache,) = (layer for layer in pool.layers if isinstance(layer, AttentionState))
        assert cache.cache.shape[2] == 256
        if read_before:
            slot = pool.alloc()
            target.prefill(torch.tensor(prompt(read_before, 7)), slot, pool)
            pool.free(slot)
            assert cache.cache.shape[2] == 300
        slots = [pool.alloc(), pool.alloc()]
        for seed, slot in enumerate(slots):
            target.prefill(torch.tensor(prompt(length, seed)), slot, pool)
        logits.append([read_one_by_one(target, prompt(80, 4), pool, slot) for slot in slots])
        assert cache.cache.shape[2] == 300
    assert equal(*logits)


def test_a_window_that_no_text_fills_takes_no_room() -> None:
    attn = {"num_heads": 4, "num_kv_heads": 2, "layers": [1], "window_size": 2**24}
    assert build_target(make_config(attn=attn)).new_pool(8, 4).bytes_per_sequence() < 2**20
