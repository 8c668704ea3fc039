"""Laws of the baselines in the engine's rounds: tokens are plain decoding's, memory is what they hold, and no more."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import specla.bench.whole_rounds as module
from specla.bench.baselines import Library
from specla.bench.decode import Decoded, decode_batch
from specla.bench.generate import BASELINES, COMMIT, LIBRARY, SNAPSHOTS, UnavailableError
from specla.bench.resident import SHAPES, Way, engine_of, random_network, random_target
from specla.bench.whole_rounds import run_as, slot_bytes
from specla.drafters import NoDrafter, SyntheticDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from specla.models.gated_deltanet import GatedDeltaNet
from specla.ops.gate import Gate, gates
from tests.ops.strategies import same_bits
from tests.ops.triton import DEVICE

LAYERS, HEADS, DIM = 2, 2, 8
SMALL = replace(
    SHAPES["tiny"], vocab_size=64, hidden_size=16, num_hidden_layers=1, num_heads=1, head_dim=DIM, expand_v=1.0,
    intermediate_size=16,
)  # fmt: skip
LARGE = replace(SMALL, num_hidden_layers=LAYERS, num_v_heads=HEADS)  # two on one key
PROMPTS = [[1, 2, 3], [5]]


@pytest.fixture(scope="module")
def small() -> GatedDeltaNet:
    return random_target(SMALL, 0, DEVICE).float()


@pytest.fixture(scope="module")
def target() -> GatedDeltaNet:
    return random_target(LARGE, 0, DEVICE).float()


def rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, output_final_state: bool,
    cu_seqlens: Tensor | None, state_v_first: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    A_log: Tensor, dt_bias: Tensor, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The library's recurrent rule as it documents it, token by token."""
    assert state_v_first and use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state))
    log_decay, strength = gates(
        g, beta, Gate(A_log, dt_bias, 2.0 if allow_neg_eigval else 1.0), torch.float32
    )
    q, k, v, log_decay, strength = (x.float().flatten(0, 1) for x in (q, k, v, log_decay, strength))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    groups = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    each = len(q) // len(initial_state)
    bounds = [each * n for n in range(len(initial_state) + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    o, states = torch.full_like(v, math.nan), initial_state.float().clone()
    for n, S in enumerate(states):
        for t in range(bounds[n], bounds[n + 1]):
            S *= log_decay[t].exp()[:, None, None]
            d = strength[t][:, None] * (v[t] - (S * k[t][:, None]).sum(-1))
            S += d[..., None] * k[t][:, None]
            o[t] = (S * q[t][:, None]).sum(-1) * q.shape[-1] ** -0.5
    if cu_seqlens is None:
        o = o.unflatten(0, (len(initial_state), each))
    return o, states if output_final_state else None


@pytest.fixture
def baselines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All of them; on a GPU the library itself, if it is installed: the stand-in waits for the device."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, "find_library", lambda: Library(rule, "0.6"))
    return [name for name in BASELINES if name != LIBRARY or module.find_library()]


def engine(
    target: GatedDeltaNet, drafts: int, topk: int, name: str | None, mode: str = "auto"
) -> ResidentEngine:
    config = SpeculativeConfig(drafts, 4, topk, synthetic_acceptance_rate=0.6)
    drafter = SyntheticDrafter(0.6, drafts, 4, topk, SMALL.vocab_size, seed=3)
    made = ResidentEngine(target, drafter, config, len(PROMPTS))
    if name is not None:
        run_as(made, name)
    return made


def params(heat: float, *lengths: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=heat, max_tokens=n, seed=s, ignore_eos=True) for s, n in enumerate(lengths)
    ]


def plain(target: GatedDeltaNet, heat: float, *lengths: int) -> Decoded:
    made = Engine(target, NoDrafter(), SpeculativeConfig(num_speculative_tokens=0), len(PROMPTS))
    return decode_batch(made, PROMPTS, params(heat, *lengths))


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding(heat: float, small: GatedDeltaNet, baselines: list[str]) -> None:
    """Of sequences that end at different times, and then again in the same slots."""
    want = plain(small, heat, 7, 4)
    for name in baselines:
        made = engine(small, 3, 1 if name == LIBRARY else 2, name)
        got = decode_batch(made, PROMPTS, params(heat, 7, 4), 1, want.outputs)
        assert got.outputs == want.outputs and got.alike, name
        assert want.rounds > got.rounds and 0 < got.accepted < got.drafted


@pytest.mark.parametrize("name", [SNAPSHOTS, COMMIT])
def test_states_have_the_bits_of_the_engines(name: str, target: GatedDeltaNet) -> None:
    """After each round, of a slot that runs; a slot of nobody holds NaN and is left alone."""
    want, (slot, nobody) = plain(target, 0.0, 8, 1), (0, 1)
    runs = []
    for made in (engine(target, 4, 2, name), engine(target, 4, 2, None)):
        made.num_requests = 0
        sequence = made.add(PROMPTS[0], params(0.0, 8)[0])
        made.drafter.references[sequence.key] = [*sequence.tokens, *want.outputs[0]]
        made.admit()
        made.rounds.layers.state[:, nobody] = math.nan
        states = []
        while made.has_work:
            made.step()
            states.append(made.rounds.layers.state[:, slot].clone())
        assert made.rounds.layers.state[:, nobody].isnan().all()
        runs.append((sequence.output, states))
    (output, states), (own_output, own_states) = runs
    assert output == own_output == want.outputs[0]
    # the engine's state of a round is written by the round after
    assert (
        all(same_bits(a, b) for a, b in zip(states[:-2], own_states[1:-1], strict=True)) and len(states) > 3
    )


def test_a_slot_that_nobody_has_any_more_is_left_alone(small: GatedDeltaNet, baselines: list[str]) -> None:
    for name in baselines:
        made = engine(small, 2, 1, name)
        short, long = (made.add(ids, p) for ids, p in zip(PROMPTS, params(0.0, 2, 6), strict=True))
        for sequence in (short, long):
            made.drafter.references[sequence.key] = [*sequence.tokens, 0, 0]
        made.admit()
        slot, left = short.slot, None
        while made.has_work:
            made.step()
            if short.finish_reason:
                left = made.rounds.layers.state[:, slot].clone() if left is None else left
                assert same_bits(made.rounds.layers.state[:, slot], left), name
        assert made.rounds.slots.count[slot] > 0 and len(long.output) == 6


def test_memory_is_that_of_a_state_a_node_or_of_factors(target: GatedDeltaNet, baselines: list[str]) -> None:
    state, channels = LAYERS * HEADS * DIM * DIM * 4, (2 + HEADS) * DIM
    committed = state + LAYERS * channels * 3 * 4
    inputs = LAYERS * 2 * 8 * channels * 4  # raw ones of the convolution, in two banks of 8 nodes
    factors = LAYERS * 8 * ((1 + HEADS) * DIM + HEADS) * 4
    raw = LAYERS * 8 * (channels + 2 * HEADS) * 4
    want = {None: 2 * factors, COMMIT: factors, SNAPSHOTS: 8 * state, LIBRARY: raw}
    for name in (None, *baselines):
        made = engine(target, 7, 1, name)
        assert slot_bytes(made.rounds) == (committed, want[name] + inputs), name


def test_what_cannot_run_says_why(target: GatedDeltaNet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a baseline is one of dense snapshots, separate commit"):
        engine(target, 3, 1, "fla")
    monkeypatch.setattr(module, "find_library", lambda: None)
    with pytest.raises(UnavailableError, match="flash-linear-attention is not installed"):
        engine(target, 3, 1, LIBRARY)
    monkeypatch.setattr(module, "find_library", lambda: Library(lambda q: q, "0.3"))
    with pytest.raises(UnavailableError, match=r"flash-linear-attention 0\.3 has no states \[V, K\]"):
        engine(target, 3, 1, LIBRARY)
    with pytest.raises(ValueError, match="verifies chains of one length"):
        engine(target, 3, 2, LIBRARY)


def test_snapshots_that_do_not_fit_are_refused() -> None:
    state = SimpleNamespace(nbytes=1 << 50, device=torch.device("cuda"), shape=(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 41))
        with pytest.raises(UnavailableError, match="snapshots of 3 nodes in 4 slots need"):
            module.DenseSnapshots.of(SimpleNamespace(state=state, max_nodes=3))  # type: ignore[arg-type]


def test_a_drafter_may_be_at_work_beside_a_baseline(target: GatedDeltaNet) -> None:
    network = random_network(LARGE, 0, DEVICE).float()
    want = plain(target, 0.0, 4, 4)
    made = engine_of(target, network, Way("", 3, 2, 2, 0.9, True), len(PROMPTS), 0)
    run_as(made, SNAPSHOTS)
    got = decode_batch(made, PROMPTS, params(0.0, 4, 4), 1, want.outputs)
    assert got.outputs == want.outputs and got.rounds < want.rounds
