"""Tiny random drafters for the targets in `tests.targets`."""

from __future__ import annotations

from typing import Any

import torch

from specla.drafters.network import Eagle, EagleConfig
from specla.models.language_model import LanguageModel

KINDS: dict[str, dict[str, Any]] = {
    "delta": {"mixer": "delta"},
    "delta_bare": {"mixer": "delta", "use_gate": False, "conv_size": 1},
    "attention": {"mixer": "attention", "sliding_window": None, "num_key_value_heads": 1},
    "window": {"mixer": "attention", "sliding_window": 5},
}


def make_eagle(
    target: LanguageModel,
    kind: str = "delta",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **changes: Any,
) -> Eagle:
    """A random drafter whose vocabulary is a part of the target's; float64 unless told otherwise."""
    config = target.config
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "draft_vocab_size": 30,
        "layer_ids": (0, 1, config.num_hidden_layers), "num_heads": 2, "head_dim": 8, "intermediate_size": 24,
    }  # fmt: skip
    network = Eagle(EagleConfig(**fields | KINDS[kind] | changes))
    generator = torch.Generator().manual_seed(seed)
    network.reset_parameters(generator)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3, 1, generator=generator)  # states that remember
            elif weight.dim() == 2:
                weight.normal_(0, 0.3, generator=generator)
        chosen = torch.randperm(config.vocab_size, generator=generator)[: network.config.draft_vocab_size]
        network.token_ids.copy_(chosen.sort().values)
        network.embeddings.weight.copy_(target.embeddings.weight)
        head = target.embeddings.weight if target.lm_head is None else target.lm_head.weight
        network.lm_head.weight.copy_(head[network.token_ids])
    return network.to(dtype).requires_grad_(False).eval()
