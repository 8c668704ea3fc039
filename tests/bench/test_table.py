"""The table of ways: it tells what differs, can be taken up again, and belongs to one measurement."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

import specla.bench.table as module
import specla.bench.whole_rounds as whole_rounds
from specla.bench.baselines import Library
from specla.bench.decode import decode_batch
from specla.bench.generate import BASELINES, Way, plain_way
from specla.bench.pieces import Table
from specla.bench.table import TableSettings, measure_table, table_ways
from specla.drafters import NoDrafter, SyntheticDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.resident import ResidentEngine
from tests.ops.triton import DEVICE
from tests.targets import VOCAB, make_target

SETTINGS = TableSettings(
    batches=(1, 3), temperatures=(0.0, 1.0), per_suite=(3,), max_tokens=9, rates=(0.0, 1.0), drafts=(2, 4)
)
SUITES = {"a": [[1, 2, 3, 1, 2], [5]], "b": [[7, 8]] * 3}


@pytest.fixture(scope="module")
def target():
    return make_target()


def test_every_cell_is_there_once_and_alike(target, tmp_path: Path) -> None:
    table = Table(tmp_path / "t.json", {"target": 1})
    assert measure_table(target, None, SUITES, SETTINGS, table)
    made = json.loads((tmp_path / "t.json").read_text())
    keys = [(r["way"], r["suite"], r["batch"], r["temperature"]) for r in made["rows"]]
    assert len(keys) == len(set(keys)) == 3 * 2 * 2 * 2
    assert all(row["identical"] and row["tokens"] == 9 * 3 for row in made["rows"])
    curve = {(point["drafts"], point["rate"]): point["acceptance_length"] for point in made["curve"]}
    assert curve[4, 1.0] > curve[2, 1.0] > curve[2, 0.0] == curve[4, 0.0] == 1
    plain = [row for row in made["rows"] if row["way"] == "plain"]
    assert all(row["speedup"] == 1 and row["acceptance_length"] == 1 for row in plain)


def test_a_table_that_was_cut_goes_on_without_measuring_again(target, tmp_path: Path) -> None:
    asked = []

    def over() -> bool:
        asked.append(1)
        return len(asked) > 4

    assert not measure_table(target, None, SUITES, SETTINGS, Table(tmp_path / "t.json", {}), over=over)
    before = json.loads((tmp_path / "t.json").read_text())
    assert measure_table(target, None, SUITES, SETTINGS, Table(tmp_path / "t.json", {}))
    after = json.loads((tmp_path / "t.json").read_text())
    assert after["rows"][: len(before["rows"])] == before["rows"] and len(after["curve"]) == 4
    assert len(after["rows"]) > len(before["rows"])


def test_texts_that_differ_are_counted(target, tmp_path: Path) -> None:
    table = Table(tmp_path / "t.json", {})
    small = TableSettings(**{**vars(SETTINGS), "batches": (3,), "temperatures": (0.0,)})
    asked = []
    measure_table(
        target, None, {"b": SUITES["b"]}, small, table, over=lambda: len(asked) > 0 or asked.append(1)
    )
    assert [row["way"] for row in table.made["rows"]] == ["plain"]
    outputs = table.plain["b/3/0"]["outputs"]
    outputs[1][4] = (outputs[1][4] + 1) % VOCAB
    measure_table(target, None, {"b": SUITES["b"]}, small, table)
    row = next(row for row in table.made["rows"] if row["way"] == "ngram chain 8")
    assert (row["identical"], row["diverged"], row["first_divergence"]) == (False, 1, 4)


def test_a_table_of_another_measurement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    Table(path, {"target": 1, "seed": 0}).add("rows", [])
    Table(path, {"target": 1, "seed": 0})
    with pytest.raises(ValueError, match=r"of another measurement \(seed\)"):
        Table(path, {"target": 1, "seed": 2})
    path.write_text("{")
    with pytest.raises(ValueError, match="not a table to go on with"):
        Table(path, {"target": 1})


def test_a_batch_tells_what_its_sequences_did(target) -> None:
    params = [SamplingParams(max_tokens=8, ignore_eos=True)] * 2
    config = SpeculativeConfig(num_speculative_tokens=0)
    plain = decode_batch(Engine(target, NoDrafter(), config, 2), [[1, 2], [3]], params)
    assert plain.rounds == 8 and plain.steps == 16 and plain.drafted == 0 and plain.seconds > 0
    queue = decode_batch(Engine(target, NoDrafter(), config, 2), [[1, 2], [3], [4]], [*params, params[0]])
    assert queue.outputs[:2] == plain.outputs and len(queue.outputs[2]) == 8
    assert queue.rounds == 16 and queue.steps == 24 and queue.steady_rate > 0
    told = SyntheticDrafter(1.0, 3, 3, 1, VOCAB)
    config = SpeculativeConfig(3, 3, 1, synthetic_acceptance_rate=1.0)
    fast = decode_batch(Engine(target, told, config, 2), [[1, 2], [3]], params, 2, plain.outputs, first=6)
    assert fast.outputs == plain.outputs and fast.rounds == 2 and fast.accepted == 12


def test_settings_that_make_no_sense_are_refused(target) -> None:
    for bad in ({"batches": ()}, {"max_tokens": 1}, {"per_suite": (0,)}, {"temperatures": ()}, {"repeat": 0},
                {"per_suite": (4, 4)}, {"per_suite": ()}):  # fmt: skip
        with pytest.raises(ValueError):
            TableSettings(**bad)
    assert [way.name for way in table_ways(SETTINGS, None)] == ["plain", "auto", "ngram chain 8"]
    assert [TableSettings(per_suite=(16, 8, 32)).prompts(batch) for batch in (1, 8, 32)] == [16, 8, 32]
    assert TableSettings(per_suite=(5,)).prompts(32) == 5


def test_what_was_skipped_is_forgotten_once_it_has_figures(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.json", {})
    for way, why in (("a", "x"), ("b", "y"), ("a", "z")):
        table.skip("rows", {"way": way}, why, failed=way == "b")
    assert [(each["way"], each["why"]) for each in table.made["skipped"]] == [("b", "y"), ("a", "z")]
    assert table.settled("rows", way="b") and not table.settled("rows", way="a")
    table.unskip("rows", {"way": "a"})
    table.add("rows", [{"way": "a"}])
    again = Table(tmp_path / "t.json", {})
    assert again.made["skipped"] == [{"part": "rows", "way": "b", "why": "y", "failed": True}]
    assert again.settled("rows", way="a") and not again.settled("parts", way="b")


def test_the_most_telling_pieces_come_first(target, tmp_path: Path) -> None:
    made: list[tuple] = []

    class Listed(Table):
        def add(self, part: str, rows: list) -> None:
            made.extend((part, row.get("batch"), row.get("temperature")) for row in rows)
            super().add(part, rows)

    settings = TableSettings(
        batches=(1, 2, 3),
        temperatures=(1.0, 0.0),
        per_suite=(1,),
        max_tokens=4,
        rates=(0.5, 1.0),
        drafts=(2, 3),
    )
    table = Listed(tmp_path / "t.json", {})
    assert measure_table(target, None, SUITES, settings, table)
    pieces = [("rows", 1, 0.0), ("curve", None, None), ("rows", 3, 0.0), ("rows", 2, 0.0)]
    assert list(dict.fromkeys(made)) == [*pieces, ("rows", 1, 1.0), ("rows", 3, 1.0), ("rows", 2, 1.0)]
    assert [(p["drafts"], p["rate"]) for p in table.made["curve"]] == [(3, 1.0), (3, 0.5), (2, 1.0), (2, 0.5)]


def test_every_way_of_a_trained_drafter_is_there() -> None:
    ways = table_ways(SETTINGS, object())  # type: ignore[arg-type]
    assert [way.name for way in ways[:6]] == [
        "plain", "chain 8", "tree 16", "tree 16, pruned", "auto", "ngram chain 8",
    ]  # fmt: skip
    assert [way.config.verify for way in ways[6:9]] == ["serial", "hybrid", "parallel"]
    assert [way.baseline for way in ways[9:]] == list(BASELINES)
    curve = TableSettings()
    assert max(curve.rates) == 1.0 and 16 in curve.drafts


def test_baselines_have_rows_or_say_why_not(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(*_: object) -> list[Way]:
        config = SpeculativeConfig(3, 2, 2, synthetic_acceptance_rate=0.9)
        chain = SpeculativeConfig(2, 2, 1, synthetic_acceptance_rate=0.9)
        return [
            plain_way(),
            Way("dense", "synthetic", config, "dense snapshots"),
            Way("fla", "synthetic", chain, "flash-linear-attention"),
        ]

    def rule(*, state_v_first: bool) -> None:
        pass

    target = copy.deepcopy(target).to(DEVICE)
    monkeypatch.setattr(module, "table_ways", ways)
    monkeypatch.setattr(
        module, "make_engine", lambda t, d, c, max_num_seqs: ResidentEngine(t, d, c, max_num_seqs)
    )
    monkeypatch.setattr(module, "measure_curve", lambda *_, **__: True)
    monkeypatch.setattr(whole_rounds, "find_library", lambda: None)
    settings = TableSettings(batches=(1,), temperatures=(0.0,), per_suite=(1,), max_tokens=4)
    path = tmp_path / "t.json"
    assert measure_table(target, None, {"a": SUITES["a"]}, settings, Table(path, {}))
    made = json.loads(path.read_text())
    plain, dense = made["rows"]
    (state,) = target.new_pool(1, 1).groups.values()
    assert dense["baseline"] == "dense snapshots" and dense["identical"] and dense["rounds"] < plain["rounds"]
    assert dense["bytes_per_draft_node"] == state.state.nbytes + 2 * state.conv_inputs.nbytes
    assert (
        dense["state_bytes_per_sequence"]
        == plain["committed_bytes_per_sequence"] + 4 * dense["bytes_per_draft_node"]
    )
    piece = {"part": "rows", "batch": 1, "temperature": 0.0, "way": "fla"}
    assert made["skipped"] == [{**piece, "why": "flash-linear-attention is not installed", "failed": False}]
    monkeypatch.setattr(whole_rounds, "find_library", lambda: Library(rule, "0.6"))
    assert measure_table(target, None, {"a": SUITES["a"]}, settings, Table(path, {}))
    failed = json.loads(path.read_text())
    (skipped,) = failed["skipped"]
    assert skipped["failed"] and skipped["why"].startswith("TypeError: ") and failed["rows"] == made["rows"]
    monkeypatch.setattr(
        module, "_engine", lambda *_: pytest.fail("a piece that failed is not measured again")
    )
    assert measure_table(target, None, {"a": SUITES["a"]}, settings, Table(path, {}))
