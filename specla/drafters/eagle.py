"""The EAGLE-style drafter: reads what the target has read, with the target's own features, and grows a tree there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specla.drafters.base import DraftRow, Exported, Proposal
from specla.drafters.grow import Growth, grow
from specla.drafters.memory import READ, beams_of, new_memory
from specla.drafters.network import DraftNetwork
from specla.drafters.traced import Step, Traced
from specla.models.experts import Experts
from specla.models.layers import Linear
from specla.sampling import gumbel_noise
from specla.tree import Tree

# Were the drafter's logits the target's own, the largest after the noise, if there is any, would be drawn for certain.
# As they are not, the chances are taken as a softmax, the flatter the larger these: at temperatures above 0, and at 0.
DOUBT, GREEDY_DOUBT = 0.7, 0.5


@dataclass
class _Reader:
    """A sequence's slot, and what the target has read and the drafter has not."""

    slot: int
    features: list[Tensor] = field(default_factory=list)  # [T, F] each
    following: list[int] = field(default_factory=list)

    def take(self, count: int) -> tuple[Tensor, list[int]]:
        """The oldest `count` of them."""
        joined = torch.cat(self.features)
        self.features = [joined[count:]] if count < len(joined) else []
        taken, self.following = self.following[:count], self.following[count:]
        return joined[:count], taken


class EagleDrafter:
    """Drafts trees with a network.

    Args:
        num_speculative_tokens: most nodes below the root. num_steps: greatest depth. topk: most children of a node.
        prune_threshold: see `grow`.
        max_num_seqs: sequences at a time.

    The target's noise at temperatures above 0 depends on seed, position and token alone, so the drafter adds the same
    noise to its own logits: drafts agree with the target's draw far more often than its likeliest token does.
    """

    def __init__(
        self,
        network: DraftNetwork,
        num_speculative_tokens: int = 16,
        num_steps: int = 8,
        topk: int = 4,
        prune_threshold: float | None = None,
        max_num_seqs: int = 8,
    ):
        self.network, self.name = network, network.name
        self.layer_ids = network.config.layer_ids
        self.num_speculative_tokens, self.num_steps, self.topk = num_speculative_tokens, num_steps, topk
        self.prune_threshold = prune_threshold
        weight = network.norm.weight
        self.memory = new_memory(network.config, max_num_seqs, weight.dtype, weight.device)
        self._step: Step = self._beam_step
        products = [part.int8 for part in network.modules() if isinstance(part, Linear)]
        chooses = any(isinstance(part, Experts) for part in network.modules())
        if None not in products and not chooses:  # these look at more than shapes
            self._step = Traced(self._beam_step)
        self._free = list(range(max_num_seqs))[::-1]
        self._readers: dict[int, _Reader] = {}

    def observe(self, key: int, features: Tensor, following: Sequence[int]) -> None:
        """Take the target's features `[T, F]` of tokens that it has read, and the token that followed each."""
        assert len(features) == len(following)
        reader = self._reader(key)
        reader.features.append(features)
        reader.following.extend(following)
        while len(reader.following) > READ:  # what the next tree starts from stays
            self._read([reader], READ)

    def export(self, key: int) -> Exported | None:
        """What is read, and the features of what waits."""
        reader = self._readers.get(key)
        if reader is None:
            return None
        waiting = torch.cat(reader.features)
        return Exported((waiting, *self.memory.export(reader.slot)), reader.following[:-1])

    def restore(self, key: int, exported: Exported, following: int) -> None:
        """The last token that waits is always there, so what followed it may differ."""
        waiting, *tensors = exported.tensors
        reader = self._reader(key)
        reader.features, reader.following = [waiting], [*exported.following, following]
        self.memory.restore(reader.slot, tensors)

    def _reader(self, key: int) -> _Reader:
        reader = self._readers.get(key)
        if reader is None:
            assert self._free, "more sequences than max_num_seqs"
            reader = self._readers[key] = _Reader(self._free.pop())
            self.memory.clear(reader.slot)
        return reader

    def forget(self, key: int) -> None:
        """Free the slot of a sequence; unknown keys are fine."""
        reader = self._readers.pop(key, None)
        if reader is not None:
            self._free.append(reader.slot)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """One tree a row; a row with limit 0, or of which the target has read nothing yet, is its root alone."""
        waiting = [
            (b, self._readers[row.key])
            for b, row in enumerate(rows)
            if row.limit and row.key in self._readers
        ]
        active = [(b, reader) for b, reader in waiting if reader.following]
        roots = torch.tensor([row.tokens[-1] for row in rows])
        if not active:
            return Proposal(roots[:, None], Tree.chain(1, len(rows)))
        places = [b for b, _ in active]
        grown = self._grow([rows[b] for b in places], [reader for _, reader in active])
        shape = (len(rows), grown.tokens.shape[1])
        tokens, parent = grown.tokens.new_zeros(shape), grown.parent.new_full(shape, -1)
        scores = grown.scores.new_full(shape, torch.nan)
        num_nodes = grown.num_nodes.new_ones(len(rows))
        tokens[places] = self.network.token_ids[grown.tokens]
        parent[places], num_nodes[places] = grown.parent, grown.num_nodes
        scores[places] = grown.scores
        tokens[:, 0] = roots
        return Proposal(tokens, Tree(parent, num_nodes), scores=scores)

    def _grow(self, rows: list[DraftRow], readers: list[_Reader]) -> Growth:
        """Trees in the draft vocabulary."""
        network = self.network
        hidden = self._read(readers, READ)[:, None]
        beams = self.memory.beams([reader.slot for reader in readers])
        bend = _Bend(rows, network.token_ids, network.config.vocab_size)
        depth = 0

        def advance(tokens: Tensor, follow: Tensor) -> Tensor:
            nonlocal beams, hidden, depth
            beams.follow(follow)
            before = hidden.gather(1, follow[..., None].expand(-1, -1, hidden.shape[2]))
            hidden, logits, *tensors = self._step(network.token_ids[tokens], before, *beams.tensors)
            beams = beams_of(network.config, tensors)
            depth += 1
            return bend(logits, depth).log_softmax(-1)

        limits = [min(row.limit, self.num_speculative_tokens) for row in rows]
        return grow(
            bend(network.logits(hidden), depth).log_softmax(-1)[:, 0], advance,
            limits=torch.tensor(limits, device=hidden.device), num_steps=self.num_steps, topk=self.topk,
            prune_threshold=self.prune_threshold,
        )  # fmt: skip

    @torch.inference_mode()
    def _read(self, readers: list[_Reader], most: int) -> Tensor:
        """Read up to `most` of what each has waiting; the layer's output `[B, hidden]` at the last of it."""
        taken = [reader.take(min(most, len(reader.following))) for reader in readers]
        lengths = [len(following) for _, following in taken]
        longest = max(lengths)
        features = torch.nn.utils.rnn.pad_sequence([features for features, _ in taken], batch_first=True)
        features = features.to(self.network.norm.weight.dtype)
        ids = [following + [0] * (longest - len(following)) for _, following in taken]
        past = self.memory.reading([reader.slot for reader in readers], lengths)
        hidden = self.network(torch.tensor(ids, device=features.device), self.network.fuse(features), past)
        return hidden[torch.arange(len(readers)), torch.tensor(lengths) - 1]

    def _beam_step(self, ids: Tensor, hidden: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Read a token in every beam: the new state and its logits, and the beams' tensors then."""
        beams = beams_of(self.network.config, tensors)
        hidden = self.network(ids, hidden, beams)
        return hidden, self.network.logits(hidden), *beams.tensors


class _Bend:
    """Adds to a drafter's logits the noise that the target will add to its own."""

    def __init__(self, rows: list[DraftRow], token_ids: Tensor, vocab_size: int):
        def column(values: list[float] | list[int]) -> Tensor:
            return torch.tensor(values, device=token_ids.device)

        self.warm = any(row.temperature > 0 for row in rows)
        self.token_ids, self.vocab_size = token_ids, vocab_size
        self.temperature = column([float(row.temperature) for row in rows])[:, None, None]
        self.scale = torch.where(self.temperature > 0, self.temperature * DOUBT, GREEDY_DOUBT)
        self.seed, self.position = (
            column([row.seed for row in rows]),
            column([len(row.tokens) for row in rows]),
        )

    def __call__(self, logits: Tensor, depth: int) -> Tensor:
        """Logits `[B, W, draft vocabulary]` of nodes at this depth: their softmax is the chance to be drawn."""
        if self.warm:
            noise = gumbel_noise(self.seed, self.position + depth, self.vocab_size)[:, self.token_ids]
            logits = logits + self.temperature * noise[:, None].to(logits.dtype)
        return logits / self.scale
