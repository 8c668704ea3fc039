"""Logits processors of transformers: some the sampler has itself, the others are applied at every node of a tree."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.engine.sequence import Sequence
from specla.models.language_model import LanguageModel
from specla.models.target import Tap
from specla.state import StatePool
from specla.tree import Tree

# a function of one row's tokens and scores alone: neither of what stood in the batch, nor of an earlier call
KNOWN = (
    "EpsilonLogitsWarper EtaLogitsWarper ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor "
    "ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization MinLengthLogitsProcessor "
    "MinNewTokensLengthLogitsProcessor MinPLogitsWarper NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor "
    "RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor SuppressTokensAtBeginLogitsProcessor "
    "SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper "
    "TypicalLogitsWarper"
).split()
# in the order in which the sampler applies them, by the sampling parameter that each becomes
OWN = {
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
}


class Plan(NamedTuple):
    """sampling: sampling parameters in our terms. processors: what is to be applied to the logits before them."""

    sampling: dict[str, float | int]
    processors: list[Any]


def plan(processors: Items[Any], do_sample: bool, starts: list[int]) -> Plan:
    """Who does what, for rows whose prompts begin at `starts`, behind their padding.

    Raises:
        ValueError: for a processor that is not known.
    """
    from transformers.generation import logits_process

    known = {getattr(logits_process, name): name for name in KNOWN if hasattr(logits_process, name)}
    for processor in processors:
        if type(processor) not in known:
            raise ValueError(
                f"logits_processor: {type(processor).__name__} is not supported, only {', '.join(sorted(KNOWN))}"
            )
    left = list(processors)
    sampling: dict[str, float | int] = {"temperature": 0.0}
    if do_sample:
        sampling["temperature"] = 1.0
        if left and known[type(left[-1])] == "LogitNormalization":  # a softmax does not see it
            left.pop()
        for name, kind in reversed(OWN.items()):
            if left and known[type(left[-1])] == kind and _is_plain(left[-1]):
                sampling[name] = getattr(left.pop(), name)
    if len(left) == 1 and known[type(left[0])] == "RepetitionPenaltyLogitsProcessor":
        ignored = getattr(left[0], "prompt_ignore_length", None)
        ignored = ignored.tolist() if isinstance(ignored, Tensor) else [ignored or 0] * len(starts)
        if ignored == starts:
            sampling["repetition_penalty"] = left.pop().penalty
    return Plan(sampling, left)


def _is_plain(warper: Any) -> bool:
    """Whether a warper of those has the settings that `generate` makes it with."""
    cuts = getattr(warper, "filter_value", -torch.inf) == -torch.inf
    return cuts and getattr(warper, "min_tokens_to_keep", 1) == 1


class Row(NamedTuple):
    """processors: of one sequence. padding: ids before its prompt."""

    processors: list[Any]
    padding: list[int]


def of_row(processors: Items[Any], row: int) -> list[Any]:
    """The processors for one row of a batch; what they hold of each row is that row's."""
    found = []
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = int(ignored[row])
        found.append(processor)
    return found


class ProcessedTarget:
    """A target whose logits at every node are what processors make of them after that node's own path.

    rows: of every sequence that runs. device: where processors expect ids and scores.
    """

    def __init__(self, target: LanguageModel):
        self.target, self.config = target, target.config
        self.rows: dict[Sequence, Row] = {}
        self.device = torch.device("cpu")

    def new_pool(self, num_slots: int, max_nodes: int) -> StatePool:
        return self.target.new_pool(num_slots, max_nodes)

    def prefill(self, token_ids: Tensor, slot: int, pool: StatePool, tap: Tap | None = None) -> None:
        self.target.prefill(token_ids, slot, pool, tap)

    def head(self, stream: Tensor) -> Tensor:
        return self.target.head(stream)

    def verify(
        self,
        tokens: Tensor,
        tree: Tree,
        slots: list[int],
        pool: StatePool,
        mode: str = "auto",
        tap: Tap | None = None,
    ) -> Tensor:
        logits = self.target.verify(tokens, tree, slots, pool, mode, tap).to(torch.float32, copy=True)
        rows = {sequence.slot: (sequence, row) for sequence, row in self.rows.items()}
        ids, parents = tokens.tolist(), tree.parent.tolist()
        for b, (slot, count) in enumerate(zip(slots, tree.num_nodes.tolist(), strict=True)):
            sequence, row = rows[slot]
            paths = [row.padding + sequence.tokens]
            for n in range(1, count):
                paths.append([*paths[parents[b][n]], ids[b][n]])
            for length in sorted({len(path) for path in paths}):
                nodes = [n for n, path in enumerate(paths) if len(path) == length]
                said = torch.tensor([paths[n] for n in nodes], device=self.device)
                scores = logits[b, nodes].to(self.device)
                for processor in row.processors:
                    scores = processor(said, scores)
                logits[b, nodes] = scores.to(logits.device)
        return logits
