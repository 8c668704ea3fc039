"""Laws of prefill in kernels: the chunked rule in float64, and that nothing but a row's own tokens matters to it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.ops import chunk_gated_delta
from specla.ops.gate import Gate, gates
from specla.ops.triton.chunk import BLOCK, chunk_prefill
from tests.ops.strategies import DECAYS, behind_gate, make_inputs, poison, same_bits
from tests.ops.triton import DEVICE, full_size

# relative to the root mean square of a head's outputs or states; outputs of bf16 cannot do better than 1.7e-3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1.2e-3, torch.bfloat16: 2e-3}
TOKENS = ("q", "k", "v", "g", "beta")


def to_device(call: dict[str, Any]) -> dict[str, Any]:
    def moved(x: Any) -> Any:
        if isinstance(x, Gate):
            return Gate(*(moved(part) for part in x))
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    return {name: moved(x) for name, x in call.items()}


@st.composite
def prompts(draw: st.DrawFn, max_length: int = 80) -> dict[str, Any]:
    """Arguments of chunk_prefill: ragged lengths, and slots of which some belong to nobody."""
    batch, size = draw(st.integers(1, 2)), draw(st.integers(1, max_length))
    h = draw(st.integers(1, 2))
    heads = (h, h * draw(st.integers(1, 2)))
    dims = (draw(st.sampled_from([1, 5, 16, 20, 32])), draw(st.sampled_from([1, 3, 16, 20])))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    decay = draw(st.sampled_from(DECAYS))
    repeated, fused = draw(st.integers(0, 3)) == 0, draw(st.booleans())
    call = make_inputs(rng, batch, size, heads, dims, decay, dtype, repeated=repeated, fused=fused)
    if decay not in ("none", "zero") and draw(st.booleans()):
        call = behind_gate(rng, call, bias=draw(st.booleans()), beta_scale=draw(st.sampled_from([1.0, 2.0])))
    slots = batch
    if draw(st.booleans()):
        slots = batch + 2
        order = torch.randperm(slots, generator=rng)[:batch]
        idle = torch.rand(batch, generator=rng) < 0.3
        ints = draw(st.sampled_from([torch.int32, torch.int64]))
        call["state_indices"] = torch.where(idle, -1, order).to(ints)
    if draw(st.booleans()):
        call["lengths"] = torch.randint(0, size + 1, (batch,), generator=rng).int()
    call["state"] = torch.randn(slots, heads[1], dims[1], dims[0], generator=rng)
    call["scale"] = draw(st.sampled_from([None, 1.0, 0.3]))
    call["normalise"] = draw(st.booleans())
    return to_device(call)


def fixed(length: int, dtype: torch.dtype = torch.float32, batch: int = 1, **extra: Any) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(length)
    heads, dims = extra.pop("heads", (1, 2)), extra.pop("dims", (16, 20))
    call = make_inputs(rng, batch, length, heads, dims, extra.pop("decay", "mild"), dtype)
    state = torch.randn(batch, heads[1], dims[1], dims[0], generator=rng)
    return to_device(call | {"state": state} | extra)


def ends(call: dict[str, Any]) -> list[int]:
    """Real tokens of each row: none in a padding row."""
    batch, size = call["q"].shape[:2]
    lengths = call["lengths"].tolist() if call.get("lengths") is not None else [size] * batch
    slots = slots_of(call)
    return [min(length, size) if slot >= 0 else 0 for length, slot in zip(lengths, slots, strict=True)]


def slots_of(call: dict[str, Any]) -> list[int]:
    slots = call.get("state_indices")
    return list(range(call["q"].shape[0])) if slots is None else slots.tolist()


def law(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """o and all states in float64, each row for itself."""
    g, beta = gates(call["g"], call["beta"], call.get("gate"), torch.float64)
    assert beta is not None
    o, state = torch.zeros(call["v"].shape, dtype=torch.float64, device=DEVICE), call["state"].double()
    for b, (slot, end) in enumerate(zip(slots_of(call), ends(call), strict=True)):
        if end:
            row = slice(b, b + 1), slice(0, end)
            o[row], last = chunk_gated_delta(
                *(call[name][row].double() for name in ("q", "k", "v")), None if g is None else g[row], beta[row],
                initial_state=state[slot : slot + 1], scale=call.get("scale"),
                use_qk_l2norm_in_kernel=call.get("normalise", True),
            )  # fmt: skip
            state = state.clone()
            state[slot] = last[0]
    return o, state


def run(call: dict[str, Any], **extra: Any) -> tuple[Tensor, Tensor]:
    """o and all states afterwards; the call's own state stays as it is."""
    call = call | extra
    state = call["state"].clone()
    return chunk_prefill(**call | {"state": state}), state


def agree(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Root mean square of the error, relative to that of `want`: head by head for `[.., HV, _, _]`."""
    assert got.shape == want.shape
    error, size = ((x.double() ** 2).mean((-1, -2)).sqrt() for x in (got.double() - want, want))
    assert (error <= tolerance * size + 1e-30).all(), float((error / size).nan_to_num().max())


@settings(max_examples=12)
@given(prompts())
def test_prefill_equals_the_rule_in_float64(call: dict[str, Any]) -> None:
    tolerance = TOLERANCE[call["v"].dtype]
    o, state = run(call)
    want, last = law(call)
    assert o.dtype == call["v"].dtype and o.shape == call["v"].shape
    agree(o.transpose(1, 2), want.transpose(1, 2), tolerance)
    agree(state, last, tolerance)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 150])
def test_any_length_around_the_edges_of_blocks(length: int) -> None:
    call = fixed(length)
    (o, state), (want, last) = run(call), law(call)
    agree(o.transpose(1, 2), want.transpose(1, 2), 1e-5)
    agree(state, last, 1e-5)


@settings(max_examples=6)
@given(prompts(max_length=50), st.booleans())
def test_padding_touches_nothing_and_reads_as_zero(call: dict[str, Any], into: bool) -> None:
    real = torch.arange(call["q"].shape[1], device=DEVICE) < torch.tensor(ends(call), device=DEVICE)[:, None]
    owned = torch.zeros(call["state"].shape[0], dtype=torch.bool, device=DEVICE)
    owned[[slot for slot, end in zip(slots_of(call), ends(call), strict=True) if end]] = True
    o, state = run(call)
    dirty = call | {name: poison(call[name], real) for name in TOKENS}
    dirty["state"] = poison(call["state"], owned)
    out = torch.full(call["v"].shape, math.nan, dtype=call["v"].dtype, device=DEVICE) if into else None
    got, after = run(dirty, out=out)
    assert got is out or not into
    assert same_bits(got, o) and not got[~real].any()
    assert same_bits(after[owned], state[owned]) and same_bits(after[~owned], dirty["state"][~owned])


@settings(max_examples=6)
@given(prompts(max_length=50))
def test_a_rows_bits_depend_on_that_row_alone(call: dict[str, Any]) -> None:
    o, state = run(call)
    for b, (slot, end) in enumerate(zip(slots_of(call), ends(call), strict=True)):
        if end:
            row = {name: None if call[name] is None else call[name][b : b + 1, :end] for name in TOKENS}
            o_row, s_row = run(
                call | row, state_indices=None, lengths=None, state=call["state"][slot : slot + 1]
            )
            assert same_bits(o_row, o[b : b + 1, :end]) and same_bits(s_row[0], state[slot])
    again = run(call)
    assert same_bits(again[0], o) and same_bits(again[1], state)


@pytest.mark.parametrize("cut", [1, BLOCK, 45])
def test_two_calls_joined_by_the_state_equal_one(cut: int) -> None:
    call = fixed(80)
    o, state = run(call)
    first = run(call | {name: call[name][:, :cut] for name in TOKENS})
    second = run(call | {name: call[name][:, cut:] for name in TOKENS} | {"state": first[1]})
    agree(torch.cat([first[0], second[0]], 1), o.double(), 1e-5)
    agree(second[1], state.double(), 1e-5)


def test_strides_of_any_tensor_do_not_matter() -> None:
    call = fixed(40, torch.float16, batch=2)
    o, state = run(call)
    turned = {name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in TOKENS}
    wide = torch.full((3, 4, 20, 30), math.nan, device=DEVICE)
    held = wide[:2, ::2, :, 5:21]
    held.copy_(call["state"])
    out = torch.full((2, 40, 2, 50), math.nan, dtype=torch.float16, device=DEVICE)
    got = chunk_prefill(**call | turned | {"state": held}, out=out[..., 7:27])
    assert same_bits(got, o) and same_bits(held, state)
    assert out[..., :7].isnan().all() and out[..., 27:].isnan().all()
    held.fill_(math.nan)
    assert wide.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_and_small_values_keep_every_bit(dtype: torch.dtype) -> None:
    call = fixed(70, dtype)
    o, state = run(call)
    for factor in (2.0**60, 2.0**-40):
        far = run(call | {"v": call["v"] * factor, "state": call["state"] * factor})
        assert same_bits(far[0], o * factor) and same_bits(far[1], state * factor)


def test_columns_of_other_sizes_do_not_blur_one_another() -> None:
    call = fixed(70, torch.float16)
    shrink = 2.0 ** -torch.arange(20, device=DEVICE)
    call |= {"v": call["v"] * shrink.half(), "state": call["state"] * shrink[:, None]}
    o, state = run(call, out=torch.zeros_like(call["v"], dtype=torch.float32))
    want, last = law(call)
    agree(o[..., None, None, :].transpose(1, -1), want[..., None, None, :].transpose(1, -1), 1e-3)
    agree(state[..., None, :], last[..., None, :], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_decay_to_nothing_forgets_and_the_decays_beside_it_stay_exact(dtype: torch.dtype) -> None:
    call = fixed(90, dtype)
    call["g"] = call["g"].float() / 8
    call["g"][:, 10:80:3] = -1000.0
    call["g"][:, 50] = -math.inf
    (o, state), (want, last) = run(call), law(call | {"g": call["g"].clamp(min=-1e4)})
    agree(o.transpose(1, 2), want.transpose(1, 2), TOLERANCE[dtype])
    agree(state, last, TOLERANCE[dtype])


def test_no_rows_and_no_tokens() -> None:
    call = fixed(3)
    for part in (slice(0, 0), slice(None)), (slice(None), slice(0, 0)):
        o, state = run(call | {name: call[name][part] for name in TOKENS})
        assert o.shape == call["v"][part].shape and same_bits(state, call["state"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"q": torch.zeros(2, 3, 1, 300), "k": torch.zeros(2, 3, 1, 300)}, "1..256"),
        ({"v": torch.zeros(2, 3, 2, 257), "state": torch.zeros(2, 2, 257, 16)}, "1..256"),
        ({"k": torch.zeros(2, 3, 1, 8)}, "B, T, H, K"),
        ({"v": torch.zeros(2, 4, 2, 20)}, "B, T, HV, V"),
        ({"q": torch.zeros(2, 3, 4, 16), "k": torch.zeros(2, 3, 4, 16)}, "multiple"),
        ({"v": torch.zeros(2, 3, 2, 20).double()}, "float16"),
        ({"v": torch.zeros(2, 3, 2, 20).half()}, "float16"),
        ({"v": torch.zeros(2, 3, 20, 2).transpose(2, 3)}, "contiguous"),
        ({"g": torch.zeros(2, 3, 2, 16)}, "g must be"),
        ({"beta": torch.zeros(2, 3, 1)}, "beta must be"),
        ({"state": torch.zeros(2, 2, 16, 20)}, "state must be"),
        ({"state": torch.zeros(2, 2, 20, 16).double()}, "float32"),
        ({"state": torch.zeros(1, 2, 20, 16)}, "slots"),
        ({"state_indices": torch.zeros(2)}, "int32"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths"),
        ({"out": torch.zeros(2, 3, 2, 16)}, "out"),
        ({"g": None, "gate": Gate(torch.zeros(2), None)}, "gate"),
        ({"gate": Gate(torch.zeros(3), None)}, "A_log"),
        ({"gate": Gate(torch.zeros(2), torch.zeros(2, 16))}, "dt_bias"),
        ({"beta": torch.zeros(2, 3, 2, device="meta")}, "meta"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(fault: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chunk_prefill(**fixed(3, batch=2) | fault)


@full_size
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("dims", "heads"), [((256, 256), (8, 8)), ((128, 128), (2, 6)), ((96, 192), (4, 4)), ((64, 64), (4, 8))]
)
def test_sizes_of_models(dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype) -> None:
    for length in (33, 777, 2048):
        call = fixed(length, dtype, batch=3, dims=dims, heads=heads)
        call["g"] = call["g"].float() / 50  # a memory of hundreds of tokens
        call["lengths"] = torch.tensor([length, length // 2, length], dtype=torch.int32, device=DEVICE)
        call["state_indices"] = torch.tensor([2, 0, -1], device=DEVICE)
        (o, state), (want, last) = run(call), law(call)
        agree(o.transpose(1, 2), want.transpose(1, 2), TOLERANCE[dtype])
        agree(state, last, min(TOLERANCE[dtype], 1e-3))
        for _ in range(3):
            again = run(call)
            assert same_bits(again[0], o) and same_bits(again[1], state)
        row = {name: call[name][:1] for name in (*TOKENS, "lengths", "state_indices")}
        alone = run(call | row)
        assert same_bits(alone[0], o[:1]) and same_bits(alone[1][2], state[2])
