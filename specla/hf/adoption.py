"""Targets made of loaded models: one for each, kept as long as the model lives, and built anew when it has changed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specla.engine.choice import make_engine
from specla.engine.drafting import choose_drafter, load_network, make_drafter
from specla.engine.engine import Engine
from specla.engine.params import SpeculativeConfig
from specla.hf.processors import ProcessedTarget
from specla.models.adopt import adopt_target
from specla.models.loader import parse_config

Setting = tuple[str | None, SpeculativeConfig]  # a drafter as it was asked for, and how to draft
Stamp = tuple[tuple[str, int, int], ...]


class Adoption:
    """The target of one model, and the engines that have run it. `lock` is held by the thread that runs one.

    copied: bytes of parameters that the target does not share with the model.
    """

    def __init__(self, model: Any, weights: Mapping[str, Tensor], stamp: Stamp):
        self.stamp = stamp
        self.target, self.copied = adopt_target(model.config.to_dict(), weights)
        self.directory = _directory(model)
        self.lock = threading.RLock()
        self._engines: dict[tuple[Setting, bool], Engine] = {}

    def engine(self, setting: Setting, processed: bool, num_seqs: int) -> Engine:
        """An engine with room for that many sequences; with `processed` its target is a `ProcessedTarget`.

        Raises:
            ValueError: for a drafter or a setting that does not fit.
        """
        known = self._engines.get((setting, processed))
        if known is not None and known.failure is None and len(known.pool.length) >= num_seqs:
            return known
        self._engines.pop((setting, processed), None)  # its slots before those of the next
        asked, config = setting
        if self.directory is None and asked == "mtp":
            raise ValueError(
                "drafter mtp is read from the directory that a model was loaded from, and there is none"
            )
        directory = self.directory or Path()
        chosen = choose_drafter(
            "ngram" if self.directory is None and asked is None else asked, directory, config
        )
        network = load_network(chosen, self.target, directory)
        drafter = make_drafter(network, config, self.target.config.vocab_size, 0, num_seqs)
        target = ProcessedTarget(self.target) if processed else self.target
        engine = self._engines[setting, processed] = make_engine(target, drafter, config, num_seqs)
        return engine


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Adoption] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def adopt(model: Any) -> Adoption:
    """What is known of a model, or is made of it now.

    Raises:
        ValueError: in one line, for a model that is not supported.
    """
    _check_modules(model)
    weights = model.state_dict()
    _check_weights(weights)
    # a write to `.data` escapes this: `forget` is for those who do that
    stamp = tuple((name, w.data_ptr(), -1 if w.is_inference() else w._version) for name, w in weights.items())
    with _LOCK:
        known = _KNOWN.get(model)
        if (
            known is None
            or known.stamp != stamp
            or known.target.config != parse_config(model.config.to_dict())
        ):
            _KNOWN.pop(model, None)  # its copies before the next ones
            known = None
            known = _KNOWN[model] = Adoption(model, weights, stamp)
    return known


def forget(model: Any) -> None:
    """Free what is kept for a model; the next generation builds it anew.

    Needed by itself only after writes that leave no trace, to `parameter.data` for instance.
    """
    with _LOCK:
        _KNOWN.pop(model, None)


def _directory(model: Any) -> Path | None:
    """Where a model was loaded from: a directory, or the place in the Hub's cache."""
    name = str(getattr(model, "name_or_path", ""))
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(
            name, "config.json", revision=getattr(model.config, "_commit_hash", None)
        )
    except HFValidationError:  # no name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def _check_modules(model: Any) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "quantised weights are not supported: load the model in float32, bfloat16 or float16"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("adapters are not supported: merge them into the model first (merge_and_unload)")
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        ours = [
            hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")
        ]
        if ours or hasattr(module, "_hf_hook"):
            raise ValueError(f"{name or 'the model'} has forward hooks, which would not run: remove them")
        if model.training and isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError("the model drops out activations: call model.eval() first")
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    if model.training and getattr(text, "attention_dropout", 0):
        raise ValueError("the model drops out activations: call model.eval() first")


def _check_weights(weights: Mapping[str, Tensor]) -> None:
    adapted = [name for name in weights if ".base_layer." in name or "lora_" in name]
    if adapted:
        raise ValueError(
            f"adapters are not supported ({adapted[0]}): merge them into the model first (merge_and_unload)"
        )
    for name, weight in weights.items():
        if type(weight) not in (Tensor, nn.Parameter):
            raise ValueError(f"{name} is a {type(weight).__name__}: only plain tensors are supported")
    devices = sorted({str(weight.device) for weight in weights.values()})
    if len(devices) != 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise ValueError(
            f"the weights must be on one device, a CPU or a CUDA GPU, and are on {', '.join(devices)}"
        )
    if torch.is_autocast_enabled(torch.device(devices[0]).type):
        raise ValueError("autocast is not supported: convert the model to the dtype instead")
