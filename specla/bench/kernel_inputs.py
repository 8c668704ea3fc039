"""What `specla bench kernel` runs on: drawn draft trees, and rounds of one layer whose states exceed the L2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specla.drafters.grow import grow
from specla.ops.factors import Factors, Pending, PendingConv
from specla.ops.gate import Gate
from specla.ops.triton import MAX_NODES
from specla.ops.triton.tuning import Config, choose
from specla.tree import Tree

TREES = 8  # drawn for each shape; rows and rounds take turns with them
# of the Dirichlet distribution that a node's children are drawn from: the likeliest has 0.72 on average, about as often
# as a trained drafter's first draft is right
VOCABULARY, CONCENTRATION = 32, 0.02
ROTATED_BYTES = 200e6  # of state at least, several times an L2
WIDTH = 4  # of the convolution


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer of gated delta rule."""

    heads: int = 8
    value_heads: int = 8
    dim_k: int = 256
    dim_v: int = 256

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.heads * self.dim_k + self.value_heads * self.dim_v

    @property
    def state_bytes(self) -> int:
        """Of one row's state, fp32."""
        return 4 * self.value_heads * self.dim_v * self.dim_k

    @property
    def factor_bytes(self) -> int:
        """Of one node's record: fp32 key, value and decay, and its raw bf16 inputs of the convolution."""
        return 4 * (self.heads * self.dim_k + self.value_heads * (self.dim_v + 1)) + 2 * self.channels

    def config(self, mode: str, device: torch.device, batch: int, nodes: int) -> Config:
        """How a verification is launched."""
        return choose(
            mode, device=device, batch=batch, nodes=nodes,
            value_heads=self.value_heads, dim_k=self.dim_k, dim_v=self.dim_v,
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What a drafter may grow: `nodes` nodes with the root, no deeper than `depth`, `topk` children a node."""

    name: str
    topk: int
    depth: int
    nodes: int

    @property
    def is_chain(self) -> bool:
        return self.topk == 1


def read_shape(text: str) -> Shape:
    """A shape from "chain:NODES" or "TOPKxDEPTH:NODES".

    Raises:
        ValueError: for other text, more than 64 nodes, or more than such a tree can have.
    """
    match = re.fullmatch(r"(?:chain|(\d{1,4})x(\d{1,4})):(\d{1,4})", text)
    if match is None:
        raise ValueError(f"a tree is chain:NODES or TOPKxDEPTH:NODES, like 4x4:32; got {text!r}")
    nodes = int(match[3])
    topk, depth = (1, nodes - 1) if match[1] is None else (int(match[1]), int(match[2]))
    most = 1 + topk + max(depth - 1, 0) * topk * topk
    if not (2 <= nodes <= min(MAX_NODES, most) and 1 <= topk <= VOCABULARY and depth >= 1):
        raise ValueError(
            f"the tree {text} must have 2 to {MAX_NODES} nodes and no more than it can grow ({most}), "
            f"and at most {VOCABULARY} children a node"
        )
    return Shape(text, topk, depth, nodes)


def draw_trees(shape: Shape, count: int = TREES, seed: int = 0) -> list[list[int]]:
    """Parents of `count` trees, grown as EAGLE-2 grows them; what a node's children may be is drawn for each node."""
    if shape.nodes == 1:
        return [[-1]] * count
    rng = np.random.default_rng(seed)

    def draw(*size: int) -> Tensor:
        chances = rng.dirichlet(np.full(VOCABULARY, CONCENTRATION), size)
        return torch.from_numpy(np.log(np.maximum(chances, 1e-30)))

    grown = grow(
        draw(count),
        lambda tokens, _: draw(*tokens.shape),
        limits=torch.full((count,), shape.nodes - 1),
        num_steps=shape.depth,
        topk=shape.topk,
    )
    assert (grown.num_nodes == shape.nodes).all()
    rows: list[list[int]] = grown.parent.tolist()
    return rows


@dataclass(frozen=True)
class Round:
    """One verification of one layer: inputs, a pool of states, and what was accepted the round before."""

    q: Tensor  # bf16 [B, N, H, K]
    k: Tensor  # bf16 [B, N, H, K]
    v: Tensor  # bf16 [B, N, HV, V]
    a: Tensor  # bf16 [B, N, HV] raw decay
    b: Tensor  # bf16 [B, N, HV] raw beta
    tree: Tree
    parents: list[list[int]]
    state: Tensor  # fp32 [B, HV, V, K]
    slots: Tensor  # int32 [B], a permutation
    pending: Pending  # rows are slots
    factors: Factors  # where the nodes' factors go; rows are slots
    x: Tensor  # bf16 [B, N, D] raw inputs of the convolution
    window: Tensor  # bf16 [B, D, W - 1]
    pending_conv: PendingConv  # rows are slots

    def fresh(self) -> Round:
        """The same round on a copy of its state and window; what it writes is NaN before."""
        lost = Factors(*(torch.full_like(x, float("nan")) for x in self.factors))
        return replace(self, state=self.state.clone(), window=self.window.clone(), factors=lost)


@dataclass(frozen=True)
class Work:
    """A layer, a shape of trees, and the rounds that launches rotate over."""

    layer: Layer
    shape: Shape
    batch: int  # that launches are configured for
    rounds: Sequence[Round]
    gate: Gate
    weight: Tensor  # bf16 [D, W]

    @property
    def scale(self) -> float:
        return self.layer.dim_k**-0.5

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def config(self, mode: str, *, nodes: int | None = None, batch: int | None = None) -> Config:
        """How a verification is launched, of other nodes or rows than its own if they are given."""
        batch, nodes = self.batch if batch is None else batch, self.shape.nodes if nodes is None else nodes
        return self.layer.config(mode, self.device, batch, nodes)


def num_rounds(layer: Layer, batch: int) -> int:
    """How many rounds hold states of 200 MB together; two at least."""
    return max(2, -int(-ROTATED_BYTES // (layer.state_bytes * batch)))


def make_work(
    layer: Layer,
    shape: Shape,
    batch: int,
    *,
    pending: int,
    seed: int,
    device: torch.device,
    rounds: int | None = None,
    rows: int | None = None,
) -> Work:
    """Random rounds, alike for the same arguments on the same device.

    Args:
        pending: accepted nodes that each round commits first.
        rounds: `num_rounds` by default.
        rows: how many rows there really are; `batch` by default.
    """
    rows = batch if rows is None else rows
    rounds = num_rounds(layer, batch) if rounds is None else rounds
    rng = torch.Generator(device).manual_seed(seed)
    drawn = draw_trees(shape, seed=seed)
    trees: dict[int, tuple[Tree, list[list[int]]]] = {}
    for first in range(min(TREES, rounds)):
        parents = [drawn[(first + row) % TREES] for row in range(rows)]
        grid = torch.tensor(parents, dtype=torch.int32, device=device)
        trees[first] = Tree.resident(grid, torch.full_like(grid[:, 0], shape.nodes)), parents
    nodes = max(shape.nodes, 8, pending)
    gate = Gate(
        torch.rand(layer.value_heads, generator=rng, device=device) * 2 - 1,
        torch.randn(layer.value_heads, generator=rng, device=device) - 3,
    )
    weight = torch.randn(layer.channels, WIDTH, generator=rng, device=device).bfloat16()
    made = [
        _round(layer, rows, nodes, pending, *trees[number % TREES], rng, device) for number in range(rounds)
    ]
    return Work(layer, shape, batch, made, gate, weight)


def _round(
    layer: Layer,
    rows: int,
    nodes: int,
    pending: int,
    tree: Tree,
    parents: list[list[int]],
    rng: torch.Generator,
    device: torch.device,
) -> Round:
    heads, value_heads, dim_k, dim_v = layer.heads, layer.value_heads, layer.dim_k, layer.dim_v
    size = tree.size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    keys = torch.nn.functional.normalize(normal(rows, nodes, heads, dim_k), dim=-1)
    decay = -0.3 * torch.rand(rows, nodes, value_heads, generator=rng, device=device)
    before = Factors(keys, 0.3 * normal(rows, nodes, value_heads, dim_v), decay)
    path = torch.rand(rows, nodes, generator=rng, device=device)
    path[:, 0] = -1  # the root is always accepted; below it, ids ascend with gaps
    path = path.argsort(-1)[:, :pending].sort(-1).values.int().contiguous()
    count = torch.full((rows,), pending, dtype=torch.int32, device=device)
    return Round(
        q=normal(rows, size, heads, dim_k).bfloat16(),
        k=normal(rows, size, heads, dim_k).bfloat16(),
        v=normal(rows, size, value_heads, dim_v).bfloat16(),
        a=normal(rows, size, value_heads).bfloat16(),
        b=normal(rows, size, value_heads).bfloat16(),
        tree=tree,
        parents=parents,
        state=normal(rows, value_heads, dim_v, dim_k).mul_(dim_k**-0.5),
        slots=torch.randperm(rows, generator=rng, device=device).int(),
        pending=Pending(before, path, count),
        factors=Factors(*(torch.empty_like(x) for x in before)),
        x=normal(rows, size, layer.channels).bfloat16(),
        window=normal(rows, layer.channels, WIDTH - 1).bfloat16(),
        pending_conv=PendingConv(normal(rows, nodes, layer.channels).bfloat16(), path, count),
    )
