"""Which targets there are: for each `model_type` its configuration, its model, and where its parameters come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from specla.models import fla_layout, kda_layout, mamba2_layout, qwen_layout, rwkv7_layout
from specla.models.config import GatedDeltaNetConfig, ModelConfig
from specla.models.delta_net import DeltaNet, DeltaNetConfig, delta_net
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.gla import GLA, GLAConfig, gla
from specla.models.kda import KDA
from specla.models.kda_config import KDAConfig
from specla.models.kimi import Kimi
from specla.models.kimi_config import KimiConfig
from specla.models.language_model import LanguageModel
from specla.models.mamba2 import Mamba2
from specla.models.mamba2_config import Mamba2Config
from specla.models.qwen import Qwen
from specla.models.qwen_config import CLASSES, QWEN_TYPES, QwenConfig
from specla.models.retnet import RetNet, RetNetConfig, retnet
from specla.models.rwkv7 import Rwkv7
from specla.models.rwkv7_config import Rwkv7Config
from specla.models.source import Source


class Architecture(NamedTuple):
    """How to read a checkpoint as a target."""

    config: Callable[[Mapping[str, Any]], ModelConfig]  # from the content of config.json
    model: Callable[[Any], LanguageModel]
    sources: Callable[[Any, Collection[str]], dict[str, Source]]  # given the names of all stored tensors
    classes: tuple[str, ...]  # what `architectures` may name
    unused: tuple[str, ...] = ()  # how names of tensors begin that a target passes over


ARCHITECTURES: dict[str, Architecture] = {
    GatedDeltaNetConfig.model_type: Architecture(
        GatedDeltaNetConfig.from_dict, GatedDeltaNet, lambda config, stored: fla_layout.gated_deltanet(config),
        (GatedDeltaNetConfig.architecture,),
    ),
    DeltaNetConfig.model_type: Architecture(
        DeltaNetConfig.from_dict, DeltaNet, lambda config, stored: delta_net(config), (DeltaNetConfig.architecture,)
    ),
    GLAConfig.model_type: Architecture(GLAConfig.from_dict, GLA, gla, (GLAConfig.architecture,)),
    RetNetConfig.model_type: Architecture(RetNetConfig.from_dict, RetNet, retnet, (RetNetConfig.architecture,)),
    Rwkv7Config.model_type: Architecture(
        Rwkv7Config.from_dict, Rwkv7, rwkv7_layout.sources, (Rwkv7Config.architecture,)
    ),
    **{
        kind: Architecture(QwenConfig.from_dict, Qwen, qwen_layout.sources, CLASSES[kind], qwen_layout.UNUSED)
        for kind in QWEN_TYPES
    },
    KDAConfig.model_type: Architecture(
        KDAConfig.from_dict, KDA, lambda config, stored: kda_layout.kda(config), (KDAConfig.architecture,)
    ),
    KimiConfig.model_type: Architecture(
        KimiConfig.from_dict, Kimi, kda_layout.kimi, (KimiConfig.architecture,)
    ),
    Mamba2Config.model_type: Architecture(
        Mamba2Config.from_dict, Mamba2, mamba2_layout.sources, (Mamba2Config.architecture,)
    ),
}  # fmt: skip


def architecture_of(raw: Mapping[str, Any]) -> Architecture:
    """That of a checkpoint with this `config.json`.

    Raises:
        ValueError: for one that is not supported, with the list of those that are.
    """
    kind, named = raw.get("model_type"), raw.get("architectures")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        told = "" if named is None else f" (architectures {named!r})"
        raise ValueError(
            f"model_type {kind!r} is not supported{told}; supported are {', '.join(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[kind]
    if named is not None and (not isinstance(named, list) or not set(map(str, named)) <= set(found.classes)):
        raise ValueError(
            f"architectures {named!r} of model_type {kind} is not supported; supported are {', '.join(found.classes)}"
        )
    return found
