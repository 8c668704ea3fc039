"""How a launch is chosen: the default rule, the nearest entry of the right table, and mistakes in a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specla.ops.triton import tuning
from specla.ops.triton.tuning import Config, choose, default_config, device_name, read_table, user_table

CPU = torch.device("cpu")
DIMS = (16, 24, 64, 96, 128, 256, 512)
SHAPE = {"batch": 1, "nodes": 16, "value_heads": 8, "dim_k": 256, "dim_v": 256}


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No table of this machine's user takes part."""
    monkeypatch.delenv(tuning.TABLE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    tuning.forget()
    yield
    tuning.forget()


def entry(**changes: Any) -> dict[str, Any]:
    configs = {"serial": {"block_v": 16}, "hybrid": {"workers": 4}, "parallel": {"block_v": 32}}
    return SHAPE | {"us": {}, "auto": "hybrid"} | configs | changes


def write(path: Path, *entries: dict[str, Any], device: str = "cpu") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": device, "entries": entries}))
    tuning.forget()
    return path


def asked(mode: str = "serial", **changes: Any) -> Config:
    return choose(mode, device=CPU, **SHAPE | changes)


@given(
    st.sampled_from(("auto", "serial", "hybrid", "parallel")),
    st.integers(1, 512), st.integers(1, 64), st.sampled_from(DIMS), st.sampled_from(DIMS),
)  # fmt: skip
def test_the_default_rule_fits_every_shape(mode: str, batch: int, heads: int, k: int, v: int):
    config = default_config(mode, batch=batch, value_heads=heads, dim_k=k, dim_v=v)
    assert config.mode == mode if mode != "auto" else config.mode in ("serial", "hybrid")
    assert config.block_v % (4 * config.num_warps) == 0 and config.block_v & (config.block_v - 1) == 0
    most = 64 if mode == "hybrid" else 128
    assert config.block_v * k <= max(16 * k, config.num_warps * 32 * most) and config.block_v <= max(
        16, 2 * v - 1
    )
    assert config.workers == 1 or config.mode == "hybrid"


def test_few_heads_get_small_tiles_and_many_get_large_ones():
    assert asked() == asked("auto") == Config("serial", 16)
    assert asked(batch=8) == asked("auto", batch=8) == Config("serial", 64)
    assert asked(batch=8, dim_k=512).block_v == asked(batch=8, dim_v=24).block_v == 32
    assert asked("parallel") == Config("parallel", 16) and asked("parallel", batch=8) == Config(
        "parallel", 64
    )
    assert asked("hybrid") == Config("hybrid", 32, workers=2)


def test_no_worker_is_without_a_chain(tmp_path: Path):
    write(user_table("cpu"), entry())
    most = {1: 1, 3: 1, 5: 2, 8: 3, 9: 4, 64: 4}
    assert {n: asked("hybrid", nodes=n).workers for n in most} == most


def test_heads_count_before_nodes_and_both_by_their_ratio():
    write(
        user_table("cpu"),
        entry(batch=1, nodes=16, serial={"block_v": 16}),
        entry(batch=8, nodes=8, serial={"block_v": 32}),
        entry(batch=8, nodes=32, serial={"block_v": 64}, auto="serial"),
        entry(dim_k=128, serial={"block_v": 128}),
    )
    assert asked(batch=2).block_v == 16 and asked(batch=1, nodes=64).block_v == 16
    assert asked(batch=3, nodes=15).block_v == 32 and asked(batch=3, nodes=17).block_v == 64
    assert asked(batch=100, value_heads=1, nodes=1).block_v == 32
    assert asked("auto", batch=8, nodes=32) == Config("serial", 64)
    assert asked("auto").mode == "hybrid" and asked("parallel").block_v == 32
    assert asked(dim_k=128).block_v == 128 and asked(dim_k=64).block_v == 16, "64 was not measured"


def test_tables_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "shipped" / "cpu.json", entry(), entry(dim_k=128, serial={"block_v": 64}))
    assert asked() == Config("serial", 16)
    write(user_table("cpu"), entry(serial={"block_v": 32, "prepared": True}))
    assert asked() == Config("serial", 32, prepared=True)
    assert asked(dim_k=128).block_v == 64, "not in the user's own table"
    named = write(tmp_path / "mine.json", entry(serial={"block_v": 64, "num_warps": 8, "registers": 128}))
    assert asked() == Config("serial", 32, prepared=True)
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(named))
    assert asked() == Config("serial", 32, prepared=True), "looked up once"
    tuning.forget()
    assert asked() == Config("serial", 64, 8, registers=128)
    monkeypatch.setenv(tuning.TABLE_VARIABLE, str(tmp_path / "nowhere.json"))
    tuning.forget()
    with pytest.raises(ValueError, match=r"SPECLA_KERNEL_TABLE must name a file, got .*nowhere.json"):
        asked()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry(batch=0)], f"entry 0: batch must be an integer in 1..{tuning.MOST}"),
        ([entry(), entry(nodes=True)], f"entry 1: nodes must be an integer in 1..{tuning.MOST}"),
        ([entry(auto="parallel")], "entry 0: auto must be one of serial, hybrid"),
        ([entry(serial=None)], "entry 0, serial must be an object"),
        ([entry(serial={"width": 3})], "entry 0, serial has no field width"),
        ([entry(serial={"mode": "hybrid"})], "entry 0, serial: mode must be serial"),
        ([entry(serial={"block_v": 48})], "entry 0, serial: block_v must be a power of two"),
        ([entry(hybrid={"num_warps": 8})], "entry 0, hybrid: block_v must be at least 32 for 8 warps"),
        ([entry(hybrid={"workers": 1.5})], "entry 0, hybrid: workers must be an integer in 1..64"),
        ([entry(serial={"prepared": 1})], "entry 0, serial: prepared must be true or false"),
        (
            [entry(serial={"registers": 0})],
            "entry 0, serial: registers must be an integer in 16..255 or null",
        ),
        ([entry(parallel={"block_k": 1})], "entry 0, parallel: block_k must be an integer in 16..512"),
        ("serial", "entries must be a list"),
        (["serial"], "entry 0 must be an object"),
    ],
)
def test_a_malformed_table_is_named(tmp_path: Path, entries: Any, said: str):
    path = user_table("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"device": "cpu", "entries": entries}))
    with pytest.raises(ValueError) as error:
        asked()
    assert str(error.value) == f"{path} is no table of kernel configurations: {said}"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"device": "cpu"}', '{"entries": []}'])
def test_what_is_no_table_at_all_is_named_too(tmp_path: Path, text: str):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json is no table of kernel configurations"):
        read_table(path)


def test_a_table_of_another_device_is_refused():
    write(user_table("cpu"), entry(), device="NVIDIA H200")
    with pytest.raises(ValueError, match="was measured on NVIDIA_H200, not on cpu"):
        asked()


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="mode must be one of auto, serial, parallel, hybrid, got 'fast'"):
        asked("fast")
    assert device_name(CPU) == "cpu"


def test_what_is_shipped_are_tables_of_the_device_in_their_name() -> None:
    paths = sorted((Path(tuning.__file__).parent / "tables").glob("*.json"))
    assert [path.stem for path in paths] == ["NVIDIA_H200"]
    for path in paths:
        table = read_table(path)
        assert table["device"].replace(" ", "_") == path.stem
        assert {(entry["batch"], entry["nodes"]) for entry in table["entries"]} == {
            (batch, nodes) for batch in (1, 8, 32, 128) for nodes in (1, 16, 32)
        }
