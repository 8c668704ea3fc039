"""What verification is compared with: tokens one at a time, leaves replayed, snapshots of every node, other libraries.

What can be made ready for a baseline (gathered tokens, gates, layouts) is made when it is built, outside of the time
that is measured.
"""

from __future__ import annotations

# the bodies of kernels are Triton's language, not Python
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.bench.kernel_inputs import Round, Work
from specla.ops.factors import Factors, Pending
from specla.ops.gate import gates
from specla.ops.triton.tuning import Config
from specla.ops.triton.verify import verify
from specla.tree import Tree


def verify_round(
    work: Work, r: Round, config: Config, *, pending: Pending | None, tree: Tree | None = None
) -> tuple[Tensor, Factors]:
    """One verification of a round's nodes, into its bank of factors."""
    return verify(
        r.q, r.k, r.v, r.a, r.b, r.tree if tree is None else tree, config,
        state=r.state, state_indices=r.slots, pending=pending, scale=work.scale, normalise=True, gate=work.gate,
        factors=r.factors, by_slot=True,
    )  # fmt: skip


def tokens_at(r: Round, ids: Tensor) -> Round:
    """The round with the nodes `ids` `[B, T]` of each row as its nodes, in that order; its tree is no longer theirs."""
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    return replace(
        r, **{name: getattr(r, name)[rows, ids].contiguous() for name in ("q", "k", "v", "a", "b")}
    )


class TokenDecoder:
    """Plain decoding by the same kernel: a launch for each token, which commits the token before."""

    def __init__(self, work: Work, r: Round, config: Config):
        self.work, self.round, self.config = work, r, config
        rows, device = len(r.slots), r.slots.device
        self.banks = [Factors(*(x[:, :1].clone() for x in r.pending.factors)) for _ in range(2)]
        one = torch.ones(rows, dtype=torch.int32, device=device)
        self.tree = Tree.resident(torch.full((rows, 1), -1, dtype=torch.int32, device=device), one)
        self.path, self.count = torch.zeros(rows, 1, dtype=torch.int32, device=device), one

    def __call__(self, pending: Pending | None = None) -> tuple[list[Tensor], Pending]:
        """All tokens of the round in order, after `pending`, by default one token.

        Returns:
            outputs `[B, 1, HV, V]` of each, and the last token, which is not committed yet.
        """
        r, outputs = self.round, []
        before = Pending(self.banks[1], self.path, self.count) if pending is None else pending
        for t in range(r.q.shape[1]):
            part = {name: getattr(r, name)[:, t : t + 1] for name in ("q", "k", "v", "a", "b")}
            token = replace(r, **part, factors=self.banks[t % 2])
            o, made = verify_round(self.work, token, self.config, pending=before, tree=self.tree)
            before = Pending(made, self.path, self.count)
            outputs.append(o)
        return outputs, before


@dataclass(frozen=True)
class Chains:
    """Root-to-leaf paths as chains from the committed states, nothing shared: `[R, T]` tokens, some of them padding."""

    tokens: Round  # its slots `[R]`, -1 for a row without such a leaf
    paths: Tensor  # int64 [R, T] node ids, 0 beyond the chain

    def run(self, work: Work, config: Config) -> Tensor:
        """Outputs `[R, T, HV, V]`; the states are only read."""
        r = self.tokens
        o, _ = verify(
            r.q, r.k, r.v, r.a, r.b, r.tree, config,
            state=r.state, state_indices=r.slots, scale=work.scale, normalise=True, gate=work.gate,
        )  # fmt: skip
        return o


def leaf_paths(parent: list[int]) -> list[list[int]]:
    """Node ids from the root to each leaf, the longest path first."""
    leaves = sorted(set(range(len(parent))) - set(parent))
    return sorted((path_to(parent, leaf) for leaf in leaves), key=len, reverse=True)


def path_to(parent: list[int], node: int) -> list[int]:
    """Node ids from the root down to `node`."""
    path = [node]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    return path[::-1]


def leaf_chains(r: Round) -> list[Chains]:
    """One batch of chains for each leaf: the n-th longest path of every row."""
    rows = [leaf_paths(parent) for parent in r.parents]
    return [
        _chains(r, [row[n] if n < len(row) else [] for row in rows], r.slots)
        for n in range(max(map(len, rows)))
    ]


def leaf_rows(r: Round) -> Chains:
    """All leaves of all rows as rows of one batch, which read their state from the slot that they share."""
    paths = [leaf_paths(parent) for parent in r.parents]
    owner = [row for row, leaves in enumerate(paths) for _ in leaves]
    repeated = tokens_of_rows(r, torch.tensor(owner, device=r.slots.device))
    return _chains(repeated, [path for leaves in paths for path in leaves], repeated.slots)


def tokens_of_rows(r: Round, rows: Tensor) -> Round:
    """The round's tokens and slots of some rows, repeated ones too; pools and banks stay whole."""
    return replace(r, **{name: getattr(r, name)[rows] for name in ("q", "k", "v", "a", "b", "slots")})


def _chains(r: Round, paths: list[list[int]], slots: Tensor) -> Chains:
    # kernels work on a power of two of nodes anyway, and are compiled for fewer sizes so
    device, size = slots.device, triton.next_power_of_2(max(map(len, paths)))
    ids = torch.tensor([path + [0] * (size - len(path)) for path in paths], device=device)
    length = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device)
    parent = torch.arange(-1, size - 1, dtype=torch.int32, device=device).repeat(len(paths), 1)
    tree = Tree.resident(parent, length.clamp(min=1))
    chosen = torch.where(length > 0, slots, -1).int()
    return Chains(replace(tokens_at(r, ids), tree=tree, slots=chosen), ids)


class Snapshots:
    """Dense snapshots: every node's state is written out, and a node of a tree reads its parent's back."""

    def __init__(self, work: Work, r: Round, memory: Tensor, *, chain: bool):
        """memory: fp32 `[B, N, HV, V, K]`; chain: the state stays in registers from node to node."""
        self.work, self.round, self.memory, self.chain = work, r, memory, chain
        self.last = torch.full_like(r.slots, r.q.shape[1] - 1)  # the node that is copied back

    def verify(self) -> Tensor:
        """Outputs `[B, N, HV, V]`."""
        r, layer, gate = self.round, self.work.layer, self.work.gate
        o = torch.empty_like(r.v)
        BV = min(16, triton.next_power_of_2(layer.dim_v))
        snapshot_kernel[(triton.cdiv(layer.dim_v, BV) * layer.value_heads, len(r.slots))](
            r.q, r.k, r.v, r.a, r.b, gate.A_log, gate.dt_bias, o, r.state, r.slots, r.tree.parent, self.memory,
            self.work.scale, r.q.shape[1],
            H=layer.heads, HV=layer.value_heads, K=layer.dim_k, V=layer.dim_v,
            BK=triton.next_power_of_2(layer.dim_k), BV=BV, CHAIN=self.chain, num_warps=4,
        )  # fmt: skip
        return o

    def copy_back(self) -> None:
        """The accepted node's snapshot into the slot."""
        r, (rows, nodes, *_) = self.round, self.memory.shape
        size, block = r.state[0].numel(), 4096
        copy_back_kernel[(triton.cdiv(size, block), rows)](
            self.memory, r.state, r.slots, self.last, nodes, SIZE=size, BLOCK=block, num_warps=4
        )


@triton.jit
def snapshot_kernel(
    q, k, v, a, b, A_log, dt_bias, o, state, slots, parent, snapshots, scale, size,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    i_v, i_hv = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    i_b = tl.program_id(1).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_v[:, None] & m_k[None, :]
    o_s = (i_hv * V + o_v[:, None]) * K + o_k[None, :]
    S = tl.load(state + tl.load(slots + i_b).to(tl.int64) * HV * V * K + o_s, mask=m_s, other=0.0)
    snapshots += i_b * size * HV * V * K
    rate, bias = -tl.exp(tl.load(A_log + i_hv)), tl.load(dt_bias + i_hv)
    for n in range(size):
        if not CHAIN:  # noqa: SIM102  (known when it is compiled, unlike n)
            if n > 0:
                tl.debug_barrier()  # other threads may read it than wrote it
                above = tl.load(parent + i_b * size + n).to(tl.int64)
                S = tl.load(snapshots + above * HV * V * K + o_s, mask=m_s, other=0.0)
        row = i_b * size + n
        b_q = tl.load(q + (row * H + i_h) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(k + (row * H + i_h) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(v + (row * HV + i_hv) * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_a = tl.load(a + row * HV + i_hv).to(tl.float32) + bias
        beta = tl.sigmoid(tl.load(b + row * HV + i_hv).to(tl.float32))
        decay = tl.exp(rate * (tl.maximum(b_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_a)))))
        b_q *= scale / tl.sqrt(tl.sum(b_q * b_q, 0) + 1e-6)
        b_k *= 1.0 / tl.sqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        S *= decay
        d = beta * (b_v - tl.sum(S * b_k[None, :], 1))
        S += d[:, None] * b_k[None, :]
        tl.store(
            o + (row * HV + i_hv) * V + o_v, tl.sum(S * b_q[None, :], 1).to(o.dtype.element_ty), mask=m_v
        )
        tl.store(snapshots + n * HV * V * K + o_s, S, mask=m_s)


@triton.jit
def copy_back_kernel(snapshots, state, slots, node, nodes, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i_b = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = snapshots + (i_b * nodes + tl.load(node + i_b)) * SIZE + at
    target = state + tl.load(slots + i_b).to(tl.int64) * SIZE + at
    tl.store(target, tl.load(source, mask=at < SIZE), mask=at < SIZE)


Rule = Callable[..., Any]


class Library(NamedTuple):
    """flash-linear-attention's recurrent rule."""

    rule: Rule
    version: str
    key_first: bool = True  # its states are [K, V]


def find_library() -> Library | None:
    """flash-linear-attention, if it is installed."""
    try:
        ops = import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    version = getattr(import_module("fla"), "__version__", "unknown")
    return Library(ops.fused_recurrent_gated_delta_rule, str(version))


class LibraryChain:
    """A round's nodes as one chain through the library's kernel, from states of its own layout."""

    def __init__(self, work: Work, r: Round, library: Library):
        g, beta = gates(r.a, r.b, work.gate, torch.float32)
        states = r.state[r.slots.long()]
        self.rule, self.key_first = library.rule, library.key_first
        self.inputs = {
            "q": r.q, "k": r.k, "v": r.v, "g": g, "beta": beta, "scale": work.scale,
            "initial_state": states.mT.contiguous() if library.key_first else states,
            "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip

    def __call__(self, *, written: bool) -> tuple[Tensor, Tensor | None]:
        """Outputs `[B, N, HV, V]` and, if `written`, the states after the chain `[B, HV, V, K]`."""
        o, states = self.rule(**self.inputs, output_final_state=written)
        return o, (states.mT if self.key_first else states) if written else None
