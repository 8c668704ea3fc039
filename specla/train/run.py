"""What all trainers share: the optimizers, and a loop with a log, checkpoints and progress that resumes to the bit.

A checkpoint holds everything that the next step depends on, and gradients are a function of the step, so a killed run
goes on as if it had not stopped. Of several processes (torchrun), each computes the gradients of its share of a
batch; the loop averages them, and rank 0 alone writes and decides.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specla.models.loader import replace_file
from specla.train.files import append_row, cut_log, load_checkpoint

RESUMABLE, LOG = "training.pt", "log.jsonl"
_KEEP, _LAST, _HALT = 1, 2, 4  # what rank 0 decides after a step

Row = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """How long to train and how fast; what a step consists of, each trainer adds for itself.

    Muon steps the matrices, AdamW the rest (`make_optimizers`). The learning rates warm up, hold, and fall linearly to
    zero over the last part of the run.

    Args:
        clock_seconds: the run lasts so long, pauses aside, and the learning rates follow the clock; `steps` at most.
            0: `steps` it is.
        checkpoint_seconds: a checkpoint also after so many seconds without one; 0: never.
    """

    steps: int = 1000
    clock_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
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
        self.need_at_least_one("steps", "eval_every", "checkpoint_every", "log_every")
        if not 0 <= self.warmup + self.decay <= 1 or min(self.warmup, self.decay) < 0:
            raise ValueError("warmup and decay are shares of the run, together at most 1")
        if min(self.clock_seconds, self.checkpoint_seconds) < 0:
            raise ValueError("clock_seconds and checkpoint_seconds must be at least 0")

    def need_at_least_one(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """Factor on the learning rates at `step`."""
        rise = max(1, round(self.warmup * self.steps))
        fall = max(1, round(self.decay * self.steps))
        return min(1.0, (step + 1) / rise, (self.steps - step) / fall)

    def rate_by_clock(self, share: float) -> float:
        """Factor on the learning rates when this share of the run's time is over."""
        share = min(share, 1.0)
        rise = share / self.warmup if self.warmup else 1.0
        fall = (1 - share) / self.decay if self.decay else 1.0
        return min(1.0, rise, fall)


def make_optimizers(model: nn.Module, training: Training) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, heads, convolutions and vectors.

    Names tell them apart: `embeddings`, `lm_head` and `conv_weight`. Parameters without `requires_grad` are left out.
    Each group's `base_lr` is its learning rate before `Training.rate`.
    """
    matrices, embeddings, vectors = [], [], []
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    for name, weight in trained:
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
        lr=training.vector_rate, betas=(0.9, 0.95), fused=trained[0][1].is_cuda,
    )  # fmt: skip
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adam]


def run_training(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    training: Training,
    out: Path,
    *,
    identity: dict[str, Any],
    gradients: Callable[[int], dict[str, Tensor]],
    save: Callable[[], None],
    tokens_per_step: int,
    measure: Callable[[], Row] | None = None,
    describe: Callable[[Row], str] | None = None,
    resume: bool = False,
    progress: TextIO | None = None,
    stop: Callable[[int], bool] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> bool:
    """Train to the end and `save`, True; or until `stop` says so, False.

    In `out` it leaves `log.jsonl` and, until the end is reached, `training.pt` to resume from: where that file stands,
    the run has not finished. A row of the log has `step`, what `gradients` returned, `grad_norm`, `lr` (the factor),
    `tokens_per_s` and, every `eval_every` steps and at the end, what was measured.

    Args:
        optimizers: as from `make_optimizers`, each group with a `base_lr`.
        identity: what a checkpoint must agree on to be resumed.
        gradients: given a step from 0 on, sets the gradients of `model`, of this rank's share of the batch, and
            returns scalars for the log, `loss` among them; read only when a row is due.
        save: writes the final weights; called on rank 0.
        tokens_per_step: of all ranks together.
        measure: called on every rank, which may share the work; what rank 0 returns is logged.
        describe: a few words about a row with measurements, for its line of progress.
        stop: asked on rank 0 after each step how many are done; True ends the run with a resumable checkpoint.
        now: seconds; rank 0's count.

    Raises:
        ValueError: when the checkpoint to resume is of another run.
        FloatingPointError: when the loss is not finite.
        OSError: when a file cannot be written, on a full disk for instance; the last checkpoint stays.
    """
    rank, world = ranks()
    saved, log = out / RESUMABLE, out / LOG
    start, spent = _restore(saved, identity, model, optimizers) if resume and saved.exists() else (0, 0.0)
    if _of_first(start) != start:
        raise ValueError(f"rank {rank} resumes at step {start}, rank 0 elsewhere: {out} must be one for all")
    if world > 1:
        for weight in _trained(model).values():
            dist.broadcast(weight, 0)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        cut_log(log, start)
    device = next(model.parameters()).device
    clock = _Clock(training.clock_seconds, spent, now, device)
    kept_at, halt = clock.elapsed(), False
    for step in range(start, training.steps):
        rate = training.rate(step)
        if clock.limit:
            rate = training.rate_by_clock(_of_first(round(clock.share() * 1e9)) / 1e9)
        scalars = gradients(step)
        if world > 1:
            _average_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * rate
            optimizer.step()
        done = step + 1
        clock.keep_pace()
        decision = 0
        if rank == 0:
            stale = 0 < training.checkpoint_seconds <= clock.elapsed() - kept_at
            ending = done == training.steps or clock.ends(done - start)
            halting = not ending and stop is not None and stop(done)
            decision = _KEEP * stale + _LAST * ending + _HALT * halting
        decision = _of_first(decision)
        last, halt = bool(decision & _LAST), bool(decision & _HALT)
        keep = halt or bool(decision & _KEEP) or done % training.checkpoint_every == 0
        due = measure is not None and (last or done % training.eval_every == 0)
        tell = halt or due or last or done % training.log_every == 0
        if tell or keep:
            numbers = _averaged(scalars)  # waits for the device
            seconds = clock.elapsed() - spent
            row = {"step": done, **numbers, "grad_norm": float(norm), "lr": rate,
                   "tokens_per_s": round((done - start) * tokens_per_step / max(seconds, 1e-9))}  # fmt: skip
            if not math.isfinite(row["loss"]):
                raise FloatingPointError(f"the loss is {row['loss']} at step {done}: lower the learning rate")
            if measure is not None and due:
                row |= measure()
            if tell and rank == 0:
                append_row(log, row)
                if progress is not None:
                    share, left = done / training.steps, (training.steps - done) * seconds / (done - start)
                    by_clock = clock.limit > 0 and clock.share() > share
                    if by_clock:
                        share, left = min(1.0, clock.share()), max(0.0, clock.limit - clock.elapsed())
                    told = describe(row) if describe is not None and due else ""
                    _show(
                        progress, row, share, training.steps, left, told, stays=halt or due or last, by_clock=by_clock
                    )  # fmt: skip
        if keep and rank == 0:
            state = {"identity": identity, "step": done, "seconds": clock.elapsed(), "model": _trained(model),
                     "optimizers": [optimizer.state_dict() for optimizer in optimizers]}  # fmt: skip
            replace_file(saved, partial(torch.save, state))
            kept_at = clock.elapsed()
        if halt or last:
            break
    if rank == 0 and not halt:
        save()
        saved.unlink(missing_ok=True)
    _of_first(1)  # the others return when the files are there
    return not halt


class _Clock:
    """Seconds that a run has taken, those before it was resumed included, and whether they are over."""

    def __init__(self, limit: float, spent: float, now: Callable[[], float], device: torch.device):
        self.limit, self.spent, self.now = limit, spent, now
        self.began = now()
        self._paced = limit > 0 and device.type == "cuda"
        self._step: torch.cuda.Event | None = None

    def elapsed(self) -> float:
        return self.spent + self.now() - self.began

    def share(self) -> float:
        return self.elapsed() / self.limit

    def ends(self, steps: int) -> bool:
        """Whether the next step, as long as the `steps` until now, would end too late."""
        elapsed = self.elapsed()
        return self.limit > 0 and elapsed + (elapsed - self.spent) / steps > self.limit

    def keep_pace(self) -> None:
        """Wait for the step before, so that the host reads the clock when the device is about as far."""
        if self._paced:
            before, self._step = self._step, torch.cuda.Event()
            self._step.record()
            if before is not None:
                before.synchronize()


@contextmanager
def process_group(device: str | torch.device) -> Iterator[torch.device]:
    """Join the processes that torchrun started, if it did, and give the device of this one.

    Raises:
        ValueError: when several processes were not started by torchrun, or have too few GPUs.
    """
    device = torch.device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set but not LOCAL_RANK: start several processes with torchrun")
    if device.type == "cuda":
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise ValueError(
                f"process {local} of this host has no GPU: there are {count}, one for each process"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    # Defaults of its functions name the group that exists when this module is first imported, which making an
    # optimizer does: that group's threads would outlive it, and one that drops a tensor while Python ends aborts
    # the process (pytorch/pytorch#190489).
    import_module("torch.distributed.nn.functional")
    # decisions travel between the hosts' memories, so that none of them waits for its GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    yield device
    dist.destroy_process_group()  # not after a failure: it would wait for ranks that wait for this one


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let rank 0 go first and the others after it, to find what it has prepared."""
    rank, world = ranks()
    if rank > 0:
        _of_first(1)
    yield
    if rank == 0 and world > 1:
        _of_first(1)


def ranks() -> tuple[int, int]:
    """Which of how many processes this is: (0, 1) where there is one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _of_first(value: int) -> int:
    """Rank 0's `value`, on all ranks."""
    told = torch.tensor(value, dtype=torch.long)
    if ranks()[1] > 1:
        dist.broadcast(told, 0)
    return int(told)


def _average_gradients(model: nn.Module) -> None:
    """The mean over the ranks in place of each gradient, in one message for each dtype."""
    kinds = defaultdict(list)
    for weight in model.parameters():
        if weight.grad is not None:
            kinds[weight.grad.dtype].append(weight.grad)
    for grads in kinds.values():
        joined = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(joined)
        joined /= ranks()[1]
        for grad, mean in zip(grads, joined.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def _averaged(scalars: dict[str, Tensor]) -> dict[str, float]:
    """The scalars as numbers, their mean over the ranks, in one copy from the device."""
    values = torch.stack([value.detach().float() for value in scalars.values()])
    world = ranks()[1]
    if world > 1:
        dist.all_reduce(values)
        values /= world
    return dict(zip(scalars, values.tolist(), strict=True))


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """The model's state without its frozen parameters, which belong to another model."""
    frozen = {
        name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad
    }
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def _restore(
    path: Path, identity: dict[str, Any], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Load a checkpoint and return its step and the seconds that the run had taken."""
    state = load_checkpoint(path, identity)
    if state["model"].keys() != _trained(model).keys():
        raise ValueError(f"{path} holds other parameters than this run trains; train into another directory")
    model.load_state_dict(state["model"], strict=False)  # the frozen ones are not in it
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    return state["step"], state["seconds"]


def _show(
    progress: TextIO,
    row: Row,
    share: float,
    steps: int,
    seconds_left: float,
    told: str,
    *,
    stays: bool,
    by_clock: bool,
) -> None:
    """One line of progress; on a terminal, the next one is written over it unless it stays."""
    filled = round(24 * share)
    of = "" if by_clock else f"/{steps}"
    line = f"[{'#' * filled}{'.' * (24 - filled)}] {row['step']}{of}  loss {row['loss']:.3f}  "
    line += f"{row['tokens_per_s']:,} tokens/s  {seconds_left / 60:.1f} min left"
    line += f"  {told}" if told else ""
    print(line, end="\r" if progress.isatty() and not stays else "\n", file=progress, flush=True)
