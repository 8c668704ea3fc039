"""Launches the verification kernels: strides, scratch and outputs. Nothing is checked and nothing is read back."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specla.ops.factors import Factors, Pending
from specla.ops.gate import Gate
from specla.ops.triton.common import CHUNK
from specla.ops.triton.counters import counters
from specla.ops.triton.exact import exact_kernel
from specla.ops.triton.overlap import launch_options
from specla.ops.triton.parallel import parallel_kernel
from specla.ops.triton.prepare import FIELDS, prepare_kernel
from specla.ops.triton.schedule import schedule_of
from specla.ops.triton.tuning import Config
from specla.tree import Tree


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    tree: Tree,
    config: Config,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    pending: Pending | None = None,
    scale: float,
    normalise: bool = False,
    delta: bool = True,
    gate: Gate | None = None,
    factors: Factors | None = None,
    by_slot: bool = False,
    due: Tensor | None = None,
) -> tuple[Tensor, Factors]:
    """`gated_delta_verify` as `config` says, for tensors whose last dimension is contiguous.

    Args:
        factors: where the nodes' factors go, `[R, M, ..]` with `M >= N`; without it, new tensors. Never those of
            `pending`: two banks take turns.
        by_slot: the rows of `factors` and of `pending.factors` are slots rather than batch rows.
        due: as in `specla.ops.verify.launch`.
    """
    batch, size, heads, dim_k = q.shape
    assert due is None or config.workers == 1
    value_heads, dim_v = v.shape[2:]
    decay = 0 if g is None else g.dim() - 2

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    if factors is None:
        channels = (dim_k,) if decay == 2 else ()
        factors = Factors(
            new(batch, size, heads, dim_k),
            new(batch, size, value_heads, dim_v),
            new(batch, size, value_heads, *channels),
        )
    o = torch.empty(batch, size, value_heads, dim_v, dtype=v.dtype, device=v.device)
    query, scalars = new(batch, size, heads, dim_k), new(batch, value_heads, size, FIELDS.value)

    KI = min(CHUNK, triton.next_power_of_2(dim_k))
    sizes = {
        "H": heads,
        "HV": value_heads,
        "K": dim_k,
        "KC": triton.next_power_of_2(triton.cdiv(dim_k, KI)),
        "KI": KI,
    }
    rule = {
        "DECAY": decay, "GATE": gate is not None, "NORM": normalise, "HAS_BETA": beta is not None,
        "HAS_BIAS": gate is not None and gate.dt_bias is not None,
        "HAS_SLOTS": state_indices is not None, "BY_SLOT": by_slot,
    }  # fmt: skip
    num_nodes = tree.num_nodes.contiguous()
    unread = q  # stands for a pointer that a kernel does not follow
    g, beta, slots = (unread if x is None else x for x in (g, beta, state_indices))
    A_log, dt_bias, beta_scale = (unread, None, 1.0) if gate is None else gate
    dt_bias = unread if dt_bias is None else dt_bias
    s_factors = [stride for x in factors for stride in x.stride()[:2]]
    s_gates = [*g.stride()[:3], *beta.stride()[:2]]

    if config.prepared:
        prepare_kernel[(triton.cdiv(size, 16), value_heads, batch)](
            q, k, g, beta, A_log, dt_bias, slots, num_nodes, factors.k, factors.g, query, scalars,
            scale, beta_scale, *q.stride()[:3], *k.stride()[:3], *s_gates, *s_factors[:2], *s_factors[4:], size,
            BN=16, KEEP_QUERY=config.mode != "parallel", **sizes, **rule, num_warps=4, **launch_options(q.device),
        )  # fmt: skip

    held, path, count = (factors, slots, slots) if pending is None else pending
    schedule = schedule_of(tree, config.workers)
    blocks = triton.cdiv(dim_v, config.block_v) * value_heads
    strides = [
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s_gates,
        *(stride for x in held for stride in x.stride()[:2]), path.stride(0), *s_factors, size,
    ]  # fmt: skip
    # touched keys and values occupy registers until the state is there: not where these are scarce
    how = {
        "V": dim_v, "BV": config.block_v, "DELTA": delta, "HAS_PENDING": pending is not None,
        "PREPARED": config.prepared, "TOUCH": config.registers is None,
        "num_warps": config.num_warps, "maxnreg": config.registers, **launch_options(q.device),
    }  # fmt: skip
    if config.mode == "parallel":
        nodes = max(16, triton.next_power_of_2(size))
        parallel_kernel[(blocks, batch)](
            q, k, v, g, beta, A_log, dt_bias, o, state, slots, num_nodes, schedule.lineage,
            *held, path, count, *factors, scalars, new(batch, value_heads, nodes, nodes), scale, beta_scale, *strides,
            BK=min(config.block_k, max(16, triton.next_power_of_2(dim_k))), BN=16, NP=nodes,
            # the interpreter multiplies bf16 as integers
            HALVES=q.dtype == k.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret,
            **sizes, **rule, **how,
        )  # fmt: skip
    else:
        arrived = counters(blocks * batch, q.device) if config.workers > 1 else unread
        exact_kernel[(blocks, batch, config.workers)](
            q, k, v, g, beta, A_log, dt_bias, o, state, slots, num_nodes, schedule.steps, schedule.count,
            *held, path, count, due, *factors, query, scalars, arrived, scale, beta_scale,
            *strides, schedule.steps.shape[2],
            BN=32 if size > 16 and config.block_v == 16 else 16, NP=triton.next_power_of_2(size),
            WORKERS=config.workers, **sizes, **rule, **how,
        )  # fmt: skip
    return o, factors
