"""Laws of the Triton kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def full_size(test: Any) -> Any:
    """A test of sizes that models have: on a GPU only."""
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE.type == "cpu", reason="full size")(test))
