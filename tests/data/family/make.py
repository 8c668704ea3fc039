"""Tiny checkpoints of the family that flash-linear-attention writes, with its answers: `make.py DIRECTORY [NAME ...]`.

Needs a GPU and flash-linear-attention 0.6. Every parameter is random; a seed is taken whose texts meet no near tie.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "fuse_cross_entropy": False,
}  # fmt: skip
HEADS = SHAPE | {"num_heads": 2}
RANKS = {"decay_low_rank_dim": 8, "gate_low_rank_dim": 12, "a_low_rank_dim": 8, "v_low_rank_dim": 4}
# by name: the configuration's class and what it is given
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta_net": ("DeltaNetConfig", HEADS),
    "delta_net_gated": (
        "DeltaNetConfig",
        HEADS | {"use_gate": True, "qk_activation": "elu", "qk_norm": "sum", "expand_v": 2.0, "allow_neg_eigval": True},
    ),
    "delta_net_bare": (
        "DeltaNetConfig",
        HEADS | {"use_short_conv": False, "use_beta": False, "qk_activation": "identity", "tie_word_embeddings": True},
    ),
    "gla": ("GLAConfig", HEADS | {"expand_k": 1.0}),
    "gla_conv": (
        "GLAConfig",
        HEADS | {"use_short_conv": True, "num_kv_heads": 1, "expand_k": 1.0, "feature_map": "relu", "clamp_min": -0.03},
    ),
    "gla_ungated": (
        "GLAConfig",
        HEADS | {"expand_k": 1.0, "expand_v": 2.0, "use_output_gate": False, "elementwise_affine": False},
    ),
    "retnet": ("RetNetConfig", HEADS),
    "retnet_conv": (
        "RetNetConfig",
        HEADS | {"use_short_conv": True, "num_kv_heads": 1, "expand_v": 1.0, "use_output_gate": False},
    ),
    "kda": ("KDAConfig", HEADS | {"head_dim": 16}),
    "kda_grouped": (
        "KDAConfig",
        HEADS | {"head_dim": 16, "num_v_heads": 4, "safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True},
    ),
    "kda_bare": ("KDAConfig", HEADS | {"head_dim": 16, "expand_v": 2.0, "use_short_conv": False}),
    "mamba2": ("Mamba2Config", SHAPE | {"head_dim": 16, "state_size": 16}),
    "rwkv7": ("RWKV7Config", SHAPE | RANKS | {"head_dim": 16}),
    "rwkv7_unfused": (
        "RWKV7Config",
        SHAPE
        | {"fuse_norm": False, "head_dim": None, "num_heads": 4, "intermediate_size": None, "hidden_ratio": 2,
           "decay_low_rank_dim": 4, "gate_low_rank_dim": 6, "a_low_rank_dim": 4, "v_low_rank_dim": 4, "norm_eps": 1e-3},
    ),
    "rwkv7_plain_norms": (
        "RWKV7Config",
        SHAPE | RANKS | {"head_dim": 32, "norm_first": False, "norm_bias": False, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def write(directory: Path, name: str) -> None:
    """Write one checkpoint and its answers."""
    for seed in range(60):
        margin = _write(directory, name, seed)
        if margin > 3e-3:
            size = sum(file.stat().st_size for file in directory.iterdir())
            print(f"{name}: seed {seed}, least margin {margin:.4f}, {size:,} bytes", flush=True)
            return
    raise ValueError(f"{name}: every seed leads to a near tie")


@torch.no_grad()
def _write(directory: Path, name: str, seed: int) -> float:
    import fla.models
    from transformers import AutoModelForCausalLM

    kind, given = VARIANTS[name]
    config = getattr(fla.models, kind)(**given)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    for key, weight in model.named_parameters():
        if weight.dim() > 1 and "conv1d" not in key:
            weight.normal_(0, 0.25)
        elif not key.endswith(("A_log", "dt_bias")):
            weight.add_(0.3 * torch.randn_like(weight))
    model = model.cuda().eval()
    texts = torch.randint(3, config.vocab_size, (2, 41), device="cuda")
    logits = model(texts, use_cache=False).logits.float()
    recurrent, past = [], None
    for at in range(texts.shape[1]):
        step = model(texts[:, at : at + 1], past_key_values=past, use_cache=True)
        past = step.past_key_values
        recurrent.append(step.logits.float())
    greedy, margins = texts[:, :16], [_margin(logits)]
    for _ in range(48):
        last = model(greedy, use_cache=False).logits[:, -1].float()
        margins.append(_margin(last))
        greedy = torch.cat([greedy, last.argmax(-1, keepdim=True)], 1)
    model.save_pretrained(directory)
    answers: dict[str, Tensor] = {
        "input_ids": texts, "logits": logits, "logits_recurrent": torch.cat(recurrent, 1), "greedy": greedy,
    }  # fmt: skip
    apart = (answers["logits"] - answers["logits_recurrent"]).abs().max().item()
    distinct = len(set(greedy[:, 16:].flatten().tolist()))
    print(f"  {name} seed {seed}: ways differ by {apart:.1e}, {distinct} distinct tokens", flush=True)
    save_file({key: x.cpu().contiguous() for key, x in answers.items()}, directory / "expected.safetensors")
    return min(margins)


def _margin(logits: Tensor) -> float:
    best = logits.topk(2, -1).values
    return (best[..., 0] - best[..., 1]).min().item()


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    out = Path(sys.argv[1])
    for chosen in sys.argv[2:] or VARIANTS:
        try:
            write(out / chosen, chosen)
        except Exception as error:
            print(f"{chosen}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
