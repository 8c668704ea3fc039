"""Rounds of a target with random weights on a GPU: `specla bench generate --random SHAPE`.

Acceptance is told (`SyntheticDrafter`), so that times can be measured without a trained model: once with drafts for
nothing, once while a trained drafter's network does all its work and its trees are replaced by told ones. Tokens of
every run are compared with plain decoding's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.bench.decode import Decoded, decode_batch
from specla.bench.generate import UnrepeatableError
from specla.drafters import NoDrafter, SyntheticDrafter
from specla.drafters.base import Exported
from specla.drafters.network import Eagle, EagleConfig
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.resident.drafts import Drafts, new_drafts
from specla.resident.eagle import EagleProposer
from specla.resident.proposers import Proposer
from specla.resident.rounds import Shape
from specla.resident.slots import Slots
from specla.resident.walk import Outcome, new_outcome
from specla.resident.writes import Writes
from specla.sampling import Plan
from specla.tree import Tree

SHAPES = {
    "gdn-1.3b": GatedDeltaNetConfig(
        vocab_size=32000, hidden_size=2048, num_hidden_layers=24, num_heads=8, head_dim=256, expand_v=1.0,
        intermediate_size=5632, eos_token_id=None,
    ),
    "tiny": GatedDeltaNetConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_heads=2, head_dim=64, expand_v=1.0,
        intermediate_size=256, eos_token_id=None,
    ),
}  # fmt: skip
DRAFT_VOCAB = 8192
PROMPT = 8  # random tokens
TOKENS = 256  # of each sequence, unless it is said
GREEDY = Plan(noise=False, penalty=False, ranks=0, min_p=False)


class Way(NamedTuple):
    """How much is drafted and how often a draft is right; `network`: whether a trained drafter does its work, too.

    drafts: None leaves it to the engine, up to 15.
    """

    name: str
    drafts: int | None
    steps: int
    topk: int
    rate: float
    network: bool


WAYS = (
    Way("chain 8 at 0.8", 8, 8, 1, 0.8, False),
    Way("chain 15 at 0.8", 15, 15, 1, 0.8, False),
    Way("tree 16 at 0.8", 15, 5, 4, 0.8, False),
    Way("tree 32 at 0.8", 31, 8, 4, 0.8, False),
    Way("eagle, 3 at 0.7", 3, 3, 1, 0.7, True),
    Way("eagle, 7 at 0.7", 7, 7, 1, 0.7, True),
    Way("eagle, tree 16 at 0.7", 15, 5, 4, 0.7, True),
    Way("eagle, auto at 0.7", None, 7, 1, 0.7, True),
)


def choose_ways(names: Sequence[str] | None) -> tuple[Way, ...]:
    """The ways of these names, in their own order; all of them for None. ValueError names those that there are."""
    unknown = sorted(set(names or ()) - {way.name for way in WAYS})
    if unknown:
        raise ValueError(
            f"--ways must be among {', '.join(repr(way.name) for way in WAYS)}, got {unknown[0]!r}"
        )
    return tuple(way for way in WAYS if names is None or way.name in names)


class Shadowed:
    """A trained drafter that works as in earnest; the trees that are verified are told."""

    def __init__(self, eagle: EagleProposer, told: Proposer):
        self.eagle, self.told = eagle, told
        self.layer_ids, self.kept = eagle.layer_ids, eagle.kept

    def chains(self, batch: int) -> bool:
        return self.told.chains(batch)

    def prepare(self) -> None:
        self.eagle.prepare()

    def clear(self, slot: int) -> None:
        self.eagle.clear(slot)

    def read(self, slot: int, features: Tensor, following: list[int]) -> None:
        self.eagle.read(slot, features, following)

    def export(self, slot: int) -> Exported | None:
        return self.eagle.export(slot)

    def restore(self, slot: int, exported: Exported, following: int) -> None:
        self.eagle.restore(slot, exported, following)

    def admit(self, writes: Writes, slot: int, key: int, size: int) -> None:
        self.eagle.admit(writes, slot, key, size)
        self.told.admit(writes, slot, key, size)

    def reading(self, last: int, size: int) -> int:
        return self.eagle.reading(last, size)

    def propose(
        self, rows: Tensor, slots: Slots, limit: Tensor, out: Drafts, noisy: bool, reading: int
    ) -> None:
        self.eagle.propose(rows, slots, limit, out, noisy, reading)
        self.told.propose(rows, slots, limit, out, noisy, reading)

    def taps(self, batch: int, size: int) -> dict[int, Tensor]:
        return self.eagle.taps(batch, size)

    def keep(self, slots: Slots, outcome: Outcome) -> None:
        self.eagle.keep(slots, outcome)


def random_target(config: GatedDeltaNetConfig, seed: int, device: torch.device) -> GatedDeltaNet:
    """Fresh weights, matrices in bfloat16."""
    with torch.device(device):
        target = GatedDeltaNet(config)
    target.reset_parameters(torch.Generator(device).manual_seed(seed))
    return _in_bfloat16(target)


def random_network(config: GatedDeltaNetConfig, seed: int, device: torch.device) -> Eagle:
    """A drafter as wide as its target, with three streams of features and a vocabulary of its own."""
    layers = config.num_hidden_layers
    shape = EagleConfig(
        hidden_size=config.hidden_size, vocab_size=config.vocab_size,
        draft_vocab_size=min(DRAFT_VOCAB, config.vocab_size), layer_ids=(0, layers // 2, layers),
        num_heads=config.num_heads, head_dim=config.head_dim, intermediate_size=config.mlp_dim,
    )  # fmt: skip
    with torch.device(device):
        network = Eagle(shape)
    network.reset_parameters(torch.Generator(device).manual_seed(seed))
    return _in_bfloat16(network)


def _in_bfloat16(module: Any) -> Any:
    for name, weight in module.named_parameters():
        if weight.dim() == 2 and not name.endswith("conv_weight"):
            weight.data = weight.data.bfloat16()
    return module.requires_grad_(False)


def measure(
    config: GatedDeltaNetConfig,
    batches: Sequence[int],
    temperature: float,
    seed: int,
    repeat: int,
    max_tokens: int,
    device: torch.device,
    ways: Sequence[Way] = WAYS,
) -> dict[str, Any]:
    """Plain decoding and every way at every batch size, JSON-ready."""
    target, network = random_target(config, seed, device), random_network(config, seed, device)
    pool, params = (
        target.new_pool(1, 2),
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed),
    )
    return {
        "parameters": sum(p.numel() for p in target.parameters()),
        "draft_vocab_size": network.config.draft_vocab_size,
        "state_bytes_per_sequence": pool.bytes_per_sequence(),
        "state_bytes_per_draft_node": pool.bytes_per_node(),
        "batches": [_measure_batch(target, network, n, params, repeat, ways) for n in batches],
    }


def _measure_batch(
    target: GatedDeltaNet, network: Eagle, batch: int, params: SamplingParams, repeat: int,
    ways: Sequence[Way],
) -> dict[str, Any]:  # fmt: skip
    device, seed = target.norm.weight.device, params.seed or 0
    torch.cuda.reset_peak_memory_stats(device)
    generator = torch.Generator().manual_seed(seed + batch)
    prompts = torch.randint(target.config.vocab_size, (batch, PROMPT), generator=generator).tolist()
    config = SpeculativeConfig(num_speculative_tokens=0)
    plain = run(ResidentEngine(target, NoDrafter(), config, batch), prompts, params, repeat)
    rows, parts = [_row("plain", plain, plain)], {}
    _tell(f"batch {batch}, {params.max_tokens} tokens each", format_row(rows[0]))
    for way in ways:
        engine = engine_of(target, network, way, batch, seed)
        rows.append(_row(way.name, run(engine, prompts, params, repeat, plain.outputs), plain))
        _tell(format_row(rows[-1]))
        if way.network and way.topk > 1 and way.drafts is not None:
            parts = time_parts(engine, way.drafts)
            _tell("  its " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in parts.items()))
    peak = torch.cuda.max_memory_allocated(device)
    _tell(f"  peak {peak / 2**30:.1f} GiB")
    return {
        "batch": batch, "max_tokens": params.max_tokens, "ways": rows, "parts_ms": parts, "peak_bytes": peak,
    }  # fmt: skip


def _tell(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def engine_of(target: GatedDeltaNet, network: Eagle, way: Way, batch: int, seed: int) -> ResidentEngine:
    """An engine that drafts in this way."""
    drafts = "auto" if way.drafts is None else way.drafts
    config = SpeculativeConfig(drafts, way.steps, way.topk, synthetic_acceptance_rate=way.rate)
    drafter = SyntheticDrafter(
        way.rate, config.max_draft, way.steps, way.topk, target.config.vocab_size, seed
    )
    engine = ResidentEngine(target, drafter, config, batch)
    if way.network:
        eagle = EagleProposer(
            network, batch, config.max_draft + 1, way.steps, way.topk, None, engine.captures
        )
        engine.rounds.proposer = Shadowed(eagle, engine.rounds.proposer)
    return engine


def run(
    engine: ResidentEngine, prompts: Sequence[list[int]], params: SamplingParams, repeat: int,
    references: Sequence[list[int]] = (),
) -> Decoded:  # fmt: skip
    """Decode a batch `repeat` times; UnrepeatableError when it does not give the same tokens each time."""
    decoded = decode_batch(engine, prompts, [params] * len(prompts), repeat, references)
    if not decoded.alike:
        raise UnrepeatableError("a batch that is decoded again gives other tokens")
    return decoded


def _row(name: str, got: Decoded, plain: Decoded) -> dict[str, Any]:
    same = got.outputs == plain.outputs
    row: dict[str, Any] = {"name": name, "identical": same}
    if same:  # a speed whose tokens differ means nothing
        step, plain_step = got.seconds / got.rounds, plain.seconds / plain.rounds
        row |= {
            "tokens_per_s": round(sum(map(len, got.outputs)) / got.seconds, 1),
            "speedup": round(plain.seconds / got.seconds, 3),
            "steady_speedup": round(got.steady_rate / plain.steady_rate, 3),
            "acceptance_length": round(got.acceptance_length, 3),
            "round_ms": round(1000 * step, 4),
            "plain_steps": round(step / plain_step, 3),
        }
    return row


@torch.inference_mode()
def time_parts(engine: ResidentEngine, drafts: int, replays: int = 20) -> dict[str, float]:
    """Milliseconds of a greedy round's parts in graphs of their own, of the whole, and the whole less its parts."""
    rounds = engine.rounds
    batch, device = rounds.num_slots, rounds.device
    assert isinstance(engine.drafter, SyntheticDrafter)
    for slot in range(batch):
        engine.drafter.references[slot] = [1, 2, 3] * 1000
        writes = Writes(device)
        rounds.slots.admit(writes, slot, [1, 2, 3], remaining=1 << 30)
        rounds.proposer.admit(writes, slot, slot, rounds.size)
        writes.make()
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    size = drafts + 1
    shape = Shape(batch, size, GREEDY, 0, rounds.proposer.reading(size, size))
    outcome = new_outcome(batch, size, device)
    made = new_drafts(batch, drafts + 1, device)
    rounds.limit.fill_(drafts)
    held: list[Tensor] = []

    def tree() -> Tree:
        return Tree.resident(made.parent, made.num_nodes)

    def propose() -> None:
        rounds.proposer.propose(rows, rounds.slots, rounds.limit, made, False, shape.read)

    def verify() -> None:
        held[:] = [rounds.verify(shape, rows, made, tree())]

    def accept() -> None:
        rounds.accept(shape, rows, made, tree(), held[0], outcome)

    def whole() -> None:
        propose()
        verify()
        accept()

    calls = {"propose": propose, "verify": verify, "accept": accept, "round": whole}
    graphs = {name: _captured(call, device) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    parts = {name: median(values) for name, values in times.items()}
    parts["gap"] = parts["round"] - parts["propose"] - parts["verify"] - parts["accept"]
    return {name: round(value, 4) for name, value in parts.items()}


def _captured(call: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


def format_row(row: dict[str, Any]) -> str:
    """The figures of one way for a person."""
    if not row["identical"]:
        return f"  {row['name']:24}   tokens DIFFER from plain decoding's"
    speed = f"{row['tokens_per_s']:10.0f} tokens/s {row['speedup']:6.2f}x {row['steady_speedup']:6.2f}x"
    step = f"{row['round_ms']:8.3f} ms a round = {row['plain_steps']:5.2f} plain steps"
    return f"  {row['name']:24}{speed} {step}, {row['acceptance_length']:5.2f} tokens a round"
