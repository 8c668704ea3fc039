"""The layers of a target over draft trees as a fixed list of launches, for a CUDA graph to hold.

Batch rows are slots: row b works on slot b, or on nothing where `rows[b]` is -1. What a round leaves of its nodes goes
into one of two banks, and the next round commits from it what was accepted while it fills the other.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.layers import Block, DeltaMixer
from specla.ops import Factors, triton as kernels
from specla.ops.conv import launch_commit as launch_conv_commit
from specla.ops.factors import Pending
from specla.ops.gate import Gate
from specla.ops.triton.conv import tree_conv
from specla.ops.triton.linear import linear, linear_parts, swiglu
from specla.ops.triton.norm import add_norm, embed_norm, gated_norm
from specla.ops.verify import launch, launch_commit
from specla.state import RecurrentState
from specla.tree import Tree


class Bank(NamedTuple):
    """What one round leaves of its nodes, by slot: factors `[.., S, M, ..]`, raw inputs of the convolution."""

    factors: Factors
    conv_inputs: Tensor

    def layer(self, index: int) -> Bank:
        return Bank(Factors(*(x[index] for x in self.factors)), self.conv_inputs[index])


class Layers(NamedTuple):
    """The recurrent layers of all slots: state `[L, S, HV, V, K]`, windows `[L, S, D, W - 1]`, two banks."""

    state: Tensor
    conv_state: Tensor
    banks: tuple[Bank, Bank]

    @classmethod
    def of(cls, group: RecurrentState) -> Layers:
        """Those of a pool, with a second bank beside its own."""
        own = Bank(group.factors, group.conv_inputs)
        other = Bank(Factors(*map(torch.zeros_like, group.factors)), torch.zeros_like(group.conv_inputs))
        return cls(group.state, group.conv_state, (own, other))

    def commit(self, bank: int, path: Tensor, count: Tensor, slots: Tensor) -> None:
        """Commit the first `count` nodes `[B]` of each `path` `[B, P]` from a bank, in all layers of `slots` `[B]`."""
        factors, inputs = self.banks[bank]
        launch_commit(self.state, factors, path, count, slots, by_slot=True)
        launch_conv_commit(self.conv_state, inputs, path, count, slots, by_slot=True)


class Round(NamedTuple):
    """What all layers of a round share.

    tree: `Tree.resident` of int32 `[B, N]`. rows: int32 `[B]`. turn: the bank to fill. mode: of verification.
    path int32 `[B, M]`, num_pending int32 `[B]`: nodes of the other bank to commit first.
    """

    tree: Tree
    rows: Tensor
    path: Tensor
    num_pending: Tensor
    turn: int
    mode: str = "auto"


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
    taps, blocks = taps or {}, [cast(Block, block) for block in target.layers]
    table = target.embeddings.weight
    norms = [block.attn_norm for block in blocks] + [target.norm]
    stream, x = embed_norm(tokens.flatten(), table, norms[0].weight, norms[0].eps, taps.get(0))
    for i, block in enumerate(blocks):
        parts = mix(
            cast(DeltaMixer, block.attn),
            x,
            layers.state[i],
            layers.conv_state[i],
            [b.layer(i) for b in layers.banks],
            now,
        )
        x = add_norm(stream, parts, block.mlp_norm.weight, block.mlp_norm.eps, table.dtype)
        parts = linear_parts(swiglu(x, block.mlp.gate_up_proj.weight), block.mlp.down_proj.weight)
        x = add_norm(stream, parts, norms[i + 1].weight, norms[i + 1].eps, table.dtype, taps.get(i + 1))
    return x


def mix(
    mixer: DeltaMixer, x: Tensor, state: Tensor, conv_state: Tensor, banks: list[Bank], now: Round
) -> Tensor:
    """What the mixer adds to the stream of x `[B * N, D]`, in parts as `linear_parts` has them."""
    projected = linear(x, mixer.in_proj.weight)
    grid = projected.unflatten(0, (now.tree.batch, now.tree.size))
    return finish(mixer, recur(mixer, grid, state, conv_state, banks, now).flatten(0, 1), projected)


def recur(
    mixer: DeltaMixer, projected: Tensor, state: Tensor, conv_state: Tensor, banks: list[Bank], now: Round
) -> Tensor:
    """Convolution and recurrence of projections `[B, N, P]`, any strides but the last: `[B, N, HV, V]`."""
    config, tree = mixer.config, now.tree
    assert mixer.conv_weight is not None
    old, new = banks[1 - now.turn], banks[now.turn]
    qkv, a, b, _ = projected.split(mixer.splits, -1)
    qkv = tree_conv(
        qkv, tree.parent, tree.num_nodes, mixer.conv_weight, mixer.conv_bias, conv_state, now.rows,
        (old.conv_inputs, now.path, now.num_pending), by_slot=True, keep=new.conv_inputs,
    )  # fmt: skip
    q, k, v = qkv.split([config.key_dim, config.key_dim, config.value_dim], -1)
    o, _ = launch(
        q.unflatten(-1, (config.num_heads, config.head_dim)), k.unflatten(-1, (config.num_heads, config.head_dim)),
        v.unflatten(-1, (config.value_heads, config.head_v_dim)), a, b, tree, state, None, now.mode, True,
        gate=Gate(mixer.A_log, mixer.dt_bias, 2.0 if config.allow_neg_eigval else 1.0), state_indices=now.rows,
        pending=Pending(old.factors, now.path, now.num_pending), factors=new.factors, by_slot=True,
    )  # fmt: skip
    return o


def finish(mixer: DeltaMixer, o: Tensor, projected: Tensor) -> Tensor:
    """Norm, gate and output projection of o `[M, HV, V]` with its projections `[M, P]`, in parts."""
    config = mixer.config
    y = gated_norm(
        o, projected.split(mixer.splits, -1)[3] if config.use_gate else None, mixer.norm.weight, mixer.norm.eps,
        config.output_gate_activation == "sigmoid", projected.dtype,
    )  # fmt: skip
    return linear_parts(y, mixer.o_proj.weight)


def head(target: GatedDeltaNet, hidden: Tensor) -> Tensor:
    """Logits fp32 `[M, vocab]` of hidden states `[M, hidden]`."""
    return logits_of(hidden, target.embeddings.weight if target.lm_head is None else target.lm_head.weight)


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """The same with a head's weight `[vocab, hidden]`."""
    return linear(
        hidden, weight, torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
    )
