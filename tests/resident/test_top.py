"""Laws of the likeliest tokens: ranks of a stable sort, noise as the drafter adds it, no look at other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specla.drafters.base import DraftRow
from specla.drafters.eagle import GREEDY_DOUBT, _Bend
from specla.ops.triton.counters import counters
from specla.resident import top as module
from specla.resident.slots import Slots, new_slots
from specla.resident.top import top
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE, full_size

INF = float("inf")
SLOTS = 5
PALETTES = [[0.5, -1.0, 3.0], [0.0, -0.0], [2.0], [-INF, 1.0, -INF, -2.0], [-INF], [-1e37, 1e37, 1e-45]]

seeds, widths, beams_of = st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4)
vocabs = st.integers(8, 40) | st.integers(8, 300)
padded_rows = st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small rows are shared among programs too."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, "CHUNK", 64)


def drawn(seed: int, rows: int, vocab: int) -> Tensor:
    """Logits of which some rows are all different and others have many equals; the best is never -inf."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab)) * rng.choice([0.1, 1.0, 8.0], (rows, 1))
    for r in np.flatnonzero(rng.random(rows) < 0.6):
        logits[r] = rng.choice(PALETTES[rng.integers(len(PALETTES))], vocab)
    logits[np.isneginf(logits).all(1), rng.integers(vocab)] = 0.0
    return torch.from_numpy(logits).float().to(DEVICE)


def warm_slots(seed: int) -> Slots:
    """Slots at several temperatures, 0 among them."""
    rng = torch.Generator().manual_seed(seed)
    slots = new_slots(SLOTS, 1, 1, 1, DEVICE)
    slots.temperature.copy_(torch.tensor([0.0, 1.0, 0.3, 1.7, 0.0])[torch.randperm(SLOTS, generator=rng)])
    slots.seed.copy_(torch.randint(-(2**63), 2**63 - 1, (SLOTS,), generator=rng))
    slots.position.copy_(torch.randint(0, 40, (SLOTS,), generator=rng))
    return slots


def some_ids(seed: int, vocab: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randperm(3 * vocab, generator=rng)[:vocab].to(DEVICE)


def run(
    logits: Tensor, rows: list[int], slots: Slots, token_ids: Tensor, depth: int = 0, **options: Any
) -> Any:
    """What `top` writes over garbage."""
    shape = (len(logits), options["width"])
    out = (
        torch.full(shape, float("nan"), device=DEVICE),
        torch.full(shape, -77, dtype=torch.int32, device=DEVICE),
    )
    given_rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    assert top(logits, given_rows, slots, token_ids, depth, out=out, **options) is out
    assert not counters(len(logits), DEVICE).any()
    return out


def doubted(logits: Tensor) -> Tensor:
    """What is ranked where no noise comes in."""
    return logits / torch.tensor(GREEDY_DOUBT, device=logits.device)


def check(found: tuple[Tensor, Tensor], logits: Tensor, rows: list[int], width: int) -> None:
    """That these are the best of the logits, by rank to the bit and by value to rounding."""
    real = torch.tensor(rows).ge(0).repeat_interleave(len(logits) // len(rows))
    values, ids = (x.cpu() for x in found)
    assert values[~real].isnan().all() and (ids[~real] == -77).all()
    values, ids, logits = values[real], ids[real].long(), logits.cpu()[real]
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :width])
    exact = logits.double().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=1e-6)
    assert (values <= 0).all() and (values[:, 1:] <= values[:, :-1]).all()


@given(seeds, vocabs, widths, beams_of, padded_rows)
def test_the_best_come_first_and_the_first_of_equals(
    seed: int, vocab: int, width: int, beams: int, rows: list[int]
) -> None:
    logits = drawn(seed, len(rows) * beams, vocab)
    found = run(logits, rows, warm_slots(seed), some_ids(seed, vocab), width=width, noisy=False)
    check(found, doubted(logits), rows, width)


@given(seeds, vocabs, widths, beams_of, padded_rows, st.integers(0, 15), st.booleans())
def test_noise_is_that_of_the_drafter(
    seed: int, vocab: int, width: int, beams: int, rows: list[int], depth: int, shared: bool
) -> None:
    slots, logits = warm_slots(seed), drawn(seed, len(rows) * beams, vocab)
    ids = some_ids(seed, vocab).to(torch.int32 if seed % 2 else torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PROGRAMS", 1 if shared else 10**9)
        found = run(logits, rows, slots, ids, depth, width=width, noisy=True)
    columns = (x.tolist() for x in (slots.position, slots.temperature, slots.seed))
    kept = [DraftRow(0, [0] * n, 0, temperature=t, seed=s) for n, t, s in zip(*columns, strict=True)]
    bend = _Bend([kept[row] for row in rows], ids.long(), 3 * vocab)
    bent = bend(logits.view(len(rows), beams, vocab), depth).flatten(0, 1)
    check(found, bent, rows, width)


@settings(max_examples=8)
@given(seeds, vocabs, widths, beams_of, padded_rows, st.booleans())
def test_rows_do_not_see_each_other(
    seed: int, vocab: int, width: int, beams: int, rows: list[int], noisy: bool
) -> None:
    slots, ids, logits = warm_slots(seed), some_ids(seed, vocab), drawn(seed, len(rows) * beams, vocab)
    whole = run(logits, rows, slots, ids, 3, width=width, noisy=noisy)
    for b, row in enumerate(rows):
        own = slice(b * beams, (b + 1) * beams)
        alone = run(logits[own], [row], slots, ids, 3, width=width, noisy=noisy)
        assert all(same_bits(a[own], c) for a, c in zip(whole, alone, strict=True))


def test_logits_may_be_a_view_and_there_may_be_none() -> None:
    slots, ids, logits = warm_slots(0), some_ids(0, 90), torch.randn(4, 200, device=DEVICE)
    for view in (logits[:, 17:107], logits[::2, :90]):
        rows = [1, 2]
        found, again = (run(x, rows, slots, ids, width=3, noisy=False) for x in (view, view.contiguous()))
        assert all(map(same_bits, found, again))
    values, found = top(logits[:0, :90], torch.zeros(0).int().to(DEVICE), slots, ids, 0, width=3, noisy=True)
    assert values.shape == found.shape == (0, 3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tokens_of_what_is_no_number_are_tokens_still() -> None:
    logits = torch.full((3, 150), float("nan"), device=DEVICE)
    logits[1] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # one with a sign
    logits[2] = -INF
    _, ids = run(logits, [0, 1, 2], warm_slots(0), some_ids(0, 150), width=8, noisy=False)
    assert ((ids >= 0) & (ids < 150)).all()
    assert all(len(set(row)) == 8 for row in ids.tolist())


def test_a_long_row_is_in_few_chunks() -> None:
    vocab = module.CHUNK * module.MAX_CHUNKS + 1
    logits = drawn(1, 1, vocab)
    check(run(logits, [0], warm_slots(0), some_ids(0, vocab), width=4, noisy=False), doubted(logits), [0], 4)


@full_size
@pytest.mark.parametrize("vocab", [8192, 32000, 1 << 17])
@pytest.mark.parametrize(("batch", "beams", "width"), [(1, 1, 4), (4, 4, 4), (128, 4, 4), (3, 8, 8)])
def test_the_sizes_of_models(vocab: int, batch: int, beams: int, width: int) -> None:
    rows = [b % SLOTS for b in range(batch)]
    slots, ids, logits = warm_slots(0), some_ids(0, vocab), drawn(0, batch * beams, vocab)
    check(run(logits, rows, slots, ids, width=width, noisy=False), doubted(logits), rows, width)
    warm = run(logits, rows, slots, ids, width=width, noisy=True)
    alone = run(logits[:beams], rows[:1], slots, ids, width=width, noisy=True)
    assert all(same_bits(a[:beams], b) for a, b in zip(warm, alone, strict=True))
