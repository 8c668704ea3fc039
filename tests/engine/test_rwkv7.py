"""RWKV-7 under the engine's laws: two windows and two rank-one updates a token are rolled back like any other state."""

from __future__ import annotations

import pytest
import torch

from specla.engine.params import SamplingParams
from specla.tree import Tree
from tests.engine import (
    test_identity as identity,
    test_prefill as prefill,
    test_prefix as prefix,
    test_reading as reading,
    test_rejections as rejections,
    test_slots as slots,
    test_stops as stops,
)
from tests.targets import RWKV7, committed, distance, make_target, pairs, prompt, take
from tests.train import test_rollouts as rollouts

every_variant = pytest.mark.parametrize("variant", RWKV7)


@pytest.mark.parametrize(
    ("name", "mode", "params", "batch"),
    pairs(
        ["ngram", "synthetic 0.7", "eagle delta", "eagle window"],
        identity.MODES,
        [identity.GREEDY, identity.WARM],
        [1, 4],
    ),
    ids=identity.told,
)
def test_tokens_equal_those_of_plain_decoding(
    name: str, mode: str, params: SamplingParams, batch: int
) -> None:
    identity.test_tokens_of_other_targets_equal_those_of_plain_decoding("rwkv7", name, mode, params, batch)


@pytest.mark.parametrize(
    ("variant", "dtype", "mode"), pairs([*RWKV7], [torch.float32, torch.bfloat16], ["serial", "hybrid"])
)
def test_logits_are_those_of_plain_decoding_bit_by_bit(variant: str, dtype: torch.dtype, mode: str) -> None:
    identity.test_logits_are_those_of_plain_decoding_bit_by_bit(variant, dtype, mode)


@every_variant
def test_parallel_mode_gives_the_tokens_of_plain_decoding_in_float64(variant: str) -> None:
    identity.test_parallel_mode_gives_the_tokens_of_plain_decoding_in_float64(variant)


@every_variant
def test_texts_are_not_trivial(variant: str) -> None:
    for params in (identity.GREEDY, identity.WARM):
        outputs = identity.plain(variant, torch.float32, 5, params).outputs
        assert len({token for output in outputs for token in output}) > 12
        assert params is identity.GREEDY or all(len(set(output)) > 8 for output in outputs)


@every_variant
def test_every_row_accepts_a_length_of_its_own(variant: str) -> None:
    rejections.test_every_row_accepts_a_length_of_its_own(variant)


@pytest.mark.parametrize("accepted", range(7))
def test_the_state_is_right_after_every_accepted_length(accepted: int) -> None:
    rejections.test_the_state_is_right_after_every_accepted_length("rwkv7", accepted)


@pytest.mark.parametrize("name", "keep_all one_too_few one_too_many one_for_all memory_order".split())
def test_a_broken_rollback_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rejections.test_a_broken_rollback_is_noticed(getattr(rejections, name), "rwkv7", monkeypatch)


@every_variant
def test_a_prefill_equals_reading_token_by_token(variant: str) -> None:
    prefill.test_a_prefill_equals_reading_token_by_token(variant)
    prefill.test_a_prefill_in_stretches_equals_one_in_one_piece(variant)
    prefill.test_the_text_form_gives_the_logits_of_decoding(variant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_prompts_of_1_to_600_tokens(dtype: torch.dtype) -> None:
    prefill.test_prompts_of_1_to_600_tokens("rwkv7", dtype)


@every_variant
def test_pauses_leave_every_bit_of_a_state_as_it_is(variant: str) -> None:
    reading.test_pauses_leave_every_bit_of_a_state_as_it_is(variant, 1)
    reading.test_nor_do_they_in_a_text_that_goes_on(variant)


@pytest.mark.parametrize(("drafter", "later"), prefix.halved(["none", "delta", "window"], [*prefix.LATER]))
def test_a_known_beginning_leaves_what_reading_would_have_left(drafter: str, later: str) -> None:
    prefix.test_a_hit_leaves_what_reading_would_have_left("rwkv7", drafter, later)


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_a_slots_next_owner_finds_nothing_of_the_last(rounds: int) -> None:
    slots.test_a_cancelled_sequence_leaves_others_and_its_slots_next_owner_unaffected("rwkv7", rounds)
    slots.test_a_round_that_fails_between_verify_and_accept_frees_all_slots("rwkv7")


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_goes_on_after_a_stop_inside_an_accepted_block(cut: int, temperature: float) -> None:
    stops.test_generation_goes_on_as_if_it_had_not_stopped("rwkv7", cut, temperature)


@pytest.mark.parametrize("extra", [1, 40])
def test_a_text_goes_on_with_more_tokens(extra: int) -> None:
    stops.test_a_resumed_text_with_more_tokens_equals_a_fresh_one("rwkv7", extra)


@every_variant
def test_a_drafters_training_sees_the_features_of_verification(variant: str) -> None:
    rollouts.test_features_and_hidden_are_verifications_bit_for_bit(variant)
    rollouts.test_features_and_hidden_are_those_of_a_whole_text(variant)


def test_kernels_commit_half_nodes_and_both_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    target, left = make_target("rwkv7"), []
    for kernels in (False, True):
        pool = target.new_pool(3, 7)
        for slot in (pool.alloc(), pool.alloc(), pool.alloc()):
            target.prefill(torch.tensor(prompt(9, slot)), slot, pool)
        tokens = torch.tensor([prompt(7, 5), prompt(7, 6)])
        target.verify(tokens, Tree([[-1, 0, 0, 1, 3, 2, 2], [-1, 0, 1, 2, 3, 4, 5]]), [2, 0], pool)
        take(pool, [2, 0], [[0, 1, 3], [0]])
        monkeypatch.setattr("specla.ops.triton.takes_heads", lambda state, by=kernels: by)
        pool.flush([2, 0])
        monkeypatch.undo()
        left.append([x for slot in range(3) for x in committed(pool, slot)])
    assert distance(left[1], left[0]) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(*(x[1::2] for x in left), strict=True))  # windows
