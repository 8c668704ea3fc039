"""The generalised delta rule of RWKV-7: a decay for each key channel, and what is removed from the state is found by
another key than what is written.

    u = S a;  S <- S diag(exp(g)) + u b^T + v k^T;  o = S q

The transition is diagonal plus a matrix of rank one that is not symmetric (fla: DPLR), and a token adds two
rank-one terms, so that it is none of the rules of `verify`. A node's record is therefore a pair of `Factors`, and half
nodes commit as whole ones do.

Shapes, here and below: q, k, g, a, b `[B, N, H, K]`; v `[B, N, H, V]`; state `[B, H, V, K]`, only read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.modes import AUTO, MODES
from specla.ops.checks import require
from specla.ops.factors import Factors
from specla.ops.torch import walk_levels, walk_nodes, whole_vectors
from specla.tree import Tree

CHUNK = 16  # tokens of a text that are solved together: the pairs of them are held for every key channel


def dplr_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    tree: Tree,
    *,
    state: Tensor,
    mode: str = "auto",
) -> tuple[Tensor, Factors]:
    """The rule at every node of a draft tree, each node under its own root-to-node path.

    `serial` and `hybrid` have the bits of one-token decoding on a CPU; `parallel` solves all nodes at once and sums in
    another order.

    Args:
        g: log-decay, at most 0. a: the key that is read before the decay (RWKV-7: minus the removal key). b: the key
            under which that is added again.
        state: `[B, H, V, K]` float32 or float64, whose dtype is that of the computation.

    Returns:
        o `[B, N, H, V]` in v's dtype and `Factors` of 2 N half nodes, 2 i (b and u, with the decay) and 2 i + 1 (k and
        v, without) for node i; zero at padding.

    Raises:
        ValueError: on shapes, dtypes or a mode that it does not support.
    """
    require(mode in MODES, f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    require(
        q.dim() == 4 and q.shape[:2] == (tree.batch, tree.size),
        f"q must be [B={tree.batch}, N={tree.size}, H, K] as the tree has it, got {list(q.shape)}",
    )
    _check(q, k, v, g, a, b, state)
    dtype, valid = v.dtype, tree.valid[..., None, None]
    q, k, v, g, a, b = (x.to(state.dtype) for x in (q, k, v, g, a, b))
    if not tree.is_full:
        q, k, v, g, a, b = (x.masked_fill(~valid, 0) for x in (q, k, v, g, a, b))
    mode = AUTO if mode == "auto" else mode
    if mode == "parallel":
        total = torch.einsum("bij,bjhk->bihk", tree.lineage.to(g.dtype), g)
        o, u = _solve(q, k, v, g, a, b, total, tree.ancestors, state)
    else:
        whole = [whole_vectors(x) for x in (q, k, g, a, b)]
        columns = _columns(v, *whole)
        o, u = (walk_nodes if mode == "serial" else walk_levels)(*columns, whole_vectors(state), tree)
    pairs = ((b, k), (u, v), (g, torch.zeros_like(g)))
    return o.to(dtype), Factors(*(torch.stack(pair, 2).flatten(1, 2) for pair in pairs))


def chunk_dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule over a text of N tokens, chunk by chunk and differentiable.

    Args:
        initial_state: `[B, H, V, K]`, zero by default; its dtype (fp32 without it, fp64 for fp64 inputs) is that of
            the computation.

    Returns:
        o `[B, N, H, V]` in v's dtype and the state after the last token.

    Raises:
        ValueError: on shapes or dtypes that it does not support.
    """
    require(q.dim() == 4 and v.dim() == 4, f"q and v must be [B, N, H, K or V], got {list(q.shape)}")
    if initial_state is None:
        work = torch.promote_types(v.dtype, torch.float32)
        initial_state = v.new_zeros(q.shape[0], *v.shape[2:], q.shape[-1], dtype=work)
    _check(q, k, v, g, a, b, initial_state)
    state, outputs = initial_state, []
    before = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril(-1)[None]
    inputs = (x.to(state.dtype).split(CHUNK, 1) for x in (q, k, v, g, a, b))
    for part in zip(*inputs, strict=True):
        q_c, k_c, v_c, g_c, a_c, b_c = part
        total, size = g_c.cumsum(1), g_c.shape[1]
        o, u = _solve(q_c, k_c, v_c, g_c, a_c, b_c, total, before[:, :size, :size], state)
        left = (total[:, -1:] - total).exp()
        keys = torch.cat([b_c * left, k_c * left], 1).transpose(1, 2)
        values = torch.cat([u, v_c], 1).permute(0, 2, 3, 1)
        state = state * total[:, -1].exp()[:, :, None] + values @ keys
        outputs.append(o)
    return torch.cat(outputs, 1).to(v.dtype), state


def half_nodes(path: Tensor) -> Tensor:
    """The half nodes `[B, 2 D]` of the nodes in `path` `[B, D]`; -1 stays."""
    first = torch.where(path < 0, path, 2 * path)
    return torch.stack([first, torch.where(path < 0, path, first + 1)], -1).flatten(1)


def _columns(
    v: Tensor, q: Tensor, k: Tensor, g: Tensor, a: Tensor, b: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """What a step reads of the state S before it and what it writes: `u = S a` and
    `o = S (e q + (b . q) a) + (k . q) v`, with e the decay, are the two rows of `base + mix S^T`.
    """
    decay = torch.exp(g)
    mix = torch.stack([a, decay * q + (b * q).sum(-1, keepdim=True) * a], -2)
    base = torch.stack([torch.zeros_like(v), (k * q).sum(-1, keepdim=True) * v], -2)
    return (mix, base), (b[..., None, :], decay[..., None, :], v[..., None], k[..., None, :])


def _solve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    total: Tensor,
    above: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs o and what is read u `[B, N, H, V]` of all nodes at once: with G the log-decay `total` since the start
    and p a node's parent,

        u_i = S_0 exp(G_p) a_i + sum over j above i of (a_i . exp(G_p - G_j) b_j) u_j + (the same of k_j) v_j

    above: `[B, N, N]`, or of one row for all; entry (i, j) says that j lies strictly above i.
    """
    q, k, v, g, a, b, total = (x.transpose(1, 2) for x in (q, k, v, g, a, b, total))
    parent = total - g
    asked = torch.stack([a, q * g.exp()], -2)  # [B, H, N, 2, K] of the parent's state
    gap = parent[:, :, :, None] - total[:, :, None]  # [B, H, N, N, K]
    gap = gap.masked_fill(~above[:, None, :, :, None], -torch.inf).exp()
    of_b, of_k = (asked @ (gap * x[:, :, None]).transpose(-1, -2) for x in (b, k))  # [B, H, N, 2, N]
    held = (asked * parent.exp()[..., None, :]).flatten(2, 3) @ state.transpose(-1, -2)
    known = (held + of_k.flatten(2, 3) @ v).unflatten(2, (-1, 2))  # [B, H, N, 2, V]
    u = torch.linalg.solve_triangular(-of_b[..., 0, :], known[..., 0, :], upper=False, unitriangular=True)
    o = known[..., 1, :] + of_b[..., 1, :] @ u
    o = o + (b * q).sum(-1, keepdim=True) * u + (k * q).sum(-1, keepdim=True) * v
    return o.transpose(1, 2), u.transpose(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
    for name, x in (("k", k), ("g", g), ("a", a), ("b", b)):
        require(x.shape == q.shape, f"{name} must be {list(q.shape)} as q, got {list(x.shape)}")
    require(
        v.dim() == 4 and v.shape[:3] == q.shape[:3],
        f"v must be [B, N, H, V] with {list(q.shape[:3])}, got {list(v.shape)}",
    )
    want = [q.shape[0], q.shape[2], v.shape[3], q.shape[3]]
    require(list(state.shape) == want, f"state must be [B, H, V, K] = {want}, got {list(state.shape)}")
    require(state.dtype in (torch.float32, torch.float64), f"state must be fp32 or fp64, got {state.dtype}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("a", a), ("b", b)):
        require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
        require(x.device == state.device, f"{name} is on {x.device}, state on {state.device}")
