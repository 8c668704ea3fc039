"""The head for multi-token prediction that a Qwen checkpoint brings with it, as a drafter.

It reads the target's last hidden state and the next token's embedding, and shares embeddings and head with the target.
Where the target has not read a token yet, its own output stands in for that state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from specla.drafters.network import DraftNetwork, EagleConfig
from specla.models.language_model import LanguageModel
from specla.models.layers import Linear, RMSNorm
from specla.models.loader import join_weights, read_raw_config, read_weights, stored_names
from specla.models.past import Past
from specla.models.qwen import Qwen, block
from specla.models.qwen_config import FULL, QWEN_TYPES, QwenConfig
from specla.models.qwen_layout import MTP, mtp_sources


class Mtp(DraftNetwork):
    """The head of a target of this configuration, of whose last norm `target_norm` is a part."""

    name = "mtp"

    def __init__(self, config: QwenConfig):
        hidden, eps = config.hidden_size, config.norm_eps
        super().__init__()
        self.config = _as_eagle(config)
        self.embeddings = nn.Embedding(config.vocab_size, hidden)
        self.embed_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.target_norm = RMSNorm(hidden, eps)
        self.fc = Linear(2 * hidden, hidden)
        self.block = block(config, 0, FULL)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = Linear(hidden, config.vocab_size)
        self.register_buffer("token_ids", torch.arange(config.vocab_size), persistent=False)

    def forward(self, next_ids: Tensor, hidden: Tensor, past: Past) -> Tensor:
        """As that of `Eagle`; the output is normalised."""
        embeds = self.embeddings(next_ids).to(hidden.dtype)
        joined = torch.cat([self.embed_norm(embeds), self.hidden_norm(hidden)], -1)
        return self.norm(self.block(self.fc(joined), past))

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_norm(features)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


def has_mtp(directory: Path) -> bool:
    """Whether a checkpoint brings such a head; False also where it cannot be read."""
    try:
        if read_raw_config(directory).get("model_type") not in QWEN_TYPES:
            return False
        return f"{MTP}fc.weight" in stored_names(directory)
    except ValueError:
        return False


def load_mtp(directory: Path, target: LanguageModel) -> Mtp:
    """The head of the checkpoint that `target` was loaded from, on its device and in its dtypes.

    Raises:
        ValueError: in one line, when there is none, or its weights do not fit.
    """
    if not isinstance(target, Qwen) or not has_mtp(directory):
        raise ValueError(f"{directory} has no {MTP}* weights to draft with: use another drafter")
    sources = mtp_sources(target.config, stored_names(directory))
    shapes = {part: shape for source in sources.values() for part, shape in source.shapes.items()}
    weights = read_weights(directory, shapes, unused=("model.", "lm_head."))
    matrices = target.embeddings.weight
    state = join_weights(sources, weights, matrices.device, matrices.dtype)
    with torch.device("meta"):
        network = Mtp(target.config).requires_grad_(False)
    network.load_state_dict(state, strict=False, assign=True)
    network.embeddings.weight = matrices
    head = matrices if target.lm_head is None else target.lm_head.weight
    network.lm_head.weight = nn.Parameter(head, requires_grad=False)
    network.target_norm.weight = target.norm.weight
    network.token_ids = torch.arange(target.config.vocab_size, device=matrices.device)
    return network.eval()


def _as_eagle(config: QwenConfig) -> EagleConfig:
    """What drafting needs to know of it."""
    return EagleConfig(
        hidden_size=config.hidden_size, vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size,
        layer_ids=(config.num_hidden_layers,), mixer="attention", num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps, qk_norm=True, norm_output=True,
    )  # fmt: skip
