"""Tree verification of the gated delta rule in plain torch, for any device and any of its three modes.

`serial` and `hybrid` apply the same operations to every node in the same order as one-token decoding does, so their
bits equal its bits. `parallel` solves all nodes of a tree at once and sums in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.ops.factors import Factors
from specla.tree import Tree


def serial(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, state: Tensor, tree: Tree):
    """One node after another, each from its parent's state. Shapes as in `hybrid`."""
    batch, size, heads = q.shape[:3]
    o, d = torch.zeros_like(v), torch.zeros_like(v)
    rows = torch.arange(batch, device=q.device)
    states: list[Tensor] = []
    parent = tree.parent.long()
    for i in range(size):
        if i == 0:
            before = state
        elif tree.is_chain:
            before = states[-1]
        else:
            before = torch.stack(states, 1)[rows, parent[:, i].clamp(min=0)]
        step = _step(q[:, i], k[:, i], v[:, i], None if decay is None else decay[:, i], beta[:, i], before)
        d[:, i], o[:, i] = step
        if i + 1 < size:
            after = _update(before.clone(), k[:, i], d[:, i], None if decay is None else decay[:, i])
            states = [after] if tree.is_chain else [*states, after]
    return o, d


def hybrid(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, state: Tensor, tree: Tree):
    """Heavy-light chains that advance together, one depth at a time, each from its resident state.

    A heavy child takes over its parent's live state, a light child starts from a copy of it.

    Args:
        q, k: `[B, N, HV, K]`; v: `[B, N, HV, V]`; decay: `exp(g)` `[B, N, HV]` or None; beta: `[B, N, HV]`.
        state: `[B, HV, V, K]`, overwritten as scratch.

    Returns:
        o and d, `[B, N, HV, V]`, zero at padding nodes.
    """
    batch, size = q.shape[:2]
    o, d = torch.zeros_like(v), torch.zeros_like(v)
    q, k, v, beta, o_flat, d_flat = (x.flatten(0, 1) for x in (q, k, v, beta, o, d))
    decay = None if decay is None else decay.flatten(0, 1)
    live = state
    for nodes, rows, inner in tree.levels:
        k_t, decay_t = k[nodes], None if decay is None else decay[nodes]
        before = live if rows is None else live.index_select(0, rows)
        d_t, o_t = _step(q[nodes], k_t, v[nodes], decay_t, beta[nodes], before)
        d_flat[nodes], o_flat[nodes] = d_t, o_t
        if inner is None:
            live = _update(before, k_t, d_t, decay_t)
        elif len(inner):
            decay_t = None if decay_t is None else decay_t[inner]
            live = _update(before.index_select(0, inner), k_t[inner], d_t[inner], decay_t)
    return o, d


def parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, tree: Tree):
    """All nodes at once: the UT transform with an ancestor mask, `(I + A) D = beta (V - exp(G) S_0 K)`.

    Shapes as in `hybrid`, but with the log-decay `g`. The order of summation is not that of one-token decoding:
    relative error near 1e-6 in fp32 state.
    """
    above = tree.ancestors[:, None]  # [B, 1, N, N]
    here = above | torch.eye(tree.size, dtype=torch.bool, device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, HV, N, *]
    valid = tree.valid[:, None, :, None]
    beta = beta.transpose(1, 2)[..., None] * valid
    reads = torch.cat([k, q], 2) @ state.transpose(-1, -2)  # [B, HV, 2N, V]
    scores = torch.cat([k, q], 2) @ k.transpose(-1, -2)  # [B, HV, 2N, N]
    size = tree.size
    if g is not None:
        total = here.to(g.dtype) @ g.transpose(1, 2)[..., None]  # [B, HV, N, 1]
        between = (total - total.transpose(-1, -2)).masked_fill(~here, -torch.inf).exp()
        reads = reads * torch.cat([total, total], 2).exp()
    else:
        between = here.to(q.dtype)
    unit = beta * scores[:, :, :size] * between * above
    d = torch.linalg.solve_triangular(unit, beta * (v - reads[:, :, :size]), upper=False, unitriangular=True)
    o = (reads[:, :, size:] + (scores[:, :, size:] * between) @ d) * valid
    return o.transpose(1, 2), d.transpose(1, 2)


def commit(state: Tensor, factors: Factors, path: Tensor, count: Tensor) -> Tensor:
    """Apply the first `count` nodes of `path` to `state` `[B, HV, V, K]` in place, in exact order."""
    steps = int(count.max()) if count.numel() else 0
    if steps == 0:
        return state
    path = path[:, :steps].clamp(min=0).long()
    live = torch.arange(steps, device=path.device) < count[:, None]  # [B, steps]
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    idle = ~live[:, :, None]
    k = factors.k[rows, path].to(state.dtype).masked_fill(idle[..., None], 0)
    d = factors.d[rows, path].to(state.dtype).masked_fill(idle[..., None], 0)
    decay = factors.g[rows, path].to(state.dtype).masked_fill(idle, 0).exp()
    groups = state.shape[1] // k.shape[2]
    k = k.repeat_interleave(groups, 2) if groups > 1 else k
    for t in range(steps):
        _update(state, k[:, t], d[:, t], decay[:, t])
    return state


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, state: Tensor):
    """One token from `state` `[M, HV, V, K]`: its corrected value d and its output o, both `[M, HV, V]`."""
    read = state @ torch.stack([k, q], -1)  # [M, HV, V, 2]
    if decay is not None:
        read = read * decay[..., None, None]
    d = beta[..., None] * (v - read[..., 0])
    o = read[..., 1] + d * (k * q).sum(-1, keepdim=True)
    return d, o


def _update(state: Tensor, k: Tensor, d: Tensor, decay: Tensor | None) -> Tensor:
    if decay is not None:
        state.mul_(decay[..., None, None])
    return state.addcmul_(d[..., None], k[..., None, :])
