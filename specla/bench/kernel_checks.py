"""Nothing is timed before its results are right: against the law in float64, and among the exact modes to the bit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
import triton
from torch import Tensor

from specla.bench.baselines import (
    Library,
    LibraryChain,
    Snapshots,
    TokenDecoder,
    leaf_chains,
    leaf_paths,
    leaf_rows,
    path_to,
    tokens_at,
    verify_round,
)
from specla.bench.kernel_inputs import Round, Work
from specla.ops.factors import Factors, Pending, PendingConv
from specla.ops.naive import naive_gated_delta_verify, naive_tree_conv
from specla.ops.triton.commit import commit
from specla.ops.triton.conv import tree_conv
from specla.ops.triton.tuning import Config
from specla.tree import Tree

BFLOAT16 = 8e-3 if triton.knobs.runtime.interpret else 4e-3  # the interpreter cuts outputs where a GPU rounds
# root mean square errors, relative
BOUNDS = {"bfloat16 outputs": BFLOAT16, "exact": 1e-4, "parallel": 2e-3, "state": 1e-4}
Verified = tuple[Tensor, Factors, Tensor]  # outputs, factors of batch rows, states


class CheckError(RuntimeError):
    """A kernel's results are wrong, so its time means nothing."""


def check(work: Work, groups: Collection[str], library: Library | None = None) -> Library | None:
    """Check all that the groups will time, on the first round.

    Returns:
        the library with the layout of its states that gives right results.

    Raises:
        CheckError: naming what is wrong, and by how much.
    """
    configs = [work.config(mode) for mode in ("serial", "hybrid", "parallel")]
    exact = check_configs(work, configs)
    r = work.rounds[0]
    committed = _after_path(r, exact)
    _check_decoding(work, exact, committed)
    if "replay" in groups:
        _check_leaves(work, exact)
    if "snapshots" in groups:
        _check_snapshots(work, exact)
    if "conv" in groups:
        _check_conv(work)
    if library is not None and work.shape.is_chain and {"fla", "commit"} & set(groups):
        library = _check_library(work, exact, library)
    return library


def verified(work: Work, r: Round, config: Config) -> Verified:
    """Results of one verification with its fused update, on copies."""
    fresh = r.fresh()
    o, factors = verify_round(work, fresh, config, pending=fresh.pending)
    slots = r.slots.long()
    return o, Factors(*(x[slots, : r.q.shape[1]] for x in factors)), fresh.state


def check_configs(work: Work, configs: Collection[Config]) -> Verified:
    """The results of the exact modes, which have one set of bits; parallel's are near enough.

    Raises:
        CheckError: when they have not.
    """
    r, first = work.rounds[0], work.config("serial")
    law = Law(work)
    exact = verified(work, r, first)
    law.check("serial", exact)
    for config in configs:
        o, factors, state = verified(work, r, config)
        if config.mode == "parallel":
            _near(f"{config}: outputs", o, exact[0], BFLOAT16)
            for name, x, y in zip(Factors._fields, factors, exact[1], strict=True):
                _near(f"{config}: factors {name}", x, y, BOUNDS["parallel"])
            _near(f"{config}: states", state, exact[2], BOUNDS["state"])
            law.check("parallel", (o, factors, state))
        else:
            for name, x, y in zip(("o", *Factors._fields), (o, *factors), (exact[0], *exact[1]), strict=True):
                _same(f"{config}: {name}", x, y)
            _same(f"{config}: state", state, exact[2])
    return exact


class Law:
    """The naive replay in float64 of the first and the last row of a work's first round."""

    def __init__(self, work: Work):
        r = work.rounds[0]
        self.rows = torch.tensor(sorted({0, len(r.slots) - 1}))
        self.slots = r.slots.cpu().long()[self.rows]
        gate = work.gate._replace(
            **{name: getattr(work.gate, name).cpu().double() for name in ("A_log", "dt_bias")}
        )
        pending = Pending(
            Factors(*map(self._of_slots, r.pending.factors)), *(x.cpu()[self.rows] for x in r.pending[1:])
        )
        q, k, v, a, b = map(self._of_rows, (r.q, r.k, r.v, r.a, r.b))
        state = self._of_slots(r.state)
        o, factors = naive_gated_delta_verify(
            q, k, v, a, b, Tree([r.parents[row] for row in self.rows.tolist()]),
            state=state, pending=pending, scale=work.scale, use_qk_l2norm_in_kernel=True, gate=gate,
        )  # fmt: skip
        self.o, self.factors, self.state = o, factors, state

    def check(self, mode: str, got: Verified) -> None:
        """Raise CheckError where results are further from it than the mode may be."""
        bound = BOUNDS["exact" if mode == "serial" else mode]
        _near(f"{mode}: outputs against the law", self._of_rows(got[0]), self.o, BFLOAT16)
        for name, x, y in zip(Factors._fields, got[1], self.factors, strict=True):
            _near(f"{mode}: factors {name} against the law", self._of_rows(x), y, bound)
        _near(f"{mode}: states against the law", self._of_slots(got[2]), self.state, BOUNDS["state"])

    def _of_rows(self, x: Tensor) -> Tensor:
        return x[self.rows.to(x.device)].cpu().double()

    def _of_slots(self, x: Tensor) -> Tensor:
        return x[self.slots.to(x.device)].cpu().double()


def _after_path(r: Round, exact: Verified) -> tuple[Tensor, Tensor]:
    """Node ids `[B, T]` of a path that each row has, as long as all have one, and the states once it is committed."""
    paths = [leaf_paths(parent)[0] for parent in r.parents]
    size = min(map(len, paths))
    ids = torch.tensor([path[:size] for path in paths], dtype=torch.int32, device=r.slots.device)
    state = exact[2].clone()
    commit(state, exact[1], ids, torch.full_like(ids[:, 0], size), r.slots)
    return ids, state


def _check_decoding(work: Work, exact: Verified, committed: tuple[Tensor, Tensor]) -> None:
    """One-token decoding along a path, and its commits, have the bits of the tree's verification and commit."""
    r, (ids, state) = work.rounds[0].fresh(), committed
    decoder = TokenDecoder(work, tokens_at(r, ids.long()), work.config("auto", nodes=1))
    outputs, last = decoder(r.pending)
    commit(r.state, *last, r.slots, by_slot=True)
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    _same("one-token decoding: outputs", torch.cat(outputs, 1), exact[0][rows, ids.long()])
    _same("one-token decoding: states", r.state, state)


def _committed_round(work: Work, exact: Verified) -> Round:
    """The first round as it is once its update was applied."""
    return replace(work.rounds[0].fresh(), state=exact[2].clone())


def _check_leaves(work: Work, exact: Verified) -> None:
    r = _committed_round(work, exact)
    for name, batches in (("leaves one by one", leaf_chains(r)), ("leaves as rows", [leaf_rows(r)])):
        for chains in batches:
            o = chains.run(work, work.config("serial", nodes=chains.paths.shape[1]))
            tree, slots = chains.tokens.tree, chains.tokens.slots
            owner = r.slots.argsort()[slots.clamp(min=0).long()]
            want = exact[0][owner[:, None], chains.paths]
            real = tree.valid & (slots >= 0)[:, None]
            _same(name, o[real], want[real])


def _check_snapshots(work: Work, exact: Verified) -> None:
    r = _committed_round(work, exact)
    rows, nodes = r.q.shape[:2]
    memory = torch.full((rows, nodes, *r.state.shape[1:]), float("nan"), device=r.state.device)
    ids = [path_to(parent, nodes - 1) for parent in r.parents]
    paths = torch.tensor([path + [0] * (nodes - len(path)) for path in ids], device=r.slots.device).int()
    count = torch.tensor([len(path) for path in ids], device=r.slots.device).int()
    want = exact[2].clone()
    commit(want, exact[1], paths, count, r.slots)
    for chain in (False, True) if work.shape.is_chain else (False,):
        snapshots = Snapshots(work, r, memory, chain=chain)
        _near(f"snapshots (chain={chain}): outputs", snapshots.verify(), exact[0], BFLOAT16)
        snapshots.copy_back()
        _near(f"snapshots (chain={chain}): states", r.state, want, BOUNDS["state"])
        r.state.copy_(exact[2])
        memory.fill_(float("nan"))


def _check_conv(work: Work) -> None:
    r = work.rounds[0].fresh()
    rows = torch.tensor(sorted({0, len(r.slots) - 1}))
    slots = r.slots.cpu().long()[rows]
    window = r.window[slots.to(r.window.device)].cpu().double()
    x, path, count = r.pending_conv
    before = PendingConv(x[slots.to(x.device)].cpu().double(), path.cpu()[rows], count.cpu()[rows])
    want = naive_tree_conv(
        r.x[rows.to(r.x.device)].cpu().double(), Tree([r.parents[row] for row in rows.tolist()]),
        work.weight.cpu().double(), conv_state=window, pending=before,
    )  # fmt: skip
    y = run_conv(work, r)
    _near("convolution: outputs", y[rows.to(y.device)].cpu(), want, BFLOAT16)
    _same("convolution: windows", r.window[slots.to(r.window.device)].cpu().double(), window)


def run_conv(work: Work, r: Round) -> Tensor:
    """The convolution of a round, its window's commit included."""
    return tree_conv(
        r.x, r.tree.parent, r.tree.num_nodes, work.weight, None, r.window, r.slots, r.pending_conv,
        by_slot=True,
    )  # fmt: skip


def _check_library(work: Work, exact: Verified, library: Library) -> Library:
    """The library's chain against ours; which way its states lie has changed between its versions."""
    r = _committed_round(work, exact)
    nodes = r.q.shape[1]
    want = exact[2].clone()
    path = torch.arange(nodes, dtype=torch.int32, device=r.slots.device).repeat(len(r.slots), 1)
    commit(want, exact[1], path, torch.full_like(r.slots, nodes), r.slots)
    wrong: list[CheckError] = []
    for fitted in (library, library._replace(key_first=not library.key_first)):
        o, states = LibraryChain(work, r, fitted)(written=True)
        assert states is not None
        try:
            _near(f"flash-linear-attention {library.version}: outputs", o, exact[0], 2 * BFLOAT16)
            _near(
                f"flash-linear-attention {library.version}: states",
                states, want[r.slots.long()], BOUNDS["parallel"],
            )  # fmt: skip
        except CheckError as error:
            wrong.append(error)
        else:
            return fitted
    raise wrong[0]


def _near(name: str, got: Tensor, want: Tensor, bound: float) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error <= bound:  # NaN too
        raise CheckError(
            f"{name} are off by {error:.2e} (relative root mean square), allowed are {bound:.0e}"
        )


def _same(name: str, got: Tensor, want: Tensor) -> None:
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    if got.dtype != want.dtype or got.shape != want.shape or not torch.equal(
        got.contiguous().view(ints), want.contiguous().view(ints)
    ):  # fmt: skip
        raise CheckError(f"{name} has other bits than the serial mode's")
