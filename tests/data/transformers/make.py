"""Tiny Mamba-2 and Kimi-Linear checkpoints that transformers writes, with its logits and greedy tokens:
`python tests/data/transformers/make.py`.

Needs transformers 5.24. Every parameter is random, and decays are slow, so that states remember.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
VOCAB = 61
MAMBA2: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8,
    "n_groups": 2, "chunk_size": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_token": 2, "linear_head_dim": 8,
    "linear_num_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
# as the checkpoints on hubs have their config.json, layers counted from 1
HUB: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16", "head_dim": 9,
    "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 8, "num_heads": 3,
                           "short_conv_kernel_size": 3},
    "first_k_dense_replace": 2, "hidden_act": "silu", "mla_use_nope": True, "model_max_length": 4096,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
    "num_nextn_predict_layers": 0, "num_shared_experts": 2, "q_lora_rank": None, "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.7, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True,
    "use_grouped_topk": True,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2_limits": (
        "Mamba2",
        MAMBA2 | {"n_groups": 1, "num_heads": 2, "head_dim": 16, "use_bias": True, "use_conv_bias": False,
                  "conv_kernel": 3, "time_step_limit": [0.01, 0.7], "tie_word_embeddings": True},
    ),
    "kimi": ("KimiLinear", KIMI),
    "kimi_groups": (
        "KimiLinear",
        KIMI | {"num_expert_group": 3, "topk_group": 2, "moe_renormalize": False, "num_experts": 9,
                "num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_experts_per_token": 3},
    ),
    "kimi_hub": ("KimiLinear", {k: v for k, v in KIMI.items() if not k.startswith(("linear_", "layer_"))} | HUB),
}  # fmt: skip


def write(directory: Path, variant: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a checkpoint whose greedy text meets no near tie; what its own library makes of it in float32."""
    for seed in range(50):
        answer, margin = _write(directory, variant, seed, dtype)
        if margin > 1e-3:
            return answer
    raise ValueError(f"{variant}: every seed leads to a near tie")


def _write(directory: Path, variant: str, seed: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    import transformers

    family, raw = VARIANTS[variant]
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**raw))
    draw(made, seed)
    made.to(dtype).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if "linear_attn_config" in raw:
        _as_on_hubs(directory, raw)
    model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed + 1)
    input_ids = torch.randint(VOCAB, (2, 41), generator=generator)
    margin = float("inf")
    with torch.no_grad():
        logits = model.eval()(input_ids).logits
        greedy = input_ids[:, :16]
        for _ in range(48):  # without a cache, whose steps forget the limits of the time step
            last = model(greedy, use_cache=False).logits[:, -1]
            first, second = last.topk(2).values.unbind(1)
            margin = min(margin, float((first - second).min()))
            greedy = torch.cat([greedy, last.argmax(1, keepdim=True)], 1)
    return {"input_ids": input_ids, "logits": logits, "greedy": greedy}, margin


def _as_on_hubs(directory: Path, raw: dict[str, Any]) -> None:
    """Their config.json, and the MLP of dense layers under the name that it has there."""
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    stored = load_file(directory / "model.safetensors")
    for name in list(stored):
        stored[name.replace(".block_sparse_moe.", ".mlp.") if _is_dense(name) else name] = stored.pop(name)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def _is_dense(name: str) -> bool:
    return name.split(".block_sparse_moe.")[-1].startswith(("gate_proj", "up_proj", "down_proj"))


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, weight in named:
        if name.endswith("A_log"):
            weight.uniform_(-3, 1, generator=generator)
        elif name.endswith("dt_bias"):
            weight.normal_(-1, 0.6, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            weight.normal_(0, 0.2, generator=generator)
        else:
            weight.normal_(0, 0.25 if weight.dim() > 1 else 0.3, generator=generator)
            if "norm" in name or name.endswith(".D"):
                weight += 1


if __name__ == "__main__":
    for name in VARIANTS:
        save_file(write(HERE / name, name, torch.bfloat16), HERE / name / "expected.safetensors")
