"""What a drafter is trained to do: how far its distributions may be from the target's, along chains of drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specla.drafters.network import Eagle
from specla.train.unroll import Unrolled

LOSSES = ("ce", "soft", "tv", "soft+tv")
STEP_WEIGHTS = ("decay", "reached")


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Args:
        loss: "ce", cross-entropy with the text's next token; "soft", with the target's distribution over the draft
            vocabulary; "tv", their distance `1 - sum min(p, q)`, the chance to refuse a draft that is drawn from q;
            "soft+tv", both.
        unroll_steps: drafts in a row that are trained.
        step_weights: "decay", `step_decay ** r`; "reached", the chance that the r drafts before are all accepted.

    Raises:
        ValueError: for a value outside its range.
    """

    loss: str = "soft"
    unroll_steps: int = 7
    step_weights: str = "decay"
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        for name, allowed in (("loss", LOSSES), ("step_weights", STEP_WEIGHTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.unroll_steps < 1 or not 0 < self.step_decay <= 1:
            raise ValueError(
                f"unroll_steps must be at least 1 and step_decay in (0, 1], got {self.unroll_steps}, {self.step_decay}"
            )


def unrolled_loss(
    network: Eagle,
    tokens: Tensor,
    features: Tensor,
    target_logits: Tensor,
    draft_ids: Tensor,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """The objective's mean over all chains of a batch of texts.

    Args:
        tokens: int64 `[B, L + 1]`. features: `[B, L, F]` of the target at `tokens[:, :-1]`.
        target_logits: `[B, L, draft vocabulary]` there.
        draft_ids: int64 `[vocab]`, the drafter's id of each token, -1 if it has none.

    Returns:
        the loss, and how often the first draft is the text's token.
    """
    length = features.shape[1]
    past = Unrolled(length, features.device)
    hidden = network.fuse(features)
    wanted = target_logits.softmax(-1)
    labels = draft_ids[tokens]
    reached: Tensor | None = None
    total = first = target_logits.new_zeros(())
    weights = 0.0
    for step in range(objective.unroll_steps):
        ids = torch.nn.functional.pad(tokens[:, step + 1 :], (0, step))
        hidden = network(ids, hidden, past)
        past.advance()
        count = length - 1 - step  # chains whose next token the target has judged
        log_q = network.logits(hidden[:, :count]).log_softmax(-1)
        p, label = wanted[:, step + 1 :], labels[:, step + 2 :]
        known = label >= 0
        losses, overlap = _losses(objective, log_q, p, label.clamp(min=0), known)
        if step == 0:
            first = ((log_q.argmax(-1) == label) & known).float().mean()
        if objective.step_weights == "reached":
            if reached is not None:
                losses = losses * reached[:, :count]
            reached = overlap if reached is None else reached[:, :count] * overlap
            weight = 1.0
        else:
            weight = objective.step_decay**step
        total = total + weight * losses.mean()
        weights += weight
    return total / weights, first


def _losses(
    objective: Objective, log_q: Tensor, p: Tensor, label: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss `[B, T]` of each draft, and the chance that it is accepted, as a constant."""
    parts = []
    if objective.loss == "ce":
        parts.append(-log_q.gather(-1, label[..., None])[..., 0] * known)
    if objective.loss in ("soft", "soft+tv"):
        parts.append(-(p * log_q).sum(-1))
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    if objective.loss in ("tv", "soft+tv"):
        parts.append(1 - overlap)
    return torch.stack(parts).sum(0), overlap.detach()


@torch.no_grad()
def chain_matches(network: Eagle, tokens: Tensor, features: Tensor, steps: int) -> Tensor:
    """Whether each draft of each chain would be the text's token if those before it were: bool `[steps, B, L]`.

    Entry (r, b, p) is the draft of `tokens[b, p + 2 + r]` by the chain whose root is `tokens[b, p + 1]`; False beyond
    the text's end.
    """
    length = features.shape[1]
    past = Unrolled(length, features.device)
    hidden = network.fuse(features)
    matches = []
    for step in range(steps):
        ids = torch.nn.functional.pad(tokens[:, step + 1 :], (0, step))
        hidden = network(ids, hidden, past)
        past.advance()
        drafts = network.token_ids[network.logits(hidden[:, : length - 1 - step]).argmax(-1)]
        right = drafts == tokens[:, step + 2 :]
        matches.append(torch.nn.functional.pad(right, (0, length - right.shape[1])))
    return torch.stack(matches)


def walk(matches: Tensor, given: Tensor) -> tuple[float, float]:
    """Rounds of chain drafting along texts of which the first `given` `[B]` tokens are the prompt.

    Returns:
        the acceptance length, the bonus token included, and the share of rounds whose first draft is accepted.
    """
    accepted = matches.cumprod(0).sum(0).cpu().numpy()  # [B, L]: of the chain that starts at p
    steps, batch, length = matches.shape
    tokens = rounds = firsts = 0
    for b in range(batch):
        root = int(given[b]) - 1
        while root >= 1 and root + 1 + steps <= length:
            count = int(accepted[b, root - 1])
            tokens, rounds, firsts = tokens + count + 1, rounds + 1, firsts + (count > 0)
            root += count + 1
    return tokens / max(rounds, 1), firsts / max(rounds, 1)
