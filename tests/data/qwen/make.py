"""Tiny Qwen checkpoints that transformers writes, with its logits and greedy tokens: `python tests/data/qwen/make.py`.

Some have a head for multi-token prediction, which transformers leaves out: it is put together from its layers, as vLLM
runs it. Needs transformers 5. Every parameter is random, and decays are slow, so that states remember.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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
COMMITTED = tuple(name for name in VARIANTS if name != "images_experts")
WITH_MTP = ("next", "dense_tied", "images")


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
    answer = {"input_ids": input_ids, "logits": logits, "greedy": greedy}
    if variant in WITH_MTP:
        head = Head(family, model, seed + 2, dtype)
        stored = load_file(directory / "model.safetensors")
        save_file(stored | head.stored(dtype), directory / "model.safetensors", metadata={"format": "pt"})
        drafts = head.draft(input_ids, 4)
        margin = min(margin, drafts.pop("margin").item())
        answer |= drafts
    return answer, margin


class Head(nn.Module):
    """The head of a loaded model."""

    def __init__(self, family: str, model: Any, seed: int, dtype: torch.dtype):
        super().__init__()
        kind = {"Qwen3Next": "qwen3_next", "Qwen3_5": "qwen3_5"}[family]
        library = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        self.text = (getattr(model.model, "language_model", model.model),)  # no submodules of this one
        self.lm_head = (model.lm_head,)
        self.config = copy.deepcopy(self.text[0].config)
        self.config.layer_types = ["full_attention"] * self.config.num_hidden_layers
        norm, size = getattr(library, f"{family}RMSNorm"), self.config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(size, self.config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([getattr(library, f"{family}DecoderLayer")(self.config, 0)])
        draw(self, seed)
        self.to(dtype).float()

    @torch.no_grad()
    def forward(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        text, length = self.text[0], next_ids.shape[1]
        embeds = self.pre_fc_norm_embedding(text.embed_tokens(next_ids))
        x = self.fc(torch.cat([embeds, self.pre_fc_norm_hidden(hidden)], -1))
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        angles = text.rotary_emb(x, torch.arange(length)[None])
        return self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask))

    @torch.no_grad()
    def draft(self, input_ids: Tensor, steps: int) -> dict[str, Tensor]:
        """Logits at all tokens but the last, and a greedy chain of drafts after it."""
        hidden, ids, margin = self.text[0](input_ids).last_hidden_state[:, :-1], input_ids[:, 1:], []
        for _ in range(steps):
            out = self(hidden, ids)
            logits = self.lm_head[0](out)
            first, second = logits[:, -1].topk(2).values.unbind(1)
            margin.append((first - second).min())
            hidden = torch.cat([hidden, out[:, -1:]], 1)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        drafts = ids[:, -steps:].contiguous()
        return {
            "mtp_logits": logits[:, :40].contiguous(),
            "mtp_drafts": drafts,
            "margin": torch.stack(margin).min(),
        }

    def stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Its weights as checkpoints hold them, experts one by one."""
        found = {}
        for name, weight in self.state_dict().items():
            weight = weight.to(dtype)
            if name.endswith("experts.gate_up_proj"):
                for i, rows in enumerate(weight):
                    gate, up = rows.chunk(2)
                    start = f"mtp.{name.removesuffix('gate_up_proj')}{i}"
                    found |= {
                        f"{start}.gate_proj.weight": gate.clone(),
                        f"{start}.up_proj.weight": up.clone(),
                    }
            elif name.endswith("experts.down_proj"):
                start = f"mtp.{name.removesuffix('down_proj')}"
                found |= {f"{start}{i}.down_proj.weight": rows.clone() for i, rows in enumerate(weight)}
            else:
                found[f"mtp.{name}"] = weight.clone()
        return found


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
    for name in COMMITTED:
        save_file(write(HERE / name, name, torch.bfloat16), HERE / name / "expected.safetensors")
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
