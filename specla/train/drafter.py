"""Training an EAGLE-style drafter for a target, on text that the target writes itself, resumable to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specla.drafters.checkpoint import save_drafter
from specla.drafters.network import Eagle, EagleConfig
from specla.models.language_model import LanguageModel
from specla.models.layers import set_compute_dtype
from specla.models.target import Tap
from specla.train.data import TokenDataset
from specla.train.graph import Step
from specla.train.objectives import Objective, chain_matches, unrolled_loss, walk
from specla.train.rollouts import Recorder, Rollouts
from specla.train.run import Row, Training, make_optimizers, ranks, run_training

FEATURES = ("recurrent", "parallel")
COMPILE = ("whole", "none")
CHAIN, NEW_TOKENS = 8, 128  # drafts in a row, and tokens of a text, when acceptance is measured


@dataclass(frozen=True)
class DrafterTraining(Training):
    """How to train; `steps` batches of `batch_size` texts of `length` tokens.

    Args:
        rows: texts that the target writes at a time, and has in memory together; passes: over each of them.
        corpus_share: share of the texts that are the corpus's own; the others go on from prompts cut out of it. At 1,
            with features "parallel", nothing is written and the corpus may be what the target wrote before.
        shortest_prompt, longest_prompt: tokens of such prompts.
        greedy_share: share of the target's texts that are its likeliest; the others are drawn at `temperature`.
        features: "recurrent", from the execution that verification runs, token by token; "parallel", from one pass over
            the whole text.
        eval_rows: held-out texts to measure acceptance on.
        compile: on a GPU, the "whole" step as one, which takes a minute or more, or "none".
    """

    steps: int = 1000
    learning_rate: float = 4e-3
    vector_rate: float = 4e-3
    batch_size: int = 32
    length: int = 512
    rows: int = 2048
    passes: int = 2
    corpus_share: float = 0.1
    shortest_prompt: int = 16
    longest_prompt: int = 96
    greedy_share: float = 0.7
    temperature: float = 1.0
    features: str = "recurrent"
    eval_rows: int = 128
    compile: str = "whole"
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need_at_least_one("batch_size", "rows", "passes", "shortest_prompt", "eval_rows")
        if self.features not in FEATURES:
            raise ValueError(f"features must be one of {', '.join(FEATURES)}, got {self.features!r}")
        if self.compile not in COMPILE:
            raise ValueError(f"compile must be one of {', '.join(COMPILE)}, got {self.compile!r}")
        for name in ("corpus_share", "greedy_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not self.shortest_prompt <= self.longest_prompt <= self.length - 2:
            raise ValueError(
                f"prompts must be shorter than texts: shortest_prompt <= longest_prompt <= length - 2, got "
                f"{self.shortest_prompt}, {self.longest_prompt} and {self.length}"
            )
        if self.length <= self.objective.unroll_steps + 1:
            raise ValueError(f"length must exceed unroll_steps + 1, got {self.length}")
        if self.rows % self.batch_size:
            raise ValueError(f"rows must be a multiple of batch_size {self.batch_size}, got {self.rows}")


class Batch(NamedTuple):
    """Texts `[B, L + 1]`, and what the target makes of their first L tokens: see `Rollouts`."""

    tokens: Tensor
    features: Tensor
    hidden: Tensor


class SelfText:
    """Texts that the target writes from prompts of a corpus, a shard of `rows` at a time.

    A shard is a function of its number. Of several processes each writes its share of the rows.
    """

    def __init__(
        self, target: LanguageModel, layer_ids: tuple[int, ...], data: TokenDataset, training: DrafterTraining
    ):
        self.target, self.layer_ids, self.data, self.training = target, layer_ids, data, training
        self.rank, self.world = ranks()
        if training.rows % (training.batch_size * self.world) or training.batch_size % self.world:
            raise ValueError(
                f"batch_size and rows must be multiples of the number of processes {self.world}, got "
                f"{training.batch_size} and {training.rows}"
            )
        self.recorder: Recorder | None = None
        if training.corpus_share < 1 or training.features == "recurrent":
            self.recorder = Recorder(target, layer_ids, training.rows // self.world, training.length)
        self._shard: tuple[int, Rollouts] | None = None

    def shard(self, number: int) -> Rollouts:
        """Shard `number`; the one before is gone then."""
        if self._shard is None or self._shard[0] != number:
            self._shard = None
            self._shard = number, self._record(number)
        return self._shard[1]

    def batch(self, step: int) -> Batch:
        """This rank's rows of batch number `step`."""
        training = self.training
        lap, within = divmod(step, training.rows // training.batch_size)
        number, size = lap // training.passes, training.batch_size // self.world
        shard = self.shard(number)
        order = np.random.default_rng([training.seed, number, lap]).permutation(len(shard.tokens))
        mine = torch.from_numpy(order[within * size : (within + 1) * size]).to(shard.tokens.device)
        if training.features == "parallel" and self.recorder is not None:
            return read_in_parallel(self.target, self.layer_ids, shard.tokens[mine])
        return Batch(shard.tokens[mine], shard.features[mine], shard.hidden[mine])

    def usual_tokens(self) -> Tensor:
        """Texts of this rank from which to choose a draft vocabulary: all that there are, or the first shard."""
        if self.recorder is not None:
            return self.shard(0).tokens
        every = torch.from_numpy(self.data.tokens[self.rank :: self.world].astype(np.int64))
        return every.to(self.target.norm.weight.device)

    def _record(self, number: int) -> Rollouts:
        training = self.training
        device = self.target.norm.weight.device
        tokens = self.data.batch(number, training.rows, training.length, seed=training.seed)
        if self.recorder is None:
            return self._read(tokens[self.rank :: self.world].to(device))
        chance = np.random.default_rng([training.seed, number])
        given = chance.integers(training.shortest_prompt, training.longest_prompt + 1, training.rows)
        given[chance.random(training.rows) < training.corpus_share] = training.length + 1
        heat = np.where(chance.random(training.rows) < training.greedy_share, 0.0, training.temperature)
        seeds = number * training.rows + np.arange(training.rows)
        mine = slice(self.rank, None, self.world)
        return self.recorder.record(
            tokens[mine].to(device), torch.from_numpy(given[mine]).to(device),
            torch.from_numpy(heat[mine]).float().to(device), torch.from_numpy(seeds[mine]).to(device),
        )  # fmt: skip

    def _read(self, tokens: Tensor) -> Rollouts:
        """What the target makes of finished texts, some of them at a time."""
        target, size = self.target, self.training.batch_size // self.world
        on_gpu = tokens.is_cuda
        if on_gpu:
            target.set_compute_dtype(torch.bfloat16)  # many rows, whose bits nobody compares
        kept: Batch | None = None
        for first in range(0, len(tokens), size):
            part = read_in_parallel(target, self.layer_ids, tokens[first : first + size])
            if kept is None:
                dtype = torch.bfloat16 if on_gpu else part.hidden.dtype
                sizes = (len(tokens), *part.hidden.shape[1:-1])
                kept = Batch(
                    tokens,
                    *(part[n].new_empty(*sizes, part[n].shape[-1], dtype=dtype) for n in (1, 2)),
                )
            for whole, piece in zip(kept[1:], part[1:], strict=True):
                whole[first : first + size] = piece
        target.set_compute_dtype(None)
        assert kept is not None
        return Rollouts(*kept)


def train_drafter(
    target: LanguageModel,
    shape: dict[str, Any],
    training: DrafterTraining,
    data: TokenDataset,
    valid: TokenDataset | None,
    out_dir: str | Path,
    *,
    target_name: str,
    standalone: bool = True,
    resume: bool = False,
    progress: TextIO | None = None,
    stop: Callable[[int], bool] | None = None,
) -> tuple[Eagle, bool]:
    """Train a drafter for `target`, on its device, and write the checkpoint directory `out_dir`.

    Args:
        shape: fields of `EagleConfig` beyond the target's own.
        data, valid: the target's corpus as tokens; prompts come from it, for training and for measuring acceptance.
        standalone: store embeddings and head, too.

    Returns:
        the network, and whether training reached its end (as `run_training`).

    Raises:
        ValueError: when the corpus is smaller than one shard, the shape does not fit the target, or the checkpoint to
            resume is of another run.
    """
    device = target.norm.weight.device
    config = EagleConfig(hidden_size=target.config.hidden_size, vocab_size=target.config.vocab_size, **shape)
    layers = target.config.num_hidden_layers
    if max(config.layer_ids) > layers:
        raise ValueError(
            f"layer_ids must be in 0..{layers}, the target's layers, got {list(config.layer_ids)}"
        )
    if data.epoch_tokens(training.seed) < training.rows * training.length:
        raise ValueError(
            f"the corpus is too small: {data.epoch_tokens(training.seed)} tokens, one shard takes "
            f"rows x length = {training.rows} x {training.length}: give more text, or make these smaller"
        )
    source = SelfText(target, config.layer_ids, data, training)
    token_ids = frequent_tokens(source.usual_tokens(), config.vocab_size, config.draft_vocab_size)
    network = new_network(target, config, token_ids, training.seed)
    head = network.lm_head.weight.detach().clone()
    draft_ids = torch.full((config.vocab_size,), -1, device=device)
    draft_ids[token_ids] = torch.arange(len(token_ids), device=device)
    torch.backends.cuda.matmul.allow_tf32 = True

    def loss(tokens: Tensor, features: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        logits = torch.nn.functional.linear(hidden.to(head.dtype), head)
        value, first = unrolled_loss(
            network, tokens, features.to(head.dtype), logits, draft_ids, training.objective
        )
        return {"loss": value, "first_token_match": first}

    step_gradients = Step(network, loss, source.batch(0), whole=training.compile == "whole")

    identity = {
        "shape": asdict(config), "training": asdict(training), "target": fingerprint(target),
        "data": data.meta["files"], "weights": data.weights, "tokenizer": data.meta["tokenizer"],
        "draft_vocabulary": token_ids.tolist(),
    }  # fmt: skip
    held_out = None if valid is None else HeldOut(target, network, valid, training)
    finished = run_training(
        network, make_optimizers(network, training), training, Path(out_dir), identity=identity,
        gradients=lambda step: step_gradients(source.batch(step)),
        save=partial(
            save_drafter, network, out_dir, target_name, architecture=target.config.architecture,
            standalone=standalone,
        ),
        tokens_per_step=training.batch_size * training.length,
        measure=None if held_out is None else held_out.measure, describe=_describe,
        resume=resume, progress=progress, stop=stop,
    )  # fmt: skip
    set_compute_dtype(network, None)
    return network.eval(), finished


def new_network(target: LanguageModel, config: EagleConfig, token_ids: Tensor, seed: int) -> Eagle:
    """A fresh drafter on the target's device, in float32, with the target's embeddings and head, which stay."""
    device = target.norm.weight.device
    network = Eagle(config)
    network.reset_parameters(torch.Generator().manual_seed(seed))
    network.to(device).train()
    network.token_ids.copy_(token_ids)
    head = target.embeddings.weight if target.lm_head is None else target.lm_head.weight
    with torch.no_grad():
        network.embeddings.weight.copy_(target.embeddings.weight)
        network.lm_head.weight.copy_(head[token_ids])
        network.norm.weight.copy_(target.norm.weight)  # the scale that the head expects
    for borrowed in (network.embeddings, network.lm_head):
        borrowed.requires_grad_(False)
    set_compute_dtype(network, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return network


def fingerprint(target: LanguageModel) -> str:
    """What tells one target from another: a hash of its embeddings and last norm."""
    digest = hashlib.sha256()
    for weight in (target.embeddings.weight, target.norm.weight):
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class HeldOut:
    """Greedy texts of the target from held-out prompts, and how a chain of drafts fares on them."""

    def __init__(self, target: LanguageModel, network: Eagle, valid: TokenDataset, training: DrafterTraining):
        rows, device = training.eval_rows, target.norm.weight.device
        length = training.longest_prompt + NEW_TOKENS + CHAIN
        self.network, self.training = network, training
        self.given = torch.full((rows,), training.longest_prompt)
        tokens = valid.batch(0, rows, length, seed=training.seed).to(device)
        zeros = torch.zeros(rows, device=device)
        recorder = Recorder(target, network.config.layer_ids, rows, length)
        self.texts = recorder.record(tokens, self.given.to(device), zeros, zeros.long())

    def measure(self) -> Row:
        """Acceptance length and first-token match of chains of `CHAIN` drafts."""
        training, dtype = self.training, self.network.norm.weight.dtype
        matches = [
            chain_matches(self.network, tokens, features.to(dtype), CHAIN)
            for tokens, features in zip(
                self.texts.tokens.split(training.batch_size),
                self.texts.features.split(training.batch_size),
                strict=True,
            )
        ]
        length, first = walk(torch.cat(matches, 1), self.given)
        return {"acceptance_length": round(length, 4), "valid_first_token_match": round(first, 4)}


@torch.no_grad()
def read_in_parallel(target: LanguageModel, layer_ids: tuple[int, ...], tokens: Tensor) -> Batch:
    """What the target makes of whole texts in one pass, chunk by chunk."""
    features: list[Tensor] = []
    hidden = target(tokens[:, :-1], tap=Tap(layer_ids, features.append))
    return Batch(tokens, features[0], hidden)


def frequent_tokens(texts: Tensor, vocab_size: int, count: int) -> Tensor:
    """The `count` tokens that occur most often in the texts of all ranks, ascending; rare ones by their number."""
    counts = torch.bincount(texts.flatten(), minlength=vocab_size)
    if ranks()[1] > 1:
        dist.all_reduce(counts)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def _describe(row: Row) -> str:
    return f"valid acceptance {row['acceptance_length']:.2f}, first {row['valid_first_token_match']:.2f}"
