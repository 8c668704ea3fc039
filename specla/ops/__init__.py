"""What one layer computes on a draft tree. Recurrence, convolution and their commits have twins in `specla.ops.naive`
that replay every path, with the same arguments but for `mode`.
"""

from specla.modes import MODES
from specla.ops.chunk import chunk_gated_delta
from specla.ops.conv import conv_commit, tree_conv
from specla.ops.dplr import chunk_dplr, dplr_verify
from specla.ops.factors import Factors, Pending, PendingConv
from specla.ops.gate import Gate
from specla.ops.verify import gated_delta_commit, gated_delta_verify

__all__ = [
    "MODES",
    "Factors",
    "Gate",
    "Pending",
    "PendingConv",
    "chunk_dplr",
    "chunk_gated_delta",
    "conv_commit",
    "dplr_verify",
    "gated_delta_commit",
    "gated_delta_verify",
    "tree_conv",
]
