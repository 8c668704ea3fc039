"""The delayed update: what was accepted is applied to the tile of the state that a verification starts from."""

import triton
import triton.language as tl

from specla.ops.triton.common import advance

TOUCHED = tl.constexpr(8)  # more nodes than are usually accepted


@triton.jit
def touch_nodes(count, path, k, d, s_kn, s_dn, o_v, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr):
    """Asks for what the first nodes of a path will be read for, keys `[8, KP]` and values `[8, BV]`, all at once.

    Later reads then find it in the nearest cache. `keep_touched` must get the results, or the compiler drops the loads.
    """
    o_t, o_r = tl.arange(0, TOUCHED), tl.arange(0, KP)
    node = tl.load(path + o_t, o_t < count, other=0)[:, None]
    m_t = (o_t < count)[:, None]
    b_k = tl.load(k + node * s_kn + o_r[None, :], m_t & (o_r < K)[None, :], other=0.0)
    b_d = tl.load(d + node * s_dn + o_v[None, :], m_t & (o_v < V)[None, :], other=0.0)
    return b_k, b_d


@triton.jit
def keep_touched(count, b_k, b_d, nowhere, KP: tl.constexpr, BV: tl.constexpr):
    """Stores nothing, since a count is never negative. The compiler cannot know that, so the loads stay."""
    o_t = tl.arange(0, TOUCHED)[:, None]
    o_k, o_v = o_t + tl.arange(0, KP)[None, :], o_t + tl.arange(0, BV)[None, :]
    tl.store(nowhere + o_k, b_k, o_k < -count)
    tl.store(nowhere + o_v, b_d, o_v < -count)


@triton.jit
def load_node(t, count, path, k, d, g, s_kn, s_dn, s_gn, o_k, m_k, o_v, m_v, DECAY: tl.constexpr):
    """Key, value and log-decay of the t-th node of a path; past its end, ones that leave every bit of a state alone.

    (There is no branch around what is loaded: the compiler would move the load into it, and wait there.)
    """
    node = tl.load(path + t, t < count, other=0)
    b_k = tl.load(k + node * s_kn + o_k, m_k, other=0.0).to(tl.float32)
    b_d = tl.load(d + node * s_dn + o_v, m_v, other=0.0).to(tl.float32)
    b_g = tl.load(g + node * s_gn + o_k, m_k, other=0.0) if DECAY == 2 else tl.load(g + node * s_gn)
    b_g = b_g.to(tl.float32)
    # -0 0 + 1 x is x, also where x is -0
    return tl.where(t < count, b_k, 0.0), tl.where(t < count, b_d, -0.0), tl.where(t < count, b_g, 0.0)


@triton.jit
def pending_state(S, count, path, k, d, g, s_kn, s_dn, s_gn, o_k, m_k, o_v, m_v, DECAY: tl.constexpr):
    """S after the first `count` nodes of a path, which are loaded in pairs."""
    for t in range(0, count, 2):
        k0, d0, g0 = load_node(t, count, path, k, d, g, s_kn, s_dn, s_gn, o_k, m_k, o_v, m_v, DECAY)
        k1, d1, g1 = load_node(t + 1, count, path, k, d, g, s_kn, s_dn, s_gn, o_k, m_k, o_v, m_v, DECAY)
        S = advance(advance(S, d0, k0, tl.exp(g0)), d1, k1, tl.exp(g1))
    return S
