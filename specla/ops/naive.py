"""The law: every root-to-node path replayed from scratch, one token and one head at a time, in plain loops.

Slow, short and obvious on purpose. Every faster op must agree with its twin here; float64 works throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.ops.factors import Factors, Pending, PendingConv
from specla.ops.gate import Gate
from specla.tree import Tree


def _l2norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _log_decay(g: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if g is None else g.to(like.dtype)


def _gated_decay(a: Tensor, gate: Gate) -> Tensor:
    """Log-decay from raw projections a [B, N, HV] or [B, N, HV, K]."""
    rate = torch.exp(gate.A_log.to(a.dtype)).view(-1, *[1] * (a.dim() - 3))
    a = a if gate.dt_bias is None else a + gate.dt_bias.to(a.dtype)
    return -rate * torch.logaddexp(a, torch.zeros_like(a))


def _step(
    state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, delta: bool = True
) -> tuple[Tensor, Tensor]:
    """One token of the rule for one head: state [V, K], k [K], v [V], g [] or [K] -> (new state, d [V])."""
    state = torch.exp(g) * state
    d = beta * (v - state @ k) if delta else beta * v
    return state + torch.outer(d, k), d


def _slots(state_indices: Tensor | None, batch: int) -> list[int]:
    return list(range(batch)) if state_indices is None else [int(s) for s in state_indices]


def _path_to(tree: Tree, row: int, node: int) -> list[int]:
    """Node ids from the root down to `node`, `node` included."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parent[row, node])
    return path


def naive_gated_delta_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    tree: Tree,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    pending: Pending | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    delta: bool = True,
    gate: Gate | None = None,
) -> tuple[Tensor, Factors]:
    """Gated delta rule at every node of a draft tree, each node under its own root-to-node path.

    q, k [B, N, H, K]; v [B, N, HV, V]; g (log decay <= 0, None: no decay) [B, N, HV] or, for each key channel,
    [B, N, HV, K]; beta (None: 1) [B, N, HV]. delta=False writes beta v whatever the state holds. With a gate,
    g and beta are the raw projections that it makes them of.
    state [slots, HV, V, K]: `pending` is committed into it in place first, otherwise it is only read.
    Returns o [B, N, HV, V] in v's dtype and Factors in state's; both are zero at padding nodes and rows.
    """
    if pending is not None:
        naive_gated_delta_commit(
            state, pending.factors, pending.path, pending.num_nodes - 1, state_indices=state_indices
        )
    batch, _, heads, key_dim = q.shape
    group = v.shape[2] // heads
    scale = key_dim**-0.5 if scale is None else scale
    out_dtype = v.dtype
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    beta = None if beta is None else beta.to(state.dtype)
    if gate is not None:
        if g is None:
            raise ValueError("a gate computes the decay from g, got None")
        g = _gated_decay(g.to(state.dtype), gate)
        beta = None if beta is None else gate.beta_scale * torch.sigmoid(beta)
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    g = _log_decay(g, beta)
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)

    o, kept = torch.zeros_like(v), Factors(torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(g))
    for b, slot in enumerate(_slots(state_indices, batch)):
        for i in range(int(tree.num_nodes[b]) if slot >= 0 else 0):
            kept.k[b, i], kept.g[b, i] = k[b, i], g[b, i]
            for h in range(v.shape[2]):
                s = state[slot, h].clone()
                for j in _path_to(tree, b, i):
                    s, d = _step(s, k[b, j, h // group], v[b, j, h], g[b, j, h], beta[b, j, h], delta)
                kept.d[b, i, h] = d
                o[b, i, h] = s @ (q[b, i, h // group] * scale)
    return o.to(out_dtype), kept


def naive_dplr_verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, tree: Tree, *, state: Tensor
) -> tuple[Tensor, Factors]:
    """The generalised delta rule at every node: u = S a, then S <- S diag(exp(g)) + u b^T + v k^T and o = S q.

    q, k, g, a, b [B, N, H, K]; v [B, N, H, V]; state [B, H, V, K], only read. Returns o [B, N, H, V] in v's dtype and
    the factors of 2 N half nodes: (b, u, g) and (k, v, 0) of each node; zero at padding.
    """
    out_dtype = v.dtype
    q, k, v, g, a, b = (x.to(state.dtype) for x in (q, k, v, g, a, b))
    batch, size, heads, key_dim = k.shape
    o = torch.zeros_like(v)
    keys, values = k.new_zeros(batch, 2 * size, heads, key_dim), v.new_zeros(batch, 2 * size, *v.shape[2:])
    decays = torch.zeros_like(keys)
    for row in range(batch):
        for i in range(int(tree.num_nodes[row])):
            keys[row, 2 * i], keys[row, 2 * i + 1] = b[row, i], k[row, i]
            values[row, 2 * i + 1], decays[row, 2 * i] = v[row, i], g[row, i]
            for h in range(heads):
                s = state[row, h].clone()
                for j in _path_to(tree, row, i):
                    u = s @ a[row, j, h]
                    s = s * torch.exp(g[row, j, h]) + torch.outer(u, b[row, j, h])
                    s = s + torch.outer(v[row, j, h], k[row, j, h])
                values[row, 2 * i, h] = u
                o[row, i, h] = s @ q[row, i, h]
    return o.to(out_dtype), Factors(keys, values, decays)


def naive_gated_delta_commit(
    state: Tensor,
    factors: Factors,
    path: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None = None,
) -> None:
    """Commits the first 1 + num_accepted nodes of `path` [B, D] into `state` in place: S <- exp(g) S + d k^T.

    num_accepted [B] counts drafts, the root excluded; -1 commits nothing. State index -1 skips the row.
    """
    group = factors.d.shape[2] // factors.k.shape[2]
    k, d, g = (x.to(state.dtype) for x in factors)
    for b, slot in enumerate(_slots(state_indices, path.shape[0])):
        for j in path[b, : 1 + int(num_accepted[b])].tolist() if slot >= 0 else []:
            for h in range(d.shape[2]):
                update = torch.outer(d[b, j, h], k[b, j, h // group])
                state[slot, h] = torch.exp(g[b, j, h]) * state[slot, h] + update


def naive_tree_conv(
    x: Tensor,
    tree: Tree,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_state: Tensor,
    state_indices: Tensor | None = None,
    pending: PendingConv | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Causal depthwise convolution at every node over its own ancestors, then over the committed history.

    x [B, N, D] raw projections; weight [D, W]; bias [D]; conv_state [slots, D, W - 1], oldest first:
    `pending` is committed into it in place first. Returns y [B, N, D] in x's dtype, zero at padding.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, not {activation!r}")
    if pending is not None:
        naive_conv_commit(
            conv_state, pending.x, pending.path, pending.num_nodes - 1, state_indices=state_indices
        )
    width = weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros_like(x, dtype=dtype)
    for b, slot in enumerate(_slots(state_indices, x.shape[0])):
        for i in range(int(tree.num_nodes[b]) if slot >= 0 else 0):
            stream = torch.cat([conv_state[slot].to(dtype), x[b, _path_to(tree, b, i)].to(dtype).T], dim=1)
            window = stream[:, stream.shape[1] - width :]
            y[b, i] = (window * weight.to(dtype)).sum(1)
            if bias is not None:
                y[b, i] += bias.to(dtype)
            if activation == "silu":
                y[b, i] *= torch.sigmoid(y[b, i])
    return y.to(x.dtype)


def naive_conv_commit(
    conv_state: Tensor, x: Tensor, path: Tensor, num_accepted: Tensor, *, state_indices: Tensor | None = None
) -> None:
    """Shifts the raw inputs of the first 1 + num_accepted nodes of `path` into `conv_state` in place.

    conv_state [slots, D, W - 1]; x [B, N, D]; num_accepted [B]: -1 commits nothing; state index -1 skips it.
    """
    for b, slot in enumerate(_slots(state_indices, path.shape[0])):
        for j in path[b, : 1 + int(num_accepted[b])].tolist() if slot >= 0 else []:
            stream = torch.cat([conv_state[slot], x[b, j, :, None].to(conv_state.dtype)], dim=1)
            conv_state[slot] = stream[:, 1:]


def naive_chunk_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    delta: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sequence form, token by token; `chunk_size` only shares the signature.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV], [B, T, HV, K] or None; beta [B, T, HV] or None; initial_state
    [B, HV, V, K] or None; delta=False writes beta v.
    Returns o [B, T, HV, V] in v's dtype and the final state [B, HV, V, K]; differentiable.
    """
    batch, length, heads, key_dim = q.shape
    group = v.shape[2] // heads
    scale = key_dim**-0.5 if scale is None else scale
    dtype = torch.promote_types(v.dtype, torch.float32 if initial_state is None else initial_state.dtype)
    out_dtype = v.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    beta = torch.ones_like(v[..., 0]) if beta is None else beta.to(dtype)
    g = _log_decay(g, beta)
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)
    if initial_state is None:
        initial_state = v.new_zeros(batch, v.shape[2], v.shape[3], key_dim)

    outputs, final = [], []
    for b in range(batch):
        for h in range(v.shape[2]):
            s = initial_state[b, h].to(dtype)
            for t in range(length):
                s, _ = _step(s, k[b, t, h // group], v[b, t, h], g[b, t, h], beta[b, t, h], delta)
                outputs.append(s @ (q[b, t, h // group] * scale))
            final.append(s)
    o = torch.stack(outputs).view(batch, v.shape[2], length, v.shape[3]).transpose(1, 2)
    return o.to(out_dtype), torch.stack(final).view(batch, v.shape[2], v.shape[3], key_dim)
