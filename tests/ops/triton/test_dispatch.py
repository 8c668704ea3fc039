"""The ops, the slots and the target hand their work to the kernels: on a GPU, or here where a switch says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.engine.params import SamplingParams
from specla.ops import (
    gated_delta_commit,
    gated_delta_verify,
    triton as kernels,
    verify as verify_ops,
)
from specla.ops.conv import conv_commit, convolve, tree_conv
from specla.ops.factors import Factors
from specla.ops.naive import (
    naive_conv_commit,
    naive_gated_delta_commit,
    naive_gated_delta_verify,
    naive_tree_conv,
)
from specla.ops.triton import MAX_TAPS
from specla.ops.verify import verify
from specla.tree import Tree
from tests.ops.strategies import Case, close, same_bits
from tests.ops.test_conv import convs
from tests.ops.test_verify_refusals import bad_calls, good_call
from tests.ops.triton import DEVICE
from tests.ops.triton.test_verify import (
    assert_near,
    in_double,
    kernel_cases,
    moved,
    plain_case,
    rms,
    to_device,
)
from tests.targets import (
    ScriptedDrafter,
    build_target,
    committed,
    equal,
    make_config,
    make_target,
    prompt,
    read_one_by_one,
    run,
    take,
)

on_the_cpu = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="matrix products of a GPU have bits of their own"
)


@contextmanager
def switched_on() -> Iterator[list[str]]:
    """Kernels for tensors of any device but float64 ones; yields the names of what was launched."""
    launched: list[str] = []

    def spy(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            launched.append(name)
            return real(*args, **kwargs)

        patch.setattr(module, name, noted)

    import specla.ops.triton.commit
    import specla.ops.triton.conv
    import specla.ops.triton.verify

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(kernels, "use_kernels", lambda state: state.dtype != torch.float64)
        spy(specla.ops.triton.verify, "verify")
        spy(specla.ops.triton.commit, "commit")
        spy(specla.ops.triton.conv, "tree_conv")
        spy(specla.ops.triton.conv, "conv_commit")
        yield launched


def verified(case: Case, mode: str) -> tuple[Tensor, Factors, Tensor]:
    """The public op, by one kernel."""
    with switched_on() as launched:
        o, factors, state = moved(case).run(gated_delta_verify, mode=mode)
    assert launched == ["verify"]
    assert o.is_contiguous() and all(x.is_contiguous() for x in factors)
    return o.cpu(), Factors(*(x.cpu() for x in factors)), state.cpu()


@settings(max_examples=8)
@given(st.data())
def test_the_public_op_runs_one_kernel_and_equals_the_naive_replay(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["serial", "hybrid", "auto", "parallel"]))
    case = data.draw(kernel_cases(max_size=5, dims=(3, 17), channels=mode != "parallel"))
    assert_near(case, verified(case, mode), in_double(case).run(naive_gated_delta_verify))


@settings(max_examples=6)
@given(kernel_cases(max_size=5, dims=(3, 17), with_pending=True))
def test_the_public_commit_runs_one_kernel_and_equals_the_naive_replay(case: Case) -> None:
    assert case.pending is not None
    (factors, path, count), want = case.pending, case.state.clone()
    naive_gated_delta_commit(want, factors, path, count - 1, state_indices=case.state_indices)
    there = moved(case)
    state = there.state.clone()
    for integers in (torch.int16, torch.int64):
        state.copy_(there.state)
        with switched_on() as launched:
            gated_delta_commit(
                state, there.pending.factors, there.pending.path.clamp(max=99).to(integers),
                there.pending.num_nodes.to(integers) - 1, state_indices=there.state_indices,
            )  # fmt: skip
        assert launched == ["commit"]
        torch.testing.assert_close(state.cpu(), want, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_inputs_may_lie_in_memory_as_they_like() -> None:
    case = plain_case([[-1, 0, 0], [-1]], (5, 6), (2, 2), counts=[2, 1], gated=True)
    want = verified(case, "serial")

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, x.new_full(x.shape, float("nan"))], -1)[..., 0]

    names = ("q", "k", "v", "g", "beta")
    pending = case.pending
    assert pending is not None and case.gate is not None and case.gate.dt_bias is not None
    path = torch.stack([pending.path, pending.path], -1)[..., 0]
    wide = replace(
        case,
        **{name: spread(getattr(case, name)) for name in names},
        pending=pending._replace(path=path),
        gate=case.gate._replace(A_log=spread(case.gate.A_log), dt_bias=spread(case.gate.dt_bias)),
    )
    got = verified(wide, "serial")
    for x, y in zip((got[0], *got[1], got[2]), (want[0], *want[1], want[2]), strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("form", ["bf16", "by channel", "by value head", "strided"])
def test_accepted_factors_of_another_form_are_committed_too(form: str) -> None:
    case = plain_case([[-1, 0, 0], [-1, 0, 1]], (5, 6), (1, 2), counts=[2, 1])
    assert case.pending is not None
    k, d, g = case.pending.factors
    factors = {
        "bf16": Factors(k.bfloat16(), d.bfloat16(), g.bfloat16()),
        "by channel": Factors(k, d, g[..., None] * torch.rand(5)),
        "by value head": Factors(k.expand(-1, -1, 2, -1) * torch.rand(2, 1), d, g),
        "strided": Factors(*(torch.stack([x, x], -1)[..., 0] for x in (k, d, g))),
    }[form]
    case = replace(case, pending=case.pending._replace(factors=factors))
    with switched_on() as launched:
        o, f, state = moved(case).run(gated_delta_verify, mode="serial")
    assert launched == ["commit", "verify"]
    got = o.cpu(), Factors(*(x.cpu() for x in f)), state.cpu()
    assert_near(case, got, in_double(case).run(naive_gated_delta_verify))


def refused(call: dict[str, Any], match: str | None = None) -> None:
    call = {name: to_device(x) if not _is_elsewhere(x) else x for name, x in call.items()}
    before = call["state"].clone()
    with switched_on() as launched, pytest.raises(ValueError, match=match):
        gated_delta_verify(**call)
    assert not launched
    assert call["state"].device.type == "meta" or same_bits(call["state"].cpu(), before.cpu())


def _is_elsewhere(x: Any) -> bool:
    if isinstance(x, tuple):
        return any(map(_is_elsewhere, x))
    return isinstance(x, (Tensor, Tree)) and x.device.type == "meta"


@pytest.mark.parametrize("fault", [name for name in bad_calls() if name != "the state is integer"])
def test_what_plain_torch_refuses_the_kernels_refuse_before_a_launch(fault: str) -> None:
    refused(good_call() | bad_calls()[fault])


def test_the_good_call_of_these_laws_is_taken() -> None:
    call = {name: to_device(x) for name, x in good_call().items()}
    with switched_on() as launched:
        gated_delta_verify(**call)
    assert launched and call["state"][[0, 2]].any()


def sized(rows: int = 1, nodes: int = 1, dim_k: int = 1, dim_v: int = 1) -> dict[str, Any]:
    z = torch.zeros
    return {
        "q": z(rows, nodes, 1, dim_k), "k": z(rows, nodes, 1, dim_k), "v": z(rows, nodes, 1, dim_v),
        "g": z(rows, nodes, 1), "beta": z(rows, nodes, 1), "tree": Tree.chain(nodes, rows),
        "state": z(rows, 1, dim_v, dim_k), "state_indices": None, "pending": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": torch.zeros(2, 3, 2, 4, dtype=torch.bfloat16)}, "one dtype, float32, bfloat16 or float16"),
        ({name: torch.zeros(2, 3, 2, 4).double() for name in "qk"}, "one dtype"),
        ({"tree": Tree.chain(3, 2).to("meta")}, "the tree is on meta.*Tree.to"),
        ({"g": torch.zeros(2, 3, 4, 4), "mode": "parallel"}, r"'parallel' takes a g of \[B, N, HV\]"),
        (sized(dim_k=513), r"K and V may be 1\.\.512"),
        (sized(dim_v=513), r"K and V may be 1\.\.512"),
        (sized(nodes=65), r"1\.\.64 nodes"),
        (sized(rows=65536), "up to 65535 rows"),
    ],
    ids=["mixed dtypes", "float64 q", "tree elsewhere", "decay by channel", "K", "V", "N", "B"],
)
def test_what_the_kernels_do_not_take_raises_before_a_launch(change: dict[str, Any], match: str) -> None:
    refused(good_call() | change, match)


def test_the_largest_sizes_pass_the_checks() -> None:
    for call in (sized(nodes=64), sized(dim_k=512), sized(dim_v=512)):
        there = {name: to_device(x) for name, x in call.items()}
        with switched_on() as launched:
            gated_delta_verify(**there, mode="serial")
        assert launched == ["verify"]


def test_a_float64_state_and_a_wanted_gradient_run_plain_torch() -> None:
    case = plain_case([[-1, 0, 0]], (5, 6), counts=[2])
    with switched_on() as launched:
        o, _, _ = moved(in_double(case)).run(gated_delta_verify)
        close(o.cpu(), in_double(case).run(naive_gated_delta_verify)[0])
        q = case.q.clone().to(DEVICE).requires_grad_()
        replace(moved(case), q=q).run(gated_delta_verify, mode="parallel")[0].sum().backward()
    assert not launched and q.grad is not None and q.grad.isfinite().all()


def unchecked(case: Case, mode: str) -> tuple[Tensor, Factors]:
    there = moved(case)
    return verify(
        there.q, there.k, there.v, there.g, there.beta, there.tree, there.state, None, mode, case.l2norm
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["serial", "hybrid", "auto", "parallel"])
def test_the_unchecked_entry_runs_one_kernel_and_returns_what_plain_torch_returns(mode: str) -> None:
    case = plain_case([[-1, 0, 0], [-1, 0]], (5, 6), (1, 2), dtype=torch.bfloat16)
    with switched_on() as launched:
        o, factors = unchecked(case, mode)
    assert launched == ["verify"] and o.is_contiguous()
    want, f_want, _ = in_double(case).run(naive_gated_delta_verify)
    assert rms(o.cpu(), want) < 5e-3 and rms(factors.d.cpu(), f_want.d) < 2e-3
    o_eager, f_eager = verify(
        case.q, case.k, case.v, case.g, case.beta, case.tree, case.state, None, mode, case.l2norm
    )
    assert [(x.shape, x.dtype) for x in (o, *factors)] == [(x.shape, x.dtype) for x in (o_eager, *f_eager)]


def test_the_unchecked_entry_never_changes_hands_with_the_tree_or_the_batch() -> None:
    """A call that no kernel takes is refused where smaller ones are taken: plain torch has other bits."""
    chain = list(range(-1, 64))
    with switched_on() as launched, pytest.raises(ValueError, match=r"1\.\.64 nodes"):
        unchecked(plain_case([chain], (2, 2)), "serial")
    with switched_on() as launched:
        unchecked(plain_case([[-1]], (513, 2)), "serial")
    assert not launched  # whatever its trees, this target's heads are too large


@settings(max_examples=8)
@given(convs(torch.float32, widest=MAX_TAPS, poisoned=True))
def test_the_public_convolution_runs_one_kernel_and_equals_the_naive_replay(case: dict[str, Any]) -> None:
    call, want_state = case["call"], case["call"]["conv_state"].clone()
    want = naive_tree_conv(**call | {"conv_state": want_state})
    there = {name: to_device(x) for name, x in call.items()} | {
        "conv_state": to_device(call["conv_state"].clone())
    }
    if call["pending"] is not None:
        there["pending"] = tuple(map(to_device, call["pending"]))
    with switched_on() as launched:
        y = tree_conv(**there)
    assert launched == ["tree_conv"]
    close(y.cpu(), want, 1e-5)
    torch.testing.assert_close(there["conv_state"].cpu(), want_state, rtol=0, atol=0, equal_nan=True)


def test_the_public_commit_of_a_window_runs_one_kernel() -> None:
    rng = torch.Generator().manual_seed(0)
    x, start = torch.randn(2, 4, 5, generator=rng), torch.randn(3, 5, 3, generator=rng)
    path, accepted, slots = torch.tensor([[0, 2, 3], [0, 1, -1]]), torch.tensor([2, 0]), torch.tensor([2, 0])
    want, state = start.clone(), to_device(start.clone())
    naive_conv_commit(want, x, path, accepted, state_indices=slots)
    with switched_on() as launched:
        conv_commit(state, *map(to_device, (x, path, accepted)), state_indices=to_device(slots))
    assert launched == ["conv_commit"] and same_bits(state.cpu(), want)


def test_a_faulty_convolution_touches_nothing_and_a_long_window_runs_plain_torch() -> None:
    rng = torch.Generator().manual_seed(0)
    x, tree = to_device(torch.randn(2, 3, 5, generator=rng)), to_device(Tree.chain(3, 2))
    state, weight = (
        to_device(torch.randn(2, 5, 3, generator=rng)),
        to_device(torch.randn(5, 4, generator=rng)),
    )
    before, zero = state.clone(), to_device(torch.zeros(2, 1, dtype=torch.int32))
    pending = (x, zero, to_device(torch.ones(2, dtype=torch.int32)))
    faults = {
        "pending": (x, zero + 3, pending[2]),
        "state_indices": to_device(torch.tensor([1, 1])),
        "activation": "relu",
    }
    for name, fault in faults.items():
        with switched_on() as launched, pytest.raises(ValueError):
            tree_conv(x, tree, weight, None, **{"conv_state": state, "pending": pending} | {name: fault})
        assert not launched and same_bits(state, before)
    longer = to_device(torch.randn(2, 5, 4, generator=rng)), to_device(torch.randn(5, 5, generator=rng))
    with switched_on() as launched:
        tree_conv(x, tree, longer[1], None, conv_state=longer[0], pending=pending)
        convolve(x, tree, longer[1], None, longer[0])
    assert not launched


@on_the_cpu
@pytest.mark.parametrize(
    ("variant", "change"),
    [("grouped", {}), ("plain", {"conv_size": 5, "num_hidden_layers": 1}), ("hybrid_narrow", {})],
    ids=["grouped", "conv_5", "hybrid"],
)
def test_slots_verified_together_have_the_bits_of_each_read_token_by_token(
    variant: str, change: dict[str, Any]
) -> None:
    target, tokens = build_target(make_config(variant, **change)), torch.tensor([prompt(4, 1), prompt(4, 2)])
    paths, slots = [[0, 1, 3], [0, 2]], [2, 0]  # no slice of the pool
    tree = Tree([[-1, 0, 0, 1], [-1, 0, 0, 1]])
    with switched_on() as launched:
        pool = target.new_pool(3, 4)
        for _ in range(3):
            pool.alloc()
        logits = target.verify(tokens, tree, slots, pool)
        take(pool, slots, paths)
        pool.flush(slots)
        assert "verify" in launched and launched.count("commit") == len(pool.groups)
        for b, (slot, path) in enumerate(zip(slots, paths, strict=True)):
            plain = target.new_pool(1, 1)
            plain.alloc()
            assert torch.equal(logits[b, path], read_one_by_one(target, tokens[b, path].tolist(), plain, 0))
            assert equal(committed(pool, slot), committed(plain, 0))
    assert not any(layer.state[1].any() for layer in pool.layers if hasattr(layer, "state"))


@on_the_cpu
def test_speculative_decoding_draws_the_tokens_of_plain_decoding() -> None:
    target, prompts = make_target("plain"), [prompt(3), prompt(5)]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with switched_on() as launched:
        plain = run(target, None, prompts, params, slots=2)
        first = len(launched)
        drafter = ScriptedDrafter(right=0.9, idle=0.1)
        drafted = run(target, drafter, prompts, params, slots=2, drafts=4, references=plain.tokens)
    assert first and len(launched) < 2 * first  # fewer rounds
    assert drafted.outputs == plain.outputs
    for got, want in zip(drafted.logits, plain.logits, strict=True):
        assert got.keys() == want.keys() and all(torch.equal(got[place], want[place]) for place in got)


def test_on_a_cpu_nothing_is_launched() -> None:
    case = plain_case([[-1, 0]], (4, 4), counts=[1])
    assert not kernels.use_kernels(case.state)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("launch", "launch_commit"):
            patch.setattr(verify_ops, name, None)
        case.run(gated_delta_verify)


def test_pending_inputs_of_another_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for on in (True, False):
        monkeypatch.setattr(kernels, "use_kernels", lambda state, on=on: on)
        for held in (1, 3):
            window = torch.randn(3, 5, 3)
            before = window.clone()
            pending = torch.randn(held, 3, 5), torch.zeros(held, 1, dtype=torch.int32), torch.ones(held).int()
            with pytest.raises(ValueError, match="pending must be of B=2 rows"):
                tree_conv(
                    torch.randn(2, 3, 5),
                    Tree.chain(3, 2),
                    torch.randn(5, 4),
                    conv_state=window,
                    pending=pending,
                )
            assert same_bits(window, before)


def test_counts_of_nodes_may_lie_anyhow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "use_kernels", lambda state: True)
    parent = torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32)
    table = torch.tensor([[3, 9], [2, 9]], dtype=torch.int32)
    q, k, v = (torch.randn(2, 3, 1, 8) for _ in range(3))
    results = []
    for count in (table[:, 0], table[:, 0].contiguous()):
        state = torch.ones(2, 1, 8, 8)
        tree = Tree.resident(parent, count)
        results.append(gated_delta_verify(q, k, v, None, None, tree, state=state)[0])
    assert same_bits(*results)
