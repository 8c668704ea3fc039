"""Train the test target that reverses a string of digits: `python tests/data/train_reverse.py` writes reverse/.

A text is 3..9 digits, the separator, the digits in reverse order, the end token. The answer can only come out of
the recurrent state, so a state that holds a rejected draft, or misses an accepted one, shows in it. Takes a minute
on one core.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from specla.models.config import GatedDeltaNetConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import save_target
from specla.train.target import TargetTraining, make_optimizers

SEPARATOR, END = 10, 11  # 0..9 are the digits
LENGTHS = (3, 9)
CONFIG = GatedDeltaNetConfig(
    vocab_size=12, hidden_size=48, num_hidden_layers=2, num_heads=2, head_dim=16, expand_v=1.0, intermediate_size=96,
    bos_token_id=None, eos_token_id=END,
)  # fmt: skip


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts `[size, T]` of one length, and their digits `[size, length]`."""
    length = int(torch.randint(LENGTHS[0], LENGTHS[1] + 1, (), generator=generator))
    few = torch.randint(
        2, 5, (size, 1), generator=generator
    )  # too few kinds for what came before to name a place
    kinds = torch.rand(size, 10, generator=generator).argsort(1)
    digits = kinds.gather(1, (torch.rand(size, length, generator=generator) * few).long())
    edge = digits.new_ones(size, 1)
    return torch.cat([digits, SEPARATOR * edge, digits.flip(1), END * edge], 1), digits


def answer_logits(model: GatedDeltaNet, texts: Tensor, length: int) -> Tensor:
    return model.logits(model(texts[:, :-1]))[:, length:]


def main(out: Path, steps: int = 1500, size: int = 64) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    model = GatedDeltaNet(CONFIG)
    model.reset_parameters(generator)
    training = TargetTraining(steps=steps, learning_rate=4e-3, vector_rate=4e-3, weight_decay=0.01)
    optimizers = make_optimizers(model, training)
    start = time.perf_counter()
    for step in range(steps):
        texts, digits = batch(size, generator)
        logits = answer_logits(model, texts, digits.shape[1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), texts[:, digits.shape[1] + 1 :].flatten()
        )
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * training.rate(step)
            optimizer.step()
        if step % 200 == 0:
            print(
                f"step {step}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    save_target(model.eval(), out, torch.float32)
    with torch.inference_mode():
        wrong = total = 0
        for _ in range(64):
            texts, digits = batch(64, generator)
            answers = answer_logits(model, texts, digits.shape[1]).argmax(-1)
            wrong += int((answers != texts[:, digits.shape[1] + 1 :]).any(1).sum())
            total += len(texts)
    print(f"{wrong} of {total} texts wrong", file=sys.stderr)


if __name__ == "__main__":
    main(Path(__file__).parent / "reverse")
