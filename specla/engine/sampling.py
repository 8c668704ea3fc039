"""The sampling parameters of a batch of sequences as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from specla.accept import Sampling
from specla.engine.sequence import Sequence


def batch_sampling(sequences: list[Sequence], logits: Tensor) -> Sampling | None:
    """One row a sequence, for `logits` `[B, N, V]`; None when all take the most likely token of unchanged logits."""
    params = [sequence.params for sequence in sequences]
    penalised = any(p.repetition_penalty != 1.0 for p in params)
    if not penalised and all(p.temperature == 0 for p in params):
        return None
    seen = None
    if penalised:
        seen = torch.zeros(len(sequences), logits.shape[-1], dtype=torch.bool, device=logits.device)
        for b, sequence in enumerate(sequences):
            if sequence.params.repetition_penalty != 1.0:
                seen[b, torch.tensor(sequence.tokens, device=logits.device)] = True

    def column(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, device=logits.device)

    return Sampling(
        temperature=column([float(p.temperature) for p in params]),
        top_k=column([p.top_k for p in params]),
        top_p=column([float(p.top_p) for p in params]),
        min_p=column([float(p.min_p) for p in params]),
        repetition_penalty=column([float(p.repetition_penalty) for p in params]),
        seed=column([sequence.seed for sequence in sequences]),
        position=column([len(sequence.tokens) for sequence in sequences]),
        seen=seen,
    )
