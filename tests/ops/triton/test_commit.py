"""Laws of the commit kernel: replay along the accepted path, bit for bit however it is cut, and nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.ops.factors import Factors
from specla.ops.naive import naive_gated_delta_commit
from specla.ops.triton.commit import commit
from tests.ops.strategies import accepted, close, make_inputs, parents, poison, same_bits, slot_maps
from tests.ops.triton import DEVICE, full_size


@st.composite
def commits(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `commit` with NaN in all that it must not read; k and d are views of one projection or not."""
    batch = draw(st.integers(1, 3))
    path, count = draw(accepted(draw(parents(batch, 6))))
    slots, indices = draw(slot_maps(batch))
    h = draw(st.integers(1, 2))
    heads = (h, h * draw(st.integers(1, 2)))
    dims = draw(st.sampled_from([5, 8, 24, 33, 64, 96])), draw(st.sampled_from([1, 5, 24, 33]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    decay, fused = draw(st.sampled_from(["mild", "channel-mild"])), draw(st.booleans())
    made = make_inputs(rng, batch, path.shape[1], heads, dims, decay, torch.float32, fused=fused)
    used, owned = torch.zeros(batch, path.shape[1], dtype=torch.bool), torch.zeros(slots, dtype=torch.bool)
    for b, slot in enumerate(range(batch) if indices is None else indices.tolist()):
        used[b, path[b, : int(count[b])].long()] = slot >= 0
        owned[slot] = owned[slot] or (slot >= 0 and int(count[b]) > 0)
        path[b, int(count[b]) :] = 10**9
    state = poison(torch.randn(slots, heads[1], dims[1], dims[0], generator=rng), owned)
    factors = Factors(*(poison(x, used) for x in (made["k"], made["v"], made["g"])))
    if draw(st.booleans()):
        path, indices = path.long(), None if indices is None else indices.long()
    return {
        "state": state,
        "factors": factors,
        "path": path,
        "count": count,
        "state_indices": indices,
    }


def run(call: dict[str, Any], **changes: Any) -> Tensor:
    """The state after the commit; the call's own state stays as it is."""
    call = call | changes
    state = call["state"].clone().to(DEVICE)
    factors = Factors(*(x.to(DEVICE) for x in call["factors"]))
    rest = {
        name: None if x is None else x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.items()
    }
    assert commit(**rest | {"state": state, "factors": factors}) is None
    return state.cpu()


@settings(max_examples=12)
@given(commits())
def test_commit_equals_the_naive_replay(call: dict[str, Any]) -> None:
    want = call["state"].clone()
    naive_gated_delta_commit(
        want, call["factors"], call["path"], call["count"] - 1, state_indices=call["state_indices"]
    )
    torch.testing.assert_close(run(call), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@settings(max_examples=10)
@given(commits())
def test_slots_that_commit_nothing_keep_their_bits(call: dict[str, Any]) -> None:
    state, counts, indices = run(call), call["count"].tolist(), call["state_indices"]
    slots = list(range(len(counts))) if indices is None else indices.tolist()
    moved = sorted(s for s, n in zip(slots, counts, strict=True) if s >= 0 and n > 0)
    still = [s for s in range(state.shape[0]) if s not in moved]
    assert same_bits(state[still], call["state"][still])
    assert state[moved].isfinite().all()


@settings(max_examples=10)
@given(commits(), st.integers(0, 6))
def test_a_path_committed_at_once_in_parts_or_node_by_node_has_the_same_bits(
    call: dict[str, Any], cut: int
) -> None:
    whole, path, count = run(call), call["path"], call["count"]
    cut = min(cut, path.shape[1] - 1)
    parts = run(call, count=count.clamp(max=cut))
    parts = run(call, state=parts, path=path[:, cut:], count=(count - cut).clamp(min=0))
    single = call["state"]
    for t in range(path.shape[1]):
        single = run(call, state=single, path=path[:, t : t + 1], count=(count > t).to(count.dtype))
    assert same_bits(whole, parts) and same_bits(whole, single)


@settings(max_examples=5)
@given(commits(), st.integers(0, 2**31))
def test_all_layers_at_once_from_banks_by_slot_have_the_bits_of_each_alone(
    call: dict[str, Any], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    slots, rows = call["state"].shape[0], call["path"].shape[0]
    indices = torch.arange(rows) if call["state_indices"] is None else call["state_indices"].long()
    state = torch.stack([call["state"], torch.randn(call["state"].shape, generator=rng)])
    factors = [Factors(*(layer * x for x in call["factors"])) for layer in (1, 0.5)]
    banks = []
    for each in zip(*factors, strict=True):
        bank = torch.full((2, slots, *each[0].shape[1:]), float("nan"))
        bank[:, indices[indices >= 0]] = torch.stack(each)[:, indices >= 0]
        banks.append(bank)
    got = run(call, state=state, factors=Factors(*banks), by_slot=True)
    for layer in range(2):
        assert same_bits(got[layer], run(call, state=state[layer], factors=factors[layer]))


def test_an_accepted_path_with_gaps_commits_its_own_nodes() -> None:
    k = torch.eye(5)[None, :, None]  # node j writes column j
    d = torch.arange(1.0, 6)[None, :, None, None]
    g = torch.tensor([0.5, 0.25, 0.5, 0.1, 0.2]).log()[None, :, None]
    call = {"state": torch.full((1, 1, 1, 5), 8.0), "factors": Factors(k, d, g)}
    state = run(call, path=torch.tensor([[0, 2, 4, -1]]), count=torch.tensor([3]))
    # the decays of 0, 2, 4 multiply to 0.05; node 0 is then decayed by 2 and 4, node 2 by 4
    close(state[0, 0, 0], torch.tensor([0.4 + 0.1, 0.4, 0.4 + 0.6, 0.4, 0.4 + 5.0]), 1e-5)


def test_a_padding_row_writes_nothing_before_the_first_slot() -> None:
    rng = torch.Generator().manual_seed(0)
    made = make_inputs(rng, 2, 1, (1, 2), (8, 5), "mild", torch.float32)
    factors, zero = Factors(made["k"], made["v"], made["g"]), torch.zeros(2, 1, dtype=torch.int32)
    pool = torch.randn(3, 2, 5, 8, generator=rng).to(DEVICE)
    before = pool.clone()
    call = {"factors": Factors(*(x.to(DEVICE) for x in factors)), "path": zero.to(DEVICE)}
    rows = torch.tensor([-1, 1], dtype=torch.int32, device=DEVICE)
    for by_slot in (False, True):
        commit(pool[1:], **call, count=torch.ones_like(rows), state_indices=rows, by_slot=by_slot)
        assert same_bits(pool[:2], before[:2]) and not same_bits(pool[2], before[2])


@full_size
@pytest.mark.parametrize("decay", ["mild", "channel-mild"])
@pytest.mark.parametrize("value_dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("key_dim", [64, 96, 128, 256, 512])
def test_full_sizes(key_dim: int, value_dim: int, decay: str) -> None:
    rng, batch, size, heads = torch.Generator().manual_seed(0), 32, 16, (2, 4)
    made = make_inputs(rng, batch, size, heads, (key_dim, value_dim), decay, torch.float32)
    factors = Factors(made["k"], made["v"], made["g"])
    count = torch.arange(batch, dtype=torch.int32) % (size + 1)
    path = torch.arange(size, dtype=torch.int32).expand(batch, size).contiguous()
    state = torch.randn(batch, heads[1], value_dim, key_dim, generator=rng)
    call = {"state": state, "factors": factors, "path": path, "count": count}
    whole, want = run(call), state.double()
    for t in range(size):
        live = count > t
        k = factors.k[live, t].double().repeat_interleave(2, 1)
        kept = factors.g[live, t].double().exp().unflatten(1, (heads[1], 1))
        kept = kept if kept.dim() == 4 else kept[..., None]  # [rows, HV, 1, K or 1]
        want[live] = want[live] * kept + factors.d[live, t].double()[..., None] * k[:, :, None]
    close(whole.double(), want, 1e-5)
    first = run(call, count=count.clamp(max=5))
    assert same_bits(whole, run(call, state=first, path=path[:, 5:], count=(count - 5).clamp(min=0)))
    assert same_bits(whole[0], state[0])
