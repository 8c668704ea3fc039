"""Training a Gated DeltaNet from scratch on one device, resumable to the bit.

Matrices are stepped by Muon, the rest by AdamW; the learning rate warms up, holds, and falls linearly to zero over the
last part of the run. A checkpoint holds everything that the next step depends on, and batches are a function of the
step, so a killed run goes on as if it had not stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import replace_file, save_target
from specla.train.data import TokenDataset
from specla.train.files import load_checkpoint
from specla.train.valid import ValidWindows

RESUMABLE = "training.pt"


@dataclass(frozen=True)
class TargetTraining:
    """How to train; `steps` batches of `batch_size` texts of `seq_len` tokens."""

    steps: int = 1000
    batch_size: int = 64
    seq_len: int = 1024
    learning_rate: float = 4e-3  # of the matrices; embeddings and vectors take `vector_rate`
    vector_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.02  # shares of the run
    decay: float = 0.4
    max_grad_norm: float = 1.0
    seed: int = 0
    eval_every: int = 500
    checkpoint_every: int = 500
    log_every: int = 20

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "eval_every", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup + self.decay <= 1 or min(self.warmup, self.decay) < 0:
            raise ValueError("warmup and decay are shares of the run, together at most 1")

    def rate(self, step: int) -> float:
        """Factor on the learning rates at `step`."""
        rise = max(1, round(self.warmup * self.steps))
        fall = max(1, round(self.decay * self.steps))
        return min(1.0, (step + 1) / rise, (self.steps - step) / fall)


def train_target(
    config: GatedDeltaNetConfig,
    training: TargetTraining,
    data: TokenDataset,
    valid: TokenDataset | None,
    out_dir: str | Path,
    *,
    device: str | torch.device = "cpu",
    resume: bool = False,
    progress: TextIO | None = None,
    stop: Callable[[int], bool] | None = None,
) -> GatedDeltaNet:
    """Train, write the checkpoint directory `out_dir` in fla's layout, and return the model (fp32).

    Beside the weights it leaves `log.jsonl` and, until the end is reached, `training.pt` to resume from: where that
    file stands, the run has not finished.

    Args:
        valid: held-out tokens for bits per byte; None skips the measurement.
        stop: asked after each step; True ends the run early with a resumable checkpoint.

    Raises:
        ValueError: when the corpus is smaller than one batch, or the checkpoint to resume is of another run.
    """
    out, device = Path(out_dir), torch.device(device)
    if data.epoch_tokens(training.seed) < training.batch_size * training.seq_len:
        raise ValueError(
            f"the corpus is too small: {data.epoch_tokens(training.seed)} tokens, one batch takes "
            f"{training.batch_size} x {training.seq_len}"
        )
    model = GatedDeltaNet(config)
    model.reset_parameters(torch.Generator().manual_seed(training.seed))
    model.to(device).train()
    model.set_compute_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = True
    optimizers = make_optimizers(model, training)
    identity = {"config": config.to_dict(), "training": asdict(training), "data": data.meta["files"],
                "weights": data.weights, "tokenizer": data.meta["tokenizer"]}  # fmt: skip
    saved = out / RESUMABLE
    start = 0
    out.mkdir(parents=True, exist_ok=True)
    if resume and saved.exists():
        state = load_checkpoint(saved, identity)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        start = state["step"]
    log = open_log(out / "log.jsonl", start)
    step_gradients = make_step(model, training, device)
    windows = None if valid is None else ValidWindows(valid, training.seq_len)
    began, done = time.perf_counter(), 0
    with log:
        for step in range(start, training.steps):
            batch = data.batch(step, training.batch_size, training.seq_len, seed=training.seed)
            loss = step_gradients(batch)
            norm = nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["base_lr"] * training.rate(step)
                optimizer.step()
            done += 1
            last = step + 1 == training.steps
            halt = stop is not None and stop(step + 1)
            measure = windows is not None and ((step + 1) % training.eval_every == 0 or last)
            if (step + 1) % training.log_every == 0 or last or halt or measure:
                speed = done * training.batch_size * training.seq_len / (time.perf_counter() - began)
                row: dict[str, Any] = {"step": step + 1, "loss": float(loss), "grad_norm": float(norm),
                       "lr": training.rate(step), "tokens_per_s": round(speed)}  # fmt: skip
                if not math.isfinite(row["loss"]):
                    raise FloatingPointError(
                        f"the loss is {row['loss']} at step {step + 1}: lower the learning rate"
                    )
                if windows is not None and measure:
                    row["bits_per_byte"] = bits_per_byte(model, windows, training.batch_size)
                log.write(json.dumps(row) + "\n")
                log.flush()
                if progress is not None:
                    show(progress, row, training.steps, done, time.perf_counter() - began)
            if (step + 1) % training.checkpoint_every == 0 or halt:
                state = {"identity": identity, "step": step + 1, "model": model.state_dict(),
                         "optimizers": [optimizer.state_dict() for optimizer in optimizers]}  # fmt: skip
                replace_file(saved, partial(torch.save, state))
            if halt:
                return model
    save_target(model, out)
    saved.unlink(missing_ok=True)
    model.set_compute_dtype(None)
    return model.eval()


def open_log(path: Path, start: int) -> TextIO:
    """The log without what a killed run wrote after step `start`, open for appending."""
    kept = []
    if start and path.exists():
        kept = [line for line in path.read_text().splitlines(True) if json.loads(line)["step"] <= start]
    path.write_text("".join(kept))
    return path.open("a", encoding="utf-8")


def make_optimizers(model: GatedDeltaNet, training: TargetTraining) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, head, convolutions and vectors."""
    matrices, embeddings, vectors = [], [], []
    for name, weight in model.named_parameters():
        if "embeddings" in name or "lm_head" in name:
            embeddings.append(weight)
        elif weight.dim() == 2 and not name.endswith("conv_weight"):
            matrices.append(weight)
        else:
            vectors.append(weight)
    muon = torch.optim.Muon(
        matrices,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [{"params": embeddings, "weight_decay": training.weight_decay * 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=training.vector_rate, betas=(0.9, 0.95), fused=vectors[0].is_cuda,
    )  # fmt: skip
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adam]


def text_loss(model: GatedDeltaNet, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats; tokens `[B, T + 1]`."""
    logits = model.logits(model(tokens[:, :-1]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_step(
    model: GatedDeltaNet, training: TargetTraining, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """A function that fills the gradients from one batch and returns the loss.

    On a GPU it is one compiled and captured graph: launched op by op, a small model waits for the host.
    """
    if device.type != "cuda":

        def eager(batch: Tensor) -> Tensor:
            model.zero_grad(set_to_none=True)
            loss = text_loss(model, batch)
            loss.backward()
            return loss.detach()

        return eager

    compiled = torch.compile(text_loss, dynamic=False)
    static = torch.zeros(training.batch_size, training.seq_len + 1, dtype=torch.long, device=device)
    model.zero_grad(set_to_none=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            compiled(model, static).backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in model.parameters():
            weight.grad = None
        loss = compiled(model, static)
        loss.backward()

    def replay(batch: Tensor) -> Tensor:
        static.copy_(batch.pin_memory(), non_blocking=True)
        graph.replay()
        return loss.detach()

    return replay


@torch.no_grad()
def bits_per_byte(model: GatedDeltaNet, windows: ValidWindows, batch_size: int) -> dict[str, float]:
    """Bits per UTF-8 byte of held-out documents, for each category and of all together."""
    device = model.norm.weight.device
    nats = torch.zeros(len(windows.categories), dtype=torch.float64, device=device)
    for batch in windows.batches(batch_size):
        inputs, targets, category = (x.to(device) for x in batch)
        logits = model.logits(model(inputs))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        nats.index_add_(0, category, loss.view_as(targets).sum(1).double())
    return {name: round(value, 4) for name, value in windows.bits_per_byte(nats.cpu()).items()}


def show(progress: TextIO, row: dict[str, Any], steps: int, done: int, seconds: float) -> None:
    """One line of progress, over the last one on a terminal."""
    filled = round(24 * row["step"] / steps)
    left = (steps - row["step"]) * seconds / done
    line = f"[{'#' * filled}{'.' * (24 - filled)}] {row['step']}/{steps}  loss {row['loss']:.3f}  "
    line += f"{row['tokens_per_s']:,} tokens/s  {left / 60:.1f} min left"
    if "bits_per_byte" in row:
        line += f"  valid {row['bits_per_byte']['all']:.3f} bits/byte"
    end = "\r" if progress.isatty() and row["step"] < steps and "bits_per_byte" not in row else "\n"
    print(line, end=end, file=progress, flush=True)
