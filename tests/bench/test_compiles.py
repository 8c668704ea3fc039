"""What the interpreter lets pass, the compiler may not."""

from __future__ import annotations

from pathlib import Path

from tests.ops.triton.test_compiles import check_compiles


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    check_compiles("tests.bench.compiled", "dense restore lay_out prepare", tmp_path)
