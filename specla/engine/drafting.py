"""Drafters by name or from a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from specla.drafters import Drafter, EagleDrafter, LookupFirst, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.drafters.checkpoint import load_drafter
from specla.drafters.mtp import Mtp, has_mtp, load_mtp
from specla.drafters.network import DraftNetwork
from specla.engine.params import DRAFTERS, SpeculativeConfig
from specla.models.language_model import LanguageModel
from specla.models.layers import quantize_linears
from specla.models.loader import measure_products

COMPANION = "drafter"  # the directory within a target's where its own drafter is


def choose_drafter(asked: str | Path | None, model: Path, config: SpeculativeConfig) -> str | Path:
    """What to draft with: a name, or a directory; by default the drafter or head that the model brings, else n-grams.

    Raises:
        ValueError: when it is neither, or for settings that it has no use for.
    """
    if asked is None:
        drafter: str | Path = "mtp" if has_mtp(model) else "ngram"
        if _is_directory(model / COMPANION):
            drafter = model / COMPANION
            if not (drafter / "config.json").is_file():
                raise ValueError(
                    f"{drafter} has no config.json (is it still being trained?): name another drafter, ngram say"
                )
    elif isinstance(asked, (str, Path)):
        drafter = asked if asked in DRAFTERS else Path(asked)
    else:
        raise ValueError(f"drafter must be a name or a directory, got {asked!r}")
    if isinstance(drafter, Path) and (asked == "" or not _is_directory(drafter)):
        raise ValueError(
            f"drafter must be one of {', '.join(DRAFTERS)} or a directory with one, got {str(drafter)!r}"
        )
    if isinstance(drafter, str) and drafter != Mtp.name and config.prune_threshold is not None:
        raise ValueError(
            f"prune_threshold needs a drafter that gives probabilities, which {drafter} does not"
        )
    if config.synthetic_acceptance_rate is not None and drafter != "synthetic":
        raise ValueError(f"synthetic_acceptance_rate is for drafter synthetic, not {drafter}")
    if config.synthetic_acceptance_rate is None and drafter == "synthetic":
        raise ValueError("drafter synthetic needs synthetic_acceptance_rate")
    return drafter


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long, say
        return False


def load_network(drafter: str | Path, target: LanguageModel, model: Path) -> str | DraftNetwork:
    """The network of a directory, or that which comes with the target in `model`, ready to draft; others stay names."""
    network: DraftNetwork
    if drafter == Mtp.name:
        network = load_mtp(model, target)
    elif isinstance(drafter, str):
        return drafter
    else:
        network = load_drafter(drafter, target)
    quantize_linears(network)
    measure_products(network)
    return network


def make_drafter(
    source: str | DraftNetwork, config: SpeculativeConfig, vocab_size: int, seed: int, max_num_seqs: int
) -> Drafter:
    """The drafter of that name or with that network, as large as the configuration allows."""
    size, steps, topk = config.max_draft, config.num_steps, config.topk
    if source == "none" or size == 0:
        return NoDrafter()
    if isinstance(source, DraftNetwork):
        trained = EagleDrafter(source, size, steps, topk, config.prune_threshold, max_num_seqs)
        return LookupFirst(trained, size) if config.num_speculative_tokens == "auto" else trained
    if source == "ngram":
        return NgramDrafter(size, steps, topk)
    assert source == "synthetic" and config.synthetic_acceptance_rate is not None
    return SyntheticDrafter(config.synthetic_acceptance_rate, size, steps, topk, vocab_size, seed)
