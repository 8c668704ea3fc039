"""Speed of one layer's kernels on draft trees, beside what they replace: `specla bench kernel`.

Launches are captured into a CUDA graph that rotates over rounds whose states exceed the L2; times are microseconds a
launch, medians over replays. Schedules of trees are built before, as a round builds them once for all its layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch

from specla.bench.baselines import (
    Library,
    LibraryChain,
    Snapshots,
    TokenDecoder,
    find_library,
    leaf_chains,
    leaf_paths,
    leaf_rows,
    verify_round,
)
from specla.bench.kernel_checks import BOUNDS, check, run_conv
from specla.bench.kernel_inputs import ROTATED_BYTES, TREES, Layer, Round, Shape, Work, draw_trees, make_work
from specla.ops.triton.commit import commit
from specla.ops.triton.schedule import build
from specla.ops.triton.tuning import Config

EIGHT = Shape("chain:8", 1, 7, 8)  # the tokens of commit against replay
MODES = ("serial", "hybrid", "parallel")
LAUNCHES = 8  # in a graph, at least
COMPILERS = 12  # processes, at most
REPLACED = (
    "replay_leaves", "replay_rows", "decode_tokens", "fla_chain", "fla_chain_written", "snapshots",
    "snapshots_chain",
)  # fmt: skip

Call = Callable[[], object]
Timer = Callable[[Sequence[Call], int], float]


class Thing(NamedTuple):
    """Something to time: a name, a call for every round, and how its launches are configured."""

    name: str
    calls: list[Call]
    config: Config | None = None


@dataclass(frozen=True)
class Options:
    """What to measure."""

    layer: Layer = field(default_factory=Layer)
    batches: tuple[int, ...] = (1, 8, 32, 128)
    shapes: tuple[Shape, ...] = ()
    pending: int = 5
    seed: int = 0
    repeats: int = 20
    groups: tuple[str, ...] = ()
    rounds: int | None = None
    copied_bytes: int = 1 << 30


class GraphTimer:
    """Times launches on a device in a CUDA graph."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def __call__(self, calls: Sequence[Call], repeats: int) -> float:
        """Median microseconds a call over `repeats` replays of a graph in which the calls take turns."""
        torch.cuda.synchronize()
        passes = -(-LAUNCHES // len(calls))
        with torch.cuda.stream(self.stream):
            for (
                call
            ) in calls:  # on the stream that captures: what is kept for a stream must not lie in the graph
                call()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for _ in range(passes):
                for call in calls:
                    call()
            graph.capture_end()
            times = []
            for number in range(repeats + 2):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if number >= 2:
                    times.append(1000 * start.elapsed_time(end) / (passes * len(calls)))
        graph.reset()
        return median(times)


def verify_things(work: Work, _: Library | None) -> Iterator[Thing]:
    """Each mode with the fused update."""
    for mode in MODES:
        config = work.config(mode)
        yield Thing(f"verify_{mode}", [_verify(work, r, config) for r in work.rounds], config)


def separate_things(work: Work, _: Library | None) -> Iterator[Thing]:
    """Verification without an update, and after a commit in a launch of its own."""
    config = work.config("auto")
    yield Thing(
        "verify_without_pending", [_verify(work, r, config, fused=False) for r in work.rounds], config
    )
    both = [_in_turn(_commit(r), _verify(work, r, config, fused=False)) for r in work.rounds]
    yield Thing("commit_then_verify", both, config)


def decode_things(work: Work, _: Library | None) -> Iterator[Thing]:
    """As many tokens as the tree has nodes, a launch each."""
    config = work.config("auto", nodes=1)
    yield Thing("decode_tokens", [TokenDecoder(work, r, config) for r in work.rounds], config)


def replay_things(work: Work, _: Library | None) -> Iterator[Thing]:
    """Every leaf's path from the committed state: a launch for each leaf, and all leaves as rows of one."""
    if work.shape.is_chain:
        return

    def each(r: Round) -> Call:
        calls = [
            partial(chains.run, work, work.config("serial", nodes=chains.paths.shape[1]))
            for chains in leaf_chains(r)
        ]
        return _in_turn(*calls)

    yield Thing("replay_leaves", [each(r) for r in work.rounds])
    calls: list[Call] = []
    for r in work.rounds:
        chains = leaf_rows(r)
        rows, nodes = chains.paths.shape
        rows = rows * work.batch // len(r.slots)
        config = work.config("serial", nodes=nodes, batch=rows)
        calls.append(partial(chains.run, work, config))
    yield Thing("replay_rows", calls, config)


def library_things(work: Work, library: Library | None) -> Iterator[Thing]:
    """flash-linear-attention on a chain, its states written or not."""
    if library is None or not work.shape.is_chain:
        return
    chains = [LibraryChain(work, r, library) for r in work.rounds]
    yield Thing("fla_chain", [partial(chain, written=False) for chain in chains])
    yield Thing("fla_chain_written", [partial(chain, written=True) for chain in chains])


def snapshot_things(work: Work, _: Library | None) -> Iterator[Thing]:
    """Dense snapshots, and the copy of the accepted one."""
    r = work.rounds[0]
    shape = (len(r.slots), work.shape.nodes, *r.state.shape[1:])
    size = work.layer.state_bytes * shape[0] * shape[1]
    number = min(len(work.rounds), max(2, -int(-ROTATED_BYTES // size)))
    memory = [torch.zeros(shape, device=r.state.device) for _ in range(number)]
    for chain in (False, True) if work.shape.is_chain else (False,):
        kept = [Snapshots(work, r, memory[n % number], chain=chain) for n, r in enumerate(work.rounds)]
        yield Thing("snapshots_chain" if chain else "snapshots", [each.verify for each in kept])
    yield Thing("snapshot_copy", [each.copy_back for each in kept])


def conv_things(work: Work, _: Library | None) -> Iterator[Thing]:
    """The convolution with the commit of its window."""
    yield Thing("conv", [partial(run_conv, work, r) for r in work.rounds])


def schedule_things(work: Work, _: Library | None) -> Iterator[Thing]:
    """The schedule of a round's trees, which all layers share."""
    for mode in ("serial", "hybrid"):
        workers = work.config(mode).workers
        calls = [partial(build, r.tree.parent, r.tree.num_nodes, workers) for r in work.rounds]
        yield Thing(f"schedule_{mode}", list(calls))


def commit_things(work: Work, library: Library | None) -> Iterator[Thing]:
    """Of work on chains of eight: their commit from factors, and several replays that write the state."""
    eight = torch.arange(8, dtype=torch.int32, device=work.device).repeat(len(work.rounds[0].slots), 1)
    count = torch.full_like(work.rounds[0].slots, 8)
    chain, token = work.config("auto"), work.config("auto", nodes=1)
    yield Thing(
        "commit_8",
        [
            partial(commit, r.state, r.pending.factors, eight, count, r.slots, by_slot=True)
            for r in work.rounds
        ],
    )
    yield Thing("replay_8_chain", [
        _in_turn(
            _verify(work, r, chain, fused=False),
            partial(commit, r.state, r.factors, eight, count, r.slots, by_slot=True),
        )
        for r in work.rounds
    ], chain)  # fmt: skip
    yield Thing("replay_8_tokens", [TokenDecoder(work, r, token) for r in work.rounds], token)
    if library is not None:
        chains = [LibraryChain(work, r, library) for r in work.rounds]
        yield Thing("replay_8_fla", [partial(each, written=True) for each in chains])


Things = Callable[[Work, "Library | None"], Iterator[Thing]]
GROUPS: dict[str, Things] = {
    "verify": verify_things, "separate": separate_things, "replay": replay_things, "decode": decode_things,
    "fla": library_things, "snapshots": snapshot_things, "conv": conv_things, "schedule": schedule_things,
    "commit": commit_things,
}  # fmt: skip


def measure_kernel(options: Options, timer: Timer, device: torch.device) -> dict[str, Any]:
    """Check and time all that is asked for, JSON-ready but for where, when and how it was measured.

    Raises:
        CheckError: when results are wrong.
    """
    groups = options.groups or tuple(GROUPS)
    library = find_library() if {"fla", "commit"} & set(groups) else None
    speed = copy_speed(timer, device, options.copied_bytes, options.repeats)
    results, commits = [], []
    for batch in options.batches:
        floor = 2 * options.layer.state_bytes * batch / speed * 1e6
        for shape in options.shapes:
            tree_groups = [name for name in groups if name != "commit"]
            if tree_groups:
                found = _measure(options, shape, batch, tree_groups, library, timer, device)
                results.append({"batch": batch, "tree": shape.name, "floor_us": round(floor, 2), **found})
        if "commit" in groups:
            found = _measure(options, EIGHT, batch, ["commit"], library, timer, device)
            commits.append({"batch": batch, "floor_us": round(floor, 2), **found})
    layer = options.layer
    return {
        "benchmark": "kernel",
        "layer": asdict(layer),
        "pending": options.pending,
        "seed": options.seed,
        "repeats": options.repeats,
        "copy_tb_per_s": round(speed / 1e12, 3),
        "bytes_per_draft_node": {
            "factors": layer.factor_bytes,
            "snapshot": layer.state_bytes,
            "ratio": round(layer.state_bytes / layer.factor_bytes, 1),
        },
        "bounds": BOUNDS,
        "trees": {
            shape.name: asdict(shape) | {"parents": draw_trees(shape, seed=options.seed)}
            for shape in options.shapes
        },
        "results": results,
        "commits": commits,
        "fla": None if library is None else library.version,
    }


def ratios(us: dict[str, float]) -> dict[str, float]:
    """How many times longer what is replaced takes; only for what was measured.

    `.._over_best` compares with the fastest mode, `.._over_exact` with the exact one that auto chooses, both with the
    fused update; `.._over_read` with the latter without a pending update, which writes no state.
    """
    found: dict[str, float] = {}

    def put(name: str, over: str, under: float | None) -> None:
        if over in us and under:
            found[name] = round(us[over] / under, 3)

    modes = [us[f"verify_{mode}"] for mode in MODES if f"verify_{mode}" in us]
    best = min(modes) if modes else None
    for over in REPLACED:
        put(f"{over}_over_best", over, best)
        put(f"{over}_over_exact", over, us.get("verify_auto"))
        put(f"{over}_over_read", over, us.get("verify_without_pending"))
    put("commit_then_verify_over_fused", "commit_then_verify", us.get("verify_auto"))
    for over in ("replay_8_chain", "replay_8_tokens", "replay_8_fla"):
        put(f"{over}_over_commit", over, us.get("commit_8"))
    return found


def copy_speed(timer: Timer, device: torch.device, size: int, repeats: int) -> float:
    """Bytes a second, read and written together, by a kernel over `size` bytes (a device's own copy is slower)."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer([partial(torch.neg, source, out=target)], repeats) * 1e6


def compile_ahead(options: Options, device: torch.device) -> None:
    """Launch every variant once, each in one of several processes, so that Triton's cache holds it."""
    jobs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    groups = options.groups or tuple(GROUPS)
    for batch in options.batches:
        for shape in (*options.shapes, EIGHT):
            configs = tuple(
                options.layer.config(mode, device, batch, nodes)
                for mode in ("auto", *MODES)
                for nodes in (shape.nodes, 1)
            )
            for group in groups:
                if (group == "commit") is (shape is EIGHT):
                    jobs.setdefault((group, shape, configs), (options, device, shape, batch, group))
    run_in_processes(_launch_once, list(jobs.values()))


def run_in_processes(job: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What jobs return that run in fresh processes, several at a time; the first that fails raises what it raised."""
    workers = max(1, min(COMPILERS, os.cpu_count() or 1, len(jobs)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return [done.result() for done in [pool.submit(job, *arguments) for arguments in jobs]]


def _measure(
    options: Options, shape: Shape, batch: int, groups: Collection[str], library: Library | None, timer: Timer,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    work = make_work(
        options.layer, shape, batch,
        pending=options.pending, seed=options.seed, device=device, rounds=options.rounds,
    )  # fmt: skip
    library = check(work, groups, library)
    us: dict[str, float] = {}
    configs: dict[str, Any] = {}
    for group in groups:
        for thing in GROUPS[group](work, library):
            us[thing.name] = round(timer(thing.calls, options.repeats), 3)
            if thing.config is not None:
                configs[thing.name] = thing.config._asdict()
        if group == "verify":
            chosen = work.config("auto")
            us["verify_auto"], configs["verify_auto"] = us[f"verify_{chosen.mode}"], chosen._asdict()
    leaves = [leaf_paths(parent) for parent in draw_trees(shape, seed=options.seed)]
    found = {
        "rounds": len(work.rounds),
        "mean_leaves": round(sum(map(len, leaves)) / len(leaves), 2),
        "mean_replayed_tokens": round(sum(len(path) for row in leaves for path in row) / len(leaves), 2),
        "us": us,
        "ratios": ratios(us),
        "configs": configs,
    }
    del work
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _verify(work: Work, r: Round, config: Config, *, fused: bool = True) -> Call:
    return partial(verify_round, work, r, config, pending=r.pending if fused else None)


def _commit(r: Round) -> Call:
    factors, path, count = r.pending
    return partial(commit, r.state, factors, path, count, r.slots, by_slot=True)


def _in_turn(*calls: Call) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _launch_once(options: Options, device: torch.device, shape: Shape, batch: int, group: str) -> None:
    rounds = TREES if group == "replay" else 1  # whose variants depend on the tree
    work = make_work(
        options.layer, shape, batch,
        pending=options.pending, seed=options.seed, device=device, rounds=rounds, rows=1,
    )  # fmt: skip
    library = find_library() if group in ("fla", "commit") else None
    for thing in GROUPS[group](work, library):
        for call in thing.calls:
            call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
