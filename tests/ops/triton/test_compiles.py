"""What the interpreter lets pass, the compiler may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def check_compiles(program: str, kernels: str, cache: Path) -> None:
    """Run a program that compiles kernels where no interpreter is on, and see that it has compiled these."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", program], cwd=Path(__file__).parents[3], env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for kernel in kernels.split():
        assert f"{kernel}_kernel" in done.stdout
    assert done.stdout.endswith("all compiled\n")


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    kernels = (
        "exact parallel prepare commit tree_conv conv_commit schedule linear norm gated_norm chunk scan walk"
    )
    check_compiles("tests.ops.triton.compiled", kernels, tmp_path)
