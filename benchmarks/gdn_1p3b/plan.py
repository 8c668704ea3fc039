"""What each stage of the recipe needs, estimated before it starts: operations, memory, disk, time."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet

GIB = 1 << 30
LEAST_STEPS = 20  # of a training run: fewer are no training
CHUNK = 64  # tokens between two states that training keeps


@dataclass(frozen=True)
class Shape:
    """A target and how it is trained: texts a process reads in a step, and what its drafter looks like."""

    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    rows: int
    seq_len: int
    draft_vocab_size: int
    text_length: int  # of texts that the target writes
    draft_rows: int  # texts in a step of the drafter's training, of all processes
    learning_rate: float
    vector_rate: float
    compile_seconds: float  # before a first step, on a GPU

    def config(self, vocab_size: int, bos: int | None, eos: int | None) -> GatedDeltaNetConfig:
        return GatedDeltaNetConfig(
            vocab_size=vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            num_heads=self.num_heads, head_dim=self.head_dim, expand_v=1.0, intermediate_size=self.intermediate_size,
            bos_token_id=bos, eos_token_id=eos,
        )  # fmt: skip


SHAPES = {
    "gdn-1.3b": Shape(2048, 24, 8, 256, 5632, 16, 1024, 8192, 512, 32, 2e-3, 3e-3, 90.0),
    "tiny": Shape(32, 2, 2, 16, 48, 4, 32, 128, 40, 4, 8e-3, 8e-3, 0.0),
}


@dataclass(frozen=True)
class Machine:
    """flops: operations a second that training reaches, of one process; memory, disk: free bytes (None: not checked)."""

    name: str
    processes: int
    flops: float
    memory: int | None
    disk: int

    @classmethod
    def h200(cls, processes: int) -> Machine:
        """139 GiB of memory a GPU, 64 GiB of disk. 280 TFLOP/s are a third of what its products reach."""
        return cls("NVIDIA H200", processes, 280e12, 138 * GIB, 60 * GIB)

    @classmethod
    def here(cls, device: torch.device, processes: int, work: Path) -> Machine:
        at = next(path for path in (work, *work.resolve().parents) if path.exists())
        disk = shutil.disk_usage(at).free
        if device.type != "cuda":
            return cls("CPU", processes, 5e9, None, disk)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(torch.cuda.get_device_name(device), processes, cls.h200(1).flops, free, disk)


@dataclass(frozen=True)
class Needs:
    """Of one stage on one machine. speed: tokens a second of all processes."""

    stage: str
    seconds: float
    speed: float
    memory: int
    disk: int
    least_seconds: float

    def line(self) -> str:
        return (
            f"{self.stage:9} {self.seconds / 60:5.1f} min   about {self.speed:9,.0f} tokens/s = "
            f"{self.speed * self.seconds / 1e6:7.2f} M tokens   {self.memory / GIB:6.1f} GiB a device   "
            f"{self.disk / GIB:5.1f} GiB of disk"
        )

    def check(self, machine: Machine) -> None:
        """ValueError in one line when the machine or the time cannot do."""
        if self.seconds < self.least_seconds:
            raise ValueError(
                f"too little time for {self.stage}: {self.seconds:.0f} s, expected at least "
                f"{self.least_seconds:.0f} s ({LEAST_STEPS} steps or texts)"
            )
        if self.disk > machine.disk:
            raise ValueError(
                f"too little disk for {self.stage}: {machine.disk / GIB:.1f} GiB are free, "
                f"{self.disk / GIB:.1f} GiB are needed"
            )
        if machine.memory is not None and self.memory > machine.memory:
            raise ValueError(
                f"too little memory for {self.stage}: {machine.memory / GIB:.1f} GiB of the device are free, about "
                f"{self.memory / GIB:.1f} GiB are needed; lower --rows or set --recompute"
            )


def parameters(config: GatedDeltaNetConfig) -> tuple[int, int]:
    """All parameters, and those of embeddings and head, which AdamW steps with two moments."""
    with torch.device("meta"):
        model = GatedDeltaNet(config)
    ends = {"embeddings.weight", "lm_head.weight"}
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    return sum(sizes.values()), sum(sizes[name] for name in ends & sizes.keys())


def flops_per_token(config: GatedDeltaNetConfig) -> float:
    """Of one forward pass: two for each weight that is multiplied by, and the delta rule in chunks."""
    total, ends = parameters(config)
    multiplied = total - (0 if config.tie_word_embeddings else ends // 2)
    heads, k, v = config.value_heads, config.head_dim, config.head_v_dim
    rule = heads * (2 * CHUNK * (3 * k + 2 * v) + 6 * k * v)
    return 2.0 * multiplied + rule * config.num_hidden_layers


def activation_bytes(config: GatedDeltaNetConfig) -> int:
    """Of a token in one layer, kept for the gradients: float32 around the rule, bf16 before products, states of chunks."""
    d = config.hidden_size
    states = 4 * config.value_heads * config.head_dim * config.head_v_dim // CHUNK
    return 4 * 14 * d + 2 * (3 * config.mlp_dim + 4 * d) + states


def target_needs(
    shape: Shape, config: GatedDeltaNetConfig, machine: Machine, minutes: float, rows: int, accumulate: int,
    recompute: int,
) -> Needs:  # fmt: skip
    total, ends = parameters(config)
    layers, d = config.num_hidden_layers, config.hidden_size
    kept = max(0, layers - recompute) + (1 if recompute else 0)
    tokens = rows * shape.seq_len
    # measured on an H200: 135 GiB at 16 x 1,024 tokens, 127 with three layers computed again; a captured step keeps
    # more than it needs at a time
    activations = int(1.38 * tokens * (kept * activation_bytes(config) + layers * 4 * d))
    logits = 4096 * config.vocab_size * 12 + 3 * config.vocab_size * d * 4
    copies = 4 if machine.processes > 1 else 0  # the message in which gradients are averaged
    memory = total * (4 + 4 + 2 + copies) + 4 * (total + ends) + activations + logits + 7 * total
    forward = flops_per_token(config)
    work = forward * (3 + min(1.0, recompute / layers)) * tokens * accumulate
    work += muon_flops(config)
    speed = machine.flops * machine.processes * tokens * accumulate / work
    step = tokens * accumulate * machine.processes / speed
    checkpoint = 8 * total + 4 * ends
    return Needs("target", 60 * minutes, speed, memory, 2 * checkpoint + 2 * total, LEAST_STEPS * step)


def muon_flops(config: GatedDeltaNetConfig) -> float:
    """Of orthogonalising the matrices of all layers, once a step on every process."""
    d, inner = config.hidden_size, 2 * config.key_dim + 2 * config.value_dim
    sizes = [(d, inner), (d, config.value_dim), (d, 2 * config.mlp_dim), (d, config.mlp_dim)]
    one = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in sizes)
    return float(one * config.num_hidden_layers)


def rollout_needs(
    shape: Shape, config: GatedDeltaNetConfig, machine: Machine, minutes: float, rows: int
) -> Needs:
    total, _ = parameters(config)
    state = 4 * config.value_heads * config.head_dim * config.head_v_dim * config.num_hidden_layers
    seconds_a_token = (
        (2 * total + rows * state * 1.5) / 2.5e12 + 1e-3 if machine.memory else rows * 2 * total / 5e9
    )
    speed = rows / seconds_a_token * machine.processes
    batch = rows * shape.text_length * machine.processes / speed
    return Needs("rollouts", 60 * minutes, speed, 2 * total + 2 * rows * state + GIB // 2, 1 << 26, batch)


def drafter_needs(
    shape: Shape, config: GatedDeltaNetConfig, machine: Machine, minutes: float, texts: int
) -> Needs:
    """texts: held in memory with their features, by each process."""
    total, ends = parameters(config)
    d, layer = config.hidden_size, (total - ends) // config.num_hidden_layers
    multiplied = layer + 8 * d * d + shape.draft_vocab_size * d
    tokens = shape.draft_rows * shape.text_length
    work = tokens * (
        7 * 6 * multiplied + flops_per_token(config) / 4
    )  # each text is read once for four passes
    speed = machine.flops * 0.6 * machine.processes * tokens / work
    features = texts * shape.text_length * 4 * d * 2
    share = tokens // machine.processes
    unrolled = share * 7 * (shape.draft_vocab_size * 12 + activation_bytes(config))
    memory = 2 * total + features + unrolled + 24 * (layer + 8 * d * d) + 8 * ends
    step = tokens / speed
    return Needs("drafter", 60 * minutes, speed, memory, 16 * (layer + 8 * d * d), LEAST_STEPS * step)
