"""Which tensors of a checkpoint a parameter is made of, and the parts that layouts have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specla.models.config import FlaConfig, ModelConfig

HEAD = "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]
Join = Callable[[list[Tensor]], Tensor]


class Source(NamedTuple):
    """A parameter's tensors in a checkpoint, with their shapes, and what becomes of them."""

    shapes: Shapes
    join: Join = torch.cat


def vocabulary(config: ModelConfig | FlaConfig, embeddings: str) -> dict[str, Source]:
    """The embeddings, stored by that name, and the head where it is not tied to them."""
    table = (config.vocab_size, config.hidden_size)
    found = {"embeddings.weight": Source({embeddings: table})}
    return found if config.tie_word_embeddings else found | {"lm_head.weight": Source({HEAD: table})}


def swiglu(ours: str, theirs: str, hidden: int, width: int) -> dict[str, Source]:
    """An MLP, by how names of its parameters begin here and there."""
    up = {f"{theirs}{x}_proj.weight": (width, hidden) for x in ("gate", "up")}
    return {
        f"{ours}gate_up_proj.weight": Source(up),
        f"{ours}down_proj.weight": Source({f"{theirs}down_proj.weight": (hidden, width)}),
    }


def rows(shapes: Shapes) -> Source:
    """The rows of these tensors, one after the other; of a convolution `[channels, 1, taps]`, as `[channels, taps]`."""
    return Source(shapes, _taps if any(len(shape) == 3 for shape in shapes.values()) else torch.cat)


def _taps(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts])


def flat(parts: list[Tensor]) -> Tensor:
    """Vectors that are stored with further dimensions, one after the other."""
    return torch.cat([part.flatten() for part in parts])


def stack(each: int, parts: list[Tensor]) -> Tensor:
    """Experts, of which every `each` tensors are the rows of one."""
    return torch.cat(parts).unflatten(0, (len(parts) // each, -1))
