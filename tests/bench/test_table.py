"""The table of ways: it tells what differs, can be taken up again, and belongs to one measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specla.bench.decode import decode_batch
from specla.bench.pieces import Table
from specla.bench.table import TableSettings, measure_table, table_ways
from specla.drafters import NoDrafter, SyntheticDrafter
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
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
