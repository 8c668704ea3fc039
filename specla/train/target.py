"""Training a Gated DeltaNet from scratch on one device or several, resumable to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import save_target
from specla.train.cross_entropy import cross_entropy, token_losses
from specla.train.data import TokenDataset
from specla.train.graph import Step
from specla.train.run import Training, make_optimizers, ranks, run_training
from specla.train.valid import ValidWindows

COMPILE = ("whole", "layers", "none")


@dataclass(frozen=True)
class TargetTraining(Training):
    """How to train; `steps` batches of `batch_size` texts of `seq_len` tokens, over all processes.

    Args:
        accumulate: parts of a process's share of a batch, which take turns in memory.
        recompute: layers, from the first on, whose insides are computed again for the gradients instead of kept.
        compile: on a GPU, the "whole" step as one, or one layer for all ("layers": a deep model compiles as fast as a
            shallow one), or "none".
    """

    batch_size: int = 64
    seq_len: int = 1024
    accumulate: int = 1
    recompute: int = 0
    compile: str = "whole"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need_at_least_one("batch_size", "seq_len", "accumulate")
        if self.recompute < 0:
            raise ValueError(f"recompute must be at least 0, got {self.recompute}")
        if self.compile not in COMPILE:
            raise ValueError(f"compile must be one of {', '.join(COMPILE)}, got {self.compile!r}")


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
        ValueError: when the corpus is smaller than one batch, a batch cannot be shared evenly, or the checkpoint to
            resume is of another run.
        FloatingPointError: when the loss is not finite.
        OSError: when a file cannot be written; the last checkpoint stays.
    """
    out, device = Path(out_dir), torch.device(device)
    if data.epoch_tokens(training.seed) < training.batch_size * training.seq_len:
        raise ValueError(
            f"the corpus is too small: {data.epoch_tokens(training.seed)} tokens, one batch takes "
            f"batch_size x seq_len = {training.batch_size} x {training.seq_len}: give more text, or make these smaller"
        )
    rank, world = ranks()
    if training.batch_size % (world * training.accumulate):
        raise ValueError(
            f"batch_size must be a multiple of processes x accumulate = {world} x {training.accumulate}, got "
            f"{training.batch_size}"
        )
    with device:
        model = GatedDeltaNet(config).train()
    model.reset_parameters(torch.Generator(device).manual_seed(training.seed))
    model.set_compute_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = True
    identity = {"config": config.to_dict(), "training": asdict(training), "data": data.meta["files"],
                "weights": data.weights, "tokenizer": data.meta["tokenizer"]}  # fmt: skip
    optimizers = make_optimizers(model, training)
    share = training.batch_size // world
    example = torch.zeros(share // training.accumulate, training.seq_len + 1, dtype=torch.long)
    windows = None if valid is None else ValidWindows(valid, training.seq_len)

    def measure() -> dict[str, Any]:
        assert windows is not None
        step_gradients.release()
        # compiling a pass without gradients would take longer than the pass
        with torch.compiler.set_stance("force_eager"):
            return {"bits_per_byte": bits_per_byte(model, windows, share // training.accumulate)}

    with _layers(model, training, compiled=device.type == "cuda" and training.compile == "layers"):
        step_gradients = Step(
            model, lambda tokens: {"loss": text_loss(model, tokens)}, [example], parts=training.accumulate,
            whole=training.compile == "whole",
        )  # fmt: skip

        def gradients(step: int) -> dict[str, Tensor]:
            batch = data.batch(step, training.batch_size, training.seq_len, seed=training.seed)
            return step_gradients([batch[rank * share : (rank + 1) * share]])

        finished = run_training(
            model, optimizers, training, out, identity=identity, gradients=gradients,
            save=partial(save_target, model, out), tokens_per_step=training.batch_size * training.seq_len,
            measure=None if windows is None else measure,
            describe=lambda row: f"valid {row['bits_per_byte']['all']:.3f} bits/byte",
            resume=resume, progress=progress, stop=stop,
        )  # fmt: skip
    if not finished:
        return model
    model.set_compute_dtype(None)
    return model.eval()


@contextmanager
def _layers(model: GatedDeltaNet, training: TargetTraining, *, compiled: bool) -> Iterator[None]:
    """Layers that work as training asks, as long as it lasts."""
    for number, layer in enumerate(model.layers):
        call: Callable[..., Any] = layer.forward
        if compiled:
            call = torch.compile(
                call, dynamic=False
            )  # the first one's graph serves all: weights are its inputs
        if number < training.recompute:
            call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
        layer.forward = call
    try:
        yield
    finally:
        for layer in model.layers:
            del layer.forward


def text_loss(model: GatedDeltaNet, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats; tokens `[B, T + 1]`."""
    hidden = model(tokens[:, :-1])
    return cross_entropy(hidden.flatten(0, 1), _head(model), tokens[:, 1:].flatten(), model.compute_dtype)


@torch.no_grad()
def bits_per_byte(model: GatedDeltaNet, windows: ValidWindows, batch_size: int) -> dict[str, float]:
    """Bits per UTF-8 byte of held-out documents, for each category and of all together; processes share the work."""
    device, (rank, world) = model.norm.weight.device, ranks()
    nats = torch.zeros(len(windows.categories), dtype=torch.float64, device=device)
    for number, batch in enumerate(windows.batches(batch_size)):
        if number % world != rank:
            continue
        inputs, targets, category = (x.to(device) for x in batch)
        hidden = model(inputs).flatten(0, 1)
        losses = token_losses(hidden, _head(model), targets.flatten(), model.compute_dtype)
        nats.index_add_(0, category, losses.view_as(targets).sum(1).double())
    if world > 1:
        dist.all_reduce(nats)
    return {name: round(value, 4) for name, value in windows.bits_per_byte(nats.cpu()).items()}


def _head(model: GatedDeltaNet) -> Tensor:
    return model.embeddings.weight if model.lm_head is None else model.lm_head.weight
