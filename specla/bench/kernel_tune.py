"""Which launch is fastest for each shape: a sweep over few configurations, and the table it ends in."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from specla.bench.baselines import verify_round
from specla.bench.kernel import MODES, Options, Timer, run_in_processes
from specla.bench.kernel_checks import check_configs
from specla.bench.kernel_inputs import Layer, Shape, Work, make_work
from specla.models.loader import replace_file
from specla.ops.triton.tuning import EXACT, Config, forget, most_rows, read_table

ONE = Shape("one node", 1, 0, 1)  # plain decoding
SWEPT = (  # rows of the state fill a device, or spare it the work that every program does again
    Config("serial", 16, 4),
    Config("serial", 32, 4, registers=168),
    Config("serial", 64, 4),
    Config("serial", 64, 4, prepared=True),
    Config("hybrid", 16, 4, workers=2),
    Config("hybrid", 32, 4, workers=2),
    Config("parallel", 16, 4, block_k=64),
    Config("parallel", 16, 4, block_k=128),
    Config("parallel", 32, 4, block_k=64),
    Config("parallel", 64, 4, block_k=64),
    Config("parallel", 64, 4, block_k=64, prepared=True, registers=168),
    Config("parallel", 64, 4, block_k=32, registers=128),
    Config("parallel", 64, 4, block_k=32, prepared=True, registers=128),
)


def candidates(layer: Layer, nodes: int) -> list[Config]:
    """The configurations to try for trees of so many nodes."""
    most = max(16, triton.next_power_of_2(layer.dim_v))
    return [
        config
        for config in SWEPT
        if config.block_v <= most
        and config.block_v <= max(16, most_rows(config.mode, config.num_warps, layer.dim_k))
        and config.workers <= max(1, (nodes - 1) // 2)
    ]


def tuned_shapes(shapes: Sequence[Shape]) -> dict[int, list[Shape]]:
    """By number of nodes what is run: real trees where there are some, chains elsewhere, and always one node."""
    found: dict[int, list[Shape]] = {1: [ONE]}
    for shape in sorted(shapes, key=lambda shape: (shape.nodes, shape.is_chain)):
        same = found.setdefault(shape.nodes, [])
        if not same or shape.is_chain is same[0].is_chain:
            same.append(shape)
    return found


def tune(options: Options, timer: Timer, device: torch.device, *, ahead: bool = True) -> list[dict[str, Any]]:
    """Entries of a table for all batches and numbers of nodes of the options.

    Args:
        ahead: find out in other processes which configurations the device can run, and compile them.

    Raises:
        CheckError: when results are wrong.
    """
    layer = options.layer
    by_nodes = tuned_shapes(options.shapes)
    jobs = [
        (options, device, shapes[0], config)
        for nodes, shapes in by_nodes.items()
        for config in candidates(layer, nodes)
    ]
    runs = run_in_processes(can_run, jobs) if ahead else [True] * len(jobs)
    usable = [(shape, config) for (*_, shape, config), run in zip(jobs, runs, strict=True) if run]
    entries = []
    for batch in options.batches:
        for nodes, shapes in by_nodes.items():
            configs = [config for shape, config in usable if shape is shapes[0]]
            us = dict.fromkeys(configs, 0.0)
            for shape in shapes:
                work = make_work(
                    layer, shape, batch,
                    pending=options.pending, seed=options.seed, device=device, rounds=options.rounds,
                )  # fmt: skip
                check_configs(work, configs)
                for config in configs:
                    us[config] += timer(_calls(work, config), options.repeats) / len(shapes)
            entries.append(entry(layer, batch, nodes, us))
            print(f"batch {batch}, {nodes} nodes: {entries[-1]['us']}", file=sys.stderr, flush=True)
    return entries


def entry(layer: Layer, batch: int, nodes: int, us: dict[Config, float]) -> dict[str, Any]:
    """A table's entry from the time of every configuration; a tree without a second chain needs no second worker."""
    best: dict[str, tuple[float, Config]] = {}
    for config, time in us.items():
        if config.mode not in best or time < best[config.mode][0]:
            best[config.mode] = time, config
    time, config = best["serial"]
    best.setdefault("hybrid", (time, config._replace(mode="hybrid")))
    auto = min(EXACT, key=lambda mode: best[mode][0])  # serial where they are equal
    defaults = Config("")._asdict()
    fields = {
        mode: {n: x for n, x in best[mode][1]._asdict().items() if n != "mode" and x != defaults[n]}
        for mode in MODES
    }
    return {
        "dim_k": layer.dim_k, "dim_v": layer.dim_v, "value_heads": layer.value_heads, "batch": batch, "nodes": nodes,
        "us": {mode: round(best[mode][0], 2) for mode in MODES}, **fields, "auto": auto,
    }  # fmt: skip


def write_table(path: Path, table: dict[str, Any]) -> None:
    """Write a table, an entry a line; from then on this process chooses by it, if it is one that it searches.

    Raises:
        OSError: when it cannot be written.
    """
    head = [
        f" {json.dumps(name)}: {json.dumps(value)}," for name, value in table.items() if name != "entries"
    ]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table["entries"])
    text = "\n".join(["{", *head, ' "entries": [', rows, " ]", "}", ""])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, partial(Path.write_text, data=text))
    read_table(path)
    forget()


def can_run(options: Options, device: torch.device, shape: Shape, config: Config) -> bool:
    """Compile and launch once; False where the device has not the registers or the memory."""
    work = make_work(
        options.layer, shape, 1, pending=options.pending, seed=options.seed, device=device, rounds=1, rows=1
    )
    try:
        _calls(work, config)[0]()
    except OutOfResources:
        return False
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return True


def _calls(work: Work, config: Config) -> list[partial[Any]]:
    return [partial(verify_round, work, r, config, pending=r.pending) for r in work.rounds]
