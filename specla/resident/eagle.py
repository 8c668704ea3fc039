"""The trained drafter inside a round: reads what was accepted, then grows a tree level by level.

Its layer is a gated delta layer like the target's, with slots and banks of its own. What it reads is a chain: the
tokens of the round before, with the target's features. The last of them is the root of what it drafts. A level is
verified together with all levels above it, from the state before the root, so that beams need no copies of a state.
Bank 0 holds the chain, bank 1 the drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.drafters.base import Exported
from specla.drafters.network import Eagle as Network
from specla.models.layers import DeltaMixer
from specla.models.past import Prefill
from specla.ops import triton as kernels
from specla.ops.triton.linear import linear, linear_parts, swiglu
from specla.ops.triton.norm import add_norm
from specla.resident.drafts import Drafts
from specla.resident.features import Backlog, Reading, gather, grow_chain, keep, pair_norm, take_last
from specla.resident.forward import Layers, Round, finish as finish_mixer, logits_of, recur
from specla.resident.grow import MAX_STEPS, begin, expand, finish as finish_tree
from specla.resident.slots import Slots
from specla.resident.top import MAX_WIDTH, top
from specla.resident.walk import Outcome
from specla.state import RecurrentSpec, Snapshot, StatePool
from specla.tree import Tree


def supports(network: Network, num_steps: int, topk: int) -> bool:
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


class Eagle:
    """A proposer with an `Eagle` network that `supports` allows.

    Args:
        max_nodes: of the target's trees, the root included.
        num_steps, topk, prune_threshold: as `EagleDrafter` has them.
    """

    def __init__(
        self,
        network: Network,
        num_slots: int,
        max_nodes: int,
        num_steps: int,
        topk: int,
        prune_threshold: float | None,
    ):
        config, weight = network.config, network.fc.weight
        self.network, self.layer_ids = network, config.layer_ids
        self.num_steps, self.topk, self.prune_threshold = num_steps, topk, prune_threshold
        self.length = max_nodes  # of a chain that is read
        self.nodes = 1 + (num_steps - 1) * topk  # that are drafted from
        heads, dim = config.num_heads, config.head_dim
        self.spec = RecurrentSpec(heads, heads, dim, dim, 3 * heads * dim, config.conv_size)
        self.pool = StatePool(
            [self.spec], num_slots, max(max_nodes, self.nodes), torch.float32, weight.device
        )
        self.layers = Layers.of(self.pool.groups[self.spec])
        self.state, self.conv_state = self.layers.state[0], self.layers.conv_state[0]
        self.banks = [bank.layer(0) for bank in self.layers.banks]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=weight.device)

        features = weight.new_zeros(num_slots * max_nodes, len(config.layer_ids) * config.hidden_size)
        self.backlog = Backlog(features, zeros(num_slots, max_nodes), zeros(num_slots), zeros(1) + 1)
        self.rooted = zeros(num_slots)  # whether bank 1 holds a root to commit
        # paths, parents and pending nodes that stay as they are
        self.path = zeros(num_slots, max_nodes) + torch.arange(max_nodes, device=weight.device).int()
        self.chain, self.nothing = self.path - 1, zeros(num_slots)
        self.kept = [*self.backlog, self.rooted]
        self._held: dict[int, tuple[Tensor, int]] = {}

    def clear(self, slot: int) -> None:
        """Forget a slot, where a sequence is to begin."""
        self.pool.groups[self.spec].clear(slot)
        self._held.pop(slot, None)

    def read(self, slot: int, features: Tensor, following: list[int]) -> None:
        """Read a stretch of a prompt: features `[T, F]` and the token after each. The last pair waits for a round."""
        if slot in self._held:
            before, token = self._held[slot]
            features, following = torch.cat([before[None], features]), [token, *following]
        self._held[slot] = features[-1], following[-1]
        if len(following) > 1:
            past = Prefill(self.pool, slot, len(following) - 1, self.network.fc.weight.dtype)
            ids = torch.tensor(following[:-1], device=features.device)
            self.network(ids[None], self.network.fuse(features[None, :-1]), past)

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

    def admit(self, slot: int, key: int, size: int) -> None:
        """What waits of the prompt's end becomes the backlog of the first round."""
        held = self._held.pop(slot, None)
        self.backlog.num_tokens[slot], self.rooted[slot] = int(held is not None), 0
        if held is not None:
            self.backlog.features[slot * size] = held[0].to(self.backlog.features.dtype)
            self.backlog.following[slot, 0] = held[1]

    def taps(self, batch: int, size: int) -> dict[int, Tensor]:
        """Where the target's features of a round go."""
        hidden = self.network.config.hidden_size
        parts = self.backlog.features[: batch * size].split(hidden, -1)
        return dict(zip(self.layer_ids, parts, strict=True))

    def keep(self, slots: Slots, outcome: Outcome) -> None:
        """After the walk: what was taken is to be read in the next round."""
        keep(outcome, self.backlog)

    def propose(self, rows: Tensor, slots: Slots, limit: Tensor, out: Drafts, noisy: bool) -> None:
        batch, size = out.tokens.shape
        reading = gather(rows, slots, self.backlog, limit, self.length)
        projected, hidden, normed = self._read(rows, reading)
        if size == 1:
            # nothing is to be drafted from the chain, so nothing of it stays pending
            self.layers.commit(0, self.path[:batch], reading.num_tokens, rows)
            self.rooted[:batch].zero_()
            out.tokens.copy_(slots.root[:batch, None])
            return
        network, width = self.network, self.topk
        grown = begin(batch, width, self.num_steps, rows.device)
        values, ids = self._top(normed, rows, slots, 0, noisy)
        expand(grown, 0, values, ids, rows, network.token_ids)
        parent = torch.full((batch, self.nodes), -1, dtype=torch.int32, device=rows.device)
        for depth in range(1, self.num_steps):
            first = 1 + (depth - 1) * width
            num_nodes = grow_chain(reading, grown.follow, parent, first)
            now = Round(
                Tree.resident(parent[:, : first + width], num_nodes), rows, self.path[:batch],
                reading.before_last if depth == 1 else self.nothing[:batch], 1,
            )  # fmt: skip
            hidden, normed = self._level(projected, grown.target_ids, grown.follow, hidden, now)
            expand(grown, depth, *self._top(normed, rows, slots, depth, noisy), rows, network.token_ids)
        torch.clamp(reading.num_tokens, max=1, out=self.rooted[:batch])
        scores = torch.empty(batch, size, device=rows.device)
        finish_tree(grown, reading.limits, rows, slots, out, scores, self.prune_threshold)

    def _read(self, rows: Tensor, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Read the backlog; of the last token of each row the projections, as node 0 of `[B, nodes, P]`, the layer's
        output fp32 `[B, hidden]`, and its norm for the head.
        """
        network, batch, length = self.network, len(rows), self.length
        weight = network.fc.weight
        hidden = torch.empty(batch * length, len(weight), dtype=torch.float32, device=rows.device)
        linear(reading.features, weight, hidden)
        x, stream = self._enter(reading.tokens, hidden, None, batch)
        read = linear(x, self._mixer.in_proj.weight)
        chain = Tree.resident(self.chain[:batch], reading.num_tokens)
        now = Round(chain, rows, self.path[:batch], self.rooted[:batch], 0)
        grid = read.unflatten(0, (batch, length))
        o = recur(self._mixer, grid, self.state, self.conv_state, self.banks, now)
        normed = self._leave(o.flatten(0, 1), read, stream)
        projected = read.new_empty(batch, self.nodes, read.shape[1])
        last = stream.new_empty(batch, stream.shape[1]), normed.new_empty(batch, normed.shape[1])
        take_last(grid, reading.num_tokens, projected[:, 0])
        take_last(stream.unflatten(0, (batch, length)), reading.num_tokens, last[0])
        take_last(normed.unflatten(0, (batch, length)), reading.num_tokens, last[1])
        return projected, *last

    def _level(
        self, projected: Tensor, tokens: Tensor, follow: Tensor, hidden: Tensor, now: Round
    ) -> tuple[Tensor, Tensor]:
        """Read the live nodes of a level, tokens and follow `[B, W]`: output and norm of the layer, `[B * W, ..]`."""
        batch, width = tokens.shape
        size = now.tree.size
        x, stream = self._enter(tokens.flatten(), hidden, follow.flatten(), batch)
        own = linear(x, self._mixer.in_proj.weight)
        projected[:, size - width : size] = own.unflatten(0, (batch, width))
        o = recur(self._mixer, projected[:, :size], self.state, self.conv_state, self.banks, now)
        normed = self._leave(o[:, size - width :].reshape(batch * width, *o.shape[2:]), own, stream)
        return stream, normed

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
        layer, dtype = self.network.layer, projected.dtype
        parts = finish_mixer(self._mixer, o, projected)
        x = add_norm(stream, parts, layer.mlp_norm.weight, layer.mlp_norm.eps, dtype)
        parts = linear_parts(swiglu(x, layer.mlp.gate_up_proj.weight), layer.mlp.down_proj.weight)
        return add_norm(stream, parts, self.network.norm.weight, self.network.norm.eps, dtype)

    def _top(
        self, normed: Tensor, rows: Tensor, slots: Slots, depth: int, noisy: bool
    ) -> tuple[Tensor, Tensor]:
        logits = logits_of(normed, self.network.lm_head.weight)
        return top(logits, rows, slots, self.network.token_ids, depth, width=self.topk, noisy=noisy)
