"""What several kernels must compute alike, to the bit, and the tile of the state that they share.

A tile is `[BV, KC, KI]`: rows of V, chunks of K, KI = 32 channels. A thread holds 4 neighbouring channels of every
chunk, 8 threads span a chunk and a warp 4 rows at least. Sums over K run over the chunks within a thread first, then
over the channels, so their order is a matter of K alone. Keys are loaded as tiles of the same shape, repeated along V:
they come in the layout of the state, and no thread needs another's.
"""

import triton
import triton.language as tl

CHUNK = 32  # KI at most


@triton.jit
def advance(S, d, k, decay):
    """The state after one node, `decay S + d k^T`: one rounding for the decay, one for all the rest.

    S `[BV, KC, KI]` fp32, K in KC chunks of KI channels; d `[BV]`; k `[1 or BV, KC, KI]`; decay, exp(g), a scalar or
    shaped like k. Every commit goes through here, so a state's bits do not tell which kernel wrote it.
    """
    return tl.fma(d[:, None][:, None, :], k, S * decay)
