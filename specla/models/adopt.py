"""A target made of tensors that lie in memory already, in another library's model: shared where the layouts agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.models.language_model import LanguageModel
from specla.models.loader import (
    STORED_DTYPES,
    check_names,
    empty_target,
    fill_target,
    parameter_dtype,
    parse_config,
    resolve_dtype,
    same_values,
)
from specla.models.source import HEAD, Source


class Adopted(NamedTuple):
    """copied: bytes of the parameters that could not be shared, because ours join several tensors or keep more bits."""

    target: LanguageModel
    copied: int


@torch.no_grad()
def adopt_target(raw: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Adopted:
    """The target of a config.json's content and its checkpoint's tensors, on their device and in the embeddings' dtype.

    A parameter that is one of those tensors, bit for bit, is that tensor and changes with it.

    Raises:
        ValueError: in one line, when configuration and tensors do not fit, or are not supported.
    """
    config = parse_config(raw)
    model, sources, unused = empty_target(config, weights)
    shapes = {part: shape for source in sources.values() for part, shape in source.shapes.items()}
    (embeddings,) = sources["embeddings.weight"].shapes
    tied = HEAD not in shapes
    check_names("the model", {HEAD, *shapes}, {HEAD} if tied else (), weights, unused)
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {list(weights[name].shape)}, the configuration asks for {list(shape)}"
            )
        if weights[name].dtype not in STORED_DTYPES:
            raise ValueError(f"{name} has dtype {weights[name].dtype}, expected float32, bfloat16 or float16")
    if tied and HEAD in weights and not same_values(weights[HEAD], weights[embeddings]):
        raise ValueError(f"the configuration says tie_word_embeddings, but {HEAD} differs from {embeddings}")
    work = resolve_dtype(weights[embeddings].dtype, weights[embeddings].device)
    state, copied = {}, 0
    for name, source in sources.items():
        parts = [weights[part].detach() for part in source.shapes]
        dtype = parameter_dtype(name, model.get_parameter(name).dim(), work)
        if _is_shared(source, parts, model.get_parameter(name).shape, dtype):
            state[name] = parts[0]
        else:
            state[name] = source.join(parts).to(dtype)
            copied += state[name].nbytes
    return Adopted(fill_target(model, state), copied)


def _is_shared(source: Source, parts: list[Tensor], shape: torch.Size, dtype: torch.dtype) -> bool:
    (part,) = parts if len(parts) == 1 else (None,)
    if part is None or part.shape != shape or part.dtype != dtype or not part.is_contiguous():
        return False
    return source.join is torch.cat or torch.equal(source.join(parts), part)
