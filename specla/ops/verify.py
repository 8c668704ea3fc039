"""The public verification ops: argument checks, slots and padding, then one of the modes."""

from __future__ import annotations

import torch
from torch import Tensor

from specla.ops import torch as modes
from specla.ops.checks import require, select_rows
from specla.ops.elementwise import l2norm
from specla.ops.factors import Factors, Pending
from specla.tree import Tree

MODES = ("auto", "serial", "parallel", "hybrid")


def gated_delta_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    tree: Tree,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    pending: Pending | None = None,
    scale: float | None = None,
    mode: str = "auto",
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Factors]:
    """Outputs of the gated delta rule at every node of a tree, from one read of the state.

    For each node, `S = exp(g) S_parent`, `d = beta (v - S k)`, `S += d k^T`, `o = S q`. The tree itself is not
    committed: its factors are returned, and those of the accepted path belong into the next call's `pending`.

    Args:
        q, k: `[B, N, H, K]`; v: `[B, N, HV, V]` with `HV` a multiple of `H` (grouped value heads).
        g: log-decay `[B, N, HV]`, or None for no decay; beta: `[B, N, HV]`.
        tree: B trees of N nodes.
        state: `[slots, HV, V, K]`, fp32 or fp64, written only by the commit of `pending`.
        state_indices: slot of each row `[B]`, -1 for a padding row; None means row b is slot b.
        pending: factors accepted earlier, committed into `state` in place first.
        scale: multiplies q, `K ** -0.5` by default.
        mode: "serial" and "hybrid" are bit-identical to one-token decoding, "parallel" is not; "auto" is "hybrid".
        use_qk_l2norm_in_kernel: normalise q and k first (eps 1e-6).

    Returns:
        o `[B, N, HV, V]` in v's dtype, zero at padding nodes and padding rows, and the nodes' factors.

    Raises:
        ValueError: on shapes, dtypes, devices or modes that are not supported, before the state is touched.
    """
    _check(q, k, v, g, beta, tree, state, mode)
    if pending is not None:
        _check_pending(pending, state, q.shape[0])
    slots, rows = select_rows(state_indices, q.shape[0], state)
    if rows is not None:
        return _without_padding_rows(
            rows, q, k, v, g, beta, tree, state, state_indices, pending, scale, mode, use_qk_l2norm_in_kernel
        )
    if pending is not None:
        committed = modes.commit(state[slots], pending.factors, pending.path, pending.count)
        if not isinstance(slots, slice):
            state[slots] = committed
    # padding may hold anything, NaN included
    if not bool(tree.valid.all()):
        pad = ~tree.valid[..., None]
        q, k, v = (x.masked_fill(pad[..., None], 0) for x in (q, k, v))
        beta = beta.masked_fill(pad, 0)
        g = None if g is None else g.masked_fill(pad, 0)
    work = state.dtype
    q, k = q.to(work), k.to(work)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    keys = k
    groups = v.shape[2] // k.shape[2]
    if groups > 1:
        q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    v_work, beta, g = v.to(work), beta.to(work), None if g is None else g.to(work)
    if mode == "parallel":
        o, d = modes.parallel(q, k, v_work, g, beta, state[slots], tree)
    else:
        decay = None if g is None else torch.exp(g)
        run = modes.serial if mode == "serial" else modes.hybrid
        o, d = run(q, k, v_work, decay, beta, state[slots].clone(), tree)
    return o.to(v.dtype), Factors(keys, d, torch.zeros_like(beta) if g is None else g)


def gated_delta_commit(
    state: Tensor, factors: Factors, path: Tensor, num_accepted: Tensor, *, state_indices: Tensor | None = None
) -> None:
    """Move the state along an accepted path, in place and in exact order, without a forward pass.

    Args:
        state: `[slots, HV, V, K]`.
        factors: of the verified nodes.
        path: `[B, D]` node ids from the root (always 0) down, -1 padded; ids ascend, with gaps.
        num_accepted: `[B]` accepted drafts, so 1 + num_accepted nodes are committed; -1 commits nothing.
        state_indices: slot of each row `[B]`, -1 for a padding row.
    """
    count = num_accepted + 1
    pending = Pending(factors, path, count)
    _check_state(state)
    _check_pending(pending, state, path.shape[0])
    slots, rows = select_rows(state_indices, path.shape[0], state)
    if rows is not None:
        factors, path, count = Factors(*(x[rows] for x in factors)), path[rows], count[rows]
    committed = modes.commit(state[slots], factors, path, count)
    if not isinstance(slots, slice):
        state[slots] = committed


def _without_padding_rows(
    rows, q, k, v, g, beta, tree, state, state_indices, pending, scale, mode, normalise
) -> tuple[Tensor, Factors]:
    """Run the real rows alone and scatter them between zero rows."""
    o = torch.zeros_like(v)
    work = state.dtype
    factors = Factors(k.new_zeros(k.shape, dtype=work), o.to(work), beta.new_zeros(beta.shape, dtype=work))
    if len(rows):
        some = Tree(tree.parent[rows], tree.num_nodes[rows])
        if pending is not None:
            pending = Pending(Factors(*(x[rows] for x in pending.factors)), pending.path[rows], pending.count[rows])
        part, part_factors = gated_delta_verify(
            q[rows], k[rows], v[rows], None if g is None else g[rows], beta[rows], some, state=state,
            state_indices=state_indices[rows], pending=pending, scale=scale, mode=mode, use_qk_l2norm_in_kernel=normalise,
        )  # fmt: skip
        o[rows] = part
        for whole, real in zip(factors, part_factors, strict=True):
            whole[rows] = real
    return o, factors


def _check_state(state: Tensor) -> None:
    require(
        state.dim() == 4 and state.dtype in (torch.float32, torch.float64) and state.is_contiguous(),
        "state must be a contiguous [slots, HV, V, K] tensor of float32 or float64, "
        f"got {list(state.shape)} {state.dtype} with strides {list(state.stride())}",
    )


def _check(q, k, v, g, beta, tree: Tree, state: Tensor, mode: str) -> None:
    require(mode in MODES, f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    _check_state(state)
    for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta), *((("g", g),) if g is not None else ())):
        require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
        require(x.device == state.device, f"{name} is on {x.device}, the state on {state.device}")
    require(
        q.dim() == 4 and q.shape[:2] == (tree.batch, tree.size),
        f"q must be [B={tree.batch}, N={tree.size}, H, K] as the tree has it, got {list(q.shape)}",
    )
    require(k.shape == q.shape, f"k must have q's shape {list(q.shape)}, got {list(k.shape)}")
    require(v.dim() == 4 and v.shape[:2] == q.shape[:2], f"v must be [B, N, HV, V], got {list(v.shape)}")
    require(v.shape[2] % q.shape[2] == 0, f"value heads ({v.shape[2]}) must be a multiple of key heads ({q.shape[2]})")
    for name, x in (("beta", beta), *((("g", g),) if g is not None else ())):
        require(x.shape == v.shape[:3], f"{name} must be [B, N, HV] = {list(v.shape[:3])}, got {list(x.shape)}")
    require(
        state.shape[1:] == (v.shape[2], v.shape[3], q.shape[3]),
        f"state must be [slots, {v.shape[2]}, {v.shape[3]}, {q.shape[3]}], got {list(state.shape)}",
    )


def _check_pending(pending: Pending, state: Tensor, batch: int) -> None:
    (k, d, g), path, count = pending
    require(
        d.dim() == 4 and d.shape[2:] == state.shape[1:3] and d.shape[0] == batch,
        f"factors.d must be [B={batch}, N, {state.shape[1]}, {state.shape[2]}], got {list(d.shape)}",
    )
    require(
        k.dim() == 4 and k.shape[:2] == d.shape[:2] and k.shape[3] == state.shape[3] and d.shape[2] % k.shape[2] == 0,
        f"factors.k must be [B, N, H, {state.shape[3]}] beside d {list(d.shape)}, got {list(k.shape)}",
    )
    require(g.shape == d.shape[:3], f"factors.g must be {list(d.shape[:3])}, got {list(g.shape)}")
    require(path.dim() == 2 and path.shape[0] == batch, f"path must be [B={batch}, D], got {list(path.shape)}")
    require(count.shape == (batch,), f"one count for each of the {batch} rows, got {list(count.shape)}")
    longest = int(count.max()) if batch else 0
    require(longest <= path.shape[1], f"num_accepted commits {longest} nodes of a path of {path.shape[1]}")
    used = path[torch.arange(path.shape[1], device=path.device) < count[:, None]]
    require(
        used.numel() == 0 or bool(((used >= 0) & (used < d.shape[1])).all()),
        f"path must name nodes 0..{d.shape[1] - 1} where it is committed",
    )
