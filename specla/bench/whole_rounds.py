"""Other ways to deal with the recurrent state, in the engine's own rounds: what `table` compares the engine with.

Drafter, walk, convolution and all else stay the engine's. A sequence cannot be gone on with afterwards.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specla.bench.baselines import find_library
from specla.bench.generate import BASELINES, COMMIT, LIBRARY, UnavailableError
from specla.bench.round_kernels import lay_out, restore, verify_dense
from specla.engine.resident import ResidentEngine
from specla.ops.factors import Factors
from specla.ops.gate import Gate
from specla.ops.verify import launch, launch_commit
from specla.resident.forward import Inputs, Layers, Round
from specla.resident.rounds import Rounds
from specla.resident.slots import Slots


@dataclass(frozen=True)
class SeparateCommit:
    """Factors, committed by a launch of its own as soon as they are accepted: `[L, S, M, ..]`, one bank."""

    kept: Factors
    defers = False

    @classmethod
    def of(cls, layers: Layers) -> SeparateCommit:
        nodes = layers.max_nodes
        return cls(Factors(*(x.new_zeros(*x.shape[:2], nodes, *x.shape[3:]) for x in layers.factors)))

    def layer(self, index: int) -> SeparateCommit:
        return SeparateCommit(Factors(*(x[index] for x in self.kept)))

    def outputs(self, inputs: Inputs, layer: Layers, now: Round) -> Tensor:
        q, k, v, a, b, gate = inputs
        o, _ = launch(
            q, k, v, a, b, now.tree, layer.state, None, now.mode, True, gate=gate, state_indices=now.rows,
            factors=self.kept, by_slot=True,
        )  # fmt: skip
        return o

    def accepted(self, layers: Layers, rows: Tensor, slots: Slots) -> None:
        path, count = (x[: len(rows)] for x in (slots.path, slots.count))
        launch_commit(layers.state, self.kept, path, count, rows, by_slot=True)


@dataclass(frozen=True)
class DenseSnapshots:
    """The whole state of every draft node, `[L, S, M, HV, V, K]`; acceptance copies one of them into the slot."""

    kept: tuple[Tensor]
    defers = False

    @classmethod
    def of(cls, layers: Layers) -> DenseSnapshots:
        """Raises UnavailableError when they do not fit the device."""
        state, nodes = layers.state, layers.max_nodes
        needed = state.nbytes * nodes
        if state.device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(state.device)[0]):
            raise UnavailableError(
                f"snapshots of {nodes} nodes in {state.shape[1]} slots need {needed:,} bytes, and {free:,} are free"
            )
        return cls((state.new_zeros(*state.shape[:2], nodes, *state.shape[2:]),))

    def layer(self, index: int) -> DenseSnapshots:
        return DenseSnapshots((self.kept[0][index],))

    def outputs(self, inputs: Inputs, layer: Layers, now: Round) -> Tensor:
        return verify_dense(inputs, now, layer.state, self.kept[0])

    def accepted(self, layers: Layers, rows: Tensor, slots: Slots) -> None:
        restore(self.kept[0], layers.state, rows, slots)


@dataclass(frozen=True)
class LibraryRule:
    """flash-linear-attention's recurrent kernel: over the chain, and again over what of it was accepted.

    Its states lie as ours do (`state_v_first`), and it makes gates itself. It wants contiguous inputs, and returns new
    states rather than write those that it was given: one launch lays inputs side by side, and one copies states, in
    every layer. Of several rows, accepted prefixes are packed one after another, which is how it takes lengths that
    only the device knows.
    """

    rule: Any
    kept: tuple[Tensor, ...]  # q, k, v, a, b [L, S * M, ..] of the last round
    gates: list[Gate]  # of all layers, known after a first forward pass
    index: int = -1
    defers = False

    @classmethod
    def of(cls, layers: Layers, rule: Any, dtype: torch.dtype) -> LibraryRule:
        """dtype: of the target's activations."""
        keys, values = layers.factors.k.shape[3:].numel(), layers.factors.d.shape[3:].numel()
        heads, count = layers.state.shape[2], layers.state.shape[1] * layers.max_nodes
        kept = tuple(
            layers.state.new_zeros(len(layers.state), count, width, dtype=dtype)
            for width in (keys, keys, values, heads, heads)
        )
        return cls(rule, kept, [Gate(layers.state, None, 1.0)] * len(layers.state))

    def layer(self, index: int) -> LibraryRule:
        return replace(self, kept=tuple(x[index] for x in self.kept), index=index)

    def outputs(self, inputs: Inputs, layer: Layers, now: Round) -> Tensor:
        q, k, v, a, b, gate = inputs
        batch, size = q.shape[:2]
        assert size == layer.max_nodes, "chains are as long as there is room"
        self.gates[self.index] = gate
        mine = tuple(x[: batch * size] for x in self.kept)
        lay_out((q, k, v, a, b), mine)
        shaped = [x.view(like.shape) for x, like in zip(mine, (q, k, v, a, b), strict=True)]
        o, _ = self._run(shaped, gate, layer.state[:batch], None)
        return o

    def accepted(self, layers: Layers, rows: Tensor, slots: Slots) -> None:
        batch, size = len(rows), layers.max_nodes
        (heads, dim_v, dim_k), mine = layers.state.shape[2:], [x[:, : batch * size] for x in self.kept]
        count = slots.count[:batch] * (rows >= 0)
        ends = count.cumsum(0)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        if batch > 1:
            place = torch.arange(batch * size, device=rows.device)
            row = torch.searchsorted(ends, place, right=True).clamp(max=batch - 1)
            source = (row * size + place - bounds[row]).clamp(max=batch * size - 1)
            mine = [x.index_select(1, source) for x in mine]
        q, k, v, a, b = mine
        q, k = (x.unflatten(-1, (-1, dim_k)) for x in (q, k))
        v = v.unflatten(-1, (heads, dim_v))
        for i, gate in enumerate(self.gates):
            state = layers.state[i, :batch]
            _, after = self._run([x[i][None] for x in (q, k, v, a, b)], gate, state, bounds)
            state.copy_(after)

    def _run(self, inputs: list[Tensor], gate: Gate, state: Tensor, bounds: Tensor | None) -> Any:
        q, k, v, a, b = inputs
        return self.rule(
            q=q, k=k, v=v, g=a, beta=b, initial_state=state, output_final_state=bounds is not None, cu_seqlens=bounds,
            state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=gate.A_log,
            dt_bias=gate.dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=gate.beta_scale == 2.0,
        )  # fmt: skip


def run_as(engine: ResidentEngine, name: str) -> None:
    """Let an engine that has not decoded yet run its rounds as a baseline does, with its memory in place of its own.

    Raises:
        UnavailableError: where the baseline cannot run.
        ValueError: for another name, or for the library with anything but chains of one length.
    """
    if name not in BASELINES:
        raise ValueError(f"a baseline is one of {', '.join(BASELINES)}, got {name!r}")
    rounds = engine.rounds
    layers = rounds.layers
    if name == LIBRARY:
        config = engine.config
        if config.num_speculative_tokens == "auto" or config.topk != 1:
            raise ValueError(f"{LIBRARY} verifies chains of one length, got {config}")
        made: Any = LibraryRule.of(layers, _library_rule(), engine.target.embeddings.weight.dtype)
    else:
        made = (SeparateCommit if name == COMMIT else DenseSnapshots).of(layers)
    none = Factors(*(x[:, :, :0].clone() for x in layers.factors))
    rounds.layers, rounds.banks = layers._replace(factors=none, recurrence=made), 2


def _library_rule() -> Any:
    library = find_library()
    if library is None:
        raise UnavailableError("flash-linear-attention is not installed")
    if "state_v_first" not in inspect.signature(library.rule).parameters:
        raise UnavailableError(f"flash-linear-attention {library.version} has no states [V, K], expected 0.6")
    return library.rule


def slot_bytes(rounds: Rounds) -> tuple[int, int]:
    """What a slot holds that is committed, states and windows, and what it holds for drafts, all banks together."""
    layers = rounds.layers
    kept: tuple[Tensor, ...] = getattr(layers.recurrence, "kept", ())
    committed = sum(x[:, 0].nbytes for x in (layers.state, layers.conv_state))
    slots = layers.state.shape[1]
    return committed, sum(x.nbytes // slots for x in (*layers.factors, layers.conv_inputs, *kept))
