"""Training's unrolled steps are what drafting computes, and the losses are what they are called."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specla.drafters.memory import new_memory
from specla.drafters.network import Eagle
from specla.train.objectives import Objective, chain_matches, unrolled_loss, walk
from specla.train.unroll import Unrolled
from tests.drafters.eagles import KINDS, make_eagle
from tests.targets import VOCAB, make_target, prompt

LENGTH, STEPS = 23, 5


def inputs(network: Eagle, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.tensor([prompt(LENGTH + 1, seed) for seed in range(batch)])
    generator = torch.Generator().manual_seed(9)
    size = network.config.hidden_size * len(network.config.layer_ids)
    return tokens, torch.randn(batch, LENGTH, size, generator=generator, dtype=torch.float64)


def unrolled(network: Eagle, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The layer's output `[STEPS, B, LENGTH, hidden]`."""
    past = Unrolled(LENGTH, tokens.device, chunk_size=8)
    hidden, steps = network.fuse(features), []
    for step in range(STEPS):
        ids = torch.nn.functional.pad(tokens[:, step + 1 :], (0, step))
        hidden = network(ids, hidden, past)
        past.advance()
        steps.append(hidden)
    return torch.stack(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unrolled_chain_is_a_drafted_one(kind: str) -> None:
    network = make_eagle(make_target("plain", torch.float64), kind)
    tokens, features = inputs(network)
    steps = unrolled(network, tokens, features)
    for start in (0, 1, 6, 17):
        memory = new_memory(network.config, 2, torch.float64, tokens.device)
        past = memory.reading([0, 1], [start + 1] * 2)
        hidden = network(tokens[:, 1 : start + 2], network.fuse(features[:, : start + 1]), past)[:, -1:]
        beams = memory.beams([0, 1])
        for step in range(STEPS):
            torch.testing.assert_close(steps[step, :, start], hidden[:, 0], rtol=1e-9, atol=1e-11)
            if step + 1 < STEPS:
                beams.follow(torch.zeros(2, 1, dtype=torch.long))
                hidden = network(tokens[:, start + step + 2, None], hidden, beams)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    network = make_eagle(make_target("plain", torch.float64), kind).requires_grad_(True)
    tokens, features = inputs(network, batch=1)
    ids = torch.full((VOCAB,), -1)
    ids[network.token_ids] = torch.arange(len(network.token_ids))
    logits = torch.randn(1, LENGTH, len(network.token_ids), dtype=torch.float64)
    weight = network.layer.mixer.o_proj.weight

    def loss() -> torch.Tensor:
        return unrolled_loss(network, tokens, features, logits, ids, Objective(unroll_steps=3))[0]

    loss().backward()
    direction = torch.randn_like(weight)
    assert weight.grad is not None
    with torch.no_grad():
        weight += 1e-5 * direction
        above = loss()
        weight -= 2e-5 * direction
        below = loss()
    torch.testing.assert_close((above - below) / 2e-5, (weight.grad * direction).sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", ["ce", "soft", "tv", "soft+tv"])
@pytest.mark.parametrize("weights", ["decay", "reached"])
def test_losses_are_those_of_a_plain_loop(loss: str, weights: str) -> None:
    network = make_eagle(make_target("plain", torch.float64))
    tokens, features = inputs(network)
    ids = torch.full((VOCAB,), -1)
    ids[network.token_ids] = torch.arange(len(network.token_ids))
    logits = 3 * torch.randn(2, LENGTH, len(network.token_ids), dtype=torch.float64)
    objective = Objective(loss=loss, unroll_steps=STEPS, step_weights=weights, step_decay=0.7)
    got, first = unrolled_loss(network, tokens, features, logits, ids, objective)
    steps = unrolled(network, tokens, features)
    total, norm, right = 0.0, 0.0, []
    for step in range(STEPS):
        values = []
        for b in range(2):
            for p in range(LENGTH - 1 - step):
                q = network.logits(steps[step, b, p]).softmax(-1)
                t = logits[b, p + 1 + step].softmax(-1)
                label = int(ids[tokens[b, p + 2 + step]])
                value = 0.0
                if loss == "ce":
                    value = -float(q[label].log()) if label >= 0 else 0.0
                if "soft" in loss:
                    value -= float((t * q.log()).sum())
                if "tv" in loss:
                    value += float((t - q).abs().sum() / 2)
                if weights == "reached":
                    for before in range(step):
                        q0 = network.logits(steps[before, b, p]).softmax(-1)
                        value *= float(torch.minimum(q0, logits[b, p + 1 + before].softmax(-1)).sum())
                values.append(value)
                if step == 0:
                    right.append(label >= 0 and int(q.argmax()) == label)
        weight = 1.0 if weights == "reached" else 0.7**step
        total += weight * sum(values) / len(values)
        norm += weight
    assert float(got) == pytest.approx(total / norm, rel=1e-9)
    assert float(first) == pytest.approx(sum(right) / len(right), rel=1e-6)


def test_matches_are_the_drafts_that_the_text_confirms() -> None:
    network = make_eagle(make_target("plain", torch.float64))
    tokens, features = inputs(network)
    steps = unrolled(network, tokens, features)
    matches = chain_matches(network, tokens, features, STEPS)
    for step in range(STEPS):
        for b in range(2):
            for p in range(LENGTH):
                at = p + 2 + step
                draft = network.token_ids[network.logits(steps[step, b, p]).argmax()] if at <= LENGTH else -1
                assert bool(matches[step, b, p]) == (at <= LENGTH and int(draft) == int(tokens[b, at]))


@settings(deadline=None)
@given(st.data())
def test_a_walk_counts_what_rounds_would_accept(data: st.DataObject) -> None:
    steps, length = data.draw(st.integers(1, 4)), data.draw(st.integers(8, 20))
    rows = data.draw(
        st.lists(st.lists(st.booleans(), min_size=steps, max_size=steps), min_size=length, max_size=length)
    )
    matches = torch.tensor(rows).t()[:, None]
    begin = data.draw(st.integers(1, length))
    root, counts = begin - 1, []
    while root >= 1 and root + 1 + steps <= length:
        count = 0
        while count < steps and rows[root - 1][count]:
            count += 1
        counts.append(count)
        root += count + 1
    length_, first = walk(matches, torch.tensor([begin]))
    assert length_ == pytest.approx(sum(c + 1 for c in counts) / max(len(counts), 1))
    assert first == pytest.approx(sum(c > 0 for c in counts) / max(len(counts), 1))


@pytest.mark.parametrize(
    "bad",
    [{"loss": "mse"}, {"step_weights": "x"}, {"unroll_steps": 0}, {"step_decay": 0.0}, {"step_decay": 1.5}],
)
def test_objectives_that_make_no_sense_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        Objective(**bad)
