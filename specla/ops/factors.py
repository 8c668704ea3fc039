"""The compact record of a verification: what a node adds to the state, not the state itself."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """Rank-one updates of every node: `S_i = exp(g_i) S_parent(i) + d_i k_i^T`.

    K numbers per key head and V + 1 (V + K with a decay per key channel) per value head for a node, where a dense
    snapshot holds `HV * V * K`.
    """

    k: Tensor  # [B, N, H, K] keys as used by the recurrence
    d: Tensor  # [B, N, HV, V] what is written: values, corrected by the delta rule, times beta
    g: Tensor  # [B, N, HV] log-decay, zero for none, or [B, N, HV, K] for each key channel


class Pending(NamedTuple):
    """Accepted factors that the next verification commits before it starts."""

    factors: Factors
    path: Tensor  # [B, D] accepted node ids from the root down; entries beyond `num_nodes` are ignored
    num_nodes: Tensor  # [B] nodes to commit, 0 for none


class PendingConv(NamedTuple):
    """Accepted raw inputs of the short convolution, committed like `Pending`."""

    x: Tensor  # [B, M, D]
    path: Tensor  # [B, D]
    num_nodes: Tensor  # [B]
