"""The public verification ops: argument checks, then a kernel, or slots, padding and one of the eager modes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from specla.modes import AUTO, MODES
from specla.ops import torch as modes, triton as kernels
from specla.ops.checks import check_path, require, select_rows
from specla.ops.elementwise import L2_EPS
from specla.ops.factors import Factors, Pending
from specla.ops.gate import Gate, gates
from specla.tree import Tree


def gated_delta_verify(
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
    mode: str = "auto",
    use_qk_l2norm_in_kernel: bool = False,
    delta: bool = True,
    gate: Gate | None = None,
) -> tuple[Tensor, Factors]:
    """Outputs of the gated delta rule at every node of a tree, from one read of the state.

    For each node, `S = exp(g) S_parent`, `d = beta (v - S k)`, `S += d k^T`, `o = S q`. The tree itself is not
    committed: its factors are returned, and those of the accepted path belong into the next call's `pending`.

    On a GPU, Triton kernels run where it is installed and no gradient is asked for. They take q, k and v of one dtype
    (fp32, bf16 or fp16), a tree on the same device, K and V up to 512, N up to 64, and one log-decay a head in mode
    "parallel"; anything else raises. With an fp64 state, and on a CPU, plain torch runs. The checks read
    `state_indices` and the pending path back to the host: `launch` does not.

    Args:
        q, k: `[B, N, H, K]`; v: `[B, N, HV, V]` with `HV` a multiple of `H` (grouped value heads).
        g: log-decay `[B, N, HV]`, one for each key channel `[B, N, HV, K]`, or None for no decay.
        beta: `[B, N, HV]`, or None for 1.
        tree: B trees of N nodes.
        state: `[slots, HV, V, K]`, fp32 or fp64, written only by the commit of `pending`.
        state_indices: slot of each row `[B]`, -1 for a padding row; None means row b is slot b.
        pending: factors accepted earlier, committed into `state` in place first.
        scale: multiplies q, `K ** -0.5` by default.
        mode: "serial" and "hybrid" are bit-identical to one-token decoding. "parallel" is not: a kernel's outputs are
            within 2e-3 (relative RMS) for bf16 and fp16, most of it the rounding of o, and 1e-5 for fp32, or 1e-4 where
            the log-decays of a path sum to hundreds; its commit of `pending` is exact all the same. "auto" is one of
            the exact two.
        use_qk_l2norm_in_kernel: normalise q and k first (eps 1e-6).
        delta: False writes `d = beta v`, whatever the state holds (linear attention, Mamba-2, GLA).
        gate: g and beta are raw projections, and this makes of them, in the state's dtype, what they are above;
            a beta of None stays 1.

    Returns:
        o `[B, N, HV, V]` in v's dtype, zero at padding nodes and padding rows, and the nodes' factors, their g as it
        was used: `[B, N, HV]` (zero for no decay) or `[B, N, HV, K]`.

    Raises:
        ValueError: on shapes, dtypes, devices or modes that are not supported, before the state is touched.
    """
    _check(q, k, v, g, beta, tree, state, scale, mode)
    _check_rule(g, v, delta, gate)
    if pending is not None:
        _check_pending(pending, state, q.shape[0])
    held = () if pending is None else pending.factors
    on_kernels = kernels.use_kernels(state) and not kernels.wants_gradient(
        state, q, k, v, g, beta, *_parameters(gate), *held
    )
    if on_kernels:
        check_launch(q, k, v, g, tree, mode)
    slots, rows = select_rows(state_indices, q.shape[0], state)
    if on_kernels:
        return launch(
            q, k, v, g, beta, tree, state, scale, mode, use_qk_l2norm_in_kernel, delta, gate,
            state_indices=state_indices, pending=pending,
        )  # fmt: skip
    if rows is not None:
        if pending is not None:
            factors = Factors(*(x[rows] for x in pending.factors))
            pending = Pending(factors, pending.path[rows], pending.num_nodes[rows])
        part = None
        if len(rows):
            some = Tree(tree.parent[rows], tree.num_nodes[rows])
            q_r, k_r, v_r = (x[rows] for x in (q, k, v))
            g_r, beta_r = (None if x is None else x[rows] for x in (g, beta))
            _commit(state, slots, pending)
            part = _eager(
                q_r, k_r, v_r, g_r, beta_r, some, state[slots], scale, mode, use_qk_l2norm_in_kernel, delta, gate
            )  # fmt: skip
        return _between_padding(part, rows, k, v, v[..., 0] if g is None else g, state.dtype)
    _commit(state, slots, pending)
    o, factors = _eager(
        q, k, v, g, beta, tree, state[slots], scale, mode, use_qk_l2norm_in_kernel, delta, gate
    )
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
    on_kernels = kernels.use_kernels(state) and not kernels.wants_gradient(state, *factors)
    if on_kernels:
        _check_sizes(path.shape[0], state.shape[3], state.shape[2])
    slots, rows = select_rows(state_indices, path.shape[0], state)
    if on_kernels:
        launch_commit(state, *pending, state_indices)
        return
    if rows is not None:
        pending = Pending(Factors(*(x[rows] for x in factors)), path[rows], pending.num_nodes[rows])
    _commit(state, slots, pending)


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    tree: Tree,
    state: Tensor,
    scale: float | None,
    mode: str,
    normalise: bool,
    delta: bool = True,
    gate: Gate | None = None,
) -> tuple[Tensor, Factors]:
    """`gated_delta_verify` without slots and pending: `state` is `[B, HV, V, K]`, one row a tree.

    What tensors hold is not looked at. Plain torch also runs for a tree that was left on the host, and where a head is
    too large for the kernels.

    Raises:
        ValueError: on a GPU, for another tree, batch, dtype or mode than the kernels take. (Plain torch in their place
            would give other bits than the calls before.)
    """
    if not takes(state, tree, q, k, v, g, beta, *_parameters(gate)):
        return _eager(q, k, v, g, beta, tree, state, scale, mode, normalise, delta, gate)
    check_launch(q, k, v, g, tree, mode)
    return launch(q, k, v, g, beta, tree, state.contiguous(), scale, mode, normalise, delta, gate)


def _parameters(gate: Gate | None) -> tuple[Tensor | None, ...]:
    return () if gate is None else gate[:2]


def takes(state: Tensor, tree: Tree, *inputs: Tensor | None) -> bool:
    """Whether `verify` goes to the kernels: by the size of heads, and a tree that lies where the state does."""
    return (
        kernels.takes_heads(state)
        and tree.device.type == state.device.type
        and not kernels.wants_gradient(state, *inputs)
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    tree: Tree,
    state: Tensor,
    scale: float | None,
    mode: str,
    normalise: bool,
    delta: bool = True,
    gate: Gate | None = None,
    *,
    state_indices: Tensor | None = None,
    pending: Pending | None = None,
    factors: Factors | None = None,
    by_slot: bool = False,
    due: Tensor | None = None,
) -> tuple[Tensor, Factors]:
    """`gated_delta_verify` by a kernel; nothing is checked, nothing is read back.

    Args:
        factors: where to write them, fp32 with `M >= N` nodes; rows are slots with `by_slot`.
        due: int32 `[B]`, 0 where what is pending is applied for this call alone, and not committed; None: nowhere. For
            chains, in an exact mode.
    """
    from specla.ops.triton.tuning import choose
    from specla.ops.triton.verify import verify as run

    batch, nodes, value_heads, dim_v = v.shape
    config = choose(
        mode, device=state.device, batch=max(batch, 1), nodes=nodes, value_heads=value_heads, dim_k=q.shape[3],
        dim_v=dim_v,
    )  # fmt: skip
    if due is not None:
        assert config.mode != "parallel"
        config = config._replace(
            mode="serial", workers=1
        )  # whose programs are alone with their part of a state
    q, k, v = (kernels.dense(x) for x in (q, k, v))
    g, beta = (None if x is None else kernels.dense(x) for x in (g, beta))
    if gate is not None:
        bias = None if gate.dt_bias is None else gate.dt_bias.contiguous()
        gate = gate._replace(A_log=gate.A_log.contiguous(), dt_bias=bias)
    if state_indices is not None:
        state_indices = kernels.integers(state_indices, state.device)
    with torch.cuda.device_of(state):
        if pending is not None and not _is_fusible(pending, k, g):
            assert due is None
            launch_commit(state, *pending, state_indices)
            pending = None
        if pending is not None:
            path, count = (kernels.integers(x, state.device) for x in pending[1:])
            pending = Pending(pending.factors, path, count)
        return run(
            q, k, v, g, beta, tree, config,
            state=state, state_indices=state_indices, pending=pending, normalise=normalise, delta=delta, gate=gate,
            scale=q.shape[-1] ** -0.5 if scale is None else scale, factors=factors, by_slot=by_slot, due=due,
        )  # fmt: skip


def _is_fusible(pending: Pending, k: Tensor, g: Tensor | None) -> bool:
    """Whether a verification can commit these factors itself: they look like those that it makes."""
    held = pending.factors
    return (
        held.k.shape[2] == k.shape[2]
        and (held.g.dim() == 4) == (g is not None and g.dim() == 4)
        and all(x.dtype == torch.float32 and x.is_contiguous() for x in held)
    )


def launch_commit(
    state: Tensor,
    factors: Factors,
    path: Tensor,
    count: Tensor,
    state_indices: Tensor | None,
    *,
    by_slot: bool = False,
) -> None:
    """`gated_delta_commit` of `count` nodes by a kernel, all layers at once where state and factors have some."""
    from specla.ops.triton.commit import commit

    path, count = (kernels.integers(x, state.device) for x in (path, count))
    if state_indices is not None:
        state_indices = kernels.integers(state_indices, state.device)
    with torch.cuda.device_of(state):
        commit(state, Factors(*map(kernels.dense, factors)), path, count, state_indices, by_slot=by_slot)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    tree: Tree,
    state: Tensor,
    scale: float | None,
    mode: str,
    normalise: bool,
    delta: bool,
    gate: Gate | None,
) -> tuple[Tensor, Factors]:
    """`verify` in plain torch."""
    work = state.dtype
    g, beta = gates(g, beta, gate, work)
    beta = v.new_ones(v.shape[:3], dtype=work) if beta is None else beta
    if not tree.is_full:  # padding may hold anything, NaN included
        pad = ~tree.valid[..., None]
        q, k, v = (x.masked_fill(pad[..., None], 0) for x in (q, k, v))
        beta = beta.masked_fill(pad, 0)
        if g is not None:
            g = g.masked_fill(pad if g.dim() == 3 else pad[..., None], 0)
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
    run = {"serial": modes.serial, "parallel": modes.parallel, "hybrid": modes.hybrid}
    o, d = run[AUTO if mode == "auto" else mode](kq, v.to(work), g, beta, state, tree, delta)
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
    part: tuple[Tensor, Factors] | None, rows: Tensor, k: Tensor, v: Tensor, g: Tensor, work: torch.dtype
) -> tuple[Tensor, Factors]:
    """Results of the real rows among zero rows."""
    o = torch.zeros_like(v)
    factors = Factors(*(torch.zeros_like(x, dtype=work) for x in (k, v, g)))
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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, tree: Tree, state: Tensor,
    scale: float | None, mode: str,
) -> None:  # fmt: skip
    require(
        scale is None or isinstance(scale, (int, float)), f"scale must be a number or None, got {scale!r}"
    )
    require(mode in MODES, f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    _check_state(state)
    for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta), ("g", g)):
        if x is not None:
            _check_floats(name, x, state)
    require(
        q.dim() == 4 and q.shape[:2] == (tree.batch, tree.size),
        f"q must be [B={tree.batch}, N={tree.size}, H, K] as the tree has it, got {list(q.shape)}",
    )
    require(k.shape == q.shape, f"k must have q's shape {list(q.shape)}, got {list(k.shape)}")
    require(v.dim() == 4 and v.shape[:2] == q.shape[:2], f"v must be [B, N, HV, V], got {list(v.shape)}")
    sizes = (*q.shape[2:], *v.shape[2:])
    require(min(sizes) > 0, f"heads, K and V must be at least 1, got {list(q.shape)} and {list(v.shape)}")
    require(
        v.shape[2] % q.shape[2] == 0,
        f"value heads ({v.shape[2]}) must be a multiple of key heads ({q.shape[2]})",
    )
    heads, channels = list(v.shape[:3]), [*v.shape[:3], q.shape[3]]
    for name, x, shapes in (("beta", beta, [heads]), ("g", g, [heads, channels])):
        if x is not None:
            allowed = " or ".join(map(str, shapes))
            require(list(x.shape) in shapes, f"{name} must be None or {allowed}, got {list(x.shape)}")
    require(
        state.shape[1:] == (v.shape[2], v.shape[3], q.shape[3]),
        f"state must be [slots, {v.shape[2]}, {v.shape[3]}, {q.shape[3]}], got {list(state.shape)}",
    )


def check_launch(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, tree: Tree, mode: str) -> None:
    """Raise ValueError for what the kernels do not take."""
    require(
        q.dtype == k.dtype == v.dtype and q.dtype in kernels.DTYPES,
        "on a GPU q, k and v must be of one dtype, float32, bfloat16 or float16 (or the state float64), "
        f"got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    require(
        tree.parent.dtype == tree.num_nodes.dtype == torch.int32 and tree.num_nodes.shape == (tree.batch,),
        f"on a GPU a tree must be int32 [B, N] and [B], got {tree.parent.dtype} and {tree.num_nodes.dtype} "
        f"{list(tree.num_nodes.shape)}",
    )
    require(
        tree.parent.device == q.device, f"the tree is on {tree.parent.device}, q on {q.device}: use Tree.to"
    )
    require(
        tree.size <= kernels.MAX_NODES,
        f"on a GPU a tree may have 1..{kernels.MAX_NODES} nodes, padding included, got {tree.size}",
    )
    require(
        mode != "parallel" or g is None or g.dim() == 3,
        "on a GPU mode 'parallel' takes a g of [B, N, HV]; with a decay for each key channel use 'serial', 'hybrid' "
        "or 'auto'",
    )
    _check_sizes(q.shape[0], q.shape[3], v.shape[3])


def _check_sizes(rows: int, dim_k: int, dim_v: int) -> None:
    require(
        min(dim_k, dim_v) >= 1 and max(dim_k, dim_v) <= kernels.MAX_DIM,
        f"on a GPU K and V may be 1..{kernels.MAX_DIM} with a float32 state, got K={dim_k} and V={dim_v}",
    )
    require(rows <= kernels.MAX_ROWS, f"on a GPU a batch may have up to {kernels.MAX_ROWS} rows, got {rows}")


def _check_rule(g: Tensor | None, v: Tensor, delta: bool, gate: Gate | None) -> None:
    require(isinstance(delta, bool), f"delta must be True or False, got {delta!r}")
    if gate is None:
        return
    require(isinstance(gate, Gate), f"gate must be a Gate or None, got {type(gate).__name__}")
    require(g is not None, "a gate computes the decay from g, got None")
    assert g is not None
    for name, x, shape in (("A_log", gate.A_log, v.shape[2:3]), ("dt_bias", gate.dt_bias, g.shape[2:])):
        if x is not None or name == "A_log":
            require(isinstance(x, Tensor), f"gate.{name} must be a tensor, got {type(x).__name__}")
            assert x is not None
            _check_floats(f"gate.{name}", x, v)
            require(x.shape == shape, f"gate.{name} must be {list(shape)}, got {list(x.shape)}")
    require(
        isinstance(gate.beta_scale, (int, float)) and 0 < gate.beta_scale < float("inf"),
        f"gate.beta_scale must be a positive and finite number, got {gate.beta_scale!r}",
    )


def _check_floats(name: str, x: Tensor, state: Tensor) -> None:
    require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
    require(x.device == state.device, f"{name} is on {x.device}, the state on {state.device}")


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
    heads, channels = list(d.shape[:3]), [*d.shape[:3], k.shape[3]]
    require(
        list(g.shape) in (heads, channels), f"factors.g must be {heads} or {channels}, got {list(g.shape)}"
    )
    check_path(path, count, batch, d.shape[1])
