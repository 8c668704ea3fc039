"""Growth and pruning of draft trees as in EAGLE-2 (arXiv 2406.16858), a whole batch at once.

On a CPU the arrays are numpy's, whose calls cost a third of torch's; elsewhere they are tensors. The algorithm keeps
to what both share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specla.drafters.base import check_at_least_one

Advance = Callable[[Tensor, Tensor], Tensor]
Array = Any  # np.ndarray on a CPU, Tensor elsewhere


class Growth(NamedTuple):
    """One tree for each row; `Tree(parent, num_nodes)` is its topology.

    tokens: int64 `[B, N]`, 0 at the root and at padding.
    parent: int64 `[B, N]`, -1 for the root and for padding; parents come first.
    scores: `[B, N]` log-probability q of the path, 0 at the root, -inf at padding.
    num_nodes: int64 `[B]`, the root included.
    """

    tokens: Tensor
    parent: Tensor
    scores: Tensor
    num_nodes: Tensor


def grow(
    first: Tensor,
    advance: Advance,
    *,
    limits: Tensor,
    num_steps: int,
    topk: int,
    prune_threshold: float | None = None,
) -> Growth:
    """Grow the likeliest nodes depth by depth, then keep the likeliest of all that grew.

    With W = min(topk, V): the W best tokens after each live node are candidates, and the W best candidates of a depth
    are live at the next. Let q* be the best score of a leaf: of a candidate that was not advanced, as those of the
    greatest depth. Candidates with q >= q* - prune_threshold stay, of these the `limits[b]` best, and none with
    q = -inf. Among equals the first wins: by depth, then by the rank of its parent, then by its own.

    On a CPU equal tokens rank by their id, and growth ends once further depths cannot change the result.

    Args:
        first: log-probabilities `[B, V]` of what follows the root; none above 0, no NaN.
        advance: called with tokens and beams, int64 `[B, W]`: new live node w of row b continues live node
            `beams[b, w]` of the call before (at the first call the root, 0) with `tokens[b, w]`. Answers with the
            log-probabilities `[B, W, V]` that follow, in the dtype of `first`.
        limits: int64 `[B]`, the most nodes below the root, 0 for none.
        num_steps: greatest depth; `advance` is called at most num_steps - 1 times.

    Raises:
        ValueError: for num_steps or topk below 1, or prune_threshold below 0.
    """
    check_at_least_one(num_steps=num_steps, topk=topk)
    threshold = torch.inf if prune_threshold is None else prune_threshold
    if not threshold >= 0:
        raise ValueError(f"prune_threshold must be a number >= 0, got {prune_threshold!r}")
    batch, width = len(first), min(topk, first.shape[1])
    block = width * width
    host = _on_host(first)
    lib: Any = np if host else torch
    array, tensor = (_numpy, torch.from_numpy) if host else (_same, _same)
    where: dict[str, Any] = {} if host else {"device": first.device}
    real = lib.float64 if first.dtype == torch.float64 else lib.float32

    # Candidate 0 is the root; candidate c > 0 descends from origin[(c - 1) // width]; the last one is padding. As -1
    # names the last place, the root and padding both descend from -1.
    padding = num_steps * block + 1
    scores = lib.full((batch, padding + 1), -lib.inf, dtype=real, **where)
    scores[:, 0] = 0
    tokens = lib.zeros((batch, padding + 1), dtype=lib.int64, **where)
    origin = lib.full((batch, num_steps * width + 1), -1, dtype=lib.int64, **where)
    floor = lib.full((batch,), lib.finfo(real).min, dtype=real, **where)  # above -inf
    row = lib.arange(batch, **where)[:, None]
    most = array(limits) + 1
    live, q, log_p = row * 0, scores[:, :1], first[:, None]
    for depth in range(num_steps):
        step, token = _best(log_p, width, host)
        reached, token = (q[..., None] + step).reshape(batch, -1), token.reshape(batch, -1)
        start = depth * block + 1
        scores[:, start : start + reached.shape[1]] = reached
        tokens[:, start : start + reached.shape[1]] = token
        origin[:, depth * width : (depth + 1) * width] = live
        order = _ranking(reached)[:, : width + 1]
        ranked, at = reached[row, order], order[:, :width]
        if ranked.shape[1] > width:
            floor = lib.maximum(floor, ranked[:, width] - threshold)
        live, q = at + start, ranked[:, :width]
        # No node to come is better than the best live one. So a row is done when enough candidates are as good
        # already: either a leaf is, which settles q*, or q* is at most as good as they and prunes none of them. And
        # it is done when the best live node is below the floor, for that settles q* as well.
        best = q[:, :1]
        if host and ((best[:, 0] < floor) | ((scores >= best).sum(1) >= most)).all():
            break
        if depth + 1 < num_steps:
            log_p = advance(tensor(token[row, at]), tensor(at // width))

    floor = lib.maximum(floor, q[:, 0] - threshold)
    count = lib.minimum(most, (scores >= floor[:, None]).sum(1))
    size = int(count.max())
    node = lib.arange(size, **where)
    kept = lib.where(node < count[:, None], _ranking(scores)[:, :size], padding)
    kept = kept[row, kept.argsort(-1)]
    place = lib.full((batch, padding + 2), -1, dtype=lib.int64, **where)
    place[row, kept] = node
    parent = place[row, origin[row, (kept - 1) // width]]
    return Growth(tensor(tokens[row, kept]), tensor(parent), tensor(scores[row, kept]), tensor(count))


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().numpy()


def _same(x: Tensor) -> Tensor:
    return x


def _ranking(x: Array) -> Array:
    """Indices along the last dimension from the largest entry down, equals in their order."""
    if isinstance(x, Tensor):
        return x.sort(dim=-1, descending=True, stable=True).indices
    return (-x).argsort(-1, kind="stable")


def _best(x: Tensor, count: int, host: bool) -> tuple[Array, Array]:
    """The largest entries along the last dimension, best first, and their indices: `[..., count]` both."""
    if not host:
        top = x.topk(count)
        return top.values, top.indices
    # One argmax an entry takes half the time of torch's topk, and finds the first of equals.
    array = (x if x.dtype in (torch.float32, torch.float64) else x.float()).detach().numpy()
    flat = array.reshape(-1) if count == 1 else array.flatten()
    rest = flat.reshape(-1, x.shape[-1])
    start = np.arange(0, flat.size, x.shape[-1])
    place = np.empty((count, len(start)), np.int64)
    values = np.empty((count, len(start)), flat.dtype)
    for n in range(count):
        at = place[n]
        rest.argmax(-1, out=at)
        at += start
        values[n] = flat[at]
        if count > 1:
            flat[at] = -np.inf
    shape = (*x.shape[:-1], count)
    return values.T.reshape(shape), (place - start).T.reshape(shape)
