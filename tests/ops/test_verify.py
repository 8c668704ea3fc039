"""Laws of gated_delta_verify: the replay, the paths, the padding, and the bits of one-token decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.ops import gated_delta_commit, gated_delta_verify
from specla.ops.factors import Factors, Pending
from specla.ops.naive import naive_gated_delta_verify
from specla.tree import Tree
from tests.ops.strategies import (
    EXACT,
    MODES,
    Case,
    CountOps,
    behind_gate,
    cases,
    close,
    make_inputs,
    path_to,
    poison_case,
    random_parent,
    same_bits,
    tree_of,
)

every_mode = pytest.mark.parametrize("mode", MODES)
exact_modes = pytest.mark.parametrize("mode", EXACT)


def assert_same(case: Case, got: tuple, want: tuple, tol: float = 1e-10) -> None:
    """o everywhere (0 at padding), factors at real nodes, and the whole state."""
    real = case.real
    assert got[0].shape == case.v.shape and not got[0][~real].any()
    close(got[0], want[0], tol)
    for x, y in zip(got[1], want[1], strict=True):
        close(x[real], y[real], tol)
    torch.testing.assert_close(got[2], want[2], rtol=tol, atol=tol, equal_nan=True)


def decay_and_strength(case: Case) -> tuple[Tensor | None, Tensor]:
    """g and beta behind the gate, as the formulas have them."""
    g, beta, gate = case.g, case.beta, case.gate
    if gate is not None and g is not None:
        rate = gate.A_log.exp().view(-1, *[1] * (g.dim() - 3))
        g = -rate * (1 + (g if gate.dt_bias is None else g + gate.dt_bias).exp()).log()
        beta = None if beta is None else gate.beta_scale / (1 + (-beta).exp())
    return g, torch.ones_like(case.v[..., 0]) if beta is None else beta


@given(cases(with_pending=False, max_batch=2, max_size=8))
def test_naive_equals_the_closed_form_of_the_recurrence(case: Case) -> None:
    o, factors, state = case.run(naive_gated_delta_verify)
    g, strength = decay_and_strength(case)
    heads = case.q.shape[2]
    scale = case.q.shape[3] ** -0.5 if case.scale is None else case.scale
    for b, (parent, slot) in enumerate(zip(case.parents, case.slots, strict=True)):
        for h in range(case.v.shape[2] if slot >= 0 else 0):
            q, k = (x[b, :, h * heads // case.v.shape[2]] for x in (case.q, case.k))
            if case.l2norm:
                q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            v, beta, s0, d = case.v[b, :, h], strength[b, :, h], state[slot, h], {}
            for i in range(len(parent)):
                path = path_to(parent, i)
                total = {j: sum(g[b, n, h] for n in path_to(parent, j)) if g is not None else 0 for j in path}
                old = {
                    j: torch.as_tensor(total[i] - total[j], dtype=torch.float64).exp() * k[j] for j in path
                }
                start = torch.as_tensor(total[i], dtype=torch.float64).exp() * s0
                held = start @ k[i] + sum((old[j] @ k[i]) * d[j] for j in path[:-1])
                d[i] = beta[i] * (v[i] - held if case.delta else v[i])
                out = start @ q[i] + sum((old[j] @ q[i]) * d[j] for j in path)
                close(factors.d[b, i, h], d[i])
                close(o[b, i, h], scale * out)


@every_mode
@given(case=cases())
def test_every_mode_equals_the_naive_replay_in_float64(mode: str, case: Case) -> None:
    assert_same(case, case.run(gated_delta_verify, mode=mode), case.run(naive_gated_delta_verify))


@every_mode
@given(case=cases(max_batch=2, max_size=8, with_pending=False))
def test_every_node_equals_its_ancestor_path_run_alone_as_a_chain(mode: str, case: Case) -> None:
    o, factors, _ = case.run(gated_delta_verify, mode=mode)
    for b, i in case.real.nonzero().tolist():
        alone = case.chain(b, path_to(case.parents[b], i))
        o_alone, f_alone, _ = alone.run(gated_delta_verify, mode=mode)
        close(o[b, i], o_alone[0, -1])
        close(factors.d[b, i], f_alone.d[0, -1])


def decode(
    case: Case, rows: list[list[int]], state: Tensor, slots: Tensor, mode: str, delayed: bool
) -> list[Tensor]:
    """Plain decoding: each row's nodes one token a call, all rows together; a finished row is padding.

    Commits into `state` and returns o [len(rows[b]), HV, V] for each row.
    """
    outs: list[list[Tensor]] = [[] for _ in rows]
    pending, zero = None, torch.zeros(len(rows), dtype=torch.int32)
    for t in range(max(map(len, rows))):
        live = torch.tensor([t < len(ids) for ids in rows])
        picks = torch.tensor([ids[t] if t < len(ids) else 0 for ids in rows])
        named = {n: getattr(case, n) for n in ("q", "k", "v", "g", "beta")}
        token = {
            n: None if x is None else x[torch.arange(len(rows)), picks][:, None] for n, x in named.items()
        }
        indices = torch.where(live, slots, -1)
        if delayed and pending is not None:  # a row that has just ended is flushed
            gone = torch.where(live, -1, slots)
            gated_delta_commit(
                state, pending.factors, pending.path, pending.num_nodes - 1, state_indices=gone
            )
        o, factors = gated_delta_verify(
            **token,
            tree=Tree.chain(1, batch=len(rows)),
            state=state,
            state_indices=indices,
            pending=pending,
            scale=case.scale,
            mode=mode,
            use_qk_l2norm_in_kernel=case.l2norm,
            delta=case.delta,
            gate=case.gate,
        )
        if delayed:
            pending = Pending(factors, zero[:, None], live.int())
        else:
            gated_delta_commit(state, factors, zero[:, None], zero, state_indices=indices)
        for b in live.nonzero().flatten().tolist():
            outs[b].append(o[b, 0])
    if delayed and pending is not None:
        alive = torch.where(pending.num_nodes > 0, slots, -1)
        gated_delta_commit(state, pending.factors, pending.path, zero, state_indices=alive)
    return [torch.stack(out) for out in outs]


@every_mode
@pytest.mark.parametrize("delayed", [False, True])
@given(case=cases(max_size=10, with_pending=False, with_slots=False))
def test_a_chain_tree_equals_token_by_token_decoding(mode: str, delayed: bool, case: Case) -> None:
    rows = [list(range(len(parent))) for parent in case.parents]
    case = replace(case, tree=tree_of([[i - 1 for i in ids] for ids in rows], case.q.shape[1]))
    o, factors, tree_state = case.run(gated_delta_verify, mode=mode)
    path = torch.arange(case.q.shape[1]).expand(len(rows), -1)
    gated_delta_commit(tree_state, factors, path, torch.tensor([len(ids) - 1 for ids in rows]))
    state = case.state.clone()
    outs = decode(case, rows, state, torch.arange(len(rows)), mode, delayed)
    for b, ids in enumerate(rows):
        close(o[b, : len(ids)], outs[b])
    close(tree_state, state)


def assert_decoding_bits(case: Case, mode: str, delayed: bool, leaves: list[int]) -> None:
    """Verify, then commit the paths to `leaves`: the bits of feeding those paths one token at a time."""
    batch = len(case.parents)
    rows = [path_to(parent, leaf) for parent, leaf in zip(case.parents, leaves, strict=True)]
    o, factors, tree_state = case.run(gated_delta_verify, mode=mode)
    path = torch.full((batch, max(map(len, rows))), -1, dtype=torch.int32)
    for b, ids in enumerate(rows):
        path[b, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    gated_delta_commit(
        tree_state, factors, path, torch.tensor([len(ids) - 1 for ids in rows], dtype=torch.int32)
    )
    together = case.state.clone()
    outs = decode(case, rows, together, torch.arange(batch), mode, delayed)
    for b, ids in enumerate(rows):
        assert same_bits(o[b, ids], outs[b])
        single = case.chain(b, ids)  # and a row alone has the bits of the batch
        state = single.state.clone()
        assert same_bits(
            decode(single, [list(range(len(ids)))], state, torch.tensor([0]), mode, delayed)[0], outs[b]
        )
        assert same_bits(state[0], tree_state[b])
    assert same_bits(tree_state, together)


@exact_modes
@pytest.mark.parametrize("delayed", [False, True])
@given(case=cases(torch.float32, with_pending=False, with_slots=False), data=st.data())
def test_forward_of_n_has_the_bits_of_n_times_forward_of_one(
    mode: str, delayed: bool, case: Case, data: st.DataObject
) -> None:
    leaves = [data.draw(st.integers(0, len(parent) - 1)) for parent in case.parents]
    assert_decoding_bits(case, mode, delayed, leaves)


@pytest.fixture
def on_threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def big_case(
    seed: int,
    dims: tuple[int, int],
    heads: tuple[int, int],
    batch: int,
    size: int,
    decay: str = "mild",
    *,
    gated: bool = False,
    **extra: Any,
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    shapes = ["random", "bushy", "comb", "star", "chain"]
    rows = [random_parent(shapes[b % 5], size - b, rng) for b in range(batch)]
    inputs = make_inputs(rng, batch, size, heads, dims, decay, torch.float32, fused=True)
    inputs = behind_gate(rng, inputs) if gated else inputs
    state = torch.randn(batch, heads[1], dims[1], dims[0], generator=rng)
    named = {"state_indices": None, "pending": None, "scale": None, "l2norm": True} | extra
    return Case(**inputs, parents=rows, tree=tree_of(rows, size), state=state, **named)


@exact_modes
@pytest.mark.parametrize(
    ("dims", "heads", "batch", "size", "threads", "rule"),
    [
        ((64, 64), (1, 1), 1, 17, 1, {}),
        ((64, 64), (4, 4), 5, 17, 1, {}),
        ((64, 64), (4, 4), 3, 9, 2, {}),
        ((128, 128), (2, 4), 2, 16, 1, {}),
        ((128, 256), (2, 2), 3, 9, 1, {}),
        ((96, 33), (1, 3), 4, 24, 2, {}),
        ((48, 96), (3, 3), 2, 33, 1, {}),
        ((17, 40), (2, 2), 5, 12, 1, {}),
        ((64, 64), (2, 2), 2, 9, 1, {"decay": "none"}),
        ((64, 64), (2, 2), 2, 9, 1, {"decay": "none", "delta": False}),
        ((64, 64), (2, 4), 2, 9, 1, {"delta": False, "gated": True}),
        ((128, 128), (2, 2), 2, 9, 2, {"decay": "channel-mild", "gated": True}),
        ((17, 40), (1, 3), 3, 12, 1, {"decay": "channel-strong"}),
        ((33, 48), (2, 4), 3, 12, 1, {"decay": "channel-mild", "delta": False}),
    ],
)
def test_forward_of_n_has_the_bits_of_n_times_forward_of_one_at_model_sizes(
    mode: str,
    dims: tuple[int, int],
    heads: tuple[int, int],
    batch: int,
    size: int,
    threads: int,
    rule: dict[str, Any],
    on_threads: Any,
) -> None:
    on_threads(threads)
    case = big_case(1, dims, heads, batch, size, **rule)
    leaves = [int(case.tree.depth[b].argmax()) for b in range(batch)]
    assert_decoding_bits(case, mode, False, leaves)


@given(cases(torch.float32))
def test_hybrid_has_the_bits_of_serial(case: Case) -> None:
    (o, f, s), (o_hybrid, f_hybrid, s_hybrid) = (case.run(gated_delta_verify, mode=mode) for mode in EXACT)
    assert same_bits(o, o_hybrid) and same_bits(s, s_hybrid)
    assert all(same_bits(x[case.real], y[case.real]) for x, y in zip(f, f_hybrid, strict=True))


@exact_modes
@given(case=cases(torch.float32, max_batch=4, with_pending=False))
def test_a_rows_bits_do_not_depend_on_its_batch_or_envelope(mode: str, case: Case) -> None:
    o, factors, _ = case.run(gated_delta_verify, mode=mode)
    for b, (parent, slot) in enumerate(zip(case.parents, case.slots, strict=True)):
        if slot >= 0:
            alone = replace(
                case.chain(b, list(range(len(parent)))), parents=[parent], tree=tree_of([parent], len(parent))
            )
            o_alone, f_alone, _ = alone.run(gated_delta_verify, mode=mode)
            assert same_bits(o[b, : len(parent)], o_alone[0])
            assert same_bits(factors.d[b, : len(parent)], f_alone.d[0])


@every_mode
@given(case=cases(torch.float32, with_pending=True))
def test_delayed_pending_has_the_bits_of_a_separate_commit(mode: str, case: Case) -> None:
    o, factors, state = case.run(gated_delta_verify, mode=mode)
    p, committed = case.pending, case.state.clone()
    assert p is not None
    gated_delta_commit(committed, p.factors, p.path, p.num_nodes - 1, state_indices=case.state_indices)
    then = replace(case, state=committed, pending=None)
    o_then, f_then, state_then = then.run(gated_delta_verify, mode=mode)
    assert same_bits(state, committed) and same_bits(state_then, committed)
    if mode in EXACT:
        assert same_bits(o, o_then) and same_bits(factors.d[case.real], f_then.d[case.real])
    else:
        close(o, o_then, 1e-4)


@every_mode
@given(case=cases(poisoned=True))
def test_padding_and_foreign_slots_never_leak(mode: str, case: Case) -> None:
    got, want = case.run(gated_delta_verify, mode=mode), case.run(naive_gated_delta_verify)
    assert want[0].isfinite().all()
    assert_same(case, got, want)
    foreign = [s for s in range(case.state.shape[0]) if s not in case.slots]
    assert same_bits(got[2][foreign], case.state[foreign])


@every_mode
def test_padding_rows_leave_slot_zero_alone(mode: str) -> None:
    case = big_case(3, (8, 8), (1, 1), 3, 4, state_indices=torch.tensor([2, -1, 1], dtype=torch.int32))
    assert case.g is not None
    count = torch.tensor([1, 2, 0], dtype=torch.int32)
    path = torch.tensor([[0, -1], [0, 1], [0, 2]], dtype=torch.int32)
    case = replace(case, pending=Pending(Factors(case.k, case.v, case.g), path, count))
    o, _, state = case.run(gated_delta_verify, mode=mode)
    assert same_bits(state[:2], case.state[:2]) and not same_bits(state[2], case.state[2])
    assert not o[1].any() and o[0].any()


@every_mode
def test_a_batch_of_padding_rows_only_changes_nothing(mode: str) -> None:
    case = big_case(3, (8, 8), (1, 1), 2, 4, state_indices=torch.tensor([-1, -1]))
    o, _, state = poison_case(case, None).run(gated_delta_verify, mode=mode)
    assert not o.any() and state.isnan().all()


@every_mode
@given(case=cases(with_pending=False, max_batch=2))
def test_verify_without_pending_only_reads(mode: str, case: Case) -> None:
    named = {n: getattr(case, n) for n in ("q", "k", "v", "g", "beta") if getattr(case, n) is not None}
    before = {n: x.clone() for n, x in named.items()}
    _, _, state = case.run(gated_delta_verify, mode=mode)
    assert same_bits(state, case.state)
    assert all(same_bits(x, before[n]) for n, x in named.items())


@every_mode
@given(case=cases(with_pending=False, with_slots=False, max_batch=2), data=st.data())
def test_siblings_never_see_each_other(mode: str, case: Case, data: st.DataObject) -> None:
    b = data.draw(st.integers(0, len(case.parents) - 1))
    node = data.draw(st.integers(0, len(case.parents[b]) - 1))
    below = {i for i in range(len(case.parents[b])) if node in path_to(case.parents[b], i)}
    others = [i for i in range(len(case.parents[b])) if i not in below]
    changed = {}
    for name, step in (("q", 3.0), ("k", 0.5), ("v", 100.0), ("beta", 0.01), ("g", -1.0)):
        x = getattr(case, name)
        if x is not None:
            x = x.clone()
            x[b, node] = x[b, node] + step
            changed[name] = x
    o, factors, _ = case.run(gated_delta_verify, mode=mode)
    o_new, f_new, _ = replace(case, **changed).run(gated_delta_verify, mode=mode)
    if mode in EXACT:
        assert same_bits(o[b, others], o_new[b, others]) and same_bits(
            factors.d[b, others], f_new.d[b, others]
        )
        rest = [r for r in range(len(case.parents)) if r != b]
        assert same_bits(o[rest], o_new[rest])
    else:
        close(o[b, others], o_new[b, others])
    assert not torch.equal(o[b, node], o_new[b, node])  # the law can fail


@every_mode
def test_branching_changes_the_result(mode: str) -> None:
    case = big_case(5, (16, 16), (2, 2), 1, 8)
    as_chain = replace(case, parents=[list(range(-1, 7))], tree=Tree.chain(8))
    o, o_chain = (c.run(gated_delta_verify, mode=mode)[0][0] for c in (case, as_chain))
    straight = [i for i in range(8) if path_to(case.parents[0], i) == list(range(i + 1))]
    bent = [i for i in range(8) if i not in straight]
    assert bent and all(not torch.allclose(o[i], o_chain[i]) for i in bent)
    close(o[straight], o_chain[straight], 1e-4)


def test_each_mode_runs_its_own_schedule() -> None:
    size, ops = 24, {}
    for shape in ("star", "chain"):
        parent = random_parent(shape, size, torch.Generator().manual_seed(0))
        case = replace(big_case(4, (8, 8), (1, 1), 1, size), parents=[parent], tree=Tree(parent))
        for mode in MODES:
            case.run(gated_delta_verify, mode=mode)  # the tree's own views are built once
            with CountOps() as count:
                case.run(gated_delta_verify, mode=mode)
            ops[mode, shape] = count.ops
    assert ops["serial", "star"] > 3 * ops["hybrid", "star"]  # one step a node, one step a depth
    assert ops["hybrid", "chain"] > 3 * ops["hybrid", "star"]
    assert ops["parallel", "star"] == ops["parallel", "chain"] < ops["serial", "chain"]


@every_mode
@given(case=cases(with_pending=False))
def test_no_decay_equals_a_log_decay_of_zero(mode: str, case: Case) -> None:
    none = replace(case, g=None, gate=None, beta=None if case.gate else case.beta)
    o, factors, _ = none.run(gated_delta_verify, mode=mode)
    assert factors.g.shape == case.v.shape[:3] and not factors.g.any()
    for zeros in (case.v[..., 0], case.v[..., :1].expand(*case.v.shape[:3], case.q.shape[3])):
        o_zero, f_zero, _ = replace(none, g=torch.zeros_like(zeros)).run(gated_delta_verify, mode=mode)
        close(o, o_zero)
        close(factors.d, f_zero.d)


@every_mode
@given(case=cases(with_pending=False))
def test_a_decay_of_equal_channels_equals_the_scalar_one(mode: str, case: Case) -> None:
    (g, beta), size = decay_and_strength(case), case.q.shape[3]
    g = -beta.abs() if g is None else g if g.dim() == 3 else g[..., 0]
    one = replace(case, g=g, beta=beta, gate=None)
    o, factors, _ = one.run(gated_delta_verify, mode=mode)
    wide = replace(one, g=g[..., None].expand(*g.shape, size))
    o_wide, f_wide, _ = wide.run(gated_delta_verify, mode=mode)
    assert torch.equal(f_wide.g, factors.g[..., None].expand(*g.shape, size))
    close(o, o_wide)
    close(factors.d, f_wide.d)


@every_mode
@given(case=cases(with_pending=False, poisoned=True))
def test_without_the_correction_a_node_writes_beta_times_v(mode: str, case: Case) -> None:
    _, factors, _ = replace(case, delta=False).run(gated_delta_verify, mode=mode)
    _, beta = decay_and_strength(case)
    close(factors.d[case.real], (beta[..., None] * case.v)[case.real])


@every_mode
@pytest.mark.parametrize("shape", ["chain", "random"])
def test_strong_decay_and_repeated_keys_stay_finite_and_accurate_in_float32(mode: str, shape: str) -> None:
    for decay, repeated in (("strong", False), ("none", True), ("mild", True), ("channel-strong", False)):
        rng = torch.Generator().manual_seed(7)
        parent = random_parent(shape, 48, rng)
        inputs = make_inputs(rng, 1, 48, (1, 2), (16, 16), decay, torch.float32, repeated=repeated)
        state = torch.randn(1, 2, 16, 16, generator=rng)
        extra = {"state_indices": None, "pending": None, "scale": None, "l2norm": True}
        case = Case(**inputs, parents=[parent], tree=Tree(parent), state=state, **extra)
        doubles = {n: x.double() for n, x in inputs.items() if x is not None}
        want, _, _ = replace(case, **doubles, state=state.double()).run(naive_gated_delta_verify)
        close(case.run(gated_delta_verify, mode=mode)[0].double(), want, 1e-3)


@every_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_the_states_dtype(mode: str, dtype: torch.dtype) -> None:
    for rule in ({}, {"decay": "channel-mild", "gated": True}):
        case = big_case(9, (32, 16), (2, 4), 2, 9, **rule)
        low = {n: getattr(case, n).to(dtype) for n in ("q", "k", "v", "g", "beta")}
        o, _, _ = replace(case, **low).run(gated_delta_verify, mode=mode)
        wide, _, _ = replace(case, **{n: x.float() for n, x in low.items()}).run(
            gated_delta_verify, mode=mode
        )
        assert o.dtype == dtype and wide.dtype == torch.float32
        assert torch.equal(o, wide.to(dtype))


@every_mode
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)])
@pytest.mark.parametrize("decay", ["none", "mild", "channel-mild"])
def test_a_node_keeps_its_key_value_and_decay_and_no_snapshot(
    mode: str, heads: tuple[int, int], decay: str
) -> None:
    (h, hv), (dk, dv), batch, nodes = heads, (24, 40), 2, 9
    _, factors, _ = big_case(2, (dk, dv), heads, batch, nodes, decay).run(gated_delta_verify, mode=mode)
    assert isinstance(factors, Factors)
    channels = (dk,) if decay == "channel-mild" else ()
    assert [tuple(x.shape) for x in factors] == [
        (batch, nodes, h, dk),
        (batch, nodes, hv, dv),
        (batch, nodes, hv, *channels),
    ]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in factors}
    numbers = h * dk + hv * (dv + (dk if channels else 1))
    assert sum(storages.values()) == 4 * batch * nodes * numbers  # a view would keep more alive
