"""A whole checkpoint made on the spot: a tiny random target, a tokenizer that fits it, and a drafter if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from specla.drafters.checkpoint import save_drafter
from specla.drafters.network import Eagle
from specla.models.architectures import ARCHITECTURES
from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import save_target
from tests.drafters.eagles import make_eagle

SENTENCES = [
    "the cat sat on the mat, and the dog sat on the cat",
    "def add(first, second):\n    return first + second",
    "naïve café für Zoë, 12 + 34 = 46",
]


def save_tokenizer(directory: Path) -> int:
    """A byte-level BPE tokenizer.json, <s> = 0 and </s> = 1; it can split characters. The size of its vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=90, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def save_checkpoint(directory: Path, seed: int = 0, **changes: Any) -> GatedDeltaNet:
    """Write config, weights (fp32) and tokenizer of a random target whose text does not loop at once."""
    vocab_size = save_tokenizer(directory)
    raw: dict[str, Any] = {
        "model_type": "gated_deltanet", "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2,
        "num_heads": 2, "head_dim": 8, "expand_v": 1.0, "intermediate_size": 40, "initializer_range": 0.3,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    model = GatedDeltaNet(GatedDeltaNetConfig.from_dict(raw | changes))
    generator = torch.Generator().manual_seed(seed)
    model.reset_parameters(generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3, 0, generator=generator)
    save_target(model, directory, torch.float32)
    return model


def save_companion(
    directory: Path,
    target: GatedDeltaNet,
    kind: str = "delta",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Eagle:
    """Write a random drafter for `target` where the checkpoint in `directory` keeps its own."""
    network = make_eagle(target, kind, dtype=torch.float32, **changes)
    save_drafter(network, directory / "drafter", "target", dtype=dtype)
    return network


def write_random(directory: Path, raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Write a checkpoint of any target, by its `config.json`, whose every tensor is random."""
    architecture = ARCHITECTURES[raw["model_type"]]
    sources = architecture.sources(architecture.config(raw), ())
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for source in sources.values():
        for name, shape in source.shapes.items():
            noise = torch.randn(shape, generator=rng)
            weights[name] = 1 + 0.3 * noise if "norm" in name else 0.3 * noise
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(weights, directory / "model.safetensors")
    return weights
