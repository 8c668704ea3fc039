"""Compiling ahead what the table needs, with random weights and a few tokens, while a GPU trains for instance."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gdn_1p3b.plan import Shape
from benchmarks.gdn_1p3b.stages import table_settings, target_config
from specla.bench.pieces import Table
from specla.bench.resident import random_network, random_target
from specla.bench.table import measure_table

LENGTHS = (20, 60, 110, 200, 300, 500)  # of prompts: all kinds of reading
TOKENS = 14  # enough for graphs of every turn


def compile_table(args: argparse.Namespace, shape: Shape, device: torch.device) -> None:
    """Run every way of the table at its batches and temperatures; what it measures says nothing."""
    config, settings = target_config(args, shape), table_settings(args)
    target, network = random_target(config, args.seed, device), random_network(config, args.seed, device)
    settings = replace(settings, max_tokens=TOKENS, per_suite=(1,), rates=(1.0,))
    chance = torch.Generator().manual_seed(args.seed)
    prompts = [torch.randint(config.vocab_size, (n,), generator=chance).tolist() for n in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder) / "table.json", {})
        measure_table(target, network, {"random": prompts}, settings, table)
        for skipped in table.made["skipped"]:
            print(f"compile: B={skipped['batch']} {skipped['way']}: {skipped['why']}", file=sys.stderr)
