"""`specla bench prefill`: one layer's reading of prompts on a GPU, beside flash-linear-attention's, if it is installed.

Outputs are compared with the law in float64 before anything is timed. Times are those of CUDA graphs; what a kernel
tunes or compiles on its first launch is timed apart, by the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specla.bench.kernel import GraphTimer, Timer
from specla.bench.kernel_checks import BFLOAT16, CheckError
from specla.bench.kernel_inputs import Layer
from specla.bench.kernel_report import cuda_device, facts
from specla.ops.chunk import chunk_gated_delta
from specla.ops.triton.chunk import chunk_prefill

Read = Callable[[], Tensor]  # outputs [B, T, HV, V]


def measure_all(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Everything that was asked for, JSON-ready.

    Raises:
        ValueError: without a CUDA device, or for heads that cannot be.
        CheckError: when outputs are wrong.
    """
    layer = Layer(args.heads, args.value_heads or args.heads, args.head_dim, args.head_v_dim or args.head_dim)
    if layer.value_heads % layer.heads:
        raise ValueError(
            f"--value-heads must be a multiple of --heads ({layer.heads}), got {layer.value_heads}"
        )
    device = cuda_device()
    report = measure(layer, args.batch, args.tokens, args.seed, args.repeats, GraphTimer(device), device)
    return report | facts(device, argv)


def measure(
    layer: Layer, batches: Sequence[int], lengths: Sequence[int], seed: int, repeats: int, timer: Timer,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Each reader at every batch size and length."""
    results = []
    for batch in batches:
        for length in lengths:
            inputs = draw(layer, batch, length, seed, device)
            law = chunk_gated_delta(*(x.double() for x in inputs), use_qk_l2norm_in_kernel=True)[0]
            us, first, errors = {}, {}, {}
            for name, read in readers(layer, inputs).items():
                start = time.perf_counter()
                errors[name] = _error(read(), law)
                first[name] = round(time.perf_counter() - start, 2)
                if not errors[name] <= 2 * BFLOAT16:
                    raise CheckError(f"{name}, {batch} x {length}: relative error {errors[name]:.1e}")
                us[name] = round(timer([read], repeats), 2)
            results.append(
                {"batch": batch, "tokens": length, "us": us, "first_s": first, "relative_error": errors}
            )
    return {
        "benchmark": "prefill",
        "layer": vars(layer),
        "seed": seed,
        "repeats": repeats,
        "results": results,
        "fla": _version(),
    }


def draw(
    layer: Layer, batch: int, length: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v in bf16, log-decays and write strengths in fp32, as layers of a trained model have them."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, length, *shape, generator=generator, device=device)

    q, k = (normal(layer.heads, layer.dim_k).bfloat16() for _ in range(2))
    v = normal(layer.value_heads, layer.dim_v).bfloat16()
    return q, k, v, functional.logsigmoid(normal(layer.value_heads) + 3), normal(layer.value_heads).sigmoid()


def readers(layer: Layer, inputs: tuple[Tensor, ...]) -> dict[str, Read]:
    """Ways to read, by name, each from a zero state to the state after the last token."""
    q, k, v, g, beta = inputs
    state = torch.zeros(q.shape[0], layer.value_heads, layer.dim_v, layer.dim_k, device=q.device)

    def own() -> Tensor:
        state.zero_()
        return chunk_prefill(q, k, v, g, beta, state=state)

    found: dict[str, Read] = {"specla": own}
    try:
        rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError:
        return found
    found["flash-linear-attention"] = partial(_library, rule, inputs)
    return found


def _library(rule: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
    o, _ = rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return o


def _version() -> str | None:
    try:
        return str(getattr(import_module("fla"), "__version__", "unknown"))
    except ImportError:
        return None


def _error(o: Tensor, law: Tensor) -> float:
    return float((o.double() - law).norm() / law.norm())


def print_table(report: dict[str, Any]) -> None:
    """The figures for a person."""
    print(
        f"{report['device']}: reading prompts, one layer, microseconds; in brackets the first launch in seconds"
    )
    for row in report["results"]:
        times = "   ".join(f"{name} {us:9.1f} ({row['first_s'][name]:.1f})" for name, us in row["us"].items())
        print(f"  {row['batch']:4} x {row['tokens']:5} tokens   {times}")
