"""Laws of gated_delta_commit: replay along the accepted path, whatever was rejected, however long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.ops import gated_delta_commit, gated_delta_verify
from specla.ops.factors import Factors, Pending
from specla.ops.naive import naive_gated_delta_commit
from specla.ops.torch import commit
from specla.tree import Tree
from tests.ops.strategies import (
    EXACT,
    MODES,
    accepted,
    close,
    make_inputs,
    parents,
    path_to,
    poison,
    random_parent,
    same_bits,
    slot_maps,
    tree_of,
)

ROUNDS = 1000
SHAPES = ("random", "comb", "bushy", "star", "chain")


@st.composite
def commits(draw: st.DrawFn, dtype: torch.dtype = torch.float64, *, poisoned: bool = False) -> dict[str, Any]:
    """Arguments of gated_delta_commit; poisoned: NaN in factors off the path and slots not owned."""
    batch = draw(st.integers(1, 3))
    rows = draw(parents(batch))
    path, count = draw(accepted(rows))
    slots, indices = draw(slot_maps(batch))
    h = draw(st.integers(1, 2))
    heads, dims = (
        (h, h * draw(st.integers(1, 3))),
        (draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 2, 9]))),
    )
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    decay = draw(st.sampled_from(["mild", "channel-mild", "channel-strong"]))
    made = make_inputs(rng, batch, path.shape[1], heads, dims, decay, dtype)
    state = torch.randn(slots, heads[1], dims[1], dims[0], generator=rng, dtype=torch.float64).to(dtype)
    factors = Factors(made["k"], made["v"], made["g"])
    if poisoned:
        used = torch.zeros(batch, path.shape[1], dtype=torch.bool)
        owned = torch.zeros(slots, dtype=torch.bool)
        for b, slot in enumerate(range(batch) if indices is None else indices.tolist()):
            used[b, path[b, : int(count[b])].long()] = slot >= 0
            owned[slot] = owned[slot] or slot >= 0
        factors, state = Factors(*(poison(x, used) for x in factors)), poison(state, owned)
    return {
        "state": state,
        "factors": factors,
        "path": path,
        "num_accepted": count - 1,
        "state_indices": indices,
    }


@given(commits(poisoned=True))
def test_commit_equals_the_naive_replay_in_float64(call: dict[str, Any]) -> None:
    fast, slow = call | {"state": call["state"].clone()}, call | {"state": call["state"].clone()}
    assert gated_delta_commit(**fast) is None
    naive_gated_delta_commit(**slow)
    torch.testing.assert_close(fast["state"], slow["state"], rtol=1e-10, atol=1e-10, equal_nan=True)


@given(commits(torch.float32, poisoned=True))
def test_slots_that_commit_nothing_keep_their_bits(call: dict[str, Any]) -> None:
    before = call["state"].clone()
    gated_delta_commit(**call)
    indices, counts = call["state_indices"], call["num_accepted"].tolist()
    slots = list(range(len(counts))) if indices is None else indices.tolist()
    moved = {s for s, n in zip(slots, counts, strict=True) if s >= 0 and n >= 0}
    still = [s for s in range(before.shape[0]) if s not in moved]
    assert same_bits(call["state"][still], before[still])
    assert call["state"][sorted(moved)].isfinite().all()


def test_an_accepted_path_with_gaps_commits_its_own_nodes() -> None:
    k = torch.eye(5, dtype=torch.float64)[None, :, None]  # node j writes column j
    d = torch.arange(1.0, 6, dtype=torch.float64)[None, :, None, None]
    g = torch.tensor([0.5, 0.25, 0.5, 0.1, 0.2], dtype=torch.float64).log()[None, :, None]
    state = torch.full((1, 1, 1, 5), 8.0, dtype=torch.float64)
    gated_delta_commit(state, Factors(k, d, g), torch.tensor([[0, 2, 4, -1]]), torch.tensor([2]))
    # the decays of 0, 2, 4 multiply to 0.05; node 0 is then decayed by 2 and 4, node 2 by 4
    close(state[0, 0, 0], torch.tensor([0.4 + 0.1, 0.4, 0.4 + 0.6, 0.4, 0.4 + 5.0], dtype=torch.float64))


def test_every_channel_decays_at_its_own_rate() -> None:
    k = torch.tensor([[1.0, 1], [2, 0]], dtype=torch.float64)[None, :, None]
    d = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    g = torch.tensor([[0.5, 1], [0.25, 0.1]], dtype=torch.float64).log()[None, :, None]
    state = torch.full((1, 1, 1, 2), 8.0, dtype=torch.float64)
    gated_delta_commit(state, Factors(k, d, g), torch.tensor([[0, 1]]), torch.tensor([1]))
    close(state[0, 0, 0], torch.tensor([0.25 * (4 + 1) + 2, 0.1 * (8 + 1)], dtype=torch.float64))


@pytest.mark.parametrize("decay", ["mild", "channel-mild"])
def test_layers_committed_together_have_the_bits_of_each_alone(decay: str) -> None:
    rng = torch.Generator().manual_seed(0)
    layers = [make_inputs(rng, 2, 5, (2, 4), (8, 6), decay, torch.float32) for _ in range(3)]
    factors = Factors(*(torch.stack([made[name] for made in layers]) for name in ("k", "v", "g")))
    path, count = torch.tensor([[0, 2, 3], [0, 4, -1]]), torch.tensor([3, 2])
    state = torch.randn(3, 2, 4, 6, 8, generator=rng)
    together = commit(state.clone(), factors, path, count)
    for layer, alone in enumerate(state):
        gated_delta_commit(alone, Factors(*(x[layer] for x in factors)), path, count - 1)
        assert same_bits(together[layer], alone)


def test_every_row_may_accept_another_length() -> None:
    rng = torch.Generator().manual_seed(0)
    made = make_inputs(rng, 6, 5, (1, 2), (4, 3), "mild", torch.float64)
    factors, path = Factors(made["k"], made["v"], made["g"]), torch.arange(5).expand(6, 5)
    start = torch.randn(6, 2, 3, 4, generator=rng, dtype=torch.float64)
    state = start.clone()
    gated_delta_commit(state, factors, path, torch.arange(6) - 1)
    for n in range(6):
        alone = start[n : n + 1].clone()
        row = Factors(*(x[n : n + 1] for x in factors))
        for t in range(n):  # one node a call
            gated_delta_commit(alone, row, torch.tensor([[t]]), torch.tensor([0]))
        close(state[n : n + 1], alone)


@given(commits(torch.float32), st.integers(0, 12))
def test_a_path_committed_in_two_parts_has_the_bits_of_one_commit(call: dict[str, Any], cut: int) -> None:
    whole, parts = call["state"].clone(), call["state"].clone()
    gated_delta_commit(**call | {"state": whole})
    cut = min(cut, call["path"].shape[1])
    first, rest = call["num_accepted"].clamp(max=cut - 1), call["num_accepted"] - cut
    gated_delta_commit(**call | {"state": parts, "num_accepted": first})
    gated_delta_commit(
        **call | {"state": parts, "path": call["path"][:, cut:], "num_accepted": rest.clamp(min=-1)}
    )
    assert same_bits(whole, parts)


def reference_step(state: Tensor, x: dict[str, Tensor], delta: bool) -> None:
    """One token [B, ...] in plain float64, written apart from all ops; state [B, HV, V, K] in place."""
    k = x["k"].repeat_interleave(state.shape[1] // x["k"].shape[1], 1)
    state *= x["g"].exp().view(*state.shape[:2], 1, -1)
    held = torch.einsum("bhvk,bhk->bhv", state, k) if delta else 0
    d = x["beta"][..., None] * (x["v"] - held)
    state += torch.einsum("bhv,bhk->bhvk", d, k)


def thousand_rounds(
    mode: str,
    dtype: torch.dtype,
    delayed: bool,
    stepwise: bool,
    decay: str = "mild",
    delta: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """1,000 rounds on random trees with random acceptance, two rows with their own lengths.

    Returns the committed state, the float64 replay, and (`stepwise`) that of the op's one-token decoding.
    """
    rng = torch.Generator().manual_seed(ROUNDS)
    heads, dims, batch, size = (1, 2), (8, 6), 2, 6
    state = torch.zeros(batch, heads[1], dims[1], dims[0], dtype=dtype)
    replay, steps, single = state.double(), state.clone(), Tree.chain(1, batch=batch)
    pending, zero = None, torch.zeros(batch, dtype=torch.int32)
    slots = torch.arange(batch)
    for t in range(ROUNDS):
        rows = [random_parent(SHAPES[(t + b) % 5], 1 + (t + b) % size, rng) for b in range(batch)]
        x = make_inputs(rng, batch, size, heads, dims, decay, dtype)
        _, factors = gated_delta_verify(
            **x, tree=tree_of(rows, size), state=state, pending=pending, mode=mode, delta=delta
        )
        ids = [path_to(row, int(torch.randint(0, len(row), (1,), generator=rng))) for row in rows]
        path = torch.tensor([row + [-1] * (size - len(row)) for row in ids], dtype=torch.int32)
        count = torch.tensor([len(row) for row in ids], dtype=torch.int32)
        if delayed:
            pending = Pending(factors, path, count)
        else:
            gated_delta_commit(state, factors, path, count - 1)
        for s in range(max(map(len, ids))):
            live = s < count
            token = {n: y[slots, path[:, s].clamp(min=0).long()] for n, y in x.items()}
            rest = replay[~live].clone()
            reference_step(replay, {n: y.double() for n, y in token.items()}, delta)
            replay[~live] = rest
            if stepwise:
                indices = torch.where(live, slots, -1)
                token = {n: y[:, None] for n, y in token.items()}
                _, f = gated_delta_verify(
                    **token, tree=single, state=steps, state_indices=indices, mode=mode, delta=delta
                )
                gated_delta_commit(steps, f, zero[:, None], zero, state_indices=indices)
    if pending is not None:
        gated_delta_commit(state, pending.factors, pending.path, pending.num_nodes - 1)
    return state, replay, steps


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_commit_equals_replay_after_1000_random_rounds_in_float64(mode: str) -> None:
    state, replay, _ = thousand_rounds(mode, torch.float64, delayed=mode != "parallel", stepwise=False)
    close(state, replay, 1e-12)


@pytest.mark.parametrize(("decay", "delta"), [("mild", False), ("channel-mild", True)])
def test_1000_random_rounds_of_the_family_equal_replay_in_float64(decay: str, delta: bool) -> None:
    state, replay, _ = thousand_rounds("hybrid", torch.float64, True, False, decay, delta)
    close(state, replay, 1e-12)


@pytest.mark.parametrize("mode", EXACT)
def test_1000_random_rounds_in_float32_have_the_bits_of_one_token_decoding(mode: str) -> None:
    state, replay, steps = thousand_rounds(mode, torch.float32, delayed=True, stepwise=True)
    assert same_bits(state, steps)
    assert float((state - replay).abs().max()) < 1e-5 * float(replay.abs().max())


def test_parallel_stays_within_1e_5_of_replay_after_1000_random_rounds_in_float32() -> None:
    state, replay, _ = thousand_rounds("parallel", torch.float32, delayed=True, stepwise=False)
    assert float((state - replay).abs().max()) < 1e-5 * float(replay.abs().max())


def bad_calls() -> dict[str, dict[str, Any]]:
    """Changes to a good call (B 2, N 3, H 1, HV 2, K 4, V 5, 3 slots) that make it unsupported."""
    z, ones = torch.zeros, torch.ones
    k, d, g = ones(2, 3, 1, 4), ones(2, 3, 2, 5), z(2, 3, 2)
    path, none = torch.tensor([[0, 1], [0, 2]]), torch.tensor([-1, -1])
    return {
        "the state is bf16": {"state": z(3, 2, 5, 4, dtype=torch.bfloat16)},
        "the state is integer": {"state": z(3, 2, 5, 4, dtype=torch.int64)},
        "the state is [K, V]": {"state": z(3, 2, 4, 5)},
        "the state is a transposed view": {"state": z(3, 2, 4, 5).transpose(2, 3)},
        "the state has another HV": {"state": z(3, 4, 5, 4)},
        "the state is on another device": {"state": z(3, 2, 5, 4, device="meta")},
        "too few slots and no indices": {"state": z(1, 2, 5, 4), "state_indices": None},
        "d has another batch": {"factors": Factors(k, d[:1], g)},
        "d has other nodes than k": {"factors": Factors(k, d[:, :2], g)},
        "g has V channels": {"factors": Factors(k, d, z(2, 3, 2, 5))},
        "g has channels of H heads": {"factors": Factors(k, d, z(2, 3, 1, 4))},
        "HV is no multiple of H": {"factors": Factors(ones(2, 3, 3, 4), d, g)},
        "k is on another device": {"factors": Factors(k.to("meta"), d, g)},
        "path has one dimension": {"path": torch.tensor([0, 0])},
        "path has another batch": {"path": path[:1]},
        "path is of floats": {"path": path.float()},
        "path names a node that is not there": {"path": torch.tensor([[0, 3], [0, 1]])},
        "path is padded within the accepted part": {"path": torch.tensor([[0, -1], [0, 1]])},
        "num_accepted has another batch": {"num_accepted": torch.tensor([1])},
        "num_accepted has two dimensions": {"num_accepted": torch.tensor([[1], [1]])},
        "num_accepted is beyond the path": {"num_accepted": torch.tensor([0, 2])},
        "num_accepted is below -1": {"num_accepted": none - 1},
        "num_accepted is of floats": {"num_accepted": torch.tensor([0.5, 1.0])},
        "state_indices have another batch": {"state_indices": torch.tensor([0])},
        "state_indices name a slot twice": {"state_indices": torch.tensor([1, 1])},
        "state_indices are beyond the slots": {"state_indices": torch.tensor([0, 3])},
    }


@pytest.mark.parametrize("fault", [None, *bad_calls()])
def test_unsupported_input_raises_value_error_before_the_state_is_touched(fault: str | None) -> None:
    call: dict[str, Any] = {
        "state": torch.zeros(3, 2, 5, 4),
        "factors": Factors(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 2, 5), torch.zeros(2, 3, 2)),
        "path": torch.tensor([[0, 1], [0, 2]]),
        "num_accepted": torch.tensor([1, 1]),
        "state_indices": torch.tensor([2, 0]),
    }
    if fault is None:  # the call without a fault commits
        gated_delta_commit(**call)
        assert call["state"][[0, 2]].any()
        return
    call |= bad_calls()[fault]
    with pytest.raises(ValueError):
        gated_delta_commit(**call)
    assert call["state"].device.type == "meta" or not call["state"].any()
