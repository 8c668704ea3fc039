"""Models as users have them loaded: tiny Qwens by transformers, and one that holds tensors by fla's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specla.drafters import DraftRow
from specla.drafters.base import Draft
from specla.hf import Speculative, adoption, forget
from specla.models.config import GatedDeltaNetConfig
from specla.models.loader import read_raw_config
from tests.data.qwen.make import COMMITTED
from tests.data.transformers.make import VARIANTS
from tests.models import naive_forward
from tests.targets import ScriptedDrafter

transformers = pytest.importorskip("transformers", "5.17")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DATA = Path(__file__).parent.parent / "data"
QWEN = sorted(COMMITTED)
# of those that transformers writes besides, what its version at hand has
OTHERS = sorted(name for name, (kind, _) in VARIANTS.items() if hasattr(transformers, f"{kind}ForCausalLM"))
VOCAB = 61


def load_qwen(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    return load(DATA / "qwen" / variant, dtype)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    name = read_raw_config(directory)["architectures"][0]
    return getattr(transformers, name).from_pretrained(directory, dtype=dtype).eval()


@cache
def qwen(variant: str = "dense") -> Any:
    """Shared by tests, which leave it as it is."""
    return load_qwen(variant)


class NamedTensors(nn.Module):
    """Parameters by dotted names."""

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        for name in sorted({name.partition(".")[0] for name in weights}):
            if name in weights:
                self.register_parameter(name, nn.Parameter(weights[name]))
            else:
                start = name + "."
                inner = {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}
                self.add_module(name, NamedTensors(inner))


class FlaConfig(transformers.PretrainedConfig):
    model_type = "gated_deltanet"


class FlaModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Names and configuration of flash-linear-attention's, and the forward pass of `naive_forward` from scratch."""

    config_class = FlaConfig

    def __init__(self, variant: str):
        directory = DATA / "fla" / variant
        raw = read_raw_config(directory)
        super().__init__(FlaConfig(**{k: v for k, v in raw.items() if k != "model_type"}))
        self.raw = GatedDeltaNetConfig.from_dict(raw).to_dict()
        weights = {name: w.float() for name, w in load_file(directory / "model.safetensors").items()}
        for name, module in NamedTensors(weights).named_children():
            self.add_module(name, module)

    def get_input_embeddings(self) -> Any:
        return nn.Embedding.from_pretrained(self.state_dict()["model.embeddings.weight"])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [ids[kept != 0].tolist() for ids, kept in zip(input_ids, mask, strict=True)]
        last = [naive_forward.logits(self.raw, self.state_dict(), ids)[-1:] for ids in rows]
        return transformers.modeling_outputs.CausalLMOutput(logits=torch.stack(last).float())

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def prompts(rows: int = 3, length: int = 12, seed: int = 0, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Random prompts padded on the left, one of them not at all."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : 1 + 3 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


class Told(ScriptedDrafter):
    """Drafts from texts that it is told, right more often than not, in trees of every shape."""

    def __init__(self, texts: list[list[int]], vocab: int):
        super().__init__(right=0.8, idle=0.1, vocab=vocab)
        self.texts = texts

    def _draft(self, row: DraftRow) -> Draft:
        known = (text for text in self.texts if text[: len(row.tokens)] == row.tokens)
        self.references.setdefault(row.key, next(known, []))
        return super()._draft(row)


@contextmanager
def told(model: Any, sequences: Tensor, mask: Tensor | None = None) -> Iterator[Speculative]:
    """A way to generate with drafts from `sequences`, of which `mask` says where their prompts begin."""
    starts = [0] * len(sequences) if mask is None else (mask == 0).sum(1).tolist()
    texts = [row[start:] for row, start in zip(sequences.tolist(), starts, strict=True)]
    forget(model)
    with pytest.MonkeyPatch.context() as patch:
        vocab = model.get_input_embeddings().num_embeddings
        patch.setattr(adoption, "make_drafter", lambda *_: Told(texts, vocab))
        yield Speculative("ngram", num_speculative_tokens=9)
    forget(model)
