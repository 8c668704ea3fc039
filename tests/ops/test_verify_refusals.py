"""What gated_delta_verify refuses, and that it refuses before it touches the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specla.ops import gated_delta_verify
from specla.ops.factors import Factors, Pending
from specla.ops.gate import Gate
from specla.tree import Tree


def bad_calls() -> dict[str, dict[str, Any]]:
    """Changes to a good call (B 2, N 3, H 2, HV 4, K 4, V 6, 3 slots) that make it unsupported."""
    z = torch.zeros
    elsewhere = Factors(*(x.to("meta") for x in pending_of().factors))

    def path(ids: list[int]) -> Tensor:
        return torch.tensor([ids, ids], dtype=torch.int32)

    return {
        "q has fewer nodes": {"q": z(2, 2, 2, 4)},
        "q has three dimensions": {"q": z(2, 3, 8)},
        "q and k differ in K": {"q": z(2, 3, 2, 5)},
        "k has other heads": {"k": z(2, 3, 1, 4)},
        "k has another batch": {"k": z(1, 3, 2, 4)},
        "v has another batch": {"v": z(1, 3, 4, 6)},
        "v has other heads than the state": {"v": z(2, 3, 2, 6)},
        "v has another V than the state": {"v": z(2, 3, 4, 5)},
        "HV is no multiple of H": {"q": z(2, 3, 3, 4), "k": z(2, 3, 3, 4)},
        "g has V channels": {"g": z(2, 3, 4, 6)},
        "g has one channel": {"g": z(2, 3, 4, 1)},
        "g has channels of H heads": {"g": z(2, 3, 2, 4)},
        "g is one per row": {"g": z(2, 1, 4)},
        "g is integer": {"g": z(2, 3, 4, dtype=torch.int64)},
        "beta is per channel": {"beta": z(2, 3, 4, 4)},
        "beta is on another device": {"beta": z(2, 3, 4, device="meta")},
        "delta is no bool": {"delta": 1},
        "delta is None": {"delta": None},
        "the gate is a tuple": {"gate": tuple(gate_of())},
        "the gate has no g": {"gate": gate_of(), "g": None},
        "A_log has H heads": {"gate": gate_of()._replace(A_log=z(2))},
        "A_log is per channel": {"gate": gate_of()._replace(A_log=z(4, 4)), "g": z(2, 3, 4, 4)},
        "A_log is integer": {"gate": gate_of()._replace(A_log=z(4, dtype=torch.int64))},
        "A_log is on another device": {"gate": gate_of()._replace(A_log=z(4, device="meta"))},
        "dt_bias has H heads": {"gate": gate_of()._replace(dt_bias=z(2))},
        "dt_bias is per channel and g is not": {"gate": gate_of()._replace(dt_bias=z(4, 4))},
        "g is per channel and dt_bias is not": {"gate": gate_of(), "g": z(2, 3, 4, 4)},
        "dt_bias is integer": {"gate": gate_of()._replace(dt_bias=z(4, dtype=torch.int64))},
        "dt_bias is on another device": {"gate": gate_of()._replace(dt_bias=z(4, device="meta"))},
        "beta_scale is zero": {"gate": gate_of()._replace(beta_scale=0.0)},
        "beta_scale is negative": {"gate": gate_of()._replace(beta_scale=-1.0)},
        "beta_scale is not a number": {"gate": gate_of()._replace(beta_scale=float("nan"))},
        "beta_scale is infinite": {"gate": gate_of()._replace(beta_scale=float("inf"))},
        "g has H heads": {"g": z(2, 3, 2)},
        "beta has H heads": {"beta": z(2, 3, 2)},
        "beta is one per row": {"beta": z(2, 1, 4)},
        "the tree has another N": {"tree": Tree.chain(4, batch=2)},
        "the tree has another batch": {"tree": Tree.chain(3, batch=1)},
        "the state is [K, V]": {"state": z(3, 4, 4, 6)},
        "the state has three dimensions": {"state": z(3, 4, 24)},
        "the state is bf16": {"state": z(3, 4, 6, 4, dtype=torch.bfloat16)},
        "the state is fp16": {"state": z(3, 4, 6, 4, dtype=torch.float16)},
        "the state is integer": {"state": z(3, 4, 6, 4, dtype=torch.int32)},
        "the state is a transposed view": {"state": z(3, 4, 4, 6).transpose(2, 3)},
        "q is integer": {"q": z(2, 3, 2, 4, dtype=torch.int64)},
        "beta is integer": {"beta": z(2, 3, 4, dtype=torch.int64)},
        "q is on another device": {"q": z(2, 3, 2, 4, device="meta")},
        "g is on another device": {"g": z(2, 3, 4, device="meta")},
        "the state is on another device": {"state": z(3, 4, 6, 4, device="meta")},
        "too few slots and no indices": {"state": z(1, 4, 6, 4), "state_indices": None},
        "state_indices have another batch": {"state_indices": torch.tensor([0])},
        "state_indices are two-dimensional": {"state_indices": torch.tensor([[0, 1]])},
        "state_indices are floats": {"state_indices": torch.tensor([0.0, 1.0])},
        "state_indices name a slot twice": {"state_indices": torch.tensor([1, 1])},
        "state_indices are beyond the slots": {"state_indices": torch.tensor([0, 3])},
        "state_indices are below -1": {"state_indices": torch.tensor([0, -2])},
        "the mode is unknown": {"mode": "tree"},
        "the mode is empty": {"mode": ""},
        "pending has another batch": {"pending": pending_of(batch=1)},
        "pending has other heads": {"pending": pending_of(hv=2)},
        "pending has another V": {"pending": pending_of(dv=5)},
        "pending has another K": {"pending": pending_of(dk=5)},
        "pending has V channels of decay": {
            "pending": pending_of()._replace(factors=pending_of().factors._replace(g=z(2, 3, 4, 6)))
        },
        "pending.num_nodes has two dimensions": {
            "pending": pending_of()._replace(num_nodes=torch.ones(2, 1, dtype=torch.int32))
        },
        "pending.path is of another batch": {
            "pending": pending_of()._replace(path=z(3, 2, dtype=torch.int32))
        },
        "pending.path is of floats": {"pending": pending_of()._replace(path=z(2, 2))},
        "pending.path names a node that is not there": {"pending": pending_of()._replace(path=path([0, 3]))},
        "pending.path is padded within count": {"pending": pending_of()._replace(path=path([0, -1]))},
        "pending.num_nodes is beyond the path": {"pending": pending_of()._replace(path=path([0]))},
        "pending is on another device": {"pending": pending_of()._replace(factors=elsewhere)},
    }


def gate_of() -> Gate:
    return Gate(torch.zeros(4), torch.zeros(4))


def pending_of(batch: int = 2, hv: int = 4, dk: int = 4, dv: int = 6) -> Pending:
    factors = Factors(torch.ones(batch, 3, 2, dk), torch.ones(batch, 3, hv, dv), torch.zeros(batch, 3, hv))
    return Pending(factors, torch.tensor([[0, 1]] * batch, dtype=torch.int32), torch.tensor([2] * batch))


def good_call() -> dict[str, Any]:
    z = torch.zeros
    return {
        "q": z(2, 3, 2, 4),
        "k": z(2, 3, 2, 4),
        "v": z(2, 3, 4, 6),
        "g": z(2, 3, 4),
        "beta": z(2, 3, 4),
        "tree": Tree.chain(3, batch=2),
        "state": z(3, 4, 6, 4),
        "state_indices": torch.tensor([2, 0]),
        "pending": pending_of(),
        "mode": "hybrid",
    }


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"g": None, "beta": None, "delta": False},
        {"gate": gate_of()},
        {"g": torch.zeros(2, 3, 4, 4), "gate": Gate(torch.zeros(4), torch.zeros(4, 4), 2.0)},
        {"gate": Gate(torch.zeros(4), None)},
    ],
)
def test_the_good_calls_of_the_next_law_commit(change: dict[str, Any]) -> None:
    call = good_call() | change
    gated_delta_verify(**call)
    assert call["state"][[0, 2]].any()


@pytest.mark.parametrize("fault", bad_calls())
def test_unsupported_input_raises_value_error_before_the_state_is_touched(fault: str) -> None:
    call = good_call() | bad_calls()[fault]
    with pytest.raises(ValueError):
        gated_delta_verify(**call)
    assert call["state"].device.type == "meta" or not call["state"].any()
