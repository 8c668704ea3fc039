"""Checkpoints of EAGLE-3 drafters: `config.json` and safetensors as speculators writes them, or as SpecForge does.

The two differ in names, and in what a layer id counts: speculators' ids are the inputs of layers, as ours; SpecForge's
are their outputs, one less. Weights come from safetensors only, and nothing in a checkpoint is executed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specla.drafters.network import Eagle, EagleConfig
from specla.models.config import MODEL_TYPE, GatedDeltaNetConfig, ModelConfig
from specla.models.language_model import LanguageModel
from specla.models.loader import SINGLE, read_raw_config, read_weights, replace_file

ALGORITHM, SPECULATORS_VERSION = "eagle3", "0.9.0"
SPECULATORS, SPECFORGE = ("Eagle3DraftModel", "Eagle3Speculator"), "LlamaForCausalLMEagle3"
LAYERS = ("llama", "qwen3", MODEL_TYPE)
ONLY = {"num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "partial_rotary_factor": 1.0}  # fmt: skip
EMBEDDINGS, HEAD, TO_TARGET, FROM_TARGET = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
FORGED_LAYER, LAYER = "midlayer", "layers.0"
SLIDING, FULL = "sliding_attention", "full_attention"
LONGEST_TEXT = 32768  # transformers' default; rotary positions have no limit


def load_drafter(directory: str | Path, target: LanguageModel) -> Eagle:
    """Load a drafter for `target`, on its device and in its dtypes.

    Reads what speculators writes (eagle3), what SpecForge writes (LlamaForCausalLMEagle3) and what `save_drafter`
    writes. Embeddings that are not stored are the target's own, without a copy; so is a head that is not stored, for
    the tokens that the drafter drafts.

    Raises:
        ValueError: in one line, when the directory, the configuration or the weights do not fit, or do not fit the
            target.
    """
    directory = Path(directory)
    raw = read_raw_config(directory)
    made = str(raw.get("architectures"))
    if "model_type" in raw and "speculators_model_type" not in raw and "Eagle" not in made:
        raise ValueError(f"{directory} is a target, not a drafter")
    try:
        forged = _is_specforge(raw)
        config = (_specforge if forged else _speculators)(raw, target.config)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from None
    layer = FORGED_LAYER if forged else LAYER
    maps = {TO_TARGET: (config.draft_vocab_size,), FROM_TARGET: (config.vocab_size,)}
    shapes = _shapes(config, layer) | maps
    weights = read_weights(directory, shapes, optional={EMBEDDINGS, HEAD, *maps}, integers=maps)
    try:
        token_ids = _token_ids(config, weights.get(TO_TARGET), weights.get(FROM_TARGET))
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    parameters = _join(weights, _sources(config, layer), target)
    with torch.device("meta"):
        network = Eagle(config).requires_grad_(False)
    network.load_state_dict(parameters, strict=False, assign=True)
    network.token_ids = token_ids.to(target.norm.weight.device)
    if EMBEDDINGS not in weights:
        network.embeddings.weight = target.embeddings.weight
    if HEAD not in weights:
        head = (target.embeddings if target.lm_head is None else target.lm_head).weight
        rows = head if len(token_ids) == len(head) else head[network.token_ids]
        network.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    return network.eval()


def save_drafter(
    network: Eagle,
    directory: str | Path,
    target_name: str,
    *,
    architecture: str = GatedDeltaNetConfig.architecture,
    dtype: torch.dtype = torch.bfloat16,
    standalone: bool = True,
) -> None:
    """Write `config.json` and `model.safetensors` as speculators does.

    Weights are stored in `dtype`, but for `A_log` and `dt_bias`, which stay float32. Each file is whole or as it was
    before, and the weights come last. speculators loads drafters with attention; it has no delta layer and cannot run
    those, whose files have the same layout and flash-linear-attention's names within the layer.

    Args:
        target_name: directory or name of the target's checkpoint, for engines that look for it. architecture: its.
        standalone: store embeddings and head, too. Without, they are the target's when the drafter is loaded.

    Raises:
        OSError: with the path in its message, on a full disk for instance.
    """
    from safetensors.torch import save_file

    directory, config = Path(directory), network.config
    directory.mkdir(parents=True, exist_ok=True)
    shapes, own = _shapes(config, LAYER), network.state_dict()
    tensors = {}
    for name, parts in _sources(config, LAYER).items():
        pieces = own[name].detach().cpu().split([shapes[part][0] for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            kept = torch.float32 if part.endswith(("A_log", "dt_bias")) else dtype
            if standalone or part not in (EMBEDDINGS, HEAD):
                tensors[part] = piece.reshape(shapes[part]).to(kept).contiguous().clone()
    if config.draft_vocab_size < config.vocab_size:
        ids = network.token_ids.cpu()
        tensors[TO_TARGET] = ids - torch.arange(len(ids))
        tensors[FROM_TARGET] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    raw = _to_raw(config, target_name, architecture, str(dtype).removeprefix("torch."))
    text = json.dumps(raw, indent=2) + "\n"
    replace_file(directory / "config.json", partial(Path.write_text, data=text, encoding="utf-8"))
    replace_file(directory / SINGLE, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def _is_specforge(raw: dict[str, Any]) -> bool:
    """Whether this is SpecForge's form and not speculators'; ValueError when it is neither."""
    form, made = raw.get("speculators_model_type"), raw.get("architectures")
    if form is None and made == [SPECFORGE]:
        return True
    algorithm = _object(raw, "speculators_config").get("algorithm", ALGORITHM)
    if form != ALGORITHM or algorithm != ALGORITHM or made not in (None, *([name] for name in SPECULATORS)):
        raise ValueError(
            f"a drafter has speculators_model_type {ALGORITHM!r} (and that algorithm) or architectures "
            f"{[SPECFORGE]}, got {form!r} ({algorithm!r}) and {made}"
        )
    return False


def _speculators(raw: dict[str, Any], target: ModelConfig) -> EagleConfig:
    joint, each = (_flag(raw, name) for name in ("norm_before_fc", "fc_norm"))
    if joint and each:
        raise ValueError("norm_before_fc and fc_norm exclude each other")
    return EagleConfig(
        **_shared(raw, _object(raw, "transformer_layer_config"), target),
        draft_vocab_size=_size(raw, "draft_vocab_size"),
        layer_ids=_layer_ids(raw.get("eagle_aux_hidden_state_layer_ids"), 0, target.num_hidden_layers),
        norm_before_residual=_flag(raw, "norm_before_residual", None),  # readers differ in its default
        norm_output=_flag(raw, "norm_output"),
        feature_norm="joint" if joint else "each" if each else "none",
    )


def _specforge(raw: dict[str, Any], target: ModelConfig) -> EagleConfig:
    for name in ("norm_output", "norm_before_residual", "norm_before_fc"):
        if raw.get(name) is not None:
            raise ValueError(
                f"{name} is not supported: SpecForge and the engines that serve its drafters differ in it"
            )
    shared = _shared(raw, raw | {"model_type": "llama"}, target)
    if shared["sliding_window"] is not None:
        raise ValueError("sliding_window is not supported: SpecForge trains without it")
    ids = _object(raw, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    return EagleConfig(
        **shared,
        draft_vocab_size=_size(raw, "draft_vocab_size", shared["vocab_size"]),
        layer_ids=_layer_ids(ids, 1, target.num_hidden_layers),
        feature_norm="each" if _flag(raw, "fc_norm") else "none",
    )


def _shared(raw: dict[str, Any], layer: dict[str, Any], target: ModelConfig) -> dict[str, Any]:
    """The fields of a drafter that both forms write alike, `layer` being the configuration of its decoder layer."""
    kind = layer.get("model_type")
    if kind not in LAYERS:
        raise ValueError(f"model_type of transformer_layer_config must be {', '.join(LAYERS)}, got {kind!r}")
    for name, only in ONLY.items():
        if layer.get(name) not in (None, only):
            raise ValueError(
                f"{name} must be {json.dumps(only)}, got {layer[name]!r}; nothing else is supported"
            )
    fields: dict[str, Any] = {
        name: _size(layer, name) for name in ("hidden_size", "vocab_size", "intermediate_size")
    }
    wide = _size(raw, "target_hidden_size", target.hidden_size)
    for name, size in (("hidden_size", fields["hidden_size"]), ("vocab_size", fields["vocab_size"]),
                       ("target_hidden_size", wide)):  # fmt: skip
        theirs = getattr(target, name.removeprefix("target_"))
        if size != theirs:
            raise ValueError(f"{name} is {size}, but the target's is {theirs}")
    fields["rms_norm_eps"] = layer.get("rms_norm_eps", 1e-6)
    if kind == MODEL_TYPE:
        sizes = {name: _size(layer, name) for name in ("num_heads", "head_dim", "conv_size")}
        return fields | sizes | {"mixer": "delta", "use_gate": _flag(layer, "use_gate", None)}
    heads = _size(layer, "num_attention_heads")
    return fields | {
        "mixer": "attention",
        "num_heads": heads,
        "num_key_value_heads": _size(layer, "num_key_value_heads", heads),
        "head_dim": _size(layer, "head_dim", 128 if kind == "qwen3" else fields["hidden_size"] // heads),
        "qk_norm": kind == "qwen3",
        "rope_theta": _rope_theta(layer),
        "sliding_window": _window(layer),
    }


def _rope_theta(layer: dict[str, Any]) -> Any:
    theta = layer.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = _object(layer, name)
        theta = rope.pop("rope_theta", theta)
        if any(field not in (("rope_type", "default"), ("type", "default")) for field in rope.items()):
            raise ValueError(f"{name} may hold rope_type 'default' and rope_theta only, got {rope}")
    return 10000.0 if theta is None else theta


def _window(layer: dict[str, Any]) -> int | None:
    """The window of the one layer, by transformers' rules: qwen3 has a switch for it, which is off by default."""
    on = _flag(layer, "use_sliding_window", layer["model_type"] != "qwen3")
    window = layer.get("sliding_window") if on else None
    types = layer.get("layer_types")
    if types is None and window is None:
        types = [FULL]
    if types not in ([FULL], [SLIDING]) or (types == [SLIDING] and window is None):
        raise ValueError(
            f"layer_types must be {[FULL]}, or {[SLIDING]} with a sliding_window in use, got {types} with {window!r}"
        )
    return _size(layer, "sliding_window") if types == [SLIDING] else None


def _layer_ids(ids: Any, shift: int, layers: int) -> tuple[int, ...]:
    told = f"got {ids}"
    if ids is None:
        ids, shift = [2, layers // 2, layers - 3], 0
        told = f"and the default is {ids}"
    valid = isinstance(ids, list) and all(type(i) is int and 0 <= i <= layers - shift for i in ids)
    if not valid or not ids or len(set(ids)) < len(ids):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids must be different integers in 0..{layers - shift}, as the target has "
            f"{layers} layers, {told}"
        )
    return tuple(i + shift for i in ids)


def _token_ids(config: EagleConfig, d2t: Tensor | None, t2d: Tensor | None) -> Tensor:
    """The target's ids of the drafter's tokens: by offset, by marks on the target's, or by both, which must agree."""
    draft, vocab = config.draft_vocab_size, config.vocab_size
    if d2t is None and t2d is None:
        if draft < vocab:
            raise ValueError(f"d2t or t2d must say which {draft} of the target's {vocab} tokens it drafts")
        return torch.arange(draft)
    marked = None if t2d is None else t2d.bool().nonzero()[:, 0]
    if marked is not None and len(marked) != draft:
        raise ValueError(f"t2d marks {len(marked)} tokens, but draft_vocab_size is {draft}")
    if d2t is None:
        assert marked is not None
        return marked
    ids = torch.arange(draft) + d2t.long()
    if not 0 <= int(ids[0]) <= int(ids[-1]) < vocab or bool((ids.diff() <= 0).any()):
        raise ValueError(f"d2t must give ascending tokens in 0..{vocab - 1}")
    if marked is not None and not torch.equal(ids, marked):
        raise ValueError("d2t and t2d name different tokens")
    return ids


def _join(
    weights: dict[str, Tensor], sources: dict[str, list[str]], target: LanguageModel
) -> dict[str, Tensor]:
    """Our parameters out of the stored ones: copies, as weights must not change when their file does."""
    exact, matrices = target.norm.weight, target.embeddings.weight
    joined = {}
    for name, parts in sources.items():
        if parts[0] in weights:
            whole = torch.cat([weights[part] for part in parts])
            dtype = matrices.dtype if whole.dim() == 2 else exact.dtype  # convolutions are stored with three
            joined[name] = (whole.flatten(1) if whole.dim() == 3 else whole).to(exact.device, dtype)
    return joined


def _sources(config: EagleConfig, layer: str) -> dict[str, list[str]]:
    """For each parameter of the network, the tensors whose rows it holds, in order; `layer` is their prefix."""
    names = {"embeddings.weight": [EMBEDDINGS], "fc.weight": ["fc.weight"], "norm.weight": ["norm.weight"],
             "lm_head.weight": [HEAD]}  # fmt: skip
    if config.feature_norm == "joint":
        names["feature_norms.0.weight"] = ["input_norm.weight"]
    elif config.feature_norm == "each":
        names |= {f"feature_norms.{i}.weight": [f"fc_norm.{i}.weight"] for i in range(len(config.layer_ids))}
    norms = {
        "input_norm": "input_layernorm",
        "hidden_norm": "hidden_norm",
        "mlp_norm": "post_attention_layernorm",
    }
    names |= {f"layer.{ours}.weight": [f"{layer}.{theirs}.weight"] for ours, theirs in norms.items()}
    names["layer.mlp.gate_up_proj.weight"] = [f"{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")]
    names["layer.mlp.down_proj.weight"] = [f"{layer}.mlp.down_proj.weight"]
    ours, theirs = "layer.mixer", f"{layer}.self_attn"
    if config.mixer == "attention":
        names[f"{ours}.qkv_proj.weight"] = [f"{theirs}.{x}_proj.weight" for x in "qkv"]
        if config.qk_norm:
            names |= {f"{ours}.{x}_norm.weight": [f"{theirs}.{x}_norm.weight"] for x in "qk"}
    else:
        joined = "qkvabg" if config.use_gate else "qkvab"
        names[f"{ours}.in_proj.weight"] = [f"{theirs}.{x}_proj.weight" for x in joined]
        names |= {f"{ours}.{leaf}": [f"{theirs}.{leaf}"] for leaf in ("A_log", "dt_bias")}
        names[f"{ours}.norm.weight"] = [f"{theirs}.o_norm.weight"]
        if config.conv_size > 1:
            names[f"{ours}.conv_weight"] = [f"{theirs}.{x}_conv1d.weight" for x in "qkv"]
    names[f"{ours}.o_proj.weight"] = [f"{theirs}.o_proj.weight"]
    return names


def _shapes(config: EagleConfig, layer: str) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of weights that a checkpoint of this configuration holds."""
    hidden, mlp, features = (
        config.hidden_size,
        config.intermediate_size,
        len(config.layer_ids) * config.hidden_size,
    )
    heads, head_dim, keys = config.num_heads, config.head_dim, config.key_value_heads
    width, kv = heads * head_dim, (keys if config.mixer == "attention" else heads) * head_dim
    rows = {"q": width, "k": kv, "v": kv, "a": heads, "b": heads, "g": width}
    mixer: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (n, 2 * hidden) for x, n in rows.items()}
    mixer |= {"o_proj.weight": (hidden, width), "A_log": (heads,), "dt_bias": (heads,)}
    mixer |= {f"{x}_norm.weight": (head_dim,) for x in "qko"}
    mixer |= {f"{x}_conv1d.weight": (width, 1, config.conv_size) for x in "qkv"}
    mlps = {
        "gate_proj.weight": (mlp, hidden),
        "up_proj.weight": (mlp, hidden),
        "down_proj.weight": (hidden, mlp),
    }
    whole = {EMBEDDINGS: (config.vocab_size, hidden), HEAD: (config.draft_vocab_size, hidden),
             "fc.weight": (hidden, features), "input_norm.weight": (features,)}  # fmt: skip
    whole |= {f"{layer}.self_attn.{name}": shape for name, shape in mixer.items()}
    whole |= {f"{layer}.mlp.{name}": shape for name, shape in mlps.items()}
    stored = [part for parts in _sources(config, layer).values() for part in parts]
    return {part: whole.get(part, (hidden,)) for part in stored}  # the rest are norms


def _to_raw(config: EagleConfig, target_name: str, architecture: str, dtype: str) -> dict[str, Any]:
    """The content of `config.json`."""
    layer: dict[str, Any] = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
                             "num_hidden_layers": 1, "rms_norm_eps": config.rms_norm_eps,
                             "vocab_size": config.vocab_size}  # fmt: skip
    if config.mixer == "delta":
        layer |= {"model_type": MODEL_TYPE, "num_heads": config.num_heads, "head_dim": config.head_dim,
                  "use_gate": config.use_gate, "conv_size": config.conv_size}  # fmt: skip
    else:
        window = config.sliding_window
        layer |= {
            "model_type": "qwen3" if config.qk_norm else "llama",
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": LONGEST_TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "tie_word_embeddings": False,
            "layer_types": [FULL if window is None else SLIDING],
            "sliding_window": window,
            "use_sliding_window": window is not None,
        }
        if not config.qk_norm:
            layer["mlp_bias"] = False
    return {
        "architectures": [SPECULATORS[0]],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "embed_requires_grad": False,
        "fc_norm": config.feature_norm == "each",
        "norm_before_fc": config.feature_norm == "joint",
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "speculators_config": {
            "algorithm": ALGORITHM,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"architectures": [architecture], "name_or_path": target_name},
        },
        "speculators_model_type": ALGORITHM,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def _object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, (dict, type(None))):
        raise ValueError(f"{name} must be an object, got {value!r}")
    return dict(value or {})


def _size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    return value


def _flag(raw: dict[str, Any], name: str, default: bool | None = False) -> bool:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value
