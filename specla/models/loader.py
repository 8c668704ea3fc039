"""Checkpoints of targets: `config.json` and safetensors, one file or shards with an index.

Weights come from safetensors only, and nothing in a checkpoint is executed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specla.models.architectures import ARCHITECTURES, architecture_of
from specla.models.config import ModelConfig
from specla.models.experts import Experts
from specla.models.fla_layout import gated_deltanet
from specla.models.gated_deltanet import GatedDeltaNet
from specla.models.kimi import LatentAttention
from specla.models.language_model import LanguageModel
from specla.models.layers import Linear
from specla.models.source import HEAD, Source
from specla.ops.linear import measure

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)


def load_target(
    directory: str | Path, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto"
) -> LanguageModel:
    """Load a checkpoint directory as a target.

    Args:
        dtype: of the matrix weights: "auto", "float32", "bfloat16", "float16" (CUDA only) or "float64" (tests). The
            recurrent state, norms and gates stay float32.

    Raises:
        ValueError: in one line, when the directory, the configuration or the weights do not fit.
    """
    directory, device = Path(directory), torch.device(device)
    config = read_config(directory)
    work = resolve_dtype(dtype, device)
    model, sources, unused = empty_target(config, stored_names(directory))
    check_room(model, device, work)
    shapes = {part: shape for source in sources.values() for part, shape in source.shapes.items()}
    (embeddings,) = sources["embeddings.weight"].shapes
    optional = {HEAD} - shapes.keys()
    weights = read_weights(directory, {HEAD: shapes[embeddings], **shapes}, optional, unused=unused)
    if optional and HEAD in weights and not same_values(weights[HEAD], weights[embeddings]):
        raise ValueError(
            f"{directory}: config.json says tie_word_embeddings, but {HEAD} differs from {embeddings}"
        )
    return fill_target(model, join_weights(sources, weights, device, work))


def empty_target(
    config: ModelConfig, stored: Collection[str]
) -> tuple[LanguageModel, dict[str, Source], tuple[str, ...]]:
    """A target without weights; of which tensors of a checkpoint that holds `stored` it takes them; and how the names
    of those begin that it passes over.
    """
    architecture = ARCHITECTURES[config.model_type]
    with torch.device("meta"):
        model = architecture.model(config)
    return model, architecture.sources(config, stored), architecture.unused


def fill_target(model: LanguageModel, state: Mapping[str, Tensor]) -> LanguageModel:
    """Give an empty target its parameters, ready to run."""
    model.load_state_dict(state, assign=True)
    measure_products(model, [] if model.lm_head is not None else [model.embeddings.weight])
    return model.requires_grad_(False).eval()


def check_room(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """ValueError when a GPU has no room for a model's weights, most of them in `dtype`."""
    if device.type != "cuda":
        return
    needed, (free, _) = (
        sum(p.numel() for p in model.parameters()) * dtype.itemsize,
        torch.cuda.mem_get_info(device),
    )
    if needed > free:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"the model needs {needed:,} bytes in {name}, and {free:,} are free on {device}")


def join_weights(
    sources: Mapping[str, Source], weights: dict[str, Tensor], device: torch.device, work: torch.dtype
) -> dict[str, Tensor]:
    """Our parameters out of the stored ones, which are used up; matrices in `work`."""
    state = {}
    uses = Counter(part for source in sources.values() for part in source.shapes)
    for name, source in sources.items():
        uses.subtract(list(source.shapes))
        joined = source.join([weights[part] if uses[part] else weights.pop(part) for part in source.shapes])
        # joined is a copy: weights must not change when their file does
        state[name] = joined.to(device=device, dtype=parameter_dtype(name, joined.dim(), work))
    return state


def parameter_dtype(name: str, dim: int, work: torch.dtype) -> torch.dtype:
    """Of one of our parameters of `dim` dimensions, where matrices are in `work`."""
    is_matrix = dim > 1 and not name.endswith("conv_weight")
    return work if is_matrix or work == torch.float64 else torch.float32


def measure_products(model: nn.Module, further: Sequence[Tensor] = ()) -> None:
    """Measure on a CPU how to multiply a model's matrices, and `further` ones, now rather than in the first request."""
    for module in model.modules():
        if isinstance(module, Linear) and module.int8 is None:
            measure(module.weight)
        elif isinstance(module, Experts):  # all of one shape
            measure(module.gate_up_proj[0])
            measure(module.down_proj[0])
        elif isinstance(module, LatentAttention):
            measure(module.query_up[0])
            measure(module.value_up[0])
    for weight in further:
        measure(weight)


def read_config(directory: str | Path) -> ModelConfig:
    """The configuration of a checkpoint directory; ValueError when there is none that specla understands."""
    return parse_config(read_raw_config(Path(directory)))


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The same of what a config.json holds."""
    return architecture_of(raw).config(raw)


def save_target(model: GatedDeltaNet, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors` as flash-linear-attention does.

    Matrices are stored in `dtype`; vectors too, but for `A_log` and `dt_bias`, which stay float32. Each file is whole
    or as it was before, and the weights come last.

    Raises:
        OSError: with the path in its message, on a full disk for instance.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config
    own = model.state_dict()
    tensors = {}
    for name, source in gated_deltanet(config).items():
        pieces = own[name].detach().cpu().split([shape[0] for shape in source.shapes.values()])
        for (part, shape), piece in zip(source.shapes.items(), pieces, strict=True):
            kept = torch.float32 if part.endswith(("A_log", "dt_bias")) else dtype
            tensors[part] = piece.reshape(shape).to(kept).contiguous().clone()
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": config.to_dict()["eos_token_id"]}
    raw = dict(config.to_dict(), dtype=str(dtype).removeprefix("torch."))
    for name, content in (("config.json", raw), ("generation_config.json", special)):
        text = json.dumps(content, indent=2) + "\n"
        replace_file(directory / name, partial(Path.write_text, data=text, encoding="utf-8"))
    replace_file(directory / SINGLE, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside `path`, then put it in place at once; a failure leaves what stood there.

    Raises:
        OSError: with the path in its message, on a full disk for instance.
    """
    from safetensors import SafetensorError

    beside = path.with_name(path.name + ".partial")
    try:
        write(beside)
        os.replace(beside, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch, safetensors: a full disk
        raise OSError(f"{path} could not be written ({error}); what stood there before is whole") from error
    finally:
        beside.unlink(missing_ok=True)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the matrix weights. "auto" is bfloat16 where the device multiplies it natively, else float32."""
    names = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }
    names |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_multiplies_bf16() else torch.float32
    chosen = names.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in names.values():
        raise ValueError(f"dtype must be auto, float32, bfloat16, float16 or float64, got {dtype!r}")
    if chosen == torch.float16 and device.type == "cpu":
        raise ValueError("dtype float16 is not supported on a CPU, use bfloat16 or float32")
    assert chosen is not None
    return chosen


def read_raw_config(directory: Path) -> dict[str, Any]:
    """What `config.json` of a checkpoint directory holds, or a ValueError that names the directory."""
    try:
        found = directory.is_dir()
    except OSError as error:  # a name too long, say
        raise ValueError(f"{str(directory)[:80]} cannot be opened: {error.strerror}") from None
    if not found:
        raise ValueError(
            f"{directory} is not a directory with a checkpoint (config.json and safetensors); "
            "one on the Hub is not fetched: hf download NAME --local-dir DIRECTORY"
        )
    return read_json(directory / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ValueError that names it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return raw


def read_weights(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = (),
    integers: Collection[str] = (),
    unused: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, as they lie in their files: copy what is kept.

    Args:
        shapes: of every tensor that it may hold. optional: those that may be missing. integers: those that are no
            numbers with a fraction. unused: how names begin that are passed over.

    Raises:
        ValueError: in one line, when a tensor is missing, unexpected, or of another shape or kind.
    """
    weights: dict[str, Tensor] = {}
    stored: set[str] = set()
    for file, name, read in _stored_tensors(directory):
        if name in stored:
            raise ValueError(f"{file}: {name} is stored twice")
        stored.add(name)
        if name not in shapes:
            continue
        tensor = read()
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{file}: {name} has shape {list(tensor.shape)}, config.json asks for {list(shapes[name])}"
            )
        if tensor.dtype not in (INTEGERS if name in integers else STORED_DTYPES):
            kinds = "integers" if name in integers else "float32, bfloat16 or float16"
            raise ValueError(f"{file}: {name} has dtype {tensor.dtype}, expected {kinds}")
        weights[name] = tensor
    check_names(str(directory), shapes, optional, stored, unused)
    return weights


def check_names(
    where: str,
    wanted: Collection[str],
    optional: Collection[str],
    stored: Collection[str],
    unused: tuple[str, ...],
) -> None:
    """ValueError, in one line, unless the tensors that are there are those that a configuration asks for."""
    missing, unexpected = sorted({*wanted} - {*optional} - {*stored}), sorted({*stored} - {*wanted})
    unexpected = [name for name in unexpected if not name.startswith(unused)]
    if missing or unexpected:
        told = [f"{len(x)} {what} ({', '.join(x[:4])}{', ...' if len(x) > 4 else ''})"
                for x, what in ((missing, "missing"), (unexpected, "unexpected")) if x]  # fmt: skip
        raise ValueError(f"{where}: the weights do not fit config.json: {' and '.join(told)}")


def same_values(a: Tensor, b: Tensor) -> bool:
    wide = torch.promote_types(a.dtype, b.dtype)
    return torch.equal(a.to(wide), b.to(wide))


def stored_names(directory: Path) -> set[str]:
    """The names of all tensors in a checkpoint."""
    return {name for _, name, _ in _stored_tensors(directory)}


def _stored_tensors(directory: Path) -> Iterator[tuple[Path, str, Callable[[], Tensor]]]:
    """File and name of each tensor, and how to read it while the next is not yet asked for."""
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as stored:
                for key in stored.keys():  # noqa: SIM118 (not a dict)
                    yield path, key, partial(stored.get_tensor, key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    index = directory / INDEX
    if not index.exists():
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise ValueError(f"{directory} holds pickled weights only ({pickles[0]}), which are never loaded: "
                             "convert them to safetensors, as save_pretrained of transformers does")  # fmt: skip
        raise ValueError(f"{directory} has no {SINGLE} and no {INDEX}")
    listed = read_json(index).get("weight_map")
    if (
        not isinstance(listed, dict)
        or not listed
        or not all(isinstance(name, str) for name in listed.values())
    ):
        raise ValueError(f"{index} has no weight_map from tensors to files")
    files = sorted(set(listed.values()))
    for name in files:
        if Path(name).name != name or name == "..":
            raise ValueError(f"{index} names a file outside the directory: {name}")
        if not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name}, but only safetensors files are ever loaded")
        if not (directory / name).exists():
            raise ValueError(f"{directory} lacks {name}, which its index names")
    return [directory / name for name in files]


def _cpu_multiplies_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
