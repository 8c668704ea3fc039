"""Texts that the target goes on with from prompts of its corpus, written by an engine into a token cache.

Each text with its end token is as long as the drafter's windows, so that those do not cut it. Parts are files, a
function of their number: a run that was interrupted writes those that are missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np

from specla.bench.generate import repeated_share
from specla.drafters import NoDrafter
from specla.engine.choice import make_engine
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.loader import replace_file
from specla.train.data import DOCUMENTS, META, TOKENS, TokenDataset
from specla.train.run import ranks

GREEDY_SHARE, SHORTEST = 0.7, 8  # of texts, the others drawn at temperature 1; tokens of a prompt
LONGEST_SHARE = 0.2  # of a text may be its prompt


def write_parts(
    target: GatedDeltaNet, data: TokenDataset, folder: Path, rows: int, length: int, seed: int,
    over: Callable[[int], bool], progress: TextIO,
) -> None:  # fmt: skip
    """Parts of this process until it is `over`, which is asked with how many it has; the first is always written."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = ranks()
    config = SpeculativeConfig(num_speculative_tokens=0)
    engine = make_engine(target, NoDrafter(), config, max_num_seqs=rows)
    for written, number in enumerate(range(rank, 1 << 20, world)):
        path = folder / f"part-{number:05}.npy"
        if not path.exists():
            if written and over(written):
                return
            texts = _write(engine, data, number, rows, length, seed)
            replace_file(path, partial(_save, texts=texts))
            shares = [repeated_share(text.tolist()) for text in texts]
            print(f"rank {rank}: {path.name}, {texts.size:,} tokens, repeated 8-grams {np.mean(shares):.2f}",
                  file=progress, flush=True)  # fmt: skip


def _save(path: Path, texts: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, texts)


def _write(engine: Engine, data: TokenDataset, number: int, rows: int, length: int, seed: int) -> np.ndarray:
    """Texts `[rows, length - 1]`."""
    chance = np.random.default_rng([seed, number])
    longest = max(2, int(LONGEST_SHARE * length))
    windows = data.batch(number, rows, longest, seed=seed + 1)[:, 1:]
    given = chance.integers(min(SHORTEST, longest), longest + 1, rows)
    heat = np.where(chance.random(rows) < GREEDY_SHARE, 0.0, 1.0)
    sequences = [
        engine.add(
            windows[row, : given[row]].tolist(),
            SamplingParams(
                temperature=float(heat[row]), max_tokens=int(length - 1 - given[row]), seed=number * rows + row,
                ignore_eos=True,
            ),
        )
        for row in range(rows)
    ]  # fmt: skip
    while engine.has_work:
        engine.step()
    return np.array([sequence.tokens for sequence in sequences], dtype=data.meta["dtype"])


def join_parts(folder: Path, data: TokenDataset, cache: Path) -> TokenDataset:
    """All parts as one token cache, whose category is "rollouts"; the parts are gone then."""
    parts = [np.load(path, allow_pickle=False) for path in sorted(folder.glob("part-*.npy"))]
    texts = np.concatenate(parts)
    eos = data.meta["eos_token_id"]
    ended = np.concatenate([texts, np.full((len(texts), 1), eos, texts.dtype)], 1)
    ends = 1 + np.arange(1, len(ended) + 1) * ended.shape[1]
    documents = np.stack([ends - ended.shape[1], ends, np.zeros_like(ends), np.zeros_like(ends)], 1)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / TOKENS).write_bytes(np.concatenate([np.array([eos], texts.dtype), ended.ravel()]).tobytes())
    np.save(cache / DOCUMENTS, documents.astype(np.int64))
    counts = {"rollouts": {"documents": len(texts), "tokens": int(ended.size), "bytes": 0}}
    meta = data.meta | {
        "files": [["rollouts", f"{len(parts)} parts", ""]], "categories": counts, "tokens": int(ended.size) + 1,
    }  # fmt: skip
    text = json.dumps(meta, indent=1) + "\n"
    replace_file(cache / META, partial(Path.write_text, data=text, encoding="utf-8"))
    shutil.rmtree(folder)
    return TokenDataset(cache)
