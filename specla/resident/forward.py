"""The layers of a target over draft trees as a fixed list of launches, for a CUDA graph to hold.

Batch rows are slots: row b works on slot b, or on nothing where `rows[b]` is -1. What a round leaves of its nodes goes
into a bank, of which there are several. What was accepted is pending there until a later round commits it: the next
one, or, since to write a state costs as much as to read it, a few rounds later. A convolution's window is small,
and always committed by the next round. Who does all this to the states is one object, the `Recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.layers import Block, DeltaMixer, SwiGLU
from specla.ops import Factors, triton as kernels
from specla.ops.conv import launch_commit as launch_conv_commit
from specla.ops.factors import Pending
from specla.ops.gate import Gate
from specla.ops.triton.conv import tree_conv
from specla.ops.triton.linear import Int7Weight, linear, linear_parts, swiglu
from specla.ops.triton.norm import add_norm, embed_norm, gated_norm
from specla.ops.verify import launch, launch_commit
from specla.resident.slots import Slots
from specla.state import RecurrentState
from specla.tree import Tree


class Inputs(NamedTuple):
    """What the rule of a layer reads: q, k `[B, N, H, K]`, v `[B, N, HV, V]`, a, b `[B, N, HV]`, any outer strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    gate: Gate


class Recurrence(Protocol):
    """What a round does with the recurrent states: the engine's `Delayed`, or what a benchmark compares it with."""

    @property
    def defers(self) -> bool:
        """Whether it heeds `Round.due`."""
        ...

    def layer(self, index: int) -> Recurrence:
        """The same for one layer, as `Layers.layer`."""
        ...

    def outputs(self, inputs: Inputs, layer: Layers, now: Round) -> Tensor:
        """`[B, N, HV, V]` at every node of the trees, in a layer."""
        ...

    def accepted(self, layers: Layers, rows: Tensor, slots: Slots) -> None:
        """Called after the walk, for all layers: int32 `rows` `[B]` is -1 for padding and for what has ended."""
        ...


class Delayed:
    """Verification leaves factors in a bank, and a later one applies those that were accepted."""

    defers = True

    def layer(self, index: int) -> Delayed:
        return self

    def outputs(self, inputs: Inputs, layer: Layers, now: Round) -> Tensor:
        q, k, v, a, b, gate = inputs
        o, _ = launch(
            q, k, v, a, b, now.tree, layer.state, None, now.mode, True, gate=gate, state_indices=now.rows,
            pending=Pending(layer.factors, now.pending_path, now.num_pending), factors=layer.bank(now.turn).factors,
            by_slot=True, due=now.due,
        )  # fmt: skip
        return o

    def accepted(self, layers: Layers, rows: Tensor, slots: Slots) -> None:
        pass


class Bank(NamedTuple):
    """What one round leaves of its nodes, by slot: factors `[.., S, M, ..]`, raw inputs of the convolution."""

    factors: Factors
    conv_inputs: Tensor


class Layers(NamedTuple):
    """The recurrent layers of all slots: state `[L, S, HV, V, K]`, windows `[L, S, D, W - 1]`, and their banks.

    Of R banks with M nodes each, side by side, are the factors `[L, S, R * M, ..]`: node n of bank t is pending as
    number t * M + n. Of two banks are the inputs of the convolution `[L, S, 2 * M, D]`.
    """

    state: Tensor
    conv_state: Tensor
    factors: Factors
    conv_inputs: Tensor
    max_nodes: int
    recurrence: Recurrence = Delayed()

    @classmethod
    def of(cls, group: RecurrentState, max_nodes: int, banks: int = 2) -> Layers:
        """Those of a pool, with banks of their own. Two convolution banks take turns: `banks` is even."""
        assert banks % 2 == 0

        def room(bank: Tensor, number: int) -> Tensor:
            return bank.new_zeros(*bank.shape[:2], number * max_nodes, *bank.shape[3:])

        factors = Factors(*(room(x, banks) for x in group.factors))
        return cls(group.state, group.conv_state, factors, room(group.conv_inputs, 2), max_nodes)

    def layer(self, index: int) -> Layers:
        """Views of one layer, without the leading dimension."""
        factors = Factors(*(x[index] for x in self.factors))
        return Layers(
            self.state[index], self.conv_state[index], factors, self.conv_inputs[index], self.max_nodes,
            self.recurrence.layer(index),
        )  # fmt: skip

    def bank(self, turn: int) -> Bank:
        """Of one layer, what the round of this turn fills."""
        first, conv_first = turn * self.max_nodes, turn % 2 * self.max_nodes
        factors = Factors(*(x[:, first : first + self.max_nodes] for x in self.factors))
        return Bank(factors, self.conv_inputs[:, conv_first : conv_first + self.max_nodes])

    def commit(self, pending: Pending, turn: int, path: Tensor, count: Tensor, slots: Tensor) -> None:
        """Commit `pending` factors in all layers of `slots` `[B]`, and into their windows the first `count` nodes `[B]`
        of each `path` `[B, P]` from the bank of a turn.
        """
        launch_commit(self.state, *pending, slots, by_slot=True)
        first = turn % 2 * self.max_nodes
        inputs = self.conv_inputs[:, :, first : first + self.max_nodes]
        launch_conv_commit(self.conv_state, inputs, path, count, slots, by_slot=True)


class Round(NamedTuple):
    """What all layers of a round share.

    tree: `Tree.resident` of int32 `[B, N]`. rows: int32 `[B]`. turn: the bank to fill. mode: of verification.
    path int32 `[B, M]`, taken int32 `[B]`: nodes of the round before to shift into the windows first.
    pending_path int32 `[B, P]`, num_pending int32 `[B]`: factors to apply to the states first, from all banks.
    due: int32 `[B]`, 0 where a state is not written but only read, with what is pending, which is for chains only;
    None: all are written.
    """

    tree: Tree
    rows: Tensor
    path: Tensor
    taken: Tensor
    pending_path: Tensor
    num_pending: Tensor
    turn: int
    mode: str = "auto"
    due: Tensor | None = None


def supports(target: GatedDeltaNet) -> bool:
    """Whether all layers have kernels: the gated delta rule with a convolution of two to four taps, on a GPU."""
    config = target.config
    return (
        not config.attn
        and 2 <= config.window <= kernels.MAX_TAPS
        and max(config.head_dim, config.head_v_dim) <= kernels.MAX_DIM
        and kernels.use_kernels(target.norm.weight)
    )


def read_trees(
    target: GatedDeltaNet, layers: Layers, tokens: Tensor, now: Round, taps: dict[int, Tensor] | None = None
) -> Tensor:
    """Normalised hidden states `[B * N, hidden]` at the nodes of tokens int32 `[B, N]`, in the weights' dtype.

    Args:
        taps: views `[B * N, hidden]` that get the residual stream which enters a layer, by its number.
    """

    def recurrence(index: int, mixer: DeltaMixer, projected: Tensor) -> Tensor:
        return recur(mixer, projected, layers.layer(index), now)

    return run_layers(target, tokens, recurrence, taps or {})


def run_layers(
    target: GatedDeltaNet, tokens: Tensor, recurrence: Callable[[int, DeltaMixer, Tensor], Tensor],
    taps: dict[int, Tensor], *, states_only: bool = False,
) -> Tensor:  # fmt: skip
    """All layers over tokens int32 `[B, N]`; the rest is as `read_trees` has it.

    Args:
        recurrence: given a layer's number, its mixer and projections `[B, N, P]`, outputs `[B, N, HV, V]`.
        states_only: stop after the last recurrence, unless a tap wants what follows. The result says nothing then.
    """
    blocks, table = [cast(Block, block) for block in target.layers], target.embeddings.weight
    norms = [block.attn_norm for block in blocks] + [target.norm]
    stream, x = embed_norm(tokens.flatten(), table, norms[0].weight, norms[0].eps, taps.get(0))
    for i, block in enumerate(blocks):
        mixer, mlp = cast(DeltaMixer, block.attn), cast(SwiGLU, block.mlp)
        projected = linear(x, mixer.in_proj.weight).unflatten(0, tokens.shape)
        o = recurrence(i, mixer, projected)
        if states_only and i + 1 == len(blocks) and i + 1 not in taps:
            break
        parts = linear_parts(leave(mixer, o, projected), mixer.o_proj.weight)
        x = add_norm(stream, parts, block.mlp_norm.weight, block.mlp_norm.eps, table.dtype)
        parts = linear_parts(swiglu(x, mlp.gate_up_proj.weight), mlp.down_proj.weight)
        x = add_norm(stream, parts, norms[i + 1].weight, norms[i + 1].eps, table.dtype, taps.get(i + 1))
    return x


def recur(mixer: DeltaMixer, projected: Tensor, layer: Layers, now: Round) -> Tensor:
    """Convolution and recurrence of projections `[B, N, P]`, any strides but the last: `[B, N, HV, V]`."""
    config, tree = mixer.config, now.tree
    assert mixer.conv_weight is not None
    old, new = layer.bank(now.turn - 1 if now.turn else 1), layer.bank(now.turn)
    qkv, a, b, _ = projected.split(mixer.splits, -1)
    qkv = tree_conv(
        qkv, tree.parent, tree.num_nodes, mixer.conv_weight, mixer.conv_bias, layer.conv_state, now.rows,
        (old.conv_inputs, now.path, now.taken), by_slot=True, keep=new.conv_inputs,
    )  # fmt: skip
    q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], -1)
    inputs = Inputs(
        q.unflatten(-1, (config.num_heads, config.head_dim)), k.unflatten(-1, (config.num_heads, config.head_dim)),
        v.unflatten(-1, (config.value_heads, config.head_v_dim)), a, b,
        Gate(mixer.A_log, mixer.dt_bias, 2.0 if config.allow_neg_eigval else 1.0),
    )  # fmt: skip
    return layer.recurrence.outputs(inputs, layer, now)


def leave(mixer: DeltaMixer, o: Tensor, projected: Tensor) -> Tensor:
    """What the output projection gets, `[B * N, HV * V]`: norm and gate of o `[B, N, HV, V]`, projected `[B, N, P]`."""
    config = mixer.config
    return gated_norm(
        o, projected.split(mixer.splits, -1)[3] if config.use_gate else None, mixer.norm.weight, mixer.norm.eps,
        config.output_gate_activation == "sigmoid", projected.dtype,
    )  # fmt: skip


def head(target: GatedDeltaNet, hidden: Tensor) -> Tensor:
    """Logits fp32 `[M, vocab]` of hidden states `[M, hidden]`."""
    return logits_of(hidden, target.embeddings.weight if target.lm_head is None else target.lm_head.weight)


def logits_of(hidden: Tensor, weight: Tensor | Int7Weight) -> Tensor:
    """The same with a head's weight `[vocab, hidden]`."""
    return linear(
        hidden, weight, torch.empty(len(hidden), weight.shape[0], dtype=torch.float32, device=hidden.device)
    )
