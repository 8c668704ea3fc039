"""What makes exactness possible: a row's matrix product has the same bits alone and among others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specla.ops import linear
from specla.ops.linear import BLOCK, FORMS, REFERENCES, Form, row_invariant_linear


def cancelling(
    shape: tuple[int, int], dtype: torch.dtype, seed: int, rest: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A weight and 40 rows whose exact products are zero but for a `rest`: what is left is the rounding of the sums'
    order, which bf16 would often hide.
    """
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(seed)
    half, odd = divmod(in_features, 2)
    order = torch.randperm(half, generator=generator)
    weight = torch.randn(out_features, half, generator=generator)
    x = torch.randn(40, half, generator=generator)
    x = x * 2.0 ** torch.randint(-6, 7, x.shape, generator=generator)
    weight = torch.cat([weight, weight[:, order], weight.new_ones(out_features, odd)], 1)
    weight += rest * torch.randn(weight.shape, generator=generator)
    x = torch.cat([x, -x[:, order], x.new_zeros(40, odd)], 1)
    return weight.to(dtype), x.to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"]
)
@pytest.mark.parametrize("shape", [(32, 32), (104, 32), (80, 32), (32, 40), (48, 33), (384, 96), (130, 300)])
@pytest.mark.parametrize("rest", [0.0, 0.01])
def test_a_rows_product_does_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], dtype: torch.dtype, rest: float
) -> None:
    weight, x = cancelling(shape, dtype, 1, rest)
    alone = torch.cat([row_invariant_linear(row[None], weight) for row in x])
    assert (alone != 0).float().mean() > 0.2, "the sums leave no trace of their order"
    for rows in range(1, 41):
        assert torch.equal(row_invariant_linear(x[:rows], weight), alone[:rows]), rows
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(row_invariant_linear(x[shuffled], weight), alone[shuffled])


@pytest.mark.parametrize("in_features", range(1, 10))
@pytest.mark.parametrize(("out_features", "shift"), [(1, 0), (2, 0), (3, 0), (5, 0), (2, 14), (3, 6)])
def test_the_law_holds_for_the_smallest_weights(out_features: int, shift: int, in_features: int) -> None:
    generator = torch.Generator().manual_seed(in_features)
    room = torch.randn(shift + out_features * in_features, generator=generator)
    weight = room[shift:].view(out_features, in_features)
    x = torch.randn(200, in_features, generator=generator)
    alone = torch.cat([row_invariant_linear(row[None], weight) for row in x])
    for rows in range(1, 34):
        assert torch.equal(torch.cat([row_invariant_linear(y, weight) for y in x.split(rows)]), alone), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_threads_keep_the_law(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        test_a_rows_product_does_not_depend_on_the_rows_beside_it((1548, 384), dtype, 0.0)
        test_a_rows_product_does_not_depend_on_the_rows_beside_it((384, 704), dtype, 0.0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("shape", [(48, 33), (384, 96), (130, 300)])
def test_where_in_memory_the_rows_lie_does_not_matter(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = cancelling(shape, dtype, 4)
    want = row_invariant_linear(x, weight)
    for shift in (1, 2, 3, 8):
        off = torch.empty(x.numel() + shift, dtype=dtype)[shift:].view(x.shape).copy_(x)
        apart = torch.empty(40, x.shape[1] + shift, dtype=dtype)[:, shift:].copy_(x)
        for rows in (1, 3, 8, 16, 31, 32, 40):
            assert torch.equal(row_invariant_linear(off[:rows], weight), want[:rows])
            assert torch.equal(row_invariant_linear(apart[:rows], weight), want[:rows])
            assert torch.equal(row_invariant_linear(x[-rows:], weight), want[-rows:])


@pytest.mark.parametrize("shift", [1, 5])
def test_the_law_holds_for_a_weight_at_any_alignment(shift: int) -> None:
    aligned, x = cancelling((130, 48), torch.float32, 5)
    weight = torch.empty(aligned.numel() + shift)[shift:].view(aligned.shape).copy_(aligned)
    alone = torch.cat([row_invariant_linear(row[None], weight) for row in x])
    for rows in (2, 5, 9, 16, 20, 32, 40):
        assert torch.equal(row_invariant_linear(x[:rows], weight), alone[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_do_not_depend_on_which_form_the_clock_prefers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = cancelling((96, 64), dtype, 6)
    want = row_invariant_linear(x, weight)
    chosen = set()
    for forms in (FORMS, FORMS[::-1], sorted(FORMS), sorted(FORMS, key=lambda form: form.weight_first)):
        monkeypatch.setattr(linear, "_fastest_first", lambda *_, forms=forms: list(forms))
        plan = linear._plan.__wrapped__(96, 64, dtype, 0, torch.get_num_threads())
        chosen.add(plan)
        monkeypatch.setattr(linear, "_plan_for", lambda *_, plan=plan: plan)
        for rows in (1, 2, 4, 7, 8, 12, 16, 17, 32, 40):
            assert torch.equal(row_invariant_linear(x[:rows], weight), want[:rows]), rows
    assert len(chosen) > 1


def test_only_forms_with_the_bits_of_the_reference_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that sums backwards is fast, and found out."""
    backwards, multiply = Form(4, True), linear._multiply

    def odd(x: Tensor, weight: Tensor, form: Form | None) -> Tensor:
        return multiply(x.flip(1), weight.flip(1), form) if form == backwards else multiply(x, weight, form)

    monkeypatch.setattr(linear, "_multiply", odd)
    monkeypatch.setattr(
        linear, "_fastest_first", lambda *_: [backwards, *(f for f in FORMS if f != backwards)]
    )
    arguments = (96, 64, torch.float32, 0, torch.get_num_threads())
    assert backwards not in linear._plan.__wrapped__(*arguments)


def test_where_a_rows_place_matters_rows_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = linear._multiply

    def by_place(x: Tensor, weight: Tensor, form: Form | None) -> Tensor:
        out = multiply(x, weight, form)
        return out if form is None else out + torch.arange(len(x))[:, None]

    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(37, 16, generator=generator)
    monkeypatch.setattr(linear, "_multiply", by_place)
    plan = linear._plan.__wrapped__(24, 16, torch.float32, 0, torch.get_num_threads())
    assert plan == (None,) * (BLOCK + 1)
    monkeypatch.setattr(linear, "_plan_for", lambda *_: plan)
    got = row_invariant_linear(x, weight)
    torch.testing.assert_close(got, x @ weight.t())
    assert torch.equal(got, torch.cat([row_invariant_linear(row[None], weight) for row in x]))


@pytest.mark.parametrize("form", [*FORMS, None], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_form_is_the_product(form: Form | None, weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(40, 33, generator=generator), torch.randn(BLOCK, 33, generator=generator)
    weight, x = weight.to(weight_dtype), x.to(weight_dtype).float()
    for rows in range(1, 1 + (BLOCK if form is None else form.rows)):
        got = linear._multiply(x[:rows], weight, form)
        assert got.is_contiguous() and got.dtype == torch.float32
        loose = {} if weight_dtype == torch.float32 else {"rtol": 0.01, "atol": 0.05}
        torch.testing.assert_close(got, x[:rows] @ weight.float().t(), **loose)


@pytest.mark.parametrize("leading", [(1,), (3, 5), (2, 1, 50), (0,), (4, 0)], ids=str)
def test_leading_dimensions_stay(leading: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(*leading, 16, generator=generator)
    got = row_invariant_linear(x, weight)
    assert got.is_contiguous()
    torch.testing.assert_close(got, x @ weight.t())


def test_the_plan_covers_every_number_of_rows() -> None:
    assert all(reference in FORMS and reference.rows == BLOCK for reference in REFERENCES)
    plan = linear._plan(64, 48, torch.float32, 0, torch.get_num_threads())
    assert len(plan) == BLOCK + 1
    assert all(form is None or form.rows >= rows for rows, form in enumerate(plan))
