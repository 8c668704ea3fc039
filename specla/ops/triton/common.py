"""What several kernels must compute alike, to the bit."""

import triton
import triton.language as tl


@triton.jit
def advance(S, d, k, decay):
    """The state after one node, `decay S + d k^T`: one rounding for the decay, one for all the rest.

    S `[BV, KC, KI]` fp32, K in KC chunks of KI channels; d `[BV]`; k `[1 or BV, KC, KI]`; decay, exp(g), a scalar or
    shaped like k. Every commit goes through here, so a state's bits do not tell which kernel wrote it.
    """
    return tl.fma(d[:, None][:, None, :], k, S * decay)
