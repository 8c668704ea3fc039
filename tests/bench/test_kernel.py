"""`specla bench kernel` without a GPU: its trees, its baselines, what it checks, and what it makes of times."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specla.bench import kernel, kernel_checks, kernel_report, kernel_tune
from specla.bench.baselines import Library, LibraryChain, Snapshots, leaf_chains, leaf_paths, leaf_rows
from specla.bench.cli import KERNEL_GROUPS
from specla.bench.kernel import EIGHT, GROUPS, Options, copy_speed, measure_kernel, ratios
from specla.bench.kernel_checks import CheckError, check
from specla.bench.kernel_inputs import Layer, Shape, Work, draw_trees, make_work, num_rounds, read_shape
from specla.cli import main
from specla.ops.factors import Factors, Pending
from specla.ops.naive import naive_chunk_gated_delta, naive_gated_delta_commit, naive_gated_delta_verify
from specla.ops.triton import tuning
from specla.ops.triton.tuning import Config, choose, read_table, user_table
from specla.tree import Tree

CPU = torch.device("cpu")
SMALL = Layer(1, 1, 16, 8)
TREE, CHAIN = read_shape("2x2:5"), read_shape("chain:3")

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in the interpreter")


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(tuning.TABLE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()


def work_of(shape: Shape = TREE, layer: Layer = SMALL, rows: int = 2, rounds: int = 1) -> Work:
    return make_work(layer, shape, rows, pending=2, seed=0, device=CPU, rounds=rounds)


def stub(calls: Any, repeats: int) -> float:
    """A timer that runs each call once, and counts calls in its answer."""
    for call in calls:
        call()
    return 10.0 * len(calls)


def small(**changes: Any) -> Options:
    options = Options(SMALL, (1,), (TREE,), pending=2, repeats=10, rounds=1, copied_bytes=1000)
    return replace(options, **changes)


def test_shapes_are_read_and_impossible_ones_refused():
    assert read_shape("chain:16") == Shape("chain:16", 1, 15, 16)
    assert read_shape("2x12:16") == Shape("2x12:16", 2, 12, 16) and not read_shape("2x12:16").is_chain
    assert read_shape("3x2:13").nodes == 13, "3 children of the root and 9 below them"
    for bad in (
        "3x2:14",
        "chain:1",
        "chain:65",
        "0x2:2",
        "4x0:4",
        "33x2:8",
        "chain",
        "4x4",
        "4x4:-1",
        "x:3",
        "9" * 9,
    ):
        with pytest.raises(ValueError, match=r"tree"):
            read_shape(bad)


@pytest.mark.parametrize("text", ["chain:5", "2x12:16", "4x4:32", "3x2:13", "4x1:5"])
def test_drawn_trees_grow_as_told(text: str):
    shape = read_shape(text)
    trees = draw_trees(shape, 6, seed=3)
    assert trees == draw_trees(shape, 6, seed=3) and len(trees) == 6
    for parent in trees:
        tree = Tree(parent)  # checks the order
        depth, children = tree.depth[0], torch.bincount(torch.tensor(parent[1:]), minlength=shape.nodes)
        assert tree.size == shape.nodes and depth.max() <= shape.depth and children.max() <= shape.topk
        grown = torch.bincount(depth[children > 0])
        assert grown.max() <= shape.topk, "no more nodes of a depth expand"
    if shape.is_chain:
        assert trees == [list(range(-1, shape.nodes - 1))] * 6
    elif shape.nodes < 1 + shape.topk + (shape.depth - 1) * shape.topk**2:
        assert len({tuple(parent) for parent in trees}) > 1 and trees != draw_trees(shape, 6, seed=4)


def test_states_of_all_rounds_exceed_the_cache():
    layer = Layer()
    assert layer.state_bytes == 2**21 and layer.factor_bytes == 4 * (2048 + 2056) + 2 * 6144
    assert [num_rounds(layer, batch) for batch in (1, 8, 32, 128)] == [96, 12, 3, 2]
    shape = read_shape("2x4:9")
    work = work_of(shape, rounds=2)
    first, second = work.rounds
    assert first.parents != second.parents and not torch.equal(first.q, second.q)
    again = work_of(shape, rounds=2).rounds[1]
    assert all(
        torch.equal(getattr(second, name), getattr(again, name)) for name in ("q", "state", "x", "slots")
    )
    path = first.pending.path
    assert path.shape == (2, 2) and (path[:, 0] == 0).all() and (path[:, 1] > 0).all()


def test_leaves_are_replayed_along_their_whole_paths():
    assert leaf_paths([-1, 0, 0, 1, 3]) == [[0, 1, 3, 4], [0, 2]] and leaf_paths([-1]) == [[0]]
    work = work_of(read_shape("2x3:6"), rows=3)
    r = work.rounds[0]
    rows = leaf_rows(r)
    want = [path for parent in r.parents for path in leaf_paths(parent)]
    got = [ids[:n].tolist() for ids, n in zip(rows.paths, rows.tokens.tree.num_nodes.tolist(), strict=True)]
    assert got == want
    one_by_one = leaf_chains(r)
    assert len(one_by_one) == max(len(leaf_paths(parent)) for parent in r.parents)
    slots = torch.stack([chains.tokens.slots for chains in one_by_one])
    assert [(s >= 0).sum().item() for s in slots.T] == [len(leaf_paths(parent)) for parent in r.parents]


@on_cpu
@pytest.mark.parametrize("shape", [TREE, CHAIN], ids=str)
def test_snapshots_hold_the_naive_state_of_every_node(shape: Shape):
    work = work_of(shape, Layer(1, 2, 24, 17))
    r = work.rounds[0]
    state = r.state.double()
    gate = work.gate._replace(A_log=work.gate.A_log.double(), dt_bias=work.gate.dt_bias.double())
    o, factors = naive_gated_delta_verify(
        r.q, r.k, r.v.double(), r.a, r.b, r.tree, state=state, state_indices=r.slots, use_qk_l2norm_in_kernel=True,
        gate=gate,
    )  # fmt: skip
    for chain in {False, shape.is_chain}:
        memory = torch.full((2, shape.nodes, *r.state.shape[1:]), float("nan"))
        snapshots = Snapshots(work, r.fresh(), memory, chain=chain)
        torch.testing.assert_close(snapshots.verify().double(), o, rtol=2**-7, atol=1e-5)
        for node in range(shape.nodes):
            want = state.clone()
            path = Tree(r.parents).paths(torch.full((2,), node))
            naive_gated_delta_commit(want, factors, path, (path >= 0).sum(1) - 1, state_indices=r.slots)
            torch.testing.assert_close(memory[:, node].double(), want[r.slots.long()], rtol=1e-5, atol=1e-5)
        snapshots.copy_back()
        assert torch.equal(snapshots.round.state[r.slots.long()], memory[:, -1])


@on_cpu
@pytest.mark.parametrize("shape", [TREE, CHAIN], ids=str)
def test_everything_is_right_on_grouped_heads_and_odd_sizes(shape: Shape):
    check(work_of(shape, Layer(1, 2, 24, 9)), tuple(GROUPS))


@on_cpu
@pytest.mark.parametrize("broken", ["parallel", "hybrid", "token", "snapshots", "conv"])
def test_wrong_results_are_never_timed(monkeypatch: pytest.MonkeyPatch, broken: str):
    honest, timed = kernel_checks.verify_round, []

    def verify(work: Work, r: Any, config: Config, **kwargs: Any) -> tuple[Tensor, Factors]:
        o, factors = honest(work, r, config, **kwargs)
        o = o * 0.9 if config.mode == broken == "parallel" else o
        return torch.nextafter(o, o + 1) if config.mode == broken == "hybrid" else o, factors

    monkeypatch.setattr(kernel_checks, "verify_round", verify)
    if broken == "token":
        first = kernel_checks.TokenDecoder.__call__

        def commit_less(self: Any, pending: Pending) -> Any:
            return first(self, pending._replace(num_nodes=pending.num_nodes - 1))

        monkeypatch.setattr(kernel_checks.TokenDecoder, "__call__", commit_less)
    if broken == "snapshots":
        monkeypatch.setattr(Snapshots, "copy_back", lambda self: None)
    if broken == "conv":
        run = kernel_checks.run_conv
        monkeypatch.setattr(kernel_checks, "run_conv", lambda work, r: run(work, r).mul_(0.9))
    options = small(groups=("verify", "snapshots", "conv"))
    name = {"token": "one-token decoding", "conv": "convolution"}.get(broken, broken)
    with pytest.raises(CheckError, match=name):
        measure_kernel(options, lambda calls, repeats: timed.append(calls) or 1.0, CPU)
    assert len(timed) == 1, "only the copy"


def library_rule(key_first: bool, **wrong: Any) -> Any:
    """The library's interface over the naive form."""

    def rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel):  # type: ignore[no-untyped-def]
        start = initial_state.mT if key_first else initial_state
        o, state = naive_chunk_gated_delta(
            q, k, v, g, beta, initial_state=start, scale=wrong.get("scale", scale),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        return o, (state.mT if key_first else state) if output_final_state else None

    return rule


@on_cpu
@pytest.mark.parametrize("key_first", [True, False])
def test_the_librarys_layout_is_found_and_its_results_are_checked(key_first: bool):
    work = work_of(CHAIN, Layer(1, 1, 16, 16), rows=1)
    fitted = check(work, ("fla",), Library(library_rule(key_first), "0"))
    assert fitted is not None and fitted.key_first is key_first
    o, states = LibraryChain(work, work.rounds[0], fitted)(written=False)
    assert o.shape == work.rounds[0].v.shape and states is None
    with pytest.raises(CheckError, match="flash-linear-attention 0: outputs are off by"):
        check(work, ("fla",), Library(library_rule(key_first, scale=0.3), "0"))


@on_cpu
def test_the_report_has_everything_and_goes_to_tables_and_pictures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(kernel_report, "cuda_device", lambda: CPU)
    monkeypatch.setattr(kernel_report, "GraphTimer", lambda device: stub)
    monkeypatch.setattr(kernel_report, "compile_ahead", lambda options, device: None)
    monkeypatch.setattr(kernel, "find_library", lambda: Library(library_rule(True), "0.6"))
    monkeypatch.setattr(
        kernel_report, "read_options", lambda args: small(shapes=(read_shape("chain:2"), read_shape("2x2:4")))
    )
    argv = ["bench", "kernel", "--json", str(tmp_path / "k.json"), "--plots", str(tmp_path / "plots")]
    assert main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    report = json.loads(out[-1])
    assert json.loads((tmp_path / "k.json").read_text()) == report
    assert {"device", "versions", "date", "command", "seed", "repeats", "bounds", "layer"} <= set(report)
    assert report["benchmark"] == "kernel" and report["fla"] == "0.6" and report["layer"] == asdict(SMALL)
    assert report["copy_tb_per_s"] == round(2 * 1000 / 10 * 1e6 / 1e12, 3)
    tree = report["trees"]["2x2:4"]
    assert len(tree["parents"]) == 8 and all(len(parent) == 4 for parent in tree["parents"])
    chain, tree = report["results"]
    both = {
        "verify_serial", "verify_hybrid", "verify_parallel", "verify_auto", "verify_without_pending",
        "commit_then_verify", "decode_tokens", "snapshots", "snapshot_copy", "conv", "schedule_serial",
        "schedule_hybrid",
    }  # fmt: skip
    assert set(chain["us"]) == both | {"fla_chain", "fla_chain_written", "snapshots_chain"}
    assert set(tree["us"]) == both | {"replay_leaves", "replay_rows"}
    assert tree["mean_replayed_tokens"] > 4 and tree["floor_us"] > 0 and tree["rounds"] == 1
    assert tree["configs"]["verify_parallel"]["mode"] == "parallel"
    (commits,) = report["commits"]
    assert set(commits["us"]) == {"commit_8", "replay_8_chain", "replay_8_tokens", "replay_8_fla"}
    assert commits["ratios"]["replay_8_fla_over_commit"] == 1
    assert any(line.startswith("verify serial") and line.endswith("10.0") for line in out)
    assert report["plots"] == ["kernel-batch.png", "kernel-baselines.png"]
    assert all((tmp_path / "plots" / name).read_bytes()[:4] == b"\x89PNG" for name in report["plots"])


@on_cpu
def test_wrong_results_end_with_status_1_and_no_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(args: Any, argv: Any) -> None:
        raise CheckError("serial: outputs are off")

    monkeypatch.setattr(kernel_report, "measure_all", fail)
    assert main(["bench", "kernel"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err == "specla bench: error: serial: outputs are off\n"


@on_cpu
def test_only_what_is_asked_for_is_measured_and_commits_alone_need_no_tree():
    def timer(calls: Any, repeats: int) -> float:
        assert repeats == 10
        return 2.0

    report = measure_kernel(small(groups=("schedule",)), timer, CPU)
    assert set(report["results"][0]["us"]) == {"schedule_serial", "schedule_hybrid"}
    assert report["commits"] == [] and report["results"][0]["ratios"] == {} and report["fla"] is None
    assert tuple(GROUPS) == KERNEL_GROUPS


def test_ratios_are_between_what_was_measured():
    us = {"verify_serial": 12.0, "verify_hybrid": 10.0, "verify_parallel": 8.0, "verify_auto": 10.0,
          "verify_without_pending": 6.0, "commit_then_verify": 15.0, "replay_rows": 24.0}  # fmt: skip
    assert ratios(us) == {
        "replay_rows_over_best": 3.0, "replay_rows_over_exact": 2.4, "replay_rows_over_read": 4.0,
        "commit_then_verify_over_fused": 1.5,
    }  # fmt: skip
    assert ratios({"commit_8": 2.0, "replay_8_tokens": 9.0}) == {"replay_8_tokens_over_commit": 4.5}
    assert ratios({"replay_rows": 24.0}) == {} and ratios({}) == {}
    assert copy_speed(lambda calls, repeats: 0.5, CPU, 1000, 1) == 2 * 1000 / 0.5e-6


def test_every_variant_is_compiled_ahead_once(monkeypatch: pytest.MonkeyPatch):
    jobs: list[Any] = []
    monkeypatch.setattr(kernel, "run_in_processes", lambda job, given: jobs.extend(given))
    options = small(batches=(1, 2, 128), shapes=(TREE, CHAIN), groups=("conv", "schedule", "commit"))
    options = replace(options, layer=Layer(1, 1, 16, 64))  # as few and as many heads want other tiles
    kernel.compile_ahead(options, CPU)
    ran = [(shape.name, batch, group) for *_, shape, batch, group in jobs]
    trees = {("2x2:5", b, g) for b in (1, 128) for g in ("conv", "schedule")}
    trees |= {("chain:3", b, g) for b in (1, 128) for g in ("conv", "schedule")}
    assert set(ran) == trees | {(EIGHT.name, 1, "commit"), (EIGHT.name, 128, "commit")}
    assert len(ran) == len(set(ran)), "batches 1 and 2 are launched alike"


@on_cpu
def test_a_compile_job_runs_every_call_of_its_group():
    kernel._launch_once(small(), CPU, TREE, 128, "schedule")


def test_the_sweep_keeps_to_what_fits():
    for layer, nodes in ((Layer(), 16), (Layer(8, 8, 512, 512), 32), (SMALL, 16), (Layer(), 1)):
        found = kernel_tune.candidates(layer, nodes)
        assert len(found) == len(set(found)) <= 30
        assert {config.mode for config in found} >= {"serial", "parallel"}
        assert ("hybrid" in {config.mode for config in found}) == (nodes > 1)
        for config in found:
            assert config.block_v <= max(16, layer.dim_v) and config.block_v >= 4 * config.num_warps
            assert config.block_v * layer.dim_k <= config.num_warps * 32 * 128
    shapes = [read_shape(text) for text in ("chain:16", "2x12:16", "4x4:32", "chain:8")]
    names = {n: [shape.name for shape in same] for n, same in kernel_tune.tuned_shapes(shapes).items()}
    assert names == {1: ["one node"], 8: ["chain:8"], 16: ["2x12:16"], 32: ["4x4:32"]}


def test_an_entry_holds_the_fastest_of_each_mode():
    us = {Config("serial", 16): 5.0, Config("serial", 64, 8): 4.0, Config("parallel"): 3.0,
          Config("hybrid", workers=2): 3.5, Config("hybrid", workers=4, prepared=True): 4.5}  # fmt: skip
    entry = kernel_tune.entry(SMALL, 8, 16, us)
    assert entry["us"] == {"serial": 4.0, "hybrid": 3.5, "parallel": 3.0} and entry["auto"] == "hybrid"
    assert entry["serial"] == {"block_v": 64, "num_warps": 8} and entry["hybrid"] == {"workers": 2}
    one = kernel_tune.entry(SMALL, 8, 1, {Config("serial", 32): 2.0, Config("parallel"): 1.0})
    assert one["auto"] == "serial" and one["hybrid"] == one["serial"] == {"block_v": 32}


@on_cpu
def test_tuning_writes_the_table_that_is_chosen_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    fast = Config("hybrid", 16, workers=2, prepared=True)

    def timer(calls: Any, repeats: int) -> float:
        return 1.0 if calls[0].args[2] == fast else 2.0

    few = [Config("serial"), Config("serial", prepared=True), Config("parallel"), fast]
    monkeypatch.setattr(kernel_tune, "candidates", lambda layer, nodes: few if nodes > 1 else few[::2])
    monkeypatch.setattr(kernel_tune, "run_in_processes", lambda job, jobs: [True for _ in jobs])
    monkeypatch.setattr(kernel_report, "cuda_device", lambda: CPU)
    monkeypatch.setattr(kernel_report, "GraphTimer", lambda device: timer)
    monkeypatch.setattr(kernel_report, "read_options", lambda args: small(shapes=(read_shape("2x2:5"),)))
    sizes = {"batch": 1, "nodes": 6, "value_heads": 1, "dim_k": 16, "dim_v": 8}
    assert choose("auto", device=CPU, **sizes) == Config("serial")
    assert main(["bench", "kernel", "--tune"]) == 0
    out = capsys.readouterr().out.splitlines()
    table = read_table(user_table("cpu"))
    assert [(e["batch"], e["nodes"], e["auto"]) for e in table["entries"]] == [
        (1, 1, "serial"),
        (1, 5, "hybrid"),
    ]
    assert {"device", "versions", "date", "command"} <= set(table) and json.loads(out[-1])["entries"]
    assert choose("auto", device=CPU, **sizes) == fast and choose("serial", device=CPU, **sizes) == few[0]
    assert main(["bench", "kernel", "--tune", "--tune-output", str(tmp_path / "t.json")]) == 0
    assert read_table(tmp_path / "t.json")["entries"] == table["entries"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--heads", "0"], "--heads must be in 1..1024"),
        (["--heads", "2", "--value-heads", "3"], "--value-heads must be a multiple of --heads (2), got 3"),
        (["--batch", "1", "0"], "--batch must be in 1..4096, got 1 0"),
        (["--trees", "4by4"], "a tree is chain:NODES or TOPKxDEPTH:NODES"),
        (["--pending", "0"], "--pending must be in 1..64"),
        (["--repeats", "9"], "--repeats must be in 10..10000"),
        (["--only", "verify", "speed"], "--only must name some of verify, "),
        (["--tune", "--only", "verify"], "goes with neither --only nor --plots"),
        (["--tune-output", "x.json"], "--tune-output needs --tune"),
        (["--json", "/nowhere/at/all.json"], "--json must be a regular file in a directory that exists"),
        pytest.param([], "bench kernel needs a CUDA device", marks=on_cpu),
        pytest.param(["--tune"], "bench kernel needs a CUDA device", marks=on_cpu),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str):
    assert main(["bench", "kernel", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1 and err.startswith("specla bench: error: ")


def test_without_triton_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from specla.bench import cli

    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert main(["bench", "kernel"]) == 2
    assert "bench kernel needs triton: pip install 'specla[gpu]'" in capsys.readouterr().err


def test_checks_run_on_copies():
    work = work_of()
    r = work.rounds[0]
    before = r.state.clone()
    fresh = r.fresh()
    assert fresh.state is not r.state and fresh.factors.d.isnan().all() and fresh.pending is r.pending
    assert isinstance(fresh.pending, Pending) and torch.equal(r.state, before)
