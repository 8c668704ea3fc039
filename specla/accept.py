"""Which drafts the target agrees with: a pure function of logits, tokens, tree and sampling parameters.

The target draws a token at every node under that node's own prefix; the accepted path goes from the root
to the child that carries the draw for as long as there is one, and the last draw is the bonus token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specla.sampling import Plan, Sampling, first_argmax, gumbel_noise, scores
from specla.tree import Tree

__all__ = ["Plan", "Sampling", "accept", "gumbel_noise"]

_NO_TOKEN = -(2**63)  # drawn above nodes without a parent


def accept(
    logits: Tensor, tokens: Tensor, tree: Tree, sampling: Sampling | None = None, *, check: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each row's tree along the target's draws.

    Args:
        logits: `[B, N, V]` of the target at each node. Those of padding nodes are never looked at.
        tokens: int64 `[B, N]`, node 0 the root.
        sampling: None for argmax in every row (the lowest id among equals).
        check: False leaves the host out of it: a row with bad logits then comes back with num_accepted -1,
            bonus -1 and an empty path instead of raising.

    Returns:
        path int32 `[B, N]`, node ids from the root down, padded with -1; num_accepted int32 `[B]`, drafts
        only; bonus int64 `[B]`.

    Raises:
        ValueError: when shapes do not fit the tree, or a repetition penalty comes without `seen`.
        FloatingPointError: when the logits of a real node hold NaN or +inf, or nothing but -inf.
    """
    shape = (tree.batch, tree.size)
    if logits.shape[:2] != shape or logits.dim() != 3 or tokens.shape != shape:
        raise ValueError(
            f"logits [B, N, V] and tokens [B, N] must fit the tree's [B, N] = {list(shape)}, "
            f"got {list(logits.shape)} and {list(tokens.shape)}"
        )
    if sampling is not None and sampling.temperature.shape != shape[:1]:
        raise ValueError(f"sampling must have {tree.batch} rows, got {list(sampling.temperature.shape)}")
    wanted = logits if sampling is None else scores(logits, tokens, tree, sampling)
    draws = first_argmax(wanted)
    # NaN and +inf win every argmax, and -inf only among its likes, so one logit tells for all.
    bad = tree.valid & ~(logits.gather(2, draws[:, :, None]).squeeze(2).abs() < torch.inf)
    if check and bool(bad.any()):
        row, node = bad.nonzero()[0].tolist()
        raise FloatingPointError(f"the target's logits are not finite in row {row}, node {node}")
    path, num_accepted, bonus = _walk(draws, tokens, tree)
    if not check:
        lost = bad.any(-1)
        path = path.masked_fill(lost[:, None], -1)
        num_accepted, bonus = num_accepted.masked_fill(lost, -1), bonus.masked_fill(lost, -1)
    return path, num_accepted, bonus


def _walk(draws: Tensor, tokens: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    size = tree.size
    if size == 1:
        path = torch.zeros(tree.batch, 1, dtype=torch.int32, device=tokens.device)
        return path, torch.zeros_like(path[:, 0]), draws[:, 0]
    ids = torch.arange(size, device=tokens.device)
    slot = (tree.parent + 1).long()  # 0: no parent, which is the root and padding
    agrees = tokens == pad(draws, (1, 0), value=_NO_TOKEN).gather(1, slot)
    # Of siblings with the same token only the first counts.
    eldest = torch.full((tree.batch, size + 1), size, device=tokens.device)
    eldest.scatter_reduce_(1, slot, torch.where(agrees, ids, size), "amin")
    agrees &= eldest.gather(1, slot) == ids
    agrees[:, 0] = True
    on_path = agrees & ~(tree.ancestors & ~agrees[:, None]).any(-1)

    path = torch.full((tree.batch, size + 1), -1, dtype=torch.int32, device=tokens.device)
    place = torch.where(on_path, tree.depth, size).long()
    path = path.scatter_(1, place, ids.int().expand_as(place))[:, :size].contiguous()
    num_accepted = on_path.sum(1, dtype=torch.int32) - 1
    return path, num_accepted, draws.gather(1, path.amax(1, keepdim=True).long()).squeeze(1)
