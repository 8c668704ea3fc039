"""Requests of all kinds for the resident engine, and a target that needs no network to be sensitive to every mistake.

Its state is a window of hashes of all that was read, so that a wrong commit changes every later token, and it costs
nothing. Rounds are otherwise what they are on a GPU, where a network takes its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specla.drafters import Drafter, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.engine.sequence import Sequence
from specla.models.gated_deltanet import GatedDeltaNet
from specla.resident import forward
from specla.resident.forward import Layers, Round
from specla.state import StatePool
from specla.tree import Tree
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE
from tests.targets import VOCAB, make_config, make_target, prompt

HASHES = 4093


class HashNet(GatedDeltaNet):
    """The logits after a token are a row of a table, which a hash of the whole text until there chooses.

    poison: whoever reads this token gets NaN.
    """

    def __init__(self, poison: int = -1):
        super().__init__(make_config(num_hidden_layers=1, num_heads=1, intermediate_size=16))
        self.requires_grad_(False)
        self.table = 2 * torch.randn(HASHES, VOCAB, generator=torch.Generator().manual_seed(0))
        self.poison = poison

    def read(self, window: Tensor, bank: Tensor, tokens: list[int], parents: list[int]) -> Tensor:
        """Logits after each node; the nodes' hashes go into the bank `[M]`."""
        above = {-1: [int(x) for x in window.tolist()]}
        logits = torch.full((len(tokens), VOCAB), torch.nan)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            old, older, oldest = reversed(above[parent])
            made = (5 * old + 7 * older + 11 * oldest + 13 * token + 1) % HASHES
            above[node] = [older, old, made]
            bank[node] = made
            if token != self.poison:
                logits[node] = self.table[made]
        return logits

    def prefill(self, token_ids: Tensor, slot: int, pool: StatePool, tap: Any = None) -> None:
        (group,) = pool.groups.values()
        pool.flush([slot])
        window, hashes = group.conv_state[0, slot, 0], torch.empty(len(token_ids))
        self.read(window, hashes, token_ids.tolist(), list(range(-1, len(token_ids) - 1)))
        window.copy_(torch.cat([window, hashes])[-3:])
        pool.length[slot] += len(token_ids)

    def verify(
        self,
        tokens: Tensor,
        tree: Tree,
        slots: list[int],
        pool: StatePool,
        mode: str = "auto",
        tap: Any = None,
    ) -> Tensor:
        (group,) = pool.groups.values()
        pool.flush(slots)
        logits = torch.full((*tokens.shape, VOCAB), torch.nan)
        for b, (slot, count) in enumerate(zip(slots, tree.num_nodes.tolist(), strict=True)):
            window, bank = group.conv_state[0, slot, 0], group.conv_inputs[0, slot, :, 0]
            logits[b, :count] = self.read(
                window, bank, tokens[b, :count].tolist(), tree.parent[b, :count].tolist()
            )
        return logits


def read_trees(target: Any, layers: Layers, tokens: Tensor, now: Round, taps: Any = None) -> Tensor:
    """That of `specla.resident.forward`; what a bank holds serves once."""
    if not isinstance(target, HashNet):
        return forward.read_trees(target, layers, tokens, now, taps)
    old, new = (layers.layer(0).bank(turn).conv_inputs[:, :, 0] for turn in (now.turn + 1, now.turn))
    logits = torch.full((*tokens.shape, VOCAB), torch.nan)
    for b, (slot, count) in enumerate(zip(now.rows.tolist(), now.tree.num_nodes.tolist(), strict=True)):
        if slot >= 0:
            window, path = layers.conv_state[0, slot, 0], now.path[b, : now.taken[b]].long()
            window.copy_(torch.cat([window, old[slot, path]])[-3:])
            old[slot] = torch.nan
            parents = now.tree.parent[b, :count].tolist()
            logits[b, :count] = target.read(window, new[slot], tokens[b, :count].tolist(), parents)
    return logits.flatten(0, 1)


def head(target: Any, hidden: Tensor) -> Tensor:
    return hidden if isinstance(target, HashNet) else forward.head(target, hidden)


@cache
def target(poison: int = -1) -> GatedDeltaNet:
    """A target whose `poison` makes NaN of what follows it: hashes where there is no GPU."""
    if DEVICE.type == "cpu":
        return HashNet(poison)
    made = copy.deepcopy(make_target("plain")).to(DEVICE)
    if poison >= 0:
        made.embeddings.weight[poison] = torch.nan
    return made


@dataclass(frozen=True)
class Request:
    """stop_after: `should_stop` ends it with this token."""

    number: int
    params: SamplingParams
    stop_after: int | None = None

    @property
    def prompt(self) -> list[int]:
        return prompt(1 + self.number % 7, self.number) * (1 + self.number % 2)

    def should_stop(self) -> Callable[[int], bool] | None:
        seen: list[int] = []

        def stop(token: int) -> bool:
            seen.append(token)
            return len(seen) == self.stop_after

        return None if self.stop_after is None else stop

    def add(self, engine: Engine, **options: Any) -> Sequence:
        sequence = engine.add(self.prompt, self.params, self.should_stop(), **options)
        if isinstance(engine.drafter, SyntheticDrafter):
            whole = replace(
                self, params=replace(self.params, stop_token_ids=(), max_tokens=60), stop_after=None
            )
            engine.drafter.references[sequence.key] = self.prompt + whole.alone()[0]
        return sequence

    @cache  # noqa: B019
    def alone(self) -> tuple[list[int], str | None]:
        """Tokens and end of plain decoding by the engine that waits."""
        engine = Engine(target(), NoDrafter(), max_num_seqs=1)
        sequence = engine.add(self.prompt, self.params, self.should_stop())
        finish(engine)
        return sequence.output, sequence.finish_reason


def going_on(tokens: list[int], request: Request) -> tuple[list[int], str | None]:
    """What plain decoding makes of all tokens so far."""
    engine = Engine(target(), NoDrafter(), max_num_seqs=1)
    sequence = engine.add(tokens, request.params, request.should_stop())
    finish(engine)
    return sequence.output, sequence.finish_reason


def finish(engine: Engine) -> None:
    while engine.has_work:
        assert step(engine)


def held(engine: Engine, slots: list[int]) -> list[Tensor]:
    """Copies of all that these slots hold."""
    assert isinstance(engine, ResidentEngine)
    state, windows, factors, inputs, *_ = engine.rounds.layers
    return [x[:, slots].clone() for x in (state, windows, *factors, inputs)]


def step(engine: Engine) -> list[Sequence]:
    """A step that leaves alone what is free before and after it."""
    if not isinstance(engine, ResidentEngine) or engine.waiting:
        return engine.step()
    free = sorted(engine.pool._free)
    before = held(engine, free)
    grown = engine.step()
    assert all(same_bits(a, b) for a, b in zip(held(engine, free), before, strict=True)), (
        "a free slot was written to"
    )
    return grown


def make(
    drafter: str = "none", drafts: int | str = 3, slots: int = 3, kind: Any = ResidentEngine, **net: Any
) -> Any:
    made: Drafter = NoDrafter()
    if drafter == "ngram":
        made = NgramDrafter(min_ngram=1)
    if drafter == "synthetic":
        made = SyntheticDrafter(0.8, drafts if isinstance(drafts, int) else 15, 3, 2, VOCAB, seed=1)
    return kind(target(**net), made, SpeculativeConfig(num_speculative_tokens=drafts), slots)


def check_counts(sequence: Sequence) -> None:
    metrics, output = sequence.metrics, sequence.output
    assert metrics.num_tokens == len(output) == len(sequence.from_draft)
    assert metrics.num_spec_steps == metrics.accepted_per_round.total()
    accepted = sum(n * times for n, times in metrics.accepted_per_round.items())
    assert (
        accepted == metrics.num_accepted_draft_tokens == sum(sequence.from_draft) <= metrics.num_draft_tokens
    )


def check_end(engine: ResidentEngine) -> None:
    """Nothing runs, on the host or the device."""
    assert engine.pool.num_free == len(engine.pool.length) and not engine.running and not engine.has_work
    assert bool((engine.rounds.rows == -1).all()), "a row still runs that nobody waits for"


WARM = SamplingParams(temperature=1.0, seed=3, max_tokens=11)
KINDS = [
    SamplingParams(max_tokens=12),
    WARM,
    replace(WARM, temperature=1.6, top_k=5),
    replace(WARM, top_k=33),
    replace(WARM, top_p=0.7),
    replace(WARM, min_p=0.05, seed=-(2**63)),
    replace(WARM, top_p=0.5, top_k=12, min_p=0.02, repetition_penalty=1.4),
    SamplingParams(max_tokens=13, repetition_penalty=0.3),
    SamplingParams(max_tokens=1),
    replace(WARM, max_tokens=2),
    SamplingParams(max_tokens=40, stop_token_ids=(1, 2, 3, 4, 5, 6, 10**12)),
    replace(WARM, max_tokens=40, stop_token_ids=tuple(range(47, 17, -1))),  # more than a slot holds
]
MIX = [Request(n, params, 5 if n % 4 == 1 else None) for n, params in enumerate(KINDS)]
