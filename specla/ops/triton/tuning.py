"""How a verification is launched: from a table measured on the device, or by a rule where nothing was measured."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specla.modes import MODES
from specla.ops.checks import require

TABLE_VARIABLE = "SPECLA_KERNEL_TABLE"
SHIPPED = Path(__file__).parent / "tables"
EXACT = ("serial", "hybrid")  # what "auto" may choose
ROWS_A_WARP = 4  # of the state, at least
VALUES_A_THREAD = 128  # of the state, at most: half of the registers
MOST = 1 << 30  # of anything that a table counts
LIMITS = {
    "block_v": (4, 512),
    "num_warps": (1, 32),
    "workers": (1, 64),
    "block_k": (16, 512),
    "registers": (16, 255),
}
MANY = 64  # heads times rows from which small tiles no longer help to fill the device


class Config(NamedTuple):
    """How a verification is launched. None of it changes the bits of the exact modes."""

    mode: str  # "serial", "hybrid" or "parallel"
    block_v: int = 16  # rows of the state a program holds; at least 4 a warp
    num_warps: int = 4
    workers: int = 1  # of a tree, in hybrid mode
    prepared: bool = False  # scale keys and queries in a launch of their own
    registers: int | None = None  # at most so many a thread
    block_k: int = 64  # columns of the state at a time, in parallel mode


@functools.lru_cache(maxsize=4096)
def choose(
    mode: str, *, device: torch.device, batch: int, nodes: int, value_heads: int, dim_k: int, dim_v: int
) -> Config:
    """The configuration for trees of `nodes` nodes, the root included, in `batch` rows.

    Of a table's entries for heads of K = `dim_k` and V = `dim_v`, the one counts whose number of heads in all rows is
    nearest in ratio, and of these the one whose number of nodes is. Tables are searched in this order:

    1. the file that SPECLA_KERNEL_TABLE names, or else the user's own (`user_table`);
    2. the one shipped for the device, if there is one.

    Without an entry, `default_config` decides. All of it is looked up once and remembered for the process.

    Args:
        mode: "serial", "hybrid", "parallel", or "auto": the faster of the exact two where both were measured, else
            serial.

    Raises:
        ValueError: for another mode, or a malformed table, whose file it names.
    """
    require(mode in MODES, f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    config = None
    for table in _tables(device_name(device)):
        near = _nearest(table, batch * value_heads, nodes, dim_k, dim_v)
        if near is not None:
            config = near[near["auto"] if mode == "auto" else mode]
            break
    if config is None:
        config = default_config(mode, batch=batch, value_heads=value_heads, dim_k=dim_k, dim_v=dim_v)
    # each chain but the first starts with a light node and its child, beside a heavy sibling with as many nodes
    return config._replace(workers=min(config.workers, max(1, (nodes - 1) // 2)))


def default_config(mode: str, *, batch: int, value_heads: int, dim_k: int, dim_v: int) -> Config:
    """The rule for what no table holds.

    Few heads in all rows (under 64) get tiles of 16 rows, many get tiles of 64, and hybrid's two workers tiles of 32. A
    tile has at most as many rows as the state, and no thread holds more than 128 of its values (64 in hybrid, which
    keeps the committed state beside the current one), but it has 16 rows at least. auto is serial.
    """
    warps = 4
    wanted = 32 if mode == "hybrid" else 64 if batch * value_heads >= MANY else 16
    block_v = max(ROWS_A_WARP * warps, min(wanted, _power_of_two(dim_v), most_rows(mode, warps, dim_k)))
    return Config("serial" if mode == "auto" else mode, block_v, warps, workers=2 if mode == "hybrid" else 1)


def most_rows(mode: str, num_warps: int, dim_k: int) -> int:
    """Rows of the state that the threads of a program can hold."""
    values = VALUES_A_THREAD // 2 if mode == "hybrid" else VALUES_A_THREAD
    return num_warps * 32 * values // _power_of_two(dim_k)


def device_name(device: torch.device) -> str:
    """The device's own name with underscores for spaces, as in the names of tables."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name.replace(" ", "_")


def user_table(name: str) -> Path:
    """Where a user's own table for the device lies: `specla/kernels` in $XDG_CACHE_HOME, or else in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "specla" / "kernels" / f"{name}.json"


def forget() -> None:
    """Look for tables anew, as after one was written."""
    choose.cache_clear()
    _tables.cache_clear()


def read_table(path: Path) -> dict[str, Any]:
    """A table as JSON has it, but with a `Config` for the modes of every entry.

    `entries` lists dim_k, dim_v, value_heads, batch, nodes; serial, hybrid and parallel with fields of `Config`; auto,
    "serial" or "hybrid"; and us, what the modes took when they were measured. `device` is the device's name; versions,
    date and command say where the figures are from.

    Raises:
        ValueError: naming the file, when it is not such a table or cannot be read.
    """
    try:
        table = json.loads(path.read_text())
        require(isinstance(table, dict), "it must be an object")
        require(isinstance(table.get("device"), str), "device must be a name")
        require(isinstance(table.get("entries"), list), "entries must be a list")
        table["entries"] = [_entry(number, entry) for number, entry in enumerate(table["entries"])]
    except (ValueError, TypeError, RecursionError, OSError) as error:
        raise ValueError(f"{path} is no table of kernel configurations: {error}") from None
    return table


@functools.lru_cache(maxsize=16)
def _tables(name: str) -> tuple[dict[str, Any], ...]:
    asked = os.environ.get(TABLE_VARIABLE)
    if asked:
        require(os.path.isfile(asked), f"{TABLE_VARIABLE} must name a file, got {asked}")
    own = Path(asked) if asked else user_table(name)
    found = []
    for path in (own, SHIPPED / f"{name}.json"):
        if os.path.isfile(path):
            table = read_table(path)
            measured = table["device"].replace(" ", "_")
            require(measured == name, f"{path} was measured on {measured}, not on {name}")
            found.append(table)
    return tuple(found)


def _nearest(table: dict[str, Any], heads: int, nodes: int, dim_k: int, dim_v: int) -> dict[str, Any] | None:
    def distance(entry: dict[str, Any]) -> tuple[float, float]:
        return (
            abs(math.log(entry["batch"] * entry["value_heads"] / heads)),
            abs(math.log(entry["nodes"] / nodes)),
        )

    same = [entry for entry in table["entries"] if (entry["dim_k"], entry["dim_v"]) == (dim_k, dim_v)]
    return min(same, key=distance, default=None)


def _entry(number: int, entry: Any) -> dict[str, Any]:
    where = f"entry {number}"
    require(isinstance(entry, dict), f"{where} must be an object")
    for name in ("dim_k", "dim_v", "value_heads", "batch", "nodes"):
        require(_is_positive(entry.get(name)), f"{where}: {name} must be an integer in 1..{MOST}")
    require(entry.get("auto") in EXACT, f"{where}: auto must be one of {', '.join(EXACT)}")
    configs = {mode: _config(f"{where}, {mode}", mode, entry.get(mode)) for mode in (*EXACT, "parallel")}
    return entry | configs


def _config(where: str, mode: str, fields: Any) -> Config:
    require(isinstance(fields, dict), f"{where} must be an object")
    unknown = sorted(set(fields) - set(Config._fields))
    require(not unknown, f"{where} has no field {', '.join(unknown)}")
    config = Config(**{"mode": mode} | fields)
    require(config.mode == mode, f"{where}: mode must be {mode}")
    for name, (least, most) in LIMITS.items():
        value = getattr(config, name)
        absent = name == "registers" and value is None
        require(
            absent or (_is_positive(value) and least <= value <= most),
            f"{where}: {name} must be an integer in {least}..{most}{' or null' * (name == 'registers')}",
        )
    for name in ("block_v", "num_warps", "block_k"):
        value = getattr(config, name)
        require(value == _power_of_two(value), f"{where}: {name} must be a power of two")
    rows = ROWS_A_WARP * config.num_warps
    require(config.block_v >= rows, f"{where}: block_v must be at least {rows} for {config.num_warps} warps")
    require(isinstance(config.prepared, bool), f"{where}: prepared must be true or false")
    return config


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _power_of_two(value: int) -> int:
    """The least that is not below `value`."""
    return 1 << (value - 1).bit_length()
