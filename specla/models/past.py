"""Where the past of a token lies: the same layers run over a whole text, a prompt, or a draft tree.

Each class answers the three questions that a layer asks: its short convolution, its recurrence, its attention.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specla.modes import MODES
from specla.ops import chunk_dplr, chunk_gated_delta, dplr_verify
from specla.ops.attention import tree_attention
from specla.ops.chunk import launch as launch_prompt, takes as takes_prompt
from specla.ops.conv import (
    causal_convolve,
    convolve,
    inputs_before,
    launch as launch_conv,
    takes as takes_conv,
)
from specla.ops.factors import Factors
from specla.ops.verify import check_launch, launch, takes, verify
from specla.state import AttentionState, RecurrentLayer, StatePool, slot_indices
from specla.tree import Tree


class Rule(NamedTuple):
    """Which relative of the gated delta rule a recurrence is; its decay and write strength say the rest."""

    delta: bool = True  # values are corrected by what the state holds of their keys
    normalise: bool = True  # queries and keys have length 1
    scale: float | None = None  # of queries; None: K ** -0.5


GATED_DELTA = Rule()


class Past(Protocol):
    """What layers of targets and drafters see of the tokens before their own; `layer` is the layer's index."""

    @property
    def positions(self) -> Tensor:
        """Absolute position of each token, int64 `[B, T]`."""

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """SiLU of the causal convolution: x `[B, T, D]`, weight `[D, W]`."""

    def delta(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Outputs of the gated delta rule `[B, T, HV, V]`, q and k normalised inside."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Causal softmax attention `[B, T, H, D]`."""


class TargetPast(Past, Protocol):
    """What targets ask beyond that, for the relatives of the gated delta rule."""

    def conv(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = "silu"
    ) -> Tensor:
        """The causal convolution, then SiLU or nothing."""

    def previous(self, layer: int, x: Tensor, first: int = 0) -> Tensor:
        """x `[B, T, D]` of the token before each, zero before the first one.

        The layer's window is of size 2; x takes its channels from `first` on, so that a layer may ask several times.
        """

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
        rule: Rule = GATED_DELTA,
    ) -> Tensor:  # fmt: skip
        """Outputs `[B, T, HV, V]` of this rule: g `[B, T, HV]`, by channel `[B, T, HV, K]`, or None for no decay; beta
        `[B, T, HV]`, or None for 1.
        """

    def dplr(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Outputs `[B, T, H, V]` of the generalised delta rule, arguments as `dplr_verify` has them."""


class FullText:
    """A text from its first token on, differentiable; nothing is kept."""

    def __init__(self, batch: int, length: int, device: torch.device, chunk_size: int = 64):
        self.positions = torch.arange(length, device=device).expand(batch, length)
        self.chunk_size = chunk_size

    def conv(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = "silu"
    ) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, weight.shape[1] - 1, 0))
        return causal_convolve(padded, weight, bias, activation)

    def previous(self, layer: int, x: Tensor, first: int = 0) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
        rule: Rule = GATED_DELTA,
    ) -> Tensor:  # fmt: skip
        o, _ = chunk_gated_delta(
            q, k, v, g, beta, chunk_size=self.chunk_size, use_qk_l2norm_in_kernel=rule.normalise, scale=rule.scale,
            delta=rule.delta,
        )  # fmt: skip
        return o

    def dplr(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        o, _ = chunk_dplr(q, k, v, g, a, b)
        return o

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        return _attend(q, k, v, self.positions[0], self.positions[0], window)


class Prefill:
    """The next stretch of one slot's prompt; the state is committed, no factors are kept.

    dtype: that of the weights, to which kernels round queries, keys and values.
    """

    def __init__(self, pool: StatePool, slot: int, length: int, dtype: torch.dtype = torch.float32):
        assert pool.count[slot] == 0, "flush the slot before a prefill"
        self.pool, self.slot, self.dtype = pool, slot, dtype
        self.start = pool.length[slot]
        self.positions = torch.arange(self.start, self.start + length, device=pool.device)[None]

    def conv(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = "silu"
    ) -> Tensor:
        state = _recurrent(self.pool, layer)
        window = state.conv_state[self.slot]
        joined = torch.cat([window.t()[None].to(x.dtype), x], 1)
        window.copy_(joined[0, joined.shape[1] - window.shape[1] :].t())
        return causal_convolve(joined, weight, bias, activation)

    def previous(self, layer: int, x: Tensor, first: int = 0) -> Tensor:
        state = _recurrent(self.pool, layer)
        assert state.conv_state.shape[-1] == 1
        window = state.conv_state[self.slot, first : first + x.shape[2], 0]
        joined = torch.cat([window[None, None].to(x.dtype), x], 1)
        window.copy_(x[0, -1])
        return joined[:, :-1]

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
        rule: Rule = GATED_DELTA,
    ) -> Tensor:  # fmt: skip
        state = _recurrent(self.pool, layer).state[self.slot : self.slot + 1]
        kernel = rule == GATED_DELTA and beta is not None and (g is None or g.dim() == 3)
        if kernel and takes_prompt(state, q, k, v, g, beta):
            assert beta is not None
            dtype, (q, k, v) = v.dtype, (x.to(self.dtype) for x in (q, k, v))
            return launch_prompt(q, k, v, g, beta, state).to(dtype)
        o, last = chunk_gated_delta(
            q, k, v, g, beta, initial_state=state, use_qk_l2norm_in_kernel=rule.normalise, scale=rule.scale,
            delta=rule.delta,
        )  # fmt: skip
        state.copy_(last)
        return o

    def dplr(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state = _recurrent(self.pool, layer).state[self.slot : self.slot + 1]
        o, last = chunk_dplr(q, k, v, g, a, b, initial_state=state)
        state.copy_(last)
        return o

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        cache = self.pool.layers[layer]
        assert isinstance(cache, AttentionState)
        first = 0 if window is None else max(0, self.start - window + 1)
        before = torch.arange(first, self.start, device=q.device)
        old = cache.cache[:, self.slot, before % cache.cache.shape[2]].to(q.dtype)
        rows = torch.stack([k[0], v[0]][: len(old)])
        cache.append(self.slot, self.start, rows)
        seen = torch.cat([old, rows], 1)[:, None]
        return _attend(
            q, seen[0], seen[-1], self.positions[0], torch.cat([before, self.positions[0]]), window
        )

    def close(self) -> None:
        self.pool.length[self.slot] += self.positions.shape[1]


class Verification:
    """A draft tree for each of some slots: commits what is pending there, keeps the new nodes' factors."""

    def __init__(self, pool: StatePool, slots: list[int], tree: Tree, mode: str):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        assert tree.size <= pool.max_nodes, f"a tree of {tree.size} nodes in an envelope of {pool.max_nodes}"
        pool.flush(slots)
        self.pool, self.slots, self.tree, self.mode = pool, slots, tree.to(pool.device), mode
        self.rows = pool.rows(slots)
        self.lengths = [pool.length[slot] for slot in slots]

    @cached_property
    def indices(self) -> Tensor:
        """The slots as kernels read them, where they lie."""
        return slot_indices(self.rows, self.pool.device)

    @cached_property
    def positions(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.pool.device)[:, None] + self.tree.depth.clamp(min=0)

    def conv(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = "silu"
    ) -> Tensor:
        state = _recurrent(self.pool, layer)
        if state.conv_inputs.shape[-1]:  # of a window of one, nothing is read again
            state.conv_inputs[self.rows, : self.tree.size] = x
        if takes_conv(state.conv_state, x, weight, bias):
            return launch_conv(x, self.tree, weight, bias, state.conv_state, activation, self.indices)
        return convolve(x, self.tree, weight, bias, state.conv_state[self.rows], activation)

    def previous(self, layer: int, x: Tensor, first: int = 0) -> Tensor:
        state, channels = _recurrent(self.pool, layer), slice(first, first + x.shape[2])
        assert state.conv_state.shape[-1] == 1
        state.conv_inputs[self.rows, : self.tree.size, channels] = x
        return inputs_before(x, self.tree, state.conv_state[self.rows][:, channels])

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
        rule: Rule = GATED_DELTA,
    ) -> Tensor:  # fmt: skip
        state = _recurrent(self.pool, layer)
        if takes(state.state, self.tree, q, k, v, g, beta):
            check_launch(q, k, v, g, self.tree, self.mode)
            o, _ = launch(
                q, k, v, g, beta, self.tree, state.state, rule.scale, self.mode, rule.normalise, rule.delta,
                state_indices=self.indices, factors=state.factors, by_slot=True,
            )  # fmt: skip
            return o
        o, factors = verify(
            q, k, v, g, beta, self.tree, state.state[self.rows], rule.scale, self.mode, rule.normalise, rule.delta
        )  # fmt: skip
        self._keep(state, factors)
        return o

    def dplr(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state = _recurrent(self.pool, layer)
        o, factors = dplr_verify(q, k, v, g, a, b, self.tree, state=state.state[self.rows], mode=self.mode)
        self._keep(state, factors)
        return o

    def _keep(self, state: RecurrentLayer, factors: Factors) -> None:
        for bank, new in zip(state.factors, factors, strict=True):
            bank[self.rows, : new.shape[1]] = new

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        state = self.pool.layers[layer]
        assert isinstance(state, AttentionState)
        state.nodes[:, self.rows, : self.tree.size] = torch.stack([k, v][: len(state.nodes)])
        return tree_attention(
            q, k, v, self.tree, keys=state.cache[0], values=state.cache[-1], slots=self.slots, lengths=self.lengths,
            window=window,
        )  # fmt: skip


def _recurrent(pool: StatePool, layer: int) -> RecurrentLayer:
    state = pool.layers[layer]
    assert isinstance(state, RecurrentLayer)
    return state


def _attend(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor, window: int | None) -> Tensor:
    visible = k_at <= q_at[:, None]
    if window is not None:
        visible &= k_at > q_at[:, None] - window
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return o.transpose(1, 2)
