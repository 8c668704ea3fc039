"""Compiles the kernels for a GPU that need not be there, as their launchers would launch them.

A program of its own, since the other tests have Triton interpret the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from specla.ops.factors import Factors, Pending
from specla.ops.gate import Gate
from specla.ops.triton import overlap
from specla.ops.triton.chunk import chunk_prefill
from specla.ops.triton.commit import commit
from specla.ops.triton.conv import conv_commit, tree_conv
from specla.ops.triton.linear import linear, linear_parts, quantize, swiglu
from specla.ops.triton.norm import add_norm, embed_norm, gated_norm
from specla.ops.triton.schedule import build
from specla.ops.triton.tuning import Config
from specla.ops.triton.verify import verify
from specla.tree import Tree

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """What a launch does here: compile for these arguments."""
    options = {name: named.pop(name) for name in OPTIONS if named.get(name) is not None}
    values = dict(zip(self.arg_names, args, strict=False)) | {
        n: x for n, x in named.items() if n in self.arg_names
    }
    assert set(values) == set(self.arg_names), f"{self.fn.__name__} lacks {set(self.arg_names) - set(values)}"
    signature, constants = {}, {}
    for param in self.params:
        value = values[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=self, signature=signature, constexprs=constants)
    triton.compile(source, target=HOPPER, options=options)
    print(self.fn.__name__, options, flush=True)


def verification(
    config: Config, *, dims: tuple[int, int] = (64, 64), size: int = 9, dtype: torch.dtype = torch.bfloat16,
    decay: int = 1, ints: torch.dtype = torch.int64, pending: bool = True, gated: bool = False, delta: bool = True,
) -> None:  # fmt: skip
    dim_k, dim_v = dims
    channels = [dim_k] if decay == 2 else []
    q, k, v = (
        torch.zeros(2, size, heads, dim, dtype=dtype) for heads, dim in ((1, dim_k), (1, dim_k), (2, dim_v))
    )
    g = torch.zeros(2, size, 2, *channels) if decay else None
    gate = Gate(torch.zeros(2), torch.zeros(2, *channels), 2.0) if gated else None
    factors = Factors(
        torch.zeros(2, 9, 1, dim_k), torch.zeros(2, 9, 2, dim_v), torch.zeros(2, 9, 2, *channels)
    )
    held = Pending(factors, torch.zeros(2, 5, dtype=ints), torch.zeros(2, dtype=ints)) if pending else None
    verify(
        q, k, v, g, torch.zeros(2, size, 2), Tree.chain(size, 2), config, state=torch.zeros(4, 2, dim_v, dim_k),
        state_indices=torch.zeros(2, dtype=ints), pending=held, scale=1.0, normalise=True, delta=delta, gate=gate,
    )  # fmt: skip


def prefill(
    dtype: torch.dtype, dims: tuple[int, int] = (64, 64), ints: torch.dtype = torch.int64, gated: bool = False
) -> None:
    q, k, v = (torch.zeros(2, 40, h, d, dtype=dtype) for h, d in ((1, dims[0]), (1, dims[0]), (2, dims[1])))
    gate, index = Gate(torch.zeros(2), torch.zeros(2), 2.0) if gated else None, torch.zeros(2, dtype=ints)
    chunk_prefill(
        q, k, v, torch.zeros(2, 40, 2), torch.zeros(2, 40, 2), state=torch.zeros(4, 2, dims[1], dims[0]),
        state_indices=index, lengths=index, gate=gate, normalise=not gated,
    )  # fmt: skip


def main() -> None:
    JITFunction.run = compile_instead
    overlap.overlaps = lambda device: True
    verification(Config("serial", 16), gated=True)
    verification(Config("serial", 16, prepared=True), dims=(96, 40), decay=2, gated=True, dtype=torch.float16)
    verification(Config("hybrid", 32, workers=2), size=17, ints=torch.int32)
    verification(Config("serial", 16, registers=128), size=1, decay=0, pending=False, delta=False)
    verification(Config("parallel", 16), gated=True)
    verification(
        Config("parallel", 32, prepared=True, registers=168, block_k=32), dtype=torch.float32, size=33
    )
    bank = Factors(torch.zeros(3, 2, 9, 1, 64), torch.zeros(3, 2, 9, 2, 64), torch.zeros(3, 2, 9, 2))
    for ints in (torch.int32, torch.int64):
        path, count = torch.zeros(2, 5, dtype=ints), torch.zeros(2, dtype=ints)
        commit(torch.zeros(3, 4, 2, 64, 64), bank, path, count, count, by_slot=True)
        x, weight, window = torch.zeros(2, 9, 64).bfloat16(), torch.zeros(64, 4), torch.zeros(4, 64, 3)
        tree = Tree.chain(9, 2)
        tree_conv(
            x, tree.parent, tree.num_nodes, weight, weight[:, 0], window, count, (x, path, count), keep=x
        )
        conv_commit(window, x, path, count, count)
    for workers in (1, 3):
        build(Tree.chain(17, 2).parent, Tree.chain(17, 2).num_nodes, workers)
    for dtype, rows in ((torch.bfloat16, 1), (torch.float32, 40)):
        x, weight = torch.zeros(rows, 1024, dtype=dtype), torch.zeros(100, 1024, dtype=dtype)
        linear(x, weight)
        swiglu(x, weight)
        stream = torch.zeros(rows, 100)
        add_norm(stream, linear_parts(x, weight), stream[0], 1e-6, dtype, stream)
        embed_norm(stream[:, 0].int(), weight, weight[0], 1e-6)
        gated_norm(x.view(1, rows, 4, 256), x[None], x[0], 1e-6, False, dtype)
        if dtype == torch.bfloat16:
            narrow = quantize(weight)
            for some in (x, x.expand(20, -1).contiguous(), x.expand(40, -1).contiguous()):
                linear(some, narrow)
                swiglu(some, narrow)
                linear_parts(some, narrow)
    prefill(torch.bfloat16, (256, 256))
    prefill(torch.float16, (96, 40), torch.int32, gated=True)
    prefill(torch.float32)
    print("all compiled")


if __name__ == "__main__":
    main()
