"""Heavy-light step lists of draft trees, built where the trees lie: one launch a round serves all layers.

A worker holds the state of one current node, at first the committed state, and runs its list in order. A step is
`node | flags << 8`:

    RESET   the committed state becomes the current one, before anything else
    READ    the node's corrected value and output are computed from the current state, its parent's
    UPDATE  the current state becomes the node's, by the value just read or, without READ, stored before
    STORE   value and output are written out

A chain starts at the root or at a light node that has children, and follows heavy children down to a leaf; light
leaves belong to the chain of their parent. One worker runs all chains in the order of their heads and replays the path
to each head from stored values. Several workers share the chains, the longest first and in snake order, and read the
path again, so that none waits for another.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.checks import require
from specla.ops.triton import MAX_NODES
from specla.ops.triton.overlap import launch_options
from specla.tree import Tree

RESET, READ, UPDATE, STORE = 1, 2, 4, 8


class Schedule(NamedTuple):
    """What the workers of each tree do, and who lies above whom."""

    lineage: Tensor  # int64 [B, N]: bit j of entry i says that j is i or lies above i; 0 for padding
    depth: Tensor  # int32 [B, N]: edges from the root; -1 for padding
    steps: Tensor  # int32 [B, W, L], unspecified beyond count
    count: Tensor  # type: ignore[assignment]  # int32 [B, W]; hides tuple.count


def envelope(size: int) -> int:
    """Most steps that a list of one worker can take on a tree of `size` nodes; some tree takes them."""
    # N nodes and m replayed paths, none longer than d, the depth of the deepest head h. Its d ancestors, h and its
    # heavy child are d + 2 nodes. Each head on that path, h included, has a heavy sibling with as large a subtree:
    # the sibling and its heavy child lie beside the path. Each other head and its heavy child do too. All these
    # pairs are disjoint: d + 2 + 2m <= N. So the replays take at most m d <= m (N - 2 - 2m) <= (N - 2)^2 / 8.
    return size + (size - 2) ** 2 // 8


def build(parent: Tensor, num_nodes: Tensor, workers: int = 1, out: Schedule | None = None) -> Schedule:
    """Step lists of `workers` workers for each tree, without a look at the trees from the host.

    Args:
        parent: int32 `[B, N]`, topologically ordered, N up to 64; num_nodes: int32 `[B]`. Entries of `parent` beyond
            `num_nodes` may hold anything. Both are trusted as `Tree.resident` trusts them.
        workers: W, at least 1.
        out: tensors to write into, as an earlier call of the same sizes returned them.

    Returns:
        the schedule with L = `envelope(N)` places in each list.

    Raises:
        ValueError: on shapes, dtypes or devices that it does not support.
    """
    require(
        parent.dim() == 2 and 1 <= parent.shape[1] <= MAX_NODES and parent.dtype == torch.int32,
        f"parent must be int32 [B, N] with N in 1..{MAX_NODES}, got {list(parent.shape)} {parent.dtype}",
    )
    batch, size = parent.shape
    require(
        num_nodes.shape == (batch,) and num_nodes.dtype == torch.int32 and num_nodes.device == parent.device,
        f"num_nodes must be int32 [B={batch}] on {parent.device}, "
        f"got {list(num_nodes.shape)} {num_nodes.dtype} on {num_nodes.device}",
    )
    require(
        isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1,
        f"workers must be an integer of at least 1, got {workers!r}",
    )
    length = envelope(size)
    kinds: tuple[tuple[list[int], torch.dtype], ...] = (
        ([batch, size], torch.int64),
        ([batch, size], torch.int32),
        ([batch, workers, length], torch.int32),
        ([batch, workers], torch.int32),
    )
    if out is None:
        out = Schedule(*(parent.new_empty(shape, dtype=dtype) for shape, dtype in kinds))
    for name, x, (shape, dtype) in zip(Schedule._fields, out, kinds, strict=True):
        require(
            list(x.shape) == shape and x.dtype == dtype and x.device == parent.device and x.is_contiguous(),
            f"out.{name} must be contiguous {dtype} {shape} on {parent.device}, "
            f"got {list(x.shape)} {x.dtype} on {x.device}",
        )
    log_p = max(4, (size - 1).bit_length())
    schedule_kernel[(batch,)](
        parent,
        num_nodes.contiguous(),
        *out,
        *parent.stride(),
        N=size,
        L=length,
        WORKERS=workers,
        LOG_P=log_p,
        LOG_W=(workers - 1).bit_length(),
        VISIT=READ | STORE,
        UPDATE=UPDATE,
        REPLAY=UPDATE if workers == 1 else READ | UPDATE,
        RESET=RESET,
        num_warps=2 ** (log_p - 2),
        **launch_options(parent.device),
    )
    return out


def schedule_of(tree: Tree, workers: int) -> Schedule:
    """`build` for a tree, once: layers that share the tree share the schedule, which is kept as long as the tree."""
    made = _made.setdefault(tree, {})
    if workers not in made:
        made[workers] = build(tree.parent, tree.num_nodes, workers)
    return made[workers]


_made: WeakKeyDictionary[Tree, dict[int, Schedule]] = WeakKeyDictionary()


@triton.jit
def schedule_kernel(
    parent, num_nodes, lineage, depths, steps, count, s_pb, s_pn,
    N: tl.constexpr, L: tl.constexpr, WORKERS: tl.constexpr, LOG_P: tl.constexpr, LOG_W: tl.constexpr,
    VISIT: tl.constexpr, UPDATE: tl.constexpr, REPLAY: tl.constexpr, RESET: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    P: tl.constexpr = 2**LOG_P
    i_b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, P)
    loaded = tl.load(parent + i_b * s_pb + node * s_pn, node < N, other=0)
    real = node < tl.minimum(tl.load(num_nodes + i_b), N)
    below = real & (node > 0)
    above = tl.where(below, loaded, node)  # the root and padding lie below themselves

    line = tl.where(real, tl.full([P], 1, tl.int64) << node.to(tl.int64), 0)
    jump = above
    for _ in tl.static_range(LOG_P):
        line |= tl.gather(line, jump, 0)
        jump = tl.gather(jump, jump, 0)
    tl.store(lineage + i_b * N + node, line, node < N)

    # tables [P, P]: entry (i, j) tells something of node i by node j
    on = ((line[:, None] >> node.to(tl.int64)[None, :]) & 1).to(tl.int32)
    depth = tl.sum(on, 1) - 1
    tl.store(depths + i_b * N + node, depth, node < N)
    weight = tl.sum(on, 0) * P + (P - 1 - node)  # the size of the subtree, lower ids first among equals
    child = below[:, None] & (above[:, None] == node[None, :])
    heaviest = tl.max(tl.where(child, weight[:, None], 0), 0)
    inner = heaviest > 0
    heavy = below & (weight == tl.gather(heaviest, above, 0))
    head = real & (inner | (node == 0)) & ~heavy
    chain = tl.max(tl.where((on > 0) & head[None, :], node[None, :], 0), 1)  # the head of its chain
    cost = real.to(tl.int32) + tl.where(head, depth, 0)  # steps: its own, for a head the path too

    worker = node * 0
    if WORKERS > 1:
        total = tl.sum(tl.where(chain[:, None] == node[None, :], cost[:, None], 0), 0)
        length = tl.where(head, total * P + (P - 1 - node), 0)
        turn = tl.sum((length[None, :] > length[:, None]).to(tl.int32), 1) % (2 * WORKERS)
        worker = tl.gather(tl.minimum(turn, 2 * WORKERS - 1 - turn), chain, 0)

    key = ((chain * P + depth) * 2 + heavy.to(tl.int32)) * P + node
    earlier = (worker[:, None] == worker[None, :]) & (key[None, :] < key[:, None])
    first = tl.sum(tl.where(earlier, cost[None, :], 0), 1)
    row = steps + (i_b * WORKERS + worker) * L + first
    what = tl.where(inner, VISIT | UPDATE, VISIT)
    tl.store(row + cost - 1, node | what << 8, real)

    replayed = head[:, None] & (on > 0) & (node[:, None] != node[None, :])
    again = tl.where(node == 0, REPLAY | RESET, REPLAY)
    tl.store(row[:, None] + depth[None, :], (node | again << 8)[None, :], replayed)

    i_w = tl.arange(0, 2**LOG_W)
    mine = tl.where(i_w[:, None] == worker[None, :], cost[None, :], 0)
    tl.store(count + i_b * WORKERS + i_w, tl.sum(mine, 1), i_w < WORKERS)
