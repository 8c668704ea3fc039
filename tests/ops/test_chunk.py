"""Laws of chunk_gated_delta: the plain loop over tokens, its gradients, and agreement with verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.ops import chunk_gated_delta, gated_delta_commit, gated_delta_verify
from specla.ops.naive import naive_chunk_gated_delta
from specla.tree import Tree
from tests.ops.strategies import CHANNEL_DECAYS, DECAYS, CountOps, close, make_inputs, same_bits

ANY_DECAY = (*DECAYS, *CHANNEL_DECAYS)
TENSORS = ("q", "k", "v", "g", "beta", "initial_state")


@st.composite
def sequences(draw: st.DrawFn, max_length: int = 200) -> dict[str, Any]:
    """Arguments of chunk_gated_delta in float64."""
    batch, length = draw(st.integers(1, 2)), draw(st.integers(1, max_length))
    h = draw(st.integers(1, 2))
    heads, dims = (
        (h, h * draw(st.integers(1, 2))),
        (draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 4, 7]))),
    )
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    repeated, fused = draw(st.integers(0, 4)) == 0, draw(st.booleans())
    decay = draw(st.sampled_from(ANY_DECAY))
    call = make_inputs(rng, batch, length, heads, dims, decay, torch.float64, repeated=repeated, fused=fused)
    if draw(st.booleans()):
        call["initial_state"] = torch.randn(
            batch, heads[1], dims[1], dims[0], generator=rng, dtype=torch.float64
        )
    call["scale"] = draw(st.sampled_from([None, 1.0, 0.3]))
    call["use_qk_l2norm_in_kernel"] = draw(st.booleans())
    call["delta"] = draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        bounded = not call["delta"] or call["use_qk_l2norm_in_kernel"]  # else errors grow from token to token
        call["beta"] = None if bounded else call["beta"]
    return call


def fixed(
    length: int, dtype: torch.dtype = torch.float64, decay: str = "mild", **extra: Any
) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(length)
    call = make_inputs(rng, 2, length, (1, 2), (8, 6), decay, dtype, repeated=extra.pop("repeated", False))
    return (
        call
        | {"initial_state": torch.randn(2, 2, 6, 8, generator=rng, dtype=torch.float64).to(dtype)}
        | extra
    )


@given(sequences(), st.sampled_from([1, 2, 4, 16, 64, 128]))
def test_chunk_equals_the_naive_loop_in_float64(call: dict[str, Any], chunk_size: int) -> None:
    got, want = chunk_gated_delta(**call, chunk_size=chunk_size), naive_chunk_gated_delta(**call)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        close(x, y)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_any_length_around_the_chunk_edges_equals_the_naive_loop(length: int) -> None:
    call = fixed(length)
    for x, y in zip(chunk_gated_delta(**call), naive_chunk_gated_delta(**call), strict=True):
        close(x, y)


@given(sequences(max_length=90), st.integers(0, 90))
def test_two_calls_joined_by_the_state_equal_one(call: dict[str, Any], cut: int) -> None:
    cut = max(1, min(cut, call["q"].shape[1] - 1)) if call["q"].shape[1] > 1 else 1
    o, final = chunk_gated_delta(**call)
    parts, state = [], call.get("initial_state")
    for piece in (slice(0, cut), slice(cut, None)):
        part = {n: None if call[n] is None else call[n][:, piece] for n in TENSORS[:5]}
        if part["q"].shape[1]:
            o_part, state = chunk_gated_delta(**call | part | {"initial_state": state}, chunk_size=16)
            parts.append(o_part)
    close(torch.cat(parts, 1), o)
    close(state, final)


@pytest.mark.parametrize("cut", [64, 128])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize(("heads", "sizes"), [(1, (34, 17)), (1, (16, 33)), (2, (34, 17))])
def test_a_cut_between_chunks_changes_no_bit(
    heads: int, sizes: tuple[int, int], decay: str, delta: bool, cut: int
) -> None:
    """In float32: a last part of one chunk, and a first."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, 145, heads, *shape, generator=generator)

    q, k, v = draw(sizes[0]), draw(sizes[0]), draw(sizes[1])
    g = {"none": None, "head": -draw().abs(), "channel": -draw(sizes[0]).abs()}[decay]
    beta = draw().sigmoid() if delta else None
    before = draw(*sizes[::-1])[:, 0].clone()

    def read(part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (None if x is None else x[:, part] for x in (q, k, v, g, beta))
        return chunk_gated_delta(*inputs, initial_state=state, delta=delta, use_qk_l2norm_in_kernel=True)

    whole, after = read(slice(None), before)
    first, between = read(slice(cut), before)
    second, last = read(slice(cut, None), between)
    assert same_bits(torch.cat([first, second], 1), whole) and same_bits(last, after)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("decay", ["none", "mild", "channel-mild"])
@pytest.mark.parametrize("mode", ["serial", "parallel", "hybrid"])
def test_prefill_and_verification_compute_the_same(mode: str, decay: str, delta: bool) -> None:
    call = fixed(40, decay=decay, delta=delta)
    o, final = chunk_gated_delta(**call, chunk_size=16)
    state = call.pop("initial_state").clone()
    o_tree, factors = gated_delta_verify(**call, tree=Tree.chain(40, batch=2), state=state, mode=mode)
    gated_delta_commit(state, factors, torch.arange(40).expand(2, 40), torch.tensor([39, 39]))
    close(o, o_tree)
    close(final, state)


@pytest.mark.parametrize("decay", ["mild", "none"])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (5, 2), (5, 4), (6, 8)])
def test_gradients_pass_gradcheck(decay: str, length: int, chunk_size: int) -> None:
    rng = torch.Generator().manual_seed(0)
    call = make_inputs(rng, 1, length, (1, 2), (3, 2), decay, torch.float64)
    call["initial_state"] = torch.randn(1, 2, 2, 3, generator=rng, dtype=torch.float64)
    names = [n for n in TENSORS if call[n] is not None]

    def op(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named: dict[str, Any] = {"g": None, **dict(zip(names, args, strict=True))}
        return chunk_gated_delta(**named, chunk_size=chunk_size, use_qk_l2norm_in_kernel=True)

    assert torch.autograd.gradcheck(op, [call[n].requires_grad_() for n in names])


def gradients(op: Any, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    leaves = {n: call[n].detach().clone().requires_grad_() for n in TENSORS if call.get(n) is not None}
    o, final = op(**call | leaves)
    rng = torch.Generator().manual_seed(1)
    (o * torch.randn(o.shape, generator=rng)).sum().add(
        (final * torch.randn(final.shape, generator=rng)).sum()
    ).backward()
    return {n: x.grad for n, x in leaves.items() if x.grad is not None}


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("decay", ANY_DECAY)
@pytest.mark.parametrize("length", [64, 70, 130])
def test_gradients_equal_those_of_the_naive_loop(length: int, decay: str, delta: bool) -> None:
    call = fixed(length, decay=decay, use_qk_l2norm_in_kernel=True, delta=delta)
    got, want = gradients(chunk_gated_delta, call), gradients(naive_chunk_gated_delta, call)
    assert got.keys() == want.keys() and set(want) >= {"q", "k", "v", "beta", "initial_state"}
    for name in want:
        close(got[name], want[name])


@pytest.mark.parametrize(
    ("decay", "repeated"),
    [("strong", False), ("none", True), ("mild", True), ("mild", False), ("channel-strong", False)],
)
def test_float32_stays_near_float64_for_strong_decay_and_repeated_keys(decay: str, repeated: bool) -> None:
    call = fixed(200, torch.float32, decay, repeated=repeated, use_qk_l2norm_in_kernel=True)
    doubles = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    for x, y in zip(chunk_gated_delta(**call), naive_chunk_gated_delta(**doubles), strict=True):
        assert x.dtype == torch.float32
        close(x.double(), y, 2e-3)
    for name, grad in gradients(chunk_gated_delta, call).items():
        assert grad.isfinite().all(), name


def test_the_inputs_and_the_initial_state_are_left_untouched() -> None:
    call = fixed(30)
    before = {n: call[n].clone() for n in TENSORS}
    o, final = chunk_gated_delta(**call, use_qk_l2norm_in_kernel=True)
    o.zero_()
    final.zero_()  # nor may the results share memory with them
    assert all(same_bits(call[n], before[n]) for n in TENSORS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_keep_a_float32_state(dtype: torch.dtype) -> None:
    call = {n: x.to(dtype) for n, x in fixed(50, torch.float32).items() if n != "initial_state"}
    o, final = chunk_gated_delta(**call)
    wide, wide_final = chunk_gated_delta(**{n: x.float() for n, x in call.items()})
    assert o.dtype == dtype and final.dtype == torch.float32
    assert torch.equal(o, wide.to(dtype)) and torch.equal(final, wide_final)


def describe(fault: dict[str, Any]) -> str:
    tensors = (n for n, x in fault.items() if isinstance(x, torch.Tensor))
    shown = [f"{n} {list(fault[n].shape)} {fault[n].dtype} {fault[n].device}" for n in tensors]
    return ", ".join(shown or map(str, fault.items()))


def test_prefill_runs_far_fewer_operations_than_tokens() -> None:
    counts = []
    for length in (1024, 2048):
        call = fixed(length, torch.float32)
        with CountOps() as count, torch.no_grad():
            chunk_gated_delta(**call)
        counts.append(count.ops)
    assert counts[1] - counts[0] < 1024 / 2  # a loop over tokens runs several for each


@pytest.mark.parametrize(
    "fault",
    [
        {"k": torch.zeros(2, 3, 1, 5)},
        {"k": torch.zeros(2, 4, 1, 4)},
        {"k": torch.zeros(2, 3, 2, 4)},
        {"q": torch.zeros(2, 3, 4)},
        {"q": torch.zeros(2, 3, 1, 4, device="meta")},
        {"q": torch.zeros(2, 3, 1, 4, dtype=torch.int64)},
        {"q": torch.zeros(2, 3, 3, 4), "k": torch.zeros(2, 3, 3, 4)},
        {"v": torch.zeros(2, 4, 2, 5)},
        {"v": torch.zeros(2, 3, 10)},
        {"g": torch.zeros(2, 3, 1)},
        {"g": torch.zeros(2, 3, 2, 5)},
        {"g": torch.zeros(2, 3, 1, 4)},
        {"beta": torch.zeros(2, 3, 1)},
        {"beta": torch.zeros(1, 3, 2)},
        {"initial_state": torch.zeros(2, 2, 4, 5)},
        {"initial_state": torch.zeros(1, 2, 5, 4)},
        {"initial_state": torch.zeros(2, 2, 5, 4, dtype=torch.bfloat16)},
        {"initial_state": torch.zeros(2, 2, 5, 4, dtype=torch.int64)},
        {"chunk_size": 0},
        {"chunk_size": -64},
    ],
    ids=describe,
)
def test_unsupported_input_raises_value_error(fault: dict[str, Any]) -> None:
    call: dict[str, Any] = {
        "q": torch.zeros(2, 3, 1, 4),
        "k": torch.zeros(2, 3, 1, 4),
        "v": torch.zeros(2, 3, 2, 5),
        "g": torch.zeros(2, 3, 2),
        "beta": torch.zeros(2, 3, 2),
        "initial_state": torch.zeros(2, 2, 5, 4),
    }
    chunk_gated_delta(**call)
    with pytest.raises(ValueError):
        chunk_gated_delta(**call | fault)
