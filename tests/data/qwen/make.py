"""Tiny Qwen checkpoints that transformers writes, with its logits and greedy tokens: `python tests/data/qwen/make.py`.

Needs transformers 5. Every parameter is random, and decays are slow, so that states remember.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "intermediate_size": 40, "initializer_range": 0.15,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
}
FEW = {"num_hidden_layers": 2, "full_attention_interval": 2}
IMAGES = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 24, "patch_size": 2,
    "num_position_embeddings": 4, "temporal_patch_size": 1,
}  # fmt: skip
# by name: model class, configuration, and the shards that it is written in
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "next": ("Qwen3Next", TEXT | EXPERTS, "1GB"),
    "next_mixed": (
        "Qwen3Next",
        TEXT | EXPERTS | {
            "num_hidden_layers": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 16,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"], "mlp_only_layers": [1],
            "norm_topk_prob": False, "num_experts_per_tok": 3, "linear_conv_kernel_dim": 3,
        },
        "1GB",
    ),
    "dense": ("Qwen3_5", TEXT, "20KB"),
    "dense_tied": (
        "Qwen3_5",
        TEXT | {
            "num_hidden_layers": 3, "tie_word_embeddings": True, "linear_num_value_heads": 2, "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
        "1GB",
    ),
    "experts": ("Qwen3_5Moe", TEXT | EXPERTS | FEW, "1GB"),
    "images": ("Qwen3_5", {"text_config": TEXT | FEW, "vision_config": IMAGES}, "1GB"),
    "images_experts": ("Qwen3_5Moe", {"text_config": TEXT | EXPERTS | FEW, "vision_config": IMAGES}, "1GB"),
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

    family, config, shards = VARIANTS[variant]
    with_images = "vision_config" in config
    kind = f"{family}{'' if with_images or family == 'Qwen3Next' else 'Text'}Config"
    name = f"{family}{'ForConditionalGeneration' if with_images else 'ForCausalLM'}"
    made = getattr(transformers, name)(getattr(transformers, kind)(**config))
    draw(made, seed)
    made.to(dtype).save_pretrained(directory, max_shard_size=shards)
    model = getattr(transformers, name).from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed + 1)
    input_ids = torch.randint(TEXT["vocab_size"], (2, 41), generator=generator)
    margin = float("inf")
    with torch.no_grad():
        logits = model.eval()(input_ids).logits
        greedy = input_ids[:, :16]
        for _ in range(48):
            last = model(greedy).logits[:, -1]
            first, second = last.topk(2).values.unbind(1)
            margin = min(margin, float((first - second).min()))
            greedy = torch.cat([greedy, last.argmax(1, keepdim=True)], 1)
    return {"input_ids": input_ids, "logits": logits, "greedy": greedy}, margin


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-3, 1, generator=generator)
        else:
            weight.normal_(0, 0.25 if weight.dim() > 1 else 0.4, generator=generator)
            if name.endswith("linear_attn.norm.weight"):
                weight += 1


if __name__ == "__main__":
    for name in VARIANTS:
        save_file(write(HERE / name, name, torch.bfloat16), HERE / name / "expected.safetensors")
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
