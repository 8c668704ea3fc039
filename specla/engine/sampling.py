"""The sampling parameters of a batch of sequences as tensors."""

from __future__ import annotations

import torch

from specla.accept import Sampling
from specla.engine.sequence import Sequence


def batch_sampling(sequences: list[Sequence], vocab_size: int) -> Sampling | None:
    """One row a sequence; None when all take the most likely token of unchanged logits."""
    params = [sequence.params for sequence in sequences]
    penalised = any(p.repetition_penalty != 1.0 for p in params)
    if not penalised and all(p.temperature == 0 for p in params):
        return None
    seen = None
    if penalised:
        seen = torch.zeros(len(sequences), vocab_size, dtype=torch.bool)
        for b, sequence in enumerate(sequences):
            if sequence.params.repetition_penalty != 1.0:
                seen[b, torch.tensor(sequence.tokens)] = True
    return Sampling(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        repetition_penalty=torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32),
        seed=torch.tensor([sequence.seed for sequence in sequences]),
        position=torch.tensor([len(sequence.tokens) for sequence in sequences]),
        seen=seen,
    )
