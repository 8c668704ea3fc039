"""Checkpoints of any architecture with random weights, every one of which matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specla.models.architectures import architecture_of
from specla.models.loader import load_target
from specla.tree import Tree

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 22, 0]


def write_random(directory: Path, raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Write config.json and the tensors that it asks for, float32; decays are slow, so that states remember."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    architecture = architecture_of(raw)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for source in architecture.sources(architecture.config(raw), ()).values():
        for name, shape in source.shapes.items():
            noise = torch.randn(shape, generator=generator)
            if name.endswith("A_log"):
                weights[name] = noise - 1
            elif name.endswith(("norm.weight", "norm_f.weight", "layernorm.weight", ".D")):
                weights[name] = 1 + 0.3 * noise
            else:
                weights[name] = 0.4 * noise
    save_file(weights, directory / "model.safetensors")
    return weights


def check_against(answer: Tensor, directory: Path) -> None:
    """That a checkpoint gives these logits of TEXT: at once, and read in pieces, a prefill and two verified chains."""
    model = load_target(directory, dtype="float64")
    whole = model.logits(model(torch.tensor([TEXT])))[0]
    torch.testing.assert_close(whole, answer, rtol=0, atol=1e-9)
    pool = model.new_pool(1, 6)
    slot = pool.alloc()
    model.prefill(torch.tensor(TEXT[:5]), slot, pool)
    for first, last in ((5, 7), (7, 13)):
        got = model.verify(torch.tensor([TEXT[first:last]]), Tree.chain(last - first), [slot], pool)
        torch.testing.assert_close(got[0], answer[first:last], rtol=0, atol=1e-9)
        pool.accept([slot], torch.arange(last - first)[None], torch.tensor([last - first - 1]))
