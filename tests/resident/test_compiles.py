"""What the interpreter lets pass, the compiler may not."""

from __future__ import annotations

from pathlib import Path

from tests.ops.triton.test_compiles import check_compiles


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    kernels = "draw walk lookup synthetic top expand finish gather keep take_last pair_norm"
    check_compiles("tests.resident.compiled", kernels, tmp_path)
