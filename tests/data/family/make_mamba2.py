"""Tiny Mamba-2 checkpoints that flash-linear-attention writes, with its answers: `make_mamba2.py [NAME ...]`.

Needs flash-linear-attention 0.6, and a GPU or Triton's interpreter.

Its plain torch gives the heads of a text that it reads at once other groups than those of a token that it reads alone:
head h has group h % n_groups there, h // (num_heads / n_groups) here, as in transformers and in mamba_ssm's kernels.
So everything is read one by one, from states of zero.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8, "state_size": 8,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "mamba2_groups": {"n_groups": 2, "norm_before_gate": True, "use_bias": True, "tie_word_embeddings": True},
    "mamba2_no_norm": {"rmsnorm": False, "D_has_hdim": True, "dt_limit": (0.02, 0.5), "conv_kernel": 3,
                       "use_conv_bias": False},
}  # fmt: skip


class Steps:
    """A model that reads one token a call."""

    def __init__(self, model: Any, batch: int):
        from fla.models.utils import Cache

        config, weight = model.config, model.lm_head.weight
        inner = config.num_heads * config.head_dim
        channels = inner + 2 * config.n_groups * config.state_size
        self.model, self.past = model, Cache()
        for layer in range(config.num_hidden_layers):
            states = (config.num_heads, config.head_dim, config.state_size), (channels, config.conv_kernel)
            recurrent, conv = (torch.zeros(batch, *shape, device=weight.device) for shape in states)
            self.past.update(recurrent_state=recurrent, conv_state=conv, layer_idx=layer, offset=0)

    def read(self, tokens: Tensor) -> Tensor:
        """Logits `[B, V]` after tokens `[B]`."""
        answer = self.model(tokens[:, None], past_key_values=self.past, use_cache=True)
        self.past = answer.past_key_values
        return answer.logits[:, -1].float()


@torch.no_grad()
def write(directory: Path, name: str, seed: int) -> float:
    """Write a checkpoint and its answers; the least distance of the two best logits that decide a token."""
    from fla.models import Mamba2Config
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Mamba2Config(**SHAPE | VARIANTS[name])).float()
    for key, weight in model.named_parameters():
        if key.endswith("A_log"):
            weight.uniform_(-3, 1)
        elif weight.dim() > 1 and "conv1d" not in key:
            weight.normal_(0, 0.3)
        else:
            weight.add_(0.3 * torch.randn_like(weight))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    texts = torch.randint(3, 61, (2, 41), device=model.device)
    reader = Steps(model, 2)
    logits = torch.stack([reader.read(tokens) for tokens in texts.t()], 1)
    reader, margin = Steps(model, 2), float("inf")
    greedy = [*texts[:, :16].t()]
    for tokens in greedy[:-1]:
        reader.read(tokens)
    for _ in range(48):
        last = reader.read(greedy[-1])
        best = last.topk(2).values
        margin = min(margin, (best[:, 0] - best[:, 1]).min().item())
        greedy.append(last.argmax(-1))
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    answers = {"input_ids": texts, "logits": logits, "greedy": torch.stack(greedy, 1)}
    save_file({key: x.cpu().contiguous() for key, x in answers.items()}, directory / "expected.safetensors")
    return margin


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for chosen in sys.argv[1:] or VARIANTS:
        seed = next(seed for seed in range(60) if write(HERE / chosen, chosen, seed) > 3e-3)
        print(f"{chosen}: seed {seed}")
