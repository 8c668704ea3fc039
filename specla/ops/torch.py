"""Tree verification of the gated delta rule in plain torch, for any device and any of its three modes.

`serial` and `hybrid` apply the same operations to every node in the same order as one-token decoding does, so their
bits equal its bits. `parallel` solves all nodes of a tree at once and sums in another order.

Shapes, here and below: kq `[B, N, HV, 2, K]` each node's key and scaled query; v `[B, N, HV, V]`; g, the log-decay
(or None), and beta `[B, N, HV]`; state `[B, HV, V, K]`, only read. Results o and d `[B, N, HV, V]` are zero at padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.ops.factors import Factors
from specla.tree import Tree

Result = tuple[Tensor, Tensor]


def serial(kq: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, tree: Tree) -> Result:
    """One node after another, each from its parent's state."""
    batch, size = v.shape[:2]
    decay, overlap = _decay(g), _overlap(kq)
    rows = torch.arange(batch, device=v.device)
    parent = tree.parent.long().clamp(min=0)
    states = state.new_empty(0 if tree.is_chain else size, *state.shape)
    before, d_parts, o_parts = state, [], []
    for i in range(size):
        if i and not tree.is_chain:
            before = states[parent[:, i], rows]
        decay_i = None if decay is None else decay[:, i]
        d, o = _step(kq[:, i], v[:, i], decay_i, beta[:, i, :, None], overlap[:, i], before)
        d_parts.append(d)
        o_parts.append(o)
        if tree.is_chain:
            before = _update(before.clone() if i == 0 else before, kq[:, i, :, 0], d, decay_i)
        else:
            states[i] = _update(before.clone(), kq[:, i, :, 0], d, decay_i)
    o, d = torch.stack(o_parts, 1), torch.stack(d_parts, 1)
    return (o, d) if tree.is_full else (o * tree.valid[..., None, None], d * tree.valid[..., None, None])


def hybrid(kq: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, tree: Tree) -> Result:
    """Heavy-light chains that advance together, one depth at a time, each from its resident state.

    A heavy child takes over its parent's live state, a light child starts from a copy of it.
    """
    if tree.size == 1:
        decay = _decay(g)
        decay = None if decay is None else decay[:, 0]
        d, o = _step(kq[:, 0], v[:, 0], decay, beta[:, 0, :, None], _overlap(kq)[:, 0], state)
        return o[:, None], d[:, None]
    order = tree.order
    flat = [
        x.flatten(0, 1) for x in (kq, v, beta[..., None], _overlap(kq), *(() if g is None else (_decay(g),)))
    ]
    if order is not None:
        flat = [x.index_select(0, order) for x in flat]
    sizes = [level.nodes.shape[0] for level in tree.levels]
    parts = zip(*(x.split(sizes) for x in flat), strict=True)
    d_parts, o_parts = [], []
    live, owned = state, False
    for (_, rows, num_inner), (kq_t, v_t, beta_t, overlap_t, *rest) in zip(tree.levels, parts, strict=True):
        decay_t = rest[0] if rest else None
        if rows is not None:
            live, owned = live.index_select(0, rows), True
        d, o = _step(kq_t, v_t, decay_t, beta_t, overlap_t, live)
        d_parts.append(d)
        o_parts.append(o)
        if num_inner:
            live = live[:num_inner]
            decay_t = None if decay_t is None else decay_t[:num_inner]
            live = _update(live if owned else live.clone(), kq_t[:num_inner, :, 0], d[:num_inner], decay_t)
            owned = True
    o, d = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (o_parts, d_parts))
    if order is not None:
        o, d = (v.new_zeros(v.shape[0] * v.shape[1], *v.shape[2:]).index_copy_(0, order, x) for x in (o, d))
    return o.view(v.shape), d.view(v.shape)


def parallel(kq: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, tree: Tree) -> Result:
    """All nodes at once: the UT transform with an ancestor mask, `(I + A) D = beta (V - exp(G) S_0 K)`.

    The order of summation is not that of one-token decoding: relative error near 1e-6 with an fp32 state.
    """
    size = tree.size
    above = tree.ancestors[:, None]  # [B, 1, N, N]
    here = above | torch.eye(size, dtype=torch.bool, device=v.device)
    valid = tree.valid[:, None, :, None]
    beta = beta.transpose(1, 2)[..., None] * valid
    both = kq.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, HV, 2N, K], keys before queries
    reads = both @ state.transpose(-1, -2)
    scores = both @ both[:, :, :size].transpose(-1, -2)  # [B, HV, 2N, N]
    if g is None:
        between = here.to(v.dtype)
    else:
        total = here.to(g.dtype) @ g.transpose(1, 2)[..., None]  # [B, HV, N, 1]
        between = (total - total.transpose(-1, -2)).masked_fill(~here, -torch.inf).exp()
        reads = reads * torch.cat([total, total], 2).exp()
    unit = beta * scores[:, :, :size] * between * above
    right = beta * (v.transpose(1, 2) - reads[:, :, :size])
    d = torch.linalg.solve_triangular(unit, right, upper=False, unitriangular=True)
    o = (reads[:, :, size:] + (scores[:, :, size:] * between) @ d) * valid
    return o.transpose(1, 2), d.transpose(1, 2)


def commit(state: Tensor, factors: Factors, path: Tensor, count: Tensor) -> Tensor:
    """Apply the first `count` `[B]` nodes of `path` `[B, D]` to `state`, in place and in exact order.

    Leading dimensions before B (layers) may stand in front of state and factors.
    """
    steps = int(count.max()) if count.numel() else 0
    if steps == 0:
        return state
    path = path[:, :steps].clamp(min=0)
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    k, d, g = (x[..., rows, path, :, :] for x in (factors.k, factors.d, factors.g[..., None]))
    k, d, g = (x.to(state.dtype) for x in (k, d, g))
    if steps > int(count.min()):
        idle = (torch.arange(steps, device=path.device) >= count[:, None])[..., None, None]
        k, d, g = k.masked_fill(idle, 0), d.masked_fill(idle, 0), g.masked_fill(idle, 0)
    decay = g.exp()[..., None]
    groups = state.shape[-3] // k.shape[-2]
    k = k.repeat_interleave(groups, -2) if groups > 1 else k
    for t in range(steps):
        state.mul_(decay[..., t, :, :, :])
        state.addcmul_(d[..., t, :, :, None], k[..., t, :, None, :])
    return state


def _step(
    kq: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, overlap: Tensor, state: Tensor
) -> Result:
    """One token from `state` `[M, HV, V, K]`: its corrected value d and its output o, both `[M, HV, V]`."""
    read = kq @ state.transpose(-1, -2)  # [M, HV, 2, V]
    if decay is not None:
        read = read * decay
    from_key, from_query = read.unbind(2)
    d = beta * (v - from_key)
    return d, torch.addcmul(from_query, d, overlap)


def _update(state: Tensor, k: Tensor, d: Tensor, decay: Tensor | None) -> Tensor:
    if decay is not None:
        state.mul_(decay)
    return state.addcmul_(d[..., None], k[..., None, :])


def _decay(g: Tensor | None) -> Tensor | None:
    return None if g is None else torch.exp(g)[..., None, None]


def _overlap(kq: Tensor) -> Tensor:
    """`k . q` of each node, `[B, N, HV, 1]`."""
    return (kq[..., 0, :] * kq[..., 1, :]).sum(-1, keepdim=True)
