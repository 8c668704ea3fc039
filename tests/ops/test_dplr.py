"""Laws of the generalised delta rule: the replay, the padding, the bits of one-token decoding, and long texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specla.ops import chunk_dplr, dplr_verify, gated_delta_commit
from specla.ops.dplr import CHUNK, half_nodes
from specla.ops.naive import naive_dplr_verify, naive_gated_delta_commit
from specla.tree import Tree
from tests.ops.strategies import EXACT, MODES, close, parents, path_to, same_bits, tree_of

every_mode = pytest.mark.parametrize("mode", MODES)


@dataclass(frozen=True)
class Case:
    inputs: tuple[Tensor, ...]  # q, k, v, g, a, b
    state: Tensor
    parents: list[list[int]]
    size: int

    def __repr__(self) -> str:
        return f"Case({[list(x.shape) for x in (*self.inputs, self.state)]}, {self.parents})"

    @property
    def tree(self) -> Tree:
        return tree_of(self.parents, self.size)

    def rows(self, b: int, ids: list[int]) -> tuple[Tensor, ...]:
        return tuple(x[b : b + 1, ids].clone() for x in self.inputs)


def make(
    seed: int, batch: int, size: int, heads: int, dims: tuple[int, int], decay: float, dtype: Any
) -> Case:
    """Keys that are removed have a norm of one, as RWKV-7 has them; b is a part of them."""
    rng = torch.Generator().manual_seed(seed)

    def normal(dim: int) -> Tensor:
        return torch.randn(batch, size, heads, dim, generator=rng, dtype=torch.float64)

    q, k, kappa, v = normal(dims[0]), normal(dims[0]), normal(dims[0]), normal(dims[1])
    kappa = kappa / kappa.norm(dim=-1, keepdim=True)
    g = -decay * torch.rand(k.shape, generator=rng, dtype=torch.float64)
    b = kappa * torch.rand(k.shape, generator=rng, dtype=torch.float64)
    state = torch.randn(batch, heads, dims[1], dims[0], generator=rng, dtype=torch.float64)
    inputs = tuple(x.to(dtype) for x in (q, k, v, g, -kappa, b))
    return Case(inputs, state.to(dtype), [list(range(-1, size - 1))] * batch, size)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64, max_size: int = 12) -> Case:
    batch = draw(st.integers(1, 3))
    rows = draw(parents(batch, max_size))
    size = max(map(len, rows)) + draw(st.integers(0, 2))
    dims = draw(st.sampled_from([(1, 1), (2, 5), (3, 2), (8, 8), (16, 8), (20, 33)]))
    decay = draw(st.sampled_from([0.0, 0.6, 60.0]))
    made = make(draw(st.integers(0, 2**31)), batch, size, draw(st.integers(1, 3)), dims, decay, dtype)
    return Case(made.inputs, made.state, rows, size)


@given(case=cases(max_size=6))
def test_naive_equals_products_of_transition_matrices(case: Case) -> None:
    o, _ = naive_dplr_verify(*case.inputs, case.tree, state=case.state)
    for b, parent in enumerate(case.parents):
        for i in range(len(parent)):
            for h in range(case.state.shape[1]):
                s = case.state[b, h]
                for j in path_to(parent, i):
                    k, v, g, remove, add = (x[b, j, h] for x in case.inputs[1:])
                    s = s @ (torch.diag(g.exp()) + torch.outer(remove, add)) + torch.outer(v, k)
                close(o[b, i, h], s @ case.inputs[0][b, i, h])


@every_mode
@given(case=cases())
def test_every_mode_equals_the_naive_replay_in_float64(mode: str, case: Case) -> None:
    o, factors = dplr_verify(*case.inputs, case.tree, state=case.state, mode=mode)
    want, kept = naive_dplr_verify(*case.inputs, case.tree, state=case.state)
    close(o, want)
    for x, y in zip(factors, kept, strict=True):
        close(x, y)


@every_mode
@given(case=cases())
def test_padding_is_not_read(mode: str, case: Case) -> None:
    clean, factors = dplr_verify(*case.inputs, case.tree, state=case.state, mode=mode)
    padding = ~case.tree.valid
    poisoned = tuple(x.masked_fill(padding[..., None, None], torch.nan) for x in case.inputs)
    o, again = dplr_verify(*poisoned, case.tree, state=case.state, mode=mode)
    assert torch.equal(o, clean) and not o[padding].any()
    assert all(torch.equal(x, y) for x, y in zip(factors, again, strict=True))


def commit(
    state: Tensor, factors: Any, path: list[int], op: Callable[..., None] = gated_delta_commit
) -> None:
    halves = half_nodes(torch.tensor([path]))
    op(state, factors, halves, torch.tensor([halves.shape[1] - 1]))


@given(case=cases(), data=st.data())
def test_half_nodes_commit_the_state_after_a_node(case: Case, data: st.DataObject) -> None:
    _, factors = dplr_verify(*case.inputs, case.tree, state=case.state)
    for b, parent in enumerate(case.parents):
        path = path_to(parent, data.draw(st.integers(0, len(parent) - 1)))
        mine = type(factors)(*(x[b : b + 1] for x in factors))
        fast, slow = case.state[b : b + 1].clone(), case.state[b : b + 1].clone()
        commit(fast, mine, path)
        commit(slow, mine, path, naive_gated_delta_commit)
        close(fast, slow)
        for h in range(slow.shape[1]):  # o = S q shows the state in every direction
            for q in torch.eye(slow.shape[3], dtype=slow.dtype):
                rows = case.rows(b, path)
                asked = torch.zeros_like(rows[0])
                asked[:, -1, h] = q
                o, _ = naive_dplr_verify(asked, *rows[1:], Tree.chain(len(path)), state=case.state[b : b + 1])
                close(o[0, -1, h], slow[0, h] @ q)


@pytest.mark.parametrize("mode", EXACT)
@given(case=cases(torch.float32), data=st.data())
def test_a_tree_has_the_bits_of_one_token_after_another(mode: str, case: Case, data: st.DataObject) -> None:
    o, factors = dplr_verify(*case.inputs, case.tree, state=case.state, mode=mode)
    for b, parent in enumerate(case.parents):
        path = path_to(parent, data.draw(st.integers(0, len(parent) - 1)))
        state = case.state[b : b + 1].clone()
        for i in path:
            one, step = dplr_verify(*case.rows(b, [i]), Tree.chain(1), state=state, mode=mode)
            assert same_bits(one[0, 0], o[b, i])
            commit(state, step, [0])
        whole = case.state[b : b + 1].clone()
        commit(whole, type(factors)(*(x[b : b + 1] for x in factors)), path)
        assert same_bits(whole, state)


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (8, 8)])
def test_bits_at_the_sizes_of_models(mode: str, dims: tuple[int, int]) -> None:
    case = make(3, 4, 24, 6, dims, 0.6, torch.float32)
    trees = [
        [-1, *(i // 2 for i in range(23))],
        list(range(-1, 23)),
        [-1, *[0] * 23],
        [-1, 0, 0, *range(1, 22)],
    ]
    o, _ = dplr_verify(*case.inputs, Tree(trees), state=case.state, mode=mode)
    for b, parent in enumerate(trees):
        for leaf in (23, 12):
            state = case.state[b : b + 1].clone()
            for i in path_to(parent, leaf):
                one, step = dplr_verify(*case.rows(b, [i]), Tree.chain(1), state=state, mode=mode)
                assert same_bits(one[0, 0], o[b, i])
                commit(state, step, [0])


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("decay", [0.0, 0.6, 60.0])
def test_a_text_in_chunks_equals_the_replay(length: int, decay: float) -> None:
    case = make(5, 2, length, 2, (8, 6), decay, torch.float64)
    o, last = chunk_dplr(*case.inputs, initial_state=case.state)
    want, factors = naive_dplr_verify(*case.inputs, case.tree, state=case.state)
    close(o, want)
    state = case.state.clone()
    path = half_nodes(torch.arange(length).expand(2, -1))
    naive_gated_delta_commit(state, factors, path, torch.full((2,), 2 * length - 1))
    close(last, state)
    fresh, _ = chunk_dplr(*case.inputs)
    zero, _ = naive_dplr_verify(*case.inputs, case.tree, state=torch.zeros_like(case.state))
    close(fresh, zero)


def test_a_text_cut_between_chunks_has_the_same_bits() -> None:
    case = make(6, 1, 5 * CHUNK + 3, 2, (16, 16), 0.6, torch.float32)
    whole, last = chunk_dplr(*case.inputs, initial_state=case.state)
    for cut in (CHUNK, 4 * CHUNK):
        first, state = chunk_dplr(*(x[:, :cut] for x in case.inputs), initial_state=case.state)
        second, end = chunk_dplr(*(x[:, cut:] for x in case.inputs), initial_state=state)
        assert same_bits(torch.cat([first, second], 1), whole) and same_bits(end, last)


def test_gradients_of_a_text() -> None:
    case = make(7, 1, CHUNK + 2, 1, (3, 2), 0.6, torch.float64)
    inputs = tuple(x.requires_grad_() for x in (*case.inputs, case.state))
    assert torch.autograd.gradcheck(lambda *x: chunk_dplr(*x[:6], initial_state=x[6]), inputs)


def test_decay_beyond_what_floats_hold_stays_finite() -> None:
    case = make(8, 1, 2 * CHUNK, 2, (8, 8), 400.0, torch.float32)
    for o in (
        chunk_dplr(*case.inputs)[0],
        dplr_verify(*case.inputs, case.tree, state=case.state, mode="parallel")[0],
    ):
        assert torch.isfinite(o).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda n: n.update(mode="wide"), "mode must be one of auto, serial, parallel, hybrid, got 'wide'"),
     (lambda n: n.update(q=n["q"][:, :1]), r"q must be \[B=2, N=3, H, K\]"),
     (lambda n: n.update(b=n["b"][..., :1]), "b must be"),
     (lambda n: n.update(v=n["v"][:, :, :1]), "v must be"),
     (lambda n: n.update(g=n["g"].long()), "g must be floating point"),
     (lambda n: n.update(state=n["state"].bfloat16()), "state must be fp32 or fp64"),
     (lambda n: n.update(state=n["state"][:, :, :2]), r"state must be \[B, H, V, K\] = \[2, 2, 4, 5\]")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    case = make(9, 2, 3, 2, (5, 4), 0.6, torch.float32)
    named: dict[str, Any] = dict(zip("qkvgab", case.inputs, strict=True)) | {"state": case.state}
    change(named)
    with pytest.raises(ValueError, match=words):
        dplr_verify(tree=case.tree, **named)
