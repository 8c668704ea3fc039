"""Tree verification of the gated delta rule and its relatives in plain torch, for any device, in any of three modes.

`serial` and `hybrid` apply the same operations to every node in the same order as one-token decoding does, so their
bits equal its bits. `parallel` solves all nodes of a tree at once and sums in another order.

Shapes, here and below: kq `[B, N, HV, 2, K]` each node's key and scaled query; v `[B, N, HV, V]`; g, the log-decay,
`[B, N, HV]`, for each key channel `[B, N, HV, K]`, or None; beta `[B, N, HV]`; state `[B, HV, V, K]`, only read; delta:
whether values are corrected by what the state holds. Results o and d `[B, N, HV, V]` are zero at padding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specla.ops.factors import Factors
from specla.tree import Tree

Result = tuple[Tensor, Tensor]
VECTOR = 64  # bytes


def serial(
    kq: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, tree: Tree, delta: bool
) -> Result:
    """One node after another, each from its parent's state; on a tree that branches, every node's state is kept
    until the layer is done.
    """
    kq, g, state = _whole_vectors(kq, g, state)
    return walk_nodes(*_columns(kq, v, g, beta, delta), state, tree)


def hybrid(
    kq: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, tree: Tree, delta: bool
) -> Result:
    """Heavy-light chains that advance together, one depth at a time, each from its resident state.

    A heavy child takes over its parent's live state, a light child starts from a copy of it.
    """
    kq, g, state = _whole_vectors(kq, g, state)
    return walk_levels(*_columns(kq, v, g, beta, delta), state, tree)


def walk_nodes(reads: tuple[Tensor, Tensor], writes: Sequence[Tensor], state: Tensor, tree: Tree) -> Result:
    """`serial` with what a step reads and writes, as `_columns` has it."""
    batch, size, heads, _, dim = reads[1].shape
    columns = (x.transpose(0, 1).flatten(0, 2).split(batch * heads) for x in (*reads, *writes))
    rows = torch.arange(batch, device=state.device)
    parent = tree.parent.long().clamp(min=0)
    parent = parent if tree.is_full else parent.masked_fill(~tree.valid, 0)
    states = state.new_empty(0 if tree.is_chain else size, *state.shape)
    before, d_parts, o_parts = state.flatten(0, 1), [], []
    for i, (mix, base, *write) in enumerate(zip(*columns, strict=True)):
        if i and not tree.is_chain:
            before = states[parent[:, i], rows].flatten(0, 1)
        d, o = _read(mix, base, before)
        d_parts.append(d)
        o_parts.append(o)
        if tree.is_chain:
            before = _write(write, d, before.clone() if i == 0 else before)
        else:
            states[i] = _write(write, d, before.clone()).view(state.shape)
    shape = (size, batch, heads, dim)
    o, d = (torch.cat(parts).view(shape).transpose(0, 1).contiguous() for parts in (o_parts, d_parts))
    if tree.is_full:
        return o, d
    padding = ~tree.valid[..., None, None]
    return o.masked_fill(padding, 0), d.masked_fill(padding, 0)


def walk_levels(reads: tuple[Tensor, Tensor], writes: Sequence[Tensor], state: Tensor, tree: Tree) -> Result:
    """`hybrid` with what a step reads and writes, as `_columns` has it."""
    batch, size, heads, _, dim = reads[1].shape
    if size == 1:
        mix, base = (x.flatten(0, 2) for x in reads)
        d, o = _read(mix, base, state.flatten(0, 1))
        return o.view(batch, size, heads, dim), d.view(batch, size, heads, dim)
    columns = [x.flatten(0, 1) for x in (*reads, *writes)]
    order = tree.order
    if order is not None:
        columns = [x.index_select(0, order) for x in columns]
    sizes = [level.nodes.shape[0] * heads for level in tree.levels]
    steps = zip(*(x.flatten(0, 1).split(sizes) for x in columns), strict=True)
    live, owned = state.flatten(0, 1), False  # [live states * HV, V, K]
    d_parts, o_parts = [], []
    for (_, rows, num_inner), (mix, base, *write) in zip(tree.levels, steps, strict=True):
        if rows is not None:
            live, owned = live.view(-1, *state.shape[1:]).index_select(0, rows).flatten(0, 1), True
        d, o = _read(mix, base, live)
        d_parts.append(d)
        o_parts.append(o)
        if num_inner:
            inner = num_inner * heads
            if inner < d.shape[0]:
                live, d, write = live[:inner], d[:inner], [x[:inner] for x in write]
            live, owned = _write(write, d, live if owned else live.clone()), True
    o, d = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (o_parts, d_parts))
    o, d = o.view(-1, heads, dim), d.view(-1, heads, dim)
    if order is not None:
        o, d = (x.new_zeros(batch * size, heads, dim).index_copy_(0, order, x) for x in (o, d))
    return o.view(batch, size, heads, dim), d.view(batch, size, heads, dim)


def parallel(
    kq: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, tree: Tree, delta: bool
) -> Result:
    """All nodes at once: the UT transform with an ancestor mask, `(I + A) D = beta (V - exp(G) S_0 K)`.

    The order of summation is not that of one-token decoding: relative error near 1e-6 with an fp32 state.
    """
    size = tree.size
    here = tree.lineage[:, None]  # [B, 1, N, N]
    valid = tree.valid[:, None, :, None]
    beta = beta.transpose(1, 2)[..., None] * valid
    both = kq.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, HV, 2N, K], keys before queries
    between = here.to(v.dtype)
    if g is not None and g.dim() == v.dim():
        total = here.to(g.dtype) @ g.transpose(1, 2)  # [B, HV, N, K]
        reads = (both * torch.cat([total, total], 2).exp()) @ state.transpose(-1, -2)
        scores = _channel_scores(kq, total, here)
    else:
        reads = both @ state.transpose(-1, -2)
        scores = both @ both[:, :, :size].transpose(-1, -2)  # [B, HV, 2N, N]
        if g is not None:
            total = here.to(g.dtype) @ g.transpose(1, 2)[..., None]  # [B, HV, N, 1]
            between = (total - total.transpose(-1, -2)).masked_fill(~here, -torch.inf).exp()
            reads = reads * torch.cat([total, total], 2).exp()
    if delta:
        unit = beta * scores[:, :, :size] * between * tree.ancestors[:, None]
        right = beta * (v.transpose(1, 2) - reads[:, :, :size])
        d = torch.linalg.solve_triangular(unit, right, upper=False, unitriangular=True)
    else:
        d = beta * v.transpose(1, 2)
    o = (reads[:, :, size:] + (scores[:, :, size:] * between) @ d) * valid
    return o.transpose(1, 2), d.transpose(1, 2)


def _channel_scores(kq: Tensor, total: Tensor, here: Tensor) -> Tensor:
    """`sum_c x_ic k_jc exp(G_ic - G_jc)` for keys, then queries x: `[B, HV, 2N, N]`, 0 off the paths.

    Not a product of two matrices: `exp(-G_jc)` alone overflows where a channel forgets fast.
    """
    gap = total[:, :, :, None] - total[:, :, None]  # [B, HV, N, N, K]
    decayed = gap.masked_fill(~here[..., None], -torch.inf).exp() * kq[..., 0, :].transpose(1, 2)[:, :, None]
    scores = decayed @ kq.permute(0, 2, 1, 4, 3)  # [B, HV, N, N, 2]
    return scores.permute(0, 1, 4, 2, 3).flatten(2, 3)


def commit(state: Tensor, factors: Factors, path: Tensor, count: Tensor) -> Tensor:
    """Apply the first `count` `[B]` nodes of `path` `[B, D]` to `state`, in place and in exact order.

    Leading dimensions before B (layers) may stand in front of state and factors; their g has K channels or none.
    """
    steps = int(count.max()) if count.numel() else 0
    if steps == 0:
        return state
    path, idle = path[:, :steps], None
    if steps > int(count.min()):
        idle = torch.arange(steps, device=path.device) >= count[:, None]
        path = path.masked_fill(idle, 0)  # whatever stands there
        idle = idle[..., None, None]
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    k, d, g = factors
    g = g if g.dim() == d.dim() else g[..., None]
    k, d, g = (x[..., rows, path, :, :] for x in (k, d, g))
    k, d, g = (x.to(state.dtype) for x in (k, d, g))
    if idle is not None:
        k, d, g = k.masked_fill(idle, 0), d.masked_fill(idle, -0.0), g.masked_fill(idle, 0)  # -0 0 + x is x
    decay = g.exp()[..., None, :]
    groups = state.shape[-3] // k.shape[-2]
    k = k.repeat_interleave(groups, -2) if groups > 1 else k
    for t in range(steps):
        state.mul_(decay[..., t, :, :, :])
        state.addcmul_(d[..., t, :, :, None], k[..., t, :, None, :])
    return state


def _whole_vectors(kq: Tensor, g: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """K filled up with zeros to whole vectors, also of a decay that has K channels."""
    if g is not None and g.dim() == kq.dim() - 1:
        g = whole_vectors(g)
    return whole_vectors(kq), g, whole_vectors(state)


def whole_vectors(x: Tensor) -> Tensor:
    """The last dimension filled up with zeros to whole vectors: a BLAS may sum in another order where a matrix starts
    in the middle of one, and which do depends on the number of rows.
    """
    missing = -x.shape[-1] % (VECTOR // x.element_size())
    return x if missing == 0 or x.device.type != "cpu" else functional.pad(x, (0, missing))


def _columns(
    kq: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, delta: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """What a step reads, `mix` `[.., .., HV, 2, K]` and `base` `[.., .., HV, 2, V]`, and what it writes: k, and exp(g)
    `[.., .., HV, 1, 1 or K]` if there is a decay.

    With S the state before a node and e its decay, `d = beta (v - S e k)` and `o = S e q + (k . q) d` are the two rows
    of `base + mix S^T`, prepared for all nodes at once. Without the correction, d reads nothing of S.
    """
    k = kq[..., :1, :]
    overlap = (kq[..., 0, :] * kq[..., 1, :]).sum(-1)
    share = torch.stack([beta, beta * overlap], -1)[..., None]
    mix = kq * _query_only(kq.dtype, kq.device)
    if delta:
        mix = torch.addcmul(mix, share, k, value=-1)
    base = share * v[..., None, :]
    if g is None:
        return (mix, base), (k,)
    decay = torch.exp(g if g.dim() == v.dim() else g[..., None])[..., None, :]
    return (mix * decay, base), (k, decay)


@functools.lru_cache(maxsize=16)
def _query_only(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([[0], [1]], dtype=dtype, device=device)


def _read(mix: Tensor, base: Tensor, state: Tensor) -> Result:
    """Corrected values d and outputs o `[M, V]` of one token for each of the states `[M, V, K]`."""
    d, o = torch.baddbmm(base, mix, state.transpose(1, 2)).unbind(1)
    return d, o


def _write(write: Sequence[Tensor], d: Tensor, state: Tensor) -> Tensor:
    """The states after those tokens, in place; `write` may name a second pair that they add, values `[M, V, 1]` and
    keys.
    """
    k, *rest = write
    if rest:
        state.mul_(rest[0])
    state.addcmul_(d[:, :, None], k)
    return state.addcmul_(*rest[1:]) if rest[1:] else state
