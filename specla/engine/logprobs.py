"""Log-probabilities of tokens in the target's own distribution, for requests that ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.engine.sequence import TokenLogprobs

ROWS = 64  # whose logits are looked at together, to bound the memory


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """What logits `[T, V]` say of the T tokens that followed, with the `count` likeliest beside each."""
    ids = torch.tensor(tokens, device=logits.device)
    rows = logits.float().log_softmax(-1)
    own = rows.gather(1, ids[:, None])[:, 0].tolist()
    top = rows.topk(min(count, rows.shape[1]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, list(zip(likeliest, values, strict=True)))
        for token, value, (likeliest, values) in zip(tokens, own, pairs, strict=True)
    ]
