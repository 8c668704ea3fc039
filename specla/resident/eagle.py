"""The trained drafter inside a round: reads what was accepted, then grows a tree level by level.

Its layer is a gated delta layer like the target's, with slots and banks of its own. What it reads is a chain: the
tokens of the round before, with the target's features. The last of them is the root of what it drafts. A level is
verified together with all levels above it, from the state before the root, so that beams need no copies of a state.
Bank 0 holds the chain, bank 1 the drafts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specla.drafters.base import Exported
from specla.drafters.network import Eagle
from specla.models.layers import DeltaMixer
from specla.models.past import Prefill
from specla.ops import triton as kernels
from specla.ops.chunk import takes as takes_prompt
from specla.ops.factors import Pending
from specla.ops.triton.linear import FEW, Int7Weight, linear, linear_parts, quantize, swiglu
from specla.ops.triton.norm import add_norm
from specla.resident.capture import Captures
from specla.resident.drafts import Drafts
from specla.resident.extend import extend
from specla.resident.features import Backlog, Reading, gather, keep, pair_norm, take_last
from specla.resident.forward import Layers, Round, leave, logits_of, recur
from specla.resident.grow import MAX_STEPS, begin, begin_levels, expand, finish
from specla.resident.lookup import lookup
from specla.resident.prompt import LENGTHS, Buckets, LayerIds, Stretch, Work, absorb
from specla.resident.slots import Slots
from specla.resident.top import MAX_WIDTH, top
from specla.resident.walk import Outcome
from specla.resident.writes import Writes
from specla.state import RecurrentSpec, Snapshot, StatePool
from specla.tree import Tree

REPEATED = 5  # tokens; fewer say no more than a network does (docs/results.md, "Why lookup first")


def supports(network: Eagle, num_steps: int, topk: int) -> bool:
    """Whether a drafter has kernels: a delta layer with two to four taps on plain features, and so small a tree."""
    config = network.config
    return (
        config.mixer == "delta"
        and 2 <= config.conv_size <= kernels.MAX_TAPS
        and config.head_dim <= kernels.MAX_DIM
        and config.feature_norm == "none"
        and not config.norm_output
        and 2 <= num_steps <= MAX_STEPS
        and topk <= min(MAX_WIDTH, config.draft_vocab_size)
        and 1 + (num_steps - 1) * topk <= kernels.MAX_NODES
    )


class Weights(NamedTuple):
    """What a network multiplies by."""

    fc: Tensor | Int7Weight
    in_proj: Tensor | Int7Weight
    o_proj: Tensor | Int7Weight
    gate_up_proj: Tensor | Int7Weight
    down_proj: Tensor | Int7Weight
    lm_head: Tensor | Int7Weight

    @classmethod
    def of(cls, network: Eagle) -> Weights:
        """Those of a network as they are."""
        layer, mixer = network.layer, cast(DeltaMixer, network.layer.mixer)
        mlp = layer.mlp.gate_up_proj, layer.mlp.down_proj
        parts = (network.fc, mixer.in_proj, mixer.o_proj, *mlp, network.lm_head)
        return cls(*(part.weight.detach() for part in parts))

    def narrow(self) -> Weights:
        """Seven bits of each that is bf16: nobody compares the bits of a draft."""
        return Weights(
            *(quantize(w) if isinstance(w, Tensor) and w.dtype == torch.bfloat16 else w for w in self)
        )


class EagleProposer:
    """A proposer with an `Eagle` network that `supports` allows.

    Args:
        max_nodes: of the target's trees, the root included.
        num_steps, topk, prune_threshold: as `EagleDrafter` has them.
        captures: makes the graphs through which prompts are read; None makes its own.
        most_beams: live nodes of a level, of all trees together, beyond which trees grow narrower than `topk`. Those
            that branch are then no deeper than half of their nodes, or three levels. None keeps trees as they are.
        repeats: whether trees go on with what followed when a text last had its last REPEATED tokens. What is drafted
            from the network has half of the room then.
    """

    def __init__(
        self,
        network: Eagle,
        num_slots: int,
        max_nodes: int,
        num_steps: int,
        topk: int,
        prune_threshold: float | None,
        captures: Captures | None = None,
        most_beams: int | None = None,
        repeats: bool = False,
    ):
        config, weight = network.config, network.fc.weight
        self.network, self.layer_ids = network, config.layer_ids
        self.full = Weights.of(network)
        self.narrow = self.full.narrow()
        self.num_steps, self.topk, self.prune_threshold = num_steps, topk, prune_threshold
        self.most_beams, self.repeats = most_beams, repeats
        self.max_nodes = max_nodes
        self.nodes = 1 + (num_steps - 1) * topk  # that are drafted from
        heads, dim = config.num_heads, config.head_dim
        self.spec = RecurrentSpec(heads, heads, dim, dim, 3 * heads * dim, config.conv_size)
        self.pool = StatePool([self.spec], num_slots, 1, torch.float32, weight.device)
        room = max(max_nodes, self.nodes)
        self.layers = Layers.of(self.pool.groups[self.spec], room)
        self.memory = self.layers.layer(0)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=weight.device)

        features = weight.new_zeros(num_slots * max_nodes, len(config.layer_ids) * config.hidden_size)
        self.backlog = Backlog(features, zeros(num_slots, max_nodes), zeros(num_slots), zeros(1) + 1)
        self.rooted = zeros(num_slots)  # whether bank 1 holds a root to commit
        # paths, parents and pending nodes that stay as they are
        self.path = zeros(num_slots, max_nodes) + torch.arange(max_nodes, device=weight.device).int()
        self.chain, self.nothing = self.path - 1, zeros(num_slots)
        self.drafted_root = zeros(num_slots, 1) + room  # the first node of bank 1
        self.kept = [*self.backlog, self.rooted]
        self._held: dict[int, tuple[Tensor, int]] = {}
        self._buckets = Buckets(captures or Captures(weight.device), LENGTHS)
        self._by_graph = takes_prompt(self.memory.state)  # not heads too large, nor under the interpreter

    def width(self, batch: int) -> int:
        """Live nodes of a level in each of so many trees."""
        return self.topk if self.most_beams is None else max(1, min(self.topk, self.most_beams // batch))

    def depth(self, batch: int, size: int) -> int:
        """Levels of each of so many trees of so many nodes: deeper ones would not fit, or cost more than they bring."""
        most = min(self.num_steps, size - 1)
        return most if self.most_beams is None or self.chains(batch) else min(most, max(3, size // 2))

    def chains(self, batch: int) -> bool:
        return self.width(batch) == 1

    def prepare(self) -> None:
        """Compile and capture what prompts of any length need."""
        for length in LENGTHS if self._by_graph else ():
            self._buckets.of(self._work, (), length)

    def clear(self, slot: int) -> None:
        """Forget a slot, where a sequence is to begin."""
        self.pool.groups[self.spec].clear(slot)
        self._held.pop(slot, None)

    def read(self, slot: int, features: Tensor, following: list[int]) -> None:
        """Read a stretch of a prompt: features `[T, F]` and the token after each. The last pair waits for a round."""
        if slot in self._held:
            before, token = self._held[slot]
            features, following = torch.cat([before[None], features]), [token, *following]
        self._held[slot] = features[-1].clone(), following[-1]
        if len(following) > 1:
            absorb_them = self.absorb_pairs if self._by_graph else self._absorb_by_network
            absorb_them(slot, features[:-1], following[:-1])

    def absorb_pairs(self, slot: int, features: Tensor, tokens: list[int]) -> None:
        """Take pairs of features `[T, F]` and the tokens after them into a slot's committed state."""
        bucket, room, run = self._buckets.of(self._work, (), len(tokens))
        room[: len(tokens)] = features
        bucket.fill([(slot, tokens)])
        run()

    def _absorb_by_network(self, slot: int, features: Tensor, tokens: list[int]) -> None:
        """The same without the kernels of prompts."""
        past = Prefill(self.pool, slot, len(tokens), self.network.fc.weight.dtype)
        ids = torch.tensor(tokens, device=features.device)
        self.network(ids[None], self.network.fuse(features[None]), past)

    def _work(self, _: LayerIds, rows: int, length: int) -> tuple[Tensor, Work]:
        room = self.backlog.features.new_zeros(rows * length, self.backlog.features.shape[1])
        return room, partial(self._read_pairs, room)

    def _read_pairs(self, features: Tensor, stretch: Stretch) -> None:
        """Of what the layer makes of a prompt, nothing is wanted but its memory."""
        sizes = len(features), self.network.config.hidden_size
        hidden = linear(features, self.full.fc, features.new_empty(sizes, dtype=torch.float32))
        x, _ = self._enter(stretch.tokens.flatten(), hidden, None, 1)
        absorb(self._mixer, linear(x, self.full.in_proj)[None], self.memory, stretch)

    def export(self, slot: int) -> Exported | None:
        """What was read, and the features of the pair that waits."""
        if slot not in self._held:
            return None
        return Exported((self._held[slot][0].clone(), *self.pool.export(slot).parts[0]), [])

    def restore(self, slot: int, exported: Exported, following: int) -> None:
        """The pair that waits gets another second half."""
        waiting, *parts = exported.tensors
        self.pool.restore(slot, Snapshot(0, [tuple(parts)]))
        self._held[slot] = waiting, following

    def admit(self, writes: Writes, slot: int, key: int, size: int) -> None:
        """What waits of the prompt's end becomes the backlog of the first round."""
        held = self._held.pop(slot, None)
        writes.put(self.backlog.num_tokens, slot, int(held is not None))
        writes.put(self.rooted, slot, 0)
        if held is not None:
            self.backlog.features[slot * size].copy_(held[0])
            writes.put(self.backlog.following, slot * self.max_nodes, held[1])

    def taps(self, batch: int, size: int) -> dict[int, Tensor]:
        """Where the target's features of a round go."""
        hidden = self.network.config.hidden_size
        parts = self.backlog.features[: batch * size].split(hidden, -1)
        return dict(zip(self.layer_ids, parts, strict=True))

    def keep(self, slots: Slots, outcome: Outcome) -> None:
        """After the walk: what was taken is to be read in the next round."""
        keep(outcome, self.backlog)

    def reading(self, last: int, size: int) -> int:
        """Where sizes change, as many as there can be at all."""
        return size if last == size else self.max_nodes

    def propose(
        self, rows: Tensor, slots: Slots, limit: Tensor, out: Drafts, noisy: bool, reading: int
    ) -> None:
        batch, size = out.tokens.shape
        backlog = gather(rows, slots, self.backlog, limit, reading)
        projected, hidden, normed = self._read(rows, backlog, reading)
        if size == 1:
            # nothing is to be drafted from the chain, so nothing of it stays pending
            path, count = self.path[:batch], backlog.num_tokens
            self.layers.commit(Pending(self.layers.factors, path, count), 0, path, count, rows)
            self.rooted[:batch].zero_()
            out.tokens.copy_(slots.root[:batch, None])
            return
        chain = Drafts(*map(torch.empty_like, out)) if self.repeats else None
        if chain is not None:
            lookup(
                rows, slots, limit, chain, max_ngram=REPEATED, min_ngram=REPEATED, periodic=True,
                others=backlog.limits,
            )  # fmt: skip
        network, width, num_steps = self.network, self.width(batch), self.depth(batch, size)
        grown = begin(batch, width, num_steps, rows.device)
        levels = begin_levels(backlog.num_tokens, self.rooted[:batch], width, num_steps)
        expand(grown, levels, 0, *self._top(normed, rows, slots, 0, noisy), rows, network.token_ids)
        for depth in range(1, num_steps):
            tree = Tree.resident(levels.parent[:, : 1 + depth * width], levels.num_nodes[depth])
            read = self.path[:batch], backlog.before_last if depth == 1 else self.nothing[:batch]
            now = Round(tree, rows, *read, *read, 1)
            hidden, normed = self._level(projected, grown.target_ids, grown.follow, hidden, now)
            expand(
                grown, levels, depth, *self._top(normed, rows, slots, depth, noisy), rows, network.token_ids
            )
        scores = torch.empty(batch, size, device=rows.device)
        finish(grown, backlog.limits, rows, slots, out, scores, self.prune_threshold)
        if chain is not None:
            extend(out, chain, rows, slots, limit, branches=width > 1)

    def _read(self, rows: Tensor, backlog: Reading, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Read the backlog; of the last token of each row the projections, as node 0 of `[B, nodes, P]`, the layer's
        output fp32 `[B, hidden]`, and its norm for the head.
        """
        batch = len(rows)
        width = self.network.config.hidden_size
        hidden = torch.empty(batch * length, width, dtype=torch.float32, device=rows.device)
        weights = self._weights(batch * length)
        linear(backlog.features, weights.fc, hidden)
        x, stream = self._enter(backlog.tokens, hidden, None, batch)
        grid = linear(x, weights.in_proj).unflatten(0, (batch, length))
        chain = Tree.resident(self.chain[:batch, :length], backlog.num_tokens)
        rooted = self.rooted[:batch]
        now = Round(chain, rows, self.path[:batch], rooted, self.drafted_root[:batch], rooted, 0)
        o = recur(self._mixer, grid, self.memory, now)
        # of the others nothing is wanted but what the recurrence has made of them
        projected = grid.new_empty(batch, self.nodes, grid.shape[2])
        last_o, last = o.new_empty(batch, 1, *o.shape[2:]), stream.new_empty(batch, width)
        take_last(grid, backlog.num_tokens, projected[:, 0])
        take_last(o.flatten(2), backlog.num_tokens, last_o.flatten(1))
        take_last(stream.unflatten(0, (batch, length)), backlog.num_tokens, last)
        return projected, last, self._leave(last_o, projected[:, :1], last)

    def _level(
        self, projected: Tensor, tokens: Tensor, follow: Tensor, hidden: Tensor, now: Round
    ) -> tuple[Tensor, Tensor]:
        """Read the live nodes of a level, tokens and follow `[B, W]`: output and norm of the layer, `[B * W, ..]`."""
        batch, width = tokens.shape
        size = now.tree.size
        x, stream = self._enter(tokens.flatten(), hidden, follow.flatten(), batch)
        own = projected[:, size - width : size]
        linear(x, self._weights(len(x)).in_proj, own)
        o = recur(self._mixer, projected[:, :size], self.memory, now)
        return stream, self._leave(o[:, size - width :], own, stream)

    def _weights(self, rows: int) -> Weights:
        return self.narrow if rows <= FEW else self.full

    @property
    def _mixer(self) -> DeltaMixer:
        mixer = self.network.layer.mixer
        assert isinstance(mixer, DeltaMixer)
        return mixer

    def _enter(
        self, tokens: Tensor, hidden: Tensor, follow: Tensor | None, batch: int
    ) -> tuple[Tensor, Tensor]:
        layer = self.network.layer
        norms = layer.input_norm.weight, layer.hidden_norm.weight
        return pair_norm(
            tokens, self.network.embeddings.weight, hidden, follow, norms, layer.input_norm.eps, batch,
            layer.norm_before_residual,
        )  # fmt: skip

    def _leave(self, o: Tensor, projected: Tensor, stream: Tensor) -> Tensor:
        """From the recurrence to the end of the layer, whose output is left in `stream`; its norm for the head."""
        layer, weights, dtype = self.network.layer, self._weights(len(stream)), projected.dtype
        parts = linear_parts(leave(self._mixer, o, projected), weights.o_proj)
        x = add_norm(stream, parts, layer.mlp_norm.weight, layer.mlp_norm.eps, dtype)
        parts = linear_parts(swiglu(x, weights.gate_up_proj), weights.down_proj)
        return add_norm(stream, parts, self.network.norm.weight, self.network.norm.eps, dtype)

    def _top(
        self, normed: Tensor, rows: Tensor, slots: Slots, depth: int, noisy: bool
    ) -> tuple[Tensor, Tensor]:
        logits = logits_of(normed, self._weights(len(normed)).lm_head)
        return top(
            logits, rows, slots, self.network.token_ids, depth, width=self.width(len(rows)), noisy=noisy
        )
