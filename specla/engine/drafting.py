"""Drafters by name."""

from __future__ import annotations

from specla.drafters import Drafter, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.engine.params import DRAFTERS, SpeculativeConfig


def check_drafter(name: str, config: SpeculativeConfig) -> None:
    """Raise ValueError for a name that is not one of DRAFTERS, or settings that it has no use for."""
    if name not in DRAFTERS:
        raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {name!r}")
    if config.prune_threshold is not None:
        raise ValueError(f"prune_threshold needs a drafter that gives probabilities, which {name} does not")
    if config.synthetic_acceptance_rate is not None and name != "synthetic":
        raise ValueError(f"synthetic_acceptance_rate is for drafter synthetic, not {name}")
    if config.synthetic_acceptance_rate is None and name == "synthetic":
        raise ValueError("drafter synthetic needs synthetic_acceptance_rate")


def make_drafter(name: str, config: SpeculativeConfig, vocab_size: int, seed: int) -> Drafter:
    """The drafter of that name, as large as the configuration allows; ValueError as `check_drafter`."""
    check_drafter(name, config)
    if name == "none" or config.max_draft == 0:
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter(config.max_draft, config.num_steps, config.topk)
    assert config.synthetic_acceptance_rate is not None
    return SyntheticDrafter(
        config.synthetic_acceptance_rate, config.max_draft, config.num_steps, config.topk, vocab_size, seed
    )
