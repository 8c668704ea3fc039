"""Random trees, tensors, slots and pending commits for the laws of the ops, and how the laws compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specla.ops.factors import Factors, Pending
from specla.ops.gate import Gate
from specla.tree import Tree

MODES = ("serial", "parallel", "hybrid", "auto")
EXACT = ("serial", "hybrid")  # the modes that promise the bits of one-token decoding
DECAYS = ("none", "zero", "mild", "strong")
CHANNEL_DECAYS = ("channel-mild", "channel-strong")  # one for each key channel
SHAPES = ("random", "chain", "star", "comb", "bushy")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit patterns, NaN included."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))
    )


def close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


class CountOps(TorchDispatchMode):
    """Counts the operations that torch runs."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **kwargs or {})


def path_to(parent: list[int], node: int) -> list[int]:
    """Ids from the root down to `node`, walked here so that the tests do not lean on Tree.paths."""
    path = [node]
    while path[0] > 0:
        path.insert(0, parent[path[0]])
    return path


def random_parent(shape: str, size: int, rng: torch.Generator) -> list[int]:
    parent = [-1]
    for i in range(1, size):
        low = {"random": 0, "chain": i - 1, "star": 0, "comb": max(0, i - 2), "bushy": (i - 1) // 2}[shape]
        high = {"random": i, "chain": i, "star": 1, "comb": i, "bushy": (i - 1) // 2 + 1}[shape]
        parent.append(int(torch.randint(low, high, (1,), generator=rng)))
    return parent


def tree_of(parents: list[list[int]], size: int) -> Tree:
    """A batch of ragged parent lists, padded with -1 to `size` nodes."""
    rows = [row + [-1] * (size - len(row)) for row in parents]
    return Tree(
        torch.tensor(rows, dtype=torch.int32), torch.tensor([len(row) for row in parents], dtype=torch.int32)
    )


@st.composite
def parents(draw: st.DrawFn, batch: int, max_size: int = 12) -> list[list[int]]:
    """One parent list a row: ragged sizes from 1 up, shapes mixed within the batch."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = [draw(st.integers(1, max_size)) for _ in range(batch)]
    return [random_parent(draw(st.sampled_from(SHAPES)), size, rng) for size in sizes]


@dataclass(frozen=True, repr=False)
class Case:
    """One call of gated_delta_verify; `parents` are the ragged lists that `tree` pads."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    parents: list[list[int]]
    tree: Tree
    state: Tensor
    state_indices: Tensor | None
    pending: Pending | None
    scale: float | None
    l2norm: bool
    delta: bool = True
    gate: Gate | None = None  # with one, g and beta are raw projections

    def __repr__(self) -> str:
        pending = (
            None if self.pending is None else (self.pending.path.tolist(), self.pending.num_nodes.tolist())
        )
        decay = None if self.g is None else round(float(self.g.nan_to_num().min()), 2)
        gate = None if self.gate is None else (self.gate.dt_bias is not None, self.gate.beta_scale)
        return (
            f"Case(parents={self.parents}, N={self.tree.size}, "
            f"q={list(self.q.shape)}, v={list(self.v.shape)}, "
            f"slots={self.slots} of {self.state.shape[0]}, pending={pending}, "
            f"g={None if self.g is None else list(self.g.shape)}, min g={decay}, beta={self.beta is not None}, "
            f"delta={self.delta}, gate={gate}, scale={self.scale}, "
            f"l2norm={self.l2norm}, {self.state.dtype})"
        )

    def run(self, op: Any, **kwargs: Any) -> tuple[Tensor, Factors, Tensor]:
        """o, factors and the state afterwards; the case's own state stays as it is."""
        state = self.state.clone()
        o, factors = op(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.tree,
            state=state,
            state_indices=self.state_indices,
            pending=self.pending,
            scale=self.scale,
            use_qk_l2norm_in_kernel=self.l2norm,
            delta=self.delta,
            gate=self.gate,
            **kwargs,
        )
        return o, factors, state

    @property
    def slots(self) -> list[int]:
        return list(range(len(self.parents))) if self.state_indices is None else self.state_indices.tolist()

    @property
    def real(self) -> Tensor:
        """bool [B, N]: nodes that are neither padding nor in a padding row."""
        real = torch.zeros(self.q.shape[:2], dtype=torch.bool)
        for b, (parent, slot) in enumerate(zip(self.parents, self.slots, strict=True)):
            real[b, : len(parent)] = slot >= 0
        return real

    def node(self, b: int, ids: list[int]) -> dict[str, Any]:
        """The inputs of some nodes of row b as a batch of one, in the given order."""
        named = {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "beta": self.beta}
        return {name: None if x is None else x[b : b + 1, ids].clone() for name, x in named.items()}

    def chain(self, b: int, ids: list[int]) -> Case:
        """The nodes `ids` of row b alone, as a chain from the row's own slot; no pending commit."""
        parent = list(range(-1, len(ids) - 1))
        state = self.state[self.slots[b]][None].clone()
        extra = {"tree": Tree.chain(len(ids)), "state": state, "state_indices": None, "pending": None}
        return replace(self, **self.node(b, ids), **extra, parents=[parent])


def make_inputs(
    rng: torch.Generator,
    batch: int,
    nodes: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    decay: str,
    dtype: torch.dtype,
    *,
    repeated: bool = False,
    fused: bool = False,
) -> dict[str, Any]:
    """q, k, v, g, beta: keys of norm 0.3 to 1, beta in (0, 2), g <= 0 or None; g of a channel decay has K channels.

    repeated: one key for all nodes (a token said over and over); fused: q, k, v are views of one projection.
    """
    (h, hv), (dk, dv) = heads, dims

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64) * (high - low) + low

    k = torch.randn(batch, 1 if repeated else nodes, h, dk, generator=rng, dtype=torch.float64)
    k = (k / k.norm(dim=-1, keepdim=True) * uniform(0.3, 1, *k.shape[:3], 1)).expand(batch, nodes, h, dk)
    q = torch.randn(batch, nodes, h, dk, generator=rng, dtype=torch.float64)
    v = torch.randn(batch, nodes, hv, dv, generator=rng, dtype=torch.float64)
    low, high = {
        "none": (0, 0),
        "zero": (0, 0),
        "mild": (-1, 0),
        "strong": (-60, -20),
        "channel-mild": (-1, 0),
        "channel-strong": (-60, 0),  # some channels keep what others forget
    }[decay]
    g_shape = (batch, nodes, hv, dk) if decay in CHANNEL_DECAYS else (batch, nodes, hv)
    g = None if decay == "none" else uniform(low, high, *g_shape).to(dtype)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    if fused:
        rows = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1).split([h * dk, h * dk, hv * dv], dim=-1)
        q, k, v = (x.unflatten(-1, y.shape[2:]) for x, y in zip(rows, (q, k, v), strict=True))
    return {"q": q, "k": k, "v": v, "g": g, "beta": uniform(0.02, 1.98, batch, nodes, hv).to(dtype)}


def behind_gate(
    rng: torch.Generator, inputs: dict[str, Any], *, bias: bool = True, beta_scale: float = 2.0
) -> dict[str, Any]:
    """The inputs with the raw projections whose gate makes their g (below 0), and their beta times beta_scale / 2."""
    g, beta = inputs["g"].double(), inputs["beta"]
    shape = g.shape[2:]
    rate = torch.rand(shape[0], generator=rng, dtype=torch.float64) * 4 - 2
    shift = torch.randn(shape, generator=rng, dtype=torch.float64) if bias else torch.zeros(shape).double()
    a = (-g / rate.exp().view(-1, *[1] * (len(shape) - 1))).clamp(1e-6, 600).expm1().log() - shift
    b = None if beta is None else torch.logit(beta.double() / 2).to(beta.dtype)
    gate = Gate(rate.to(inputs["g"].dtype), shift.to(inputs["g"].dtype) if bias else None, beta_scale)
    return inputs | {"g": a.to(inputs["g"].dtype), "beta": b, "gate": gate}


@st.composite
def accepted(draw: st.DrawFn, rows: list[list[int]], *, garbage: bool = True) -> tuple[Tensor, Tensor]:
    """A random path from the root per row and a count from 0 to its length; beyond the count: anything."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = max(map(len, rows)) + draw(st.integers(0, 2))
    path, count = torch.full((len(rows), size), -1, dtype=torch.int32), []
    for b, parent in enumerate(rows):
        ids = path_to(parent, int(torch.randint(0, len(parent), (1,), generator=rng)))
        path[b, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        count.append(draw(st.integers(0, len(ids))))
        if garbage:
            rest = torch.randint(-1, len(parent), (size - count[b],), generator=rng)
            path[b, count[b] :] = rest.to(torch.int32)
    return path, torch.tensor(count, dtype=torch.int32)


@st.composite
def slot_maps(draw: st.DrawFn, batch: int) -> tuple[int, Tensor | None]:
    """(slots, state_indices): None, or permuted slots of a larger pool with some rows -1."""
    if draw(st.booleans()):
        return batch, None
    slots = batch + draw(st.integers(0, 3))
    order = draw(st.permutations(range(slots)))[:batch]
    return slots, torch.tensor([-1 if draw(st.integers(0, 4)) == 0 else s for s in order], dtype=torch.int32)


def poison(x: Tensor | None, keep: Tensor) -> Tensor | None:
    """x with NaN wherever `keep` (a mask over the leading dims) is False."""
    if x is None:
        return None
    return torch.where(
        keep.view(*keep.shape, *[1] * (x.dim() - keep.dim())), x, torch.full_like(x, float("nan"))
    )


@st.composite
def pendings(
    draw: st.DrawFn,
    batch: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    max_size: int,
    decay: str = "mild",
) -> tuple[Pending, Tensor]:
    """A pending commit of another round's tree, and the mask [B, M] of the nodes that it really commits."""
    rows = draw(parents(batch, max_size))
    path, count = draw(accepted(rows))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = max(map(len, rows)) + draw(st.integers(0, 2))
    made = make_inputs(rng, batch, size, heads, dims, decay, dtype)
    used = torch.zeros(batch, size, dtype=torch.bool)
    for b in range(batch):
        used[b, path[b, : int(count[b])].long()] = True
    return Pending(Factors(made["k"], made["v"], made["g"]), path, count), used


@st.composite
def cases(
    draw: st.DrawFn,
    dtype: torch.dtype = torch.float64,
    *,
    max_batch: int = 3,
    max_size: int = 12,
    max_group: int = 3,
    dims: tuple[int, ...] = (1, 2, 3, 5, 8, 16),
    decays: tuple[str, ...] = (*DECAYS, *CHANNEL_DECAYS),
    with_pending: bool | None = None,
    with_slots: bool | None = None,
    poisoned: bool = False,
) -> Case:
    """A whole call. max_group: value heads to a key head. poisoned: NaN where no input or slot must matter."""
    batch = draw(st.integers(1, max_batch))
    rows = draw(parents(batch, max_size))
    size = max(map(len, rows)) + draw(st.integers(0, 3))
    h = draw(st.integers(1, 2))
    heads = (h, h * draw(st.integers(1, max_group)))
    dk, dv = draw(st.sampled_from(dims)), draw(st.sampled_from(dims))
    decay = draw(st.sampled_from(decays))
    repeated, fused = draw(st.integers(0, 4)) == 0, draw(st.booleans())
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    inputs = make_inputs(rng, batch, size, heads, (dk, dv), decay, dtype, repeated=repeated, fused=fused)
    if draw(st.integers(0, 4)) == 0:
        inputs["beta"] = None
    if decay not in ("none", "zero") and draw(st.booleans()):
        bias, beta_scale = draw(st.booleans()), draw(st.sampled_from([1.0, 2.0]))
        inputs = behind_gate(rng, inputs, bias=bias, beta_scale=beta_scale)
    slots, indices = (batch, None) if with_slots is False else draw(slot_maps(batch))
    state = torch.randn(slots, heads[1], dv, dk, generator=rng, dtype=torch.float64).to(dtype)
    pending = used = None
    if with_pending or (with_pending is None and draw(st.booleans())):
        form = "channel-mild" if decay in CHANNEL_DECAYS else "mild"
        pending, used = draw(pendings(batch, heads, (dk, dv), dtype, max_size, form))
    scale, l2norm = draw(st.sampled_from([None, 1.0, 0.3])), draw(st.booleans())
    case = Case(
        **inputs,
        parents=rows,
        tree=tree_of(rows, size),
        state=state,
        state_indices=indices,
        pending=pending,
        scale=scale,
        l2norm=l2norm,
        delta=draw(st.booleans()),
    )
    return poison_case(case, used) if poisoned else case


def poison_case(case: Case, used: Tensor | None) -> Case:
    """NaN in padding nodes, padding rows, unowned slots and factors off the accepted path."""
    live = torch.tensor(case.slots) >= 0
    owned = torch.zeros(case.state.shape[0], dtype=torch.bool)
    owned[[s for s in case.slots if s >= 0]] = True
    pending = case.pending
    if pending is not None and used is not None:
        factors = Factors(*(poison(x, used & live[:, None]) for x in pending.factors))
        pending = pending._replace(factors=factors)
    named = {name: poison(getattr(case, name), case.real) for name in ("q", "k", "v", "g", "beta")}
    return replace(case, **named, state=poison(case.state, owned), pending=pending)
