"""Argument checks that the ops share."""

from __future__ import annotations

import torch
from torch import Tensor


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def select_rows(
    state_indices: Tensor | None, batch: int, state: Tensor
) -> tuple[Tensor | slice, Tensor | None]:
    """The slots to touch, and the batch rows that own them (None when every row owns one).

    Consecutive slots come back as a slice, so that indexing gives a view.
    """
    if state_indices is None:
        require(state.shape[0] >= batch, f"state has {state.shape[0]} slots for {batch} rows")
        return slice(0, batch), None
    require(
        state_indices.shape == (batch,) and not state_indices.is_floating_point(),
        f"state_indices must be {batch} integers, got {list(state_indices.shape)} {state_indices.dtype}",
    )
    slots = state_indices.tolist()
    real = [s for s in slots if s != -1]
    require(
        all(0 <= s < state.shape[0] for s in real) and len(set(real)) == len(real),
        f"state_indices must be distinct slots in 0..{state.shape[0] - 1} or -1, got {slots}",
    )
    if len(real) < batch:
        rows = torch.tensor(
            [b for b, s in enumerate(slots) if s != -1], dtype=torch.long, device=state.device
        )
        return state_indices.long().to(state.device)[rows], rows
    if real and real == list(range(real[0], real[0] + batch)):
        return slice(real[0], real[0] + batch), None
    return state_indices.long().to(state.device), None


def check_path(path: Tensor, count: Tensor, batch: int, nodes: int) -> None:
    """Raise ValueError unless the first `count` `[B]` entries of `path` `[B, D]` name nodes."""
    for name, x in (("path", path), ("num_accepted", count)):
        require(
            not x.is_floating_point() and x.dtype != torch.bool, f"{name} must hold integers, got {x.dtype}"
        )
    require(
        path.dim() == 2 and path.shape[0] == batch, f"path must be [B={batch}, D], got {list(path.shape)}"
    )
    require(count.shape == (batch,), f"num_accepted must be [B={batch}], got {list(count.shape)}")
    if batch == 0:
        return
    require(
        int(count.min()) >= 0 and int(count.max()) <= path.shape[1],
        f"num_accepted must be in -1..{path.shape[1] - 1} for a path of {path.shape[1]}, got {(count - 1).tolist()}",
    )
    used = path[torch.arange(path.shape[1], device=path.device) < count[:, None]]
    require(
        used.numel() == 0 or bool(((used >= 0) & (used < nodes)).all()),
        f"path must name nodes 0..{nodes - 1} where it is committed, got {path.tolist()}",
    )
