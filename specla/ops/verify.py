"""The public verification ops: argument checks, slots and padding, then one of the modes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from specla.modes import AUTO, MODES
from specla.ops import torch as modes
from specla.ops.checks import check_path, require, select_rows
from specla.ops.factors import Factors, Pending
from specla.tree import Tree

L2_EPS = 1e-6


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
        if pending is not None:
            factors = Factors(*(x[rows] for x in pending.factors))
            pending = Pending(factors, pending.path[rows], pending.num_nodes[rows])
        part = None
        if len(rows):
            some = Tree(tree.parent[rows], tree.num_nodes[rows])
            q_r, k_r, v_r, beta_r = (x[rows] for x in (q, k, v, beta))
            g_r = None if g is None else g[rows]
            _commit(state, slots, pending)
            part = verify(
                q_r, k_r, v_r, g_r, beta_r, some, state[slots], scale, mode, use_qk_l2norm_in_kernel
            )
        return _between_padding(part, rows, k, v, beta, state.dtype)
    _commit(state, slots, pending)
    o, factors = verify(q, k, v, g, beta, tree, state[slots], scale, mode, use_qk_l2norm_in_kernel)
    return o, Factors(*(x.contiguous() for x in factors))  # views would keep more alive than the factors


def gated_delta_commit(
    state: Tensor,
    factors: Factors,
    path: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None = None,
) -> None:
    """Move the state along an accepted path, in place and in exact order, without a forward pass.

    Args:
        state: `[slots, HV, V, K]`.
        factors: of the verified nodes.
        path: `[B, D]` node ids from the root (always 0) down, -1 padded; ids ascend, with gaps.
        num_accepted: `[B]` accepted drafts, so 1 + num_accepted nodes are committed; -1 commits nothing.
        state_indices: slot of each row `[B]`, -1 for a padding row.

    Raises:
        ValueError: as `gated_delta_verify`.
    """
    _check_state(state)
    require(
        not num_accepted.is_floating_point(), f"num_accepted must hold integers, got {num_accepted.dtype}"
    )
    pending = Pending(factors, path, num_accepted + 1)
    _check_pending(pending, state, path.shape[0])
    slots, rows = select_rows(state_indices, path.shape[0], state)
    if rows is not None:
        pending = Pending(Factors(*(x[rows] for x in factors)), path[rows], pending.num_nodes[rows])
    _commit(state, slots, pending)


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    tree: Tree,
    state: Tensor,
    scale: float | None,
    mode: str,
    normalise: bool,
) -> tuple[Tensor, Factors]:
    """`gated_delta_verify` without checks, slots and pending: `state` is `[B, HV, V, K]`, one row a tree."""
    if not tree.is_full:  # padding may hold anything, NaN included
        pad = ~tree.valid[..., None]
        q, k, v = (x.masked_fill(pad[..., None], 0) for x in (q, k, v))
        beta = beta.masked_fill(pad, 0)
        g = None if g is None else g.masked_fill(pad, 0)
    work = state.dtype
    kq = torch.stack([k, q], -2).to(work)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if normalise:  # x / sqrt(sum(x^2) + eps) as a root mean square norm, whose sqrt(K) goes into the factors
        size = q.shape[-1]
        kq = torch.nn.functional.rms_norm(kq, (size,), eps=L2_EPS / size)
        kq = kq * _key_query_scale(size**-0.5, scale * size**-0.5, work, q.device)
    else:
        kq = kq * _key_query_scale(1.0, scale, work, q.device)
    keys = kq[..., 0, :]
    groups = v.shape[2] // k.shape[2]
    if groups > 1:
        kq = kq.repeat_interleave(groups, 2)
    beta, g = beta.to(work), None if g is None else g.to(work)
    run = {"serial": modes.serial, "parallel": modes.parallel, "hybrid": modes.hybrid}
    o, d = run[AUTO if mode == "auto" else mode](kq, v.to(work), g, beta, state, tree)
    return o.contiguous().to(v.dtype), Factors(keys, d, torch.zeros_like(beta) if g is None else g)


@functools.lru_cache(maxsize=64)
def _key_query_scale(key: float, query: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([[key], [query]], dtype=dtype, device=device)


def _commit(state: Tensor, slots: Tensor | slice, pending: Pending | None) -> None:
    if pending is not None:
        committed = modes.commit(state[slots], pending.factors, pending.path.long(), pending.num_nodes)
        if not isinstance(slots, slice):
            state[slots] = committed


def _between_padding(
    part: tuple[Tensor, Factors] | None, rows: Tensor, k: Tensor, v: Tensor, beta: Tensor, work: torch.dtype
) -> tuple[Tensor, Factors]:
    """Results of the real rows among zero rows."""
    o = torch.zeros_like(v)
    factors = Factors(*(torch.zeros_like(x, dtype=work) for x in (k, v, beta)))
    if part is not None:
        o[rows] = part[0]
        for whole, real in zip(factors, part[1], strict=True):
            whole[rows] = real
    return o, factors


def _check_state(state: Tensor) -> None:
    require(
        state.dim() == 4 and state.dtype in (torch.float32, torch.float64) and state.is_contiguous(),
        "state must be a contiguous [slots, HV, V, K] tensor of float32 or float64, "
        f"got {list(state.shape)} {state.dtype} with strides {list(state.stride())}",
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, tree: Tree, state: Tensor, mode: str
) -> None:
    require(mode in MODES, f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    _check_state(state)
    named = {"q": q, "k": k, "v": v, "beta": beta} | ({} if g is None else {"g": g})
    for name, x in named.items():
        require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
        require(x.device == state.device, f"{name} is on {x.device}, the state on {state.device}")
    require(
        q.dim() == 4 and q.shape[:2] == (tree.batch, tree.size),
        f"q must be [B={tree.batch}, N={tree.size}, H, K] as the tree has it, got {list(q.shape)}",
    )
    require(k.shape == q.shape, f"k must have q's shape {list(q.shape)}, got {list(k.shape)}")
    require(v.dim() == 4 and v.shape[:2] == q.shape[:2], f"v must be [B, N, HV, V], got {list(v.shape)}")
    require(
        v.shape[2] % q.shape[2] == 0,
        f"value heads ({v.shape[2]}) must be a multiple of key heads ({q.shape[2]})",
    )
    for name in ("beta", "g"):
        shape = named[name].shape if name in named else v.shape[:3]
        require(shape == v.shape[:3], f"{name} must be [B, N, HV] = {list(v.shape[:3])}, got {list(shape)}")
    require(
        state.shape[1:] == (v.shape[2], v.shape[3], q.shape[3]),
        f"state must be [slots, {v.shape[2]}, {v.shape[3]}, {q.shape[3]}], got {list(state.shape)}",
    )


def _check_pending(pending: Pending, state: Tensor, batch: int) -> None:
    (k, d, g), path, count = pending
    for name, x in (
        ("factors.k", k),
        ("factors.d", d),
        ("factors.g", g),
        ("path", path),
        ("num_accepted", count),
    ):
        require(x.device == state.device, f"{name} is on {x.device}, the state on {state.device}")
    require(
        d.dim() == 4 and d.shape[2:] == state.shape[1:3] and d.shape[0] == batch,
        f"factors.d must be [B={batch}, N, {state.shape[1]}, {state.shape[2]}], got {list(d.shape)}",
    )
    require(
        k.dim() == 4
        and k.shape[:2] == d.shape[:2]
        and k.shape[3] == state.shape[3]
        and d.shape[2] % k.shape[2] == 0,
        f"factors.k must be [B, N, H, {state.shape[3]}] beside d {list(d.shape)}, got {list(k.shape)}",
    )
    require(g.shape == d.shape[:3], f"factors.g must be {list(d.shape[:3])}, got {list(g.shape)}")
    check_path(path, count, batch, d.shape[1])
