"""Every rule of the family, from linear attention to the gated delta rule with a decay a channel, in every mode.

Small shapes against the naive twin; on a GPU, the shapes of real models against plain torch in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specla.ops import gated_delta_verify
from specla.ops.factors import Factors
from specla.ops.naive import naive_gated_delta_verify
from specla.ops.triton.tuning import Config, default_config
from tests.ops.strategies import Case, random_parent
from tests.ops.triton import full_size
from tests.ops.triton.test_verify import (
    MODES,
    assert_near,
    assert_same_bits,
    in_double,
    moved,
    plain_case,
    rms,
    run,
)

DECAYS = {"none": "none", "scalar": "mild", "channel": "channel-mild"}
GRID = [(decay, delta, mode) for decay in DECAYS for delta in (True, False) for mode in MODES]


@pytest.mark.parametrize("inside", [True, False], ids=["gate-inside", "plain"])
@pytest.mark.parametrize(
    ("decay", "delta", "mode"),
    [(*rule, mode) for *rule, mode in GRID if (rule[0], mode) != ("channel", "parallel")],
)
def test_every_rule_equals_the_naive_replay(decay: str, delta: bool, mode: str, inside: bool) -> None:
    gated = inside and decay != "none"
    case = plain_case(
        [[-1, 0, 0, 1, 2]],
        (19, 21),
        (1, 2),
        decay=DECAYS[decay],
        counts=[2],
        delta=delta,
        gated=gated,
        l2norm=inside,
    )
    got = run(case, MODES[mode])
    assert_near(case, got, in_double(case).run(naive_gated_delta_verify))
    assert got[1].g.dim() == (4 if decay == "channel" else 3)


def trees(batch: int, size: int) -> list[list[int]]:
    """Ragged rows of every shape; the first is full."""
    rng = torch.Generator().manual_seed(size)
    shapes = ("random", "bushy", "comb", "star", "chain")
    return [random_parent(shapes[b % 5], max(1, size - b % 7), rng) for b in range(batch)]


def reference(case: Case) -> tuple[Tensor, Factors, Tensor]:
    """Plain torch in float64 on the device."""
    o, factors, state = moved(in_double(case)).run(gated_delta_verify, mode="serial")
    return o.cpu(), Factors(*(x.cpu() for x in factors)), state.cpu()


def at_full_size(dims: tuple[int, int], heads: tuple[int, int], batch: int, size: int, **rule: Any) -> Case:
    counts = [b % 8 for b in range(batch)]
    return plain_case(trees(batch, size), dims, heads, dtype=torch.bfloat16, counts=counts, **rule)


def config_of(mode: str, case: Case) -> Config:
    """The one that is taken where nothing was measured."""
    batch, _, value_heads, dim_v = case.v.shape
    return default_config(mode, batch=batch, value_heads=value_heads, dim_k=case.q.shape[3], dim_v=dim_v)


def assert_right_at_full_size(case: Case, modes: tuple[str, ...], *, another: bool = False) -> None:
    """Values in every mode, and the same bits in exact modes; `another` adds a configuration to theirs."""
    configs = [config_of(mode, case) for mode in modes]
    if another:
        configs.append(Config("serial", 8, 2, prepared=not configs[0].prepared))
    o, factors, state = reference(case)
    first = None
    for config in configs:
        got = run(case, config)
        assert rms(got[0], o) < 2e-3, config  # o is rounded to bfloat16, which alone is 1.2e-3
        assert rms(got[1].d, factors.d) < (1e-4 if config.mode == "parallel" else 1e-5), config
        assert rms(got[1].k, factors.k) < 1e-5 and rms(got[2], state) < 1e-5, config
        assert not got[0][~case.real].any()
        if config.mode != "parallel":
            first = first or got
            assert_same_bits(got, first)


@full_size
@pytest.mark.parametrize(
    ("dims", "heads", "batch", "size"),
    [
        ((64, 64), (4, 4), 256, 16),
        ((96, 96), (2, 4), 3, 32),
        ((128, 128), (4, 16), 32, 16),
        ((256, 256), (8, 8), 1, 64),
        ((256, 512), (2, 4), 3, 32),
        ((512, 128), (2, 2), 3, 16),
        ((128, 64), (4, 8), 32, 1),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_full_sizes(dims: tuple[int, int], heads: tuple[int, int], batch: int, size: int) -> None:
    modes = ("serial", "hybrid", "parallel") if size > 1 else ("serial", "parallel")
    another = dims in ((96, 96), (256, 256))
    assert_right_at_full_size(at_full_size(dims, heads, batch, size), modes, another=another)


@full_size
@pytest.mark.parametrize(
    ("decay", "delta", "modes"),
    [
        ("none", True, ("parallel",)),
        ("none", False, ("hybrid",)),
        ("scalar", False, ("parallel",)),
        ("channel", True, ("serial", "hybrid")),
        ("channel", False, ("serial",)),
    ],
)
def test_full_sizes_of_the_family(decay: str, delta: bool, modes: tuple[str, ...]) -> None:
    rule = {"decay": DECAYS[decay], "gated": decay != "none", "delta": delta}
    assert_right_at_full_size(at_full_size((128, 128), (2, 4), 3, 16, **rule), modes)
