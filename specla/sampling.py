"""What a request asks of the sampler, its noise, and the scores whose argmax is the token drawn.

Noise is a hash of (seed, absolute position, token id), and every step is elementwise, an exact integer sum or
a maximum: a draw depends neither on the batch around it nor on what was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specla.tree import Tree

_WEIGHT_ONE = 2.0**43  # fixed point of exp(0): sums over 2**19 tokens stay below 2**63


class Plan(NamedTuple):
    """Which steps some row of a batch needs: host facts, so that shapes are decided without a device sync."""

    noise: bool
    penalty: bool
    ranks: int  # sorted tokens that top-k and top-p look at: 0 = neither is on, -1 = the whole vocabulary
    min_p: bool


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a batch, one entry per row; `Sampling.of` builds one from plain values.

    temperature, top_p, min_p, repetition_penalty: float `[B]`; temperature 0 means argmax.
    top_k: int64 `[B]`, -1 or 0 for off.
    seed: int64 `[B]`. position: int64 `[B]`, the absolute position of the token that the root's logits draw.
    seen: bool `[B, V]`, tokens of prompt and output, or None; needed by repetition penalties only.
    plan: read from the tensors when not given.

    Raises:
        ValueError: for a parameter out of range.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor
    position: Tensor
    seen: Tensor | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        if self.plan is None:
            object.__setattr__(self, "plan", self._read_plan())

    @classmethod
    def of(
        cls,
        batch: int,
        *,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = -1,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        repetition_penalty: float | Sequence[float] = 1.0,
        seed: int | Sequence[int] = 0,
        position: int | Sequence[int] = 0,
        seen: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Sampling:
        """One value for all rows, or one for each."""

        def column(name: str, value: float | Sequence[float], dtype: torch.dtype) -> Tensor:
            values = [value] * batch if isinstance(value, (int, float)) else list(value)
            if len(values) != batch:
                raise ValueError(f"{name} needs one value or {batch}, got {len(values)}")
            return torch.tensor(values, dtype=dtype)

        host = cls(
            temperature=column("temperature", temperature, torch.float32),
            top_k=column("top_k", top_k, torch.int64),
            top_p=column("top_p", top_p, torch.float32),
            min_p=column("min_p", min_p, torch.float32),
            repetition_penalty=column("repetition_penalty", repetition_penalty, torch.float32),
            seed=column("seed", seed, torch.int64),
            position=column("position", position, torch.int64),
        )
        return cls(
            temperature=host.temperature.to(device),
            top_k=host.top_k.to(device),
            top_p=host.top_p.to(device),
            min_p=host.min_p.to(device),
            repetition_penalty=host.repetition_penalty.to(device),
            seed=host.seed.to(device),
            position=host.position.to(device),
            seen=seen,
            plan=host.plan,
        )

    def at(self, position: Tensor, seen: Tensor | None = None) -> Sampling:
        """The same parameters in a later round; `seen` stays as it was when not given."""
        return replace(self, position=position, seen=self.seen if seen is None else seen)

    def _read_plan(self) -> Plan:
        warm = self.temperature > 0
        _check("temperature", "finite and >= 0", (self.temperature >= 0) & self.temperature.isfinite())
        _check("top_k", "-1 (off) or at least 1", self.top_k >= -1)
        _check("top_p", "in (0, 1]", (self.top_p > 0) & (self.top_p <= 1))
        _check("min_p", "in [0, 1]", (self.min_p >= 0) & (self.min_p <= 1))
        penalty = self.repetition_penalty
        _check("repetition_penalty", "> 0 and finite", (penalty > 0) & penalty.isfinite())
        narrow = warm & (self.top_k > 0)
        if bool((warm & ~narrow & (self.top_p < 1)).any()):
            ranks = -1
        else:
            ranks = int(torch.where(narrow, self.top_k, 0).max()) if len(warm) else 0
        return Plan(
            noise=bool(warm.any()),
            penalty=bool((penalty != 1).any()),
            ranks=ranks,
            min_p=bool((warm & (self.min_p > 0)).any()),
        )


def gumbel_noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, float64 `[R, vocab]`, keyed by (seed `[R]`, position `[R]`, token id)."""
    key = _mix64(_mix64(seed.long() + _GOLDEN) ^ (position.long() * _GOLDEN))[:, None]
    low, high = key.int(), (key >> 32).int()
    token = torch.arange(1, vocab + 1, dtype=torch.int32, device=seed.device)
    x = _xorshift(token.mul_(_signed(0x9E3779B1, 32)), 15)
    x = _xorshift(x ^ low, 16).mul_(_signed(0x7FEB352D, 32))
    x = _xorshift(x, 15).bitwise_xor_(high).mul_(_signed(0x846CA68B, 32))
    uniform = _xorshift(x, 16).double().add_(2.0**31 + 0.5).mul_(2.0**-32)  # strictly inside (0, 1)
    return uniform.log_().neg_().log_().neg_()


def scores(logits: Tensor, tokens: Tensor, tree: Tree, sampling: Sampling) -> Tensor:
    """`[B, N, V]` whose argmax over V is the token each node draws: logits + temperature * Gumbel noise.

    Steps in order: repetition penalty, temperature, top-k, top-p, min-p. Equal logits rank by token id,
    lowest first; the best token always stays.
    """
    plan = sampling.plan
    assert plan is not None
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if plan.penalty:
        logits = _penalise(logits, tokens, tree, sampling)
    if not plan.noise:
        return logits
    batch, nodes, vocab = logits.shape
    host = logits.device.type == "cpu"  # elsewhere nothing may depend on what the tree holds
    size = 1 + int(tree.depth.max()) if host else nodes
    seed = sampling.seed[:, None].expand(batch, size)
    position = sampling.position[:, None] + torch.arange(size, device=logits.device)
    noise = gumbel_noise(seed.reshape(-1), position.reshape(-1), vocab).view(batch, size, vocab)
    noise.mul_(sampling.temperature[:, None, None])
    if not (host and size == nodes and tree.is_chain):
        row = torch.arange(batch, device=logits.device)[:, None] * size
        noise = noise.view(-1, vocab)[row + tree.depth.clamp(min=0)]
    wide = logits.double()
    drop = _dropped(logits, wide, sampling) if plan.ranks or plan.min_p else None
    drawn = noise.add_(wide)
    return drawn if drop is None else drawn.masked_fill_(drop, -torch.inf)


def first_argmax(x: Tensor) -> Tensor:
    """int64 index of the largest entry along the last dimension, the first among equals."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.argmax(x.detach().numpy(), -1))  # 8 times as fast as torch's
    return x.max(-1).indices


def _descending(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.detach().neg().numpy(), -1)).neg_()  # 20 times as fast as torch's
    return x.sort(-1, descending=True).values


def _penalise(logits: Tensor, tokens: Tensor, tree: Tree, sampling: Sampling) -> Tensor:
    if sampling.seen is None:
        raise ValueError("repetition_penalty other than 1 needs `seen` [B, V], the tokens so far")
    batch, nodes, vocab = logits.shape
    own = torch.where(tree.valid, tokens, tokens[:, :1])[:, :, None]
    # Tokens on each node's path [B, N, N]; its own stands in for those that are not.
    path = torch.where(tree.ancestors, own.transpose(1, 2), own)
    seen = sampling.seen[:, None].expand(batch, nodes, vocab).clone().scatter_(2, path, True)
    penalty = sampling.repetition_penalty.to(logits.dtype)[:, None, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _dropped(logits: Tensor, wide: Tensor, sampling: Sampling) -> Tensor:
    """Tokens that fall to top-k, top-p or min-p: bool `[B, N, V]`. `wide` holds the logits as float64."""
    plan, vocab = sampling.plan, logits.shape[-1]
    assert plan is not None
    # The best token always stays, so rows at temperature 0 need no care beyond the division.
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1.0).double()[:, None, None]
    floor = torch.full((), -torch.inf, dtype=torch.float64, device=logits.device)
    if plan.min_p:
        below = sampling.min_p.double().log()[:, None, None] * temperature
        floor = logits.amax(-1, keepdim=True).double() + below
    if not plan.ranks:
        return wide < floor

    # One rank more than asked for, to see whether the cut parts equals.
    size = vocab if plan.ranks < 0 else min(plan.ranks + 1, vocab)
    values = _descending(logits)[..., :size].double()
    rank = torch.arange(size, device=logits.device)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocab)[:, None, None]
    top_p = sampling.top_p.double()[:, None, None]
    weight = (values - values[..., :1]).div_(temperature).exp_().mul_(_WEIGHT_ONE).long()
    weight = weight.masked_fill_(rank >= top_k, 0)
    mass = weight.cumsum(-1)
    inside = (rank < top_k) & ((top_p >= 1) | ((mass - weight).double() < top_p * mass[..., -1:].double()))
    count = inside.sum(-1, keepdim=True).clamp(min=1)  # NaN on padding leaves nothing inside
    free = (top_k >= vocab) & (top_p >= 1)
    last = values.gather(-1, count - 1).masked_fill_(free, -torch.inf)
    drop = wide < torch.maximum(floor, last)
    after = values.gather(-1, count.clamp(max=size - 1))
    if logits.device.type == "cpu" and not bool((after == last).any()):
        return drop
    equal = wide == last
    spare = count - (values > last).sum(-1, keepdim=True)
    return drop | (equal & (equal.cumsum(-1, dtype=torch.int32) > spare))


def _check(name: str, allowed: str, good: Tensor) -> None:
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ValueError(f"{name} of row {row} is out of range: allowed is {allowed}")


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, which wraps."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & (2**33 - 1))


def _xorshift(x: Tensor, shift: int) -> Tensor:
    """x ^ (x >>> shift), in place, on int32."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
