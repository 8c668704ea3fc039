"""Texts that the target writes itself, recorded with what a drafter is trained on.

They are read one token at a time by the operations that verification and its commit run. Training and prefill sum in
another order; a drafter at work sees what verification leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.models.language_model import LanguageModel
from specla.models.past import GATED_DELTA, Rule, TargetPast, Verification
from specla.models.target import Tap
from specla.ops.checks import require
from specla.ops.conv import convolve
from specla.ops.dplr import dplr_verify, half_nodes
from specla.ops.torch import commit
from specla.ops.verify import verify
from specla.sampling import first_argmax, gumbel_noise
from specla.state import AttentionSpec, RecurrentLayer, StatePool
from specla.tree import Tree

MOST_ROWS = 1 << 16
NOISE_BLOCK = 1 << 26  # numbers of noise computed together: with what they are made from, below 2 GB


@dataclass(frozen=True)
class Rollouts:
    """R texts of L + 1 tokens, and the target's view of all but their last."""

    tokens: Tensor  # int64 [R, L + 1]
    features: Tensor  # [R, L, F] residual streams, side by side as a `Tap` shows them, at tokens[:, :-1]
    hidden: Tensor  # [R, L, hidden] normalised: target.logits(hidden) are the logits for tokens[:, 1:]


class Recorder:
    """Writes and records `rows` texts of `length + 1` tokens at a time.

    On a GPU a target without attention layers reads a token of every row in one captured graph, which refers to the
    target's weights where they lie: change them in place or make a new recorder.

    Memory: `(len(layer_ids) + 1) * hidden_size` numbers of `dtype` and 8 bytes a token, held as long as the recorder
    is; beside them the states of the rows and what one token of each needs in passing.

    Args:
        layer_ids: the residual streams to record, as in `Tap`.
        dtype: of features and hidden; by default bfloat16 on a GPU and float32 elsewhere.

    Raises:
        ValueError: for a number of rows, a length or layers that cannot be.
    """

    @torch.no_grad()
    def __init__(
        self,
        target: LanguageModel,
        layer_ids: tuple[int, ...],
        rows: int,
        length: int,
        dtype: torch.dtype | None = None,
    ):
        config, device = target.config, target.norm.weight.device
        require(1 <= rows <= MOST_ROWS, f"rows must be in 1..{MOST_ROWS}, got {rows}")
        require(length >= 1, f"length must be at least 1, got {length}")
        require(
            len(layer_ids) > 0 and all(0 <= i <= config.num_hidden_layers for i in layer_ids),
            f"layer_ids must name streams in 0..{config.num_hidden_layers}, got {layer_ids}",
        )
        self.target, self.layer_ids, self.rows, self.length = target, tuple(layer_ids), rows, length
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        size = config.hidden_size
        # time comes first, so that what a step writes lies together
        self._tokens = torch.zeros(length + 1, rows, dtype=torch.long, device=device)
        self._features = torch.zeros(length, rows, len(layer_ids) * size, dtype=dtype, device=device)
        self._hidden = torch.zeros(length, rows, size, dtype=dtype, device=device)
        self._time = torch.zeros(1, dtype=torch.long, device=device)
        self._given = torch.ones(rows, dtype=torch.long, device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._seed = torch.zeros(rows, dtype=torch.long, device=device)
        attends = any(isinstance(spec, AttentionSpec) for spec in target.state_specs())
        self._stepwise = None if attends else _Stepwise(target.new_pool(rows, 1), self._time)
        self._graph = self._capture() if device.type == "cuda" and self._stepwise else None

    @torch.no_grad()
    def record(self, tokens: Tensor, given: Tensor, temperature: Tensor, seed: Tensor) -> Rollouts:
        """Let the target go on from what is given, as an engine would, but past EOS.

        Args:
            tokens: int64 `[rows, length + 1]`, of which only what is given is read.
            given: int64 `[rows]` tokens at the start of each row, from 1 to all.
            temperature: `[rows]`, 0 for the most likely token; seed: int64 `[rows]`, of the noise above 0.

        Returns:
            views of the recorder's memory, good until the next call; constants to autograd.

        Raises:
            ValueError: for a shape, a dtype or a value that does not fit.
        """
        self._check(tokens, given, temperature, seed)
        self._tokens.copy_(tokens.t())
        self._given.copy_(given)
        self._temperature.copy_(temperature)
        self._seed.copy_(seed)
        self._time.zero_()
        if self._stepwise is not None:
            self._stepwise.clear()
        if self._graph is not None:
            for _ in range(self.length):
                self._graph.replay()
        else:
            first, noise = int(given.min()), bool((temperature > 0).any())
            for time, past in enumerate(self._pasts()):
                self._advance(past, draw=time + 1 >= first, noise=noise)
        return Rollouts(self._tokens.t(), self._features.transpose(0, 1), self._hidden.transpose(0, 1))

    def _pasts(self) -> Iterator[TargetPast]:
        """What lies before each token in turn."""
        if self._stepwise is not None:
            yield from [self._stepwise] * self.length
            return
        pool = self.target.new_pool(self.rows, 1)
        slots = [pool.alloc() for _ in range(self.rows)]
        tree = Tree.chain(1, self.rows, pool.device)
        root = torch.zeros(self.rows, 1, dtype=torch.long, device=pool.device)
        for _ in range(self.length):
            yield Verification(pool, slots, tree, "auto")
            pool.accept(slots, root, [0] * self.rows)

    def _advance(self, past: TargetPast, draw: bool, noise: bool) -> None:
        """Read the token at `_time` in every row, and write the next one where it is not given."""
        tokens = self._tokens.index_select(0, self._time)
        hidden = self.target(tokens.t(), past, Tap(self.layer_ids, self._keep_features))
        self._hidden.index_copy_(0, self._time, hidden.transpose(0, 1).to(self._hidden.dtype))
        self._time.add_(1)
        if draw:
            drawn = self._draw(self.target.logits(hidden)[:, 0], noise)
            tokens = self._tokens.index_select(0, self._time)
            tokens = torch.where(self._time < self._given, tokens, drawn)
            self._tokens.index_copy_(0, self._time, tokens)

    def _keep_features(self, streams: Tensor) -> None:
        self._features.index_copy_(0, self._time, streams.transpose(0, 1).to(self._features.dtype))

    def _draw(self, logits: Tensor, noise: bool) -> Tensor:
        """The token `[R]` at `_time` for logits `[R, vocab]`; without noise, as if every temperature were 0."""
        if not noise:
            return first_argmax(logits)
        vocab = logits.shape[1]
        columns = (logits, self._temperature[:, None], self._seed, self._time.expand(self.rows))
        blocks = zip(*(x.split(max(1, NOISE_BLOCK // vocab)) for x in columns), strict=True)
        return torch.cat(
            [
                first_argmax(gumbel_noise(seed, position, vocab).mul_(temperature).add_(part))
                for part, temperature, seed, position in blocks
            ]
        )

    def _capture(self) -> torch.cuda.CUDAGraph:
        """One step of all rows as a graph; whatever it reads or writes between steps is allocated by now."""
        assert self._stepwise is not None
        with torch.cuda.device(self._time.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._time.zero_()  # a text may be shorter than the warm-up
                    self._advance(self._stepwise, draw=True, noise=True)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # other threads, such as a process group's watchdog, may call CUDA meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._advance(self._stepwise, draw=True, noise=True)
        return graph

    def _check(self, tokens: Tensor, given: Tensor, temperature: Tensor, seed: Tensor) -> None:
        rows, width, vocab = self.rows, self.length + 1, self.target.config.vocab_size
        for name, x, shape in (
            ("tokens", tokens, [rows, width]), ("given", given, [rows]), ("seed", seed, [rows]),
        ):  # fmt: skip
            require(
                list(x.shape) == shape and x.dtype == torch.long,
                f"{name} must be int64 {shape}, got {list(x.shape)} {x.dtype}",
            )
        require(
            list(temperature.shape) == [rows] and temperature.is_floating_point(),
            f"temperature must be floating point [{rows}], got {list(temperature.shape)} {temperature.dtype}",
        )
        require(bool(((given >= 1) & (given <= width)).all()), f"given must be in 1..{width}")
        require(
            bool((temperature.isfinite() & (temperature >= 0)).all()), "temperature must be finite and >= 0"
        )
        read = torch.arange(width, device=tokens.device) < given.to(tokens.device)[:, None]
        require(
            not bool((read & ((tokens < 0) | (tokens >= vocab))).any()),
            f"given tokens must be in 0..{vocab - 1}",
        )


class _Stepwise:
    """The past of one token a row, at position `time` `[1]`, for recurrent layers, whose states move on as it is read.

    Nothing waits for what a tensor on the device holds, so that a graph can capture it.
    """

    def __init__(self, pool: StatePool, time: Tensor):
        rows = len(pool.length)
        self.pool = pool
        self.positions = time.expand(rows, 1)  # a view, which sees time move
        self.tree = Tree.chain(1, rows)  # on the host, which asks it and `count` how far to go
        self.count = torch.ones(rows, dtype=torch.long)
        self.root = torch.zeros(rows, 1, dtype=torch.long, device=pool.device)
        self.halves = half_nodes(self.root)

    def clear(self) -> None:
        for group in self.pool.groups.values():
            group.state.zero_()
            group.conv_state.zero_()

    def conv(
        self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = "silu"
    ) -> Tensor:
        window = self._layer(layer).conv_state
        y = convolve(x, self.tree, weight, bias, window, activation)
        if window.shape[-1]:
            inputs = window.transpose(1, 2)
            inputs.copy_(torch.cat([inputs[:, 1:], x], 1))
        return y

    def previous(self, layer: int, x: Tensor, first: int = 0) -> Tensor:
        window = self._layer(layer).conv_state[:, None, first : first + x.shape[2], 0]
        before = window.to(x.dtype, copy=True)
        window.copy_(x)
        return before

    def delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
        rule: Rule = GATED_DELTA,
    ) -> Tensor:  # fmt: skip
        state = self._layer(layer).state
        o, factors = verify(
            q, k, v, g, beta, self.tree, state, rule.scale, "auto", rule.normalise, rule.delta
        )
        commit(state, factors, self.root, self.count)
        return o

    def dplr(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        state = self._layer(layer).state
        o, factors = dplr_verify(q, k, v, g, a, b, self.tree, state=state)
        commit(state, factors, self.halves, 2 * self.count)
        return o

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        raise AssertionError("a target with attention layers is read through a pool")

    def _layer(self, layer: int) -> RecurrentLayer:
        state = self.pool.layers[layer]
        assert isinstance(state, RecurrentLayer)
        return state
