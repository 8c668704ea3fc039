"""Training a Gated DeltaNet from scratch on one device, resumable to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import save_target
from specla.train.data import TokenDataset
from specla.train.graph import step_function
from specla.train.run import Training, make_optimizers, run_training
from specla.train.valid import ValidWindows


@dataclass(frozen=True)
class TargetTraining(Training):
    """How to train; `steps` batches of `batch_size` texts of `seq_len` tokens."""

    batch_size: int = 64
    seq_len: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need_at_least_one("batch_size", "seq_len")


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
        FloatingPointError: when the loss is not finite.
        OSError: when a file cannot be written; the last checkpoint stays.
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
    identity = {"config": config.to_dict(), "training": asdict(training), "data": data.meta["files"],
                "weights": data.weights, "tokenizer": data.meta["tokenizer"]}  # fmt: skip
    optimizers = make_optimizers(model, training)
    example = torch.zeros(training.batch_size, training.seq_len + 1, dtype=torch.long)
    step_gradients = step_function(model, lambda tokens: {"loss": text_loss(model, tokens)}, [example])
    windows = None if valid is None else ValidWindows(valid, training.seq_len)

    def gradients(step: int) -> dict[str, Tensor]:
        return step_gradients([data.batch(step, training.batch_size, training.seq_len, seed=training.seed)])

    finished = run_training(
        model, optimizers, training, out, identity=identity, gradients=gradients, save=partial(save_target, model, out),
        tokens_per_step=training.batch_size * training.seq_len,
        measure=None if windows is None else (
            lambda: {"bits_per_byte": bits_per_byte(model, windows, training.batch_size)}
        ),
        describe=lambda row: f"valid {row['bits_per_byte']['all']:.3f} bits/byte",
        resume=resume, progress=progress, stop=stop,
    )  # fmt: skip
    if not finished:
        return model
    model.set_compute_dtype(None)
    return model.eval()


def text_loss(model: GatedDeltaNet, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats; tokens `[B, T + 1]`."""
    logits = model.logits(model(tokens[:, :-1]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


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
