"""Which engine runs a target: decided without Triton, which is an extra."""

from __future__ import annotations

from specla.drafters import Drafter
from specla.engine.engine import Engine
from specla.engine.params import SpeculativeConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.target import Target
from specla.ops import triton as kernels


def make_engine(
    target: Target,
    drafter: Drafter,
    config: SpeculativeConfig,
    max_num_seqs: int = 8,
    seed: int = 0,
    max_num_batched_tokens: int | None = None,
    prefix_cache_bytes: int = 0,
) -> Engine:
    """The resident engine where target and drafter have kernels for all of a round, else the one that runs anywhere."""
    sizes = max_num_seqs, seed, max_num_batched_tokens, prefix_cache_bytes
    if isinstance(target, GatedDeltaNet) and kernels.use_kernels(target.norm.weight):
        from specla.engine.resident import ResidentEngine

        if ResidentEngine.takes(target, drafter, config):
            return ResidentEngine(target, drafter, config, *sizes)
    return Engine(target, drafter, config, *sizes)
