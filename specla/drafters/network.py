"""The network of an EAGLE-3 drafter: one decoder layer over the target's features and the next token's embedding.

Features are residual streams of the target at three depths, fused by `fc`. Where the target has not read a token yet,
the layer's own output stands in for them. Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specla.models.config import AttentionConfig, GatedDeltaNetConfig
from specla.models.layers import AttentionMixer, DeltaMixer, Linear, RMSNorm, SwiGLU, draw_weights
from specla.models.past import Past

MIXERS = ("delta", "attention")
FEATURE_NORMS = ("none", "joint", "each")


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a drafter.

    Args:
        hidden_size: of the drafter and of its target. vocab_size: of the target.
        draft_vocab_size: tokens that it can draft.
        layer_ids: residual streams of the target that it reads: i enters layer i, the number of layers leaves the last.
        mixer: "delta", a gated delta layer with a state of fixed size, or "attention".
        num_key_value_heads, qk_norm, rope_theta, sliding_window: of attention; None attends to everything.
        use_gate, conv_size: of a delta layer: an output gate, and the width of the convolution (1: none).
        norm_before_residual: the residual around the mixer is the normalised hidden state.
        norm_output: what stands in for features is the normalised output.
        feature_norm: of the features before they are fused: "none", "joint", of all streams as one vector, or "each".

    Raises:
        ValueError: naming the field, for a value outside its range.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...]
    mixer: str = "delta"
    num_heads: int = 6
    head_dim: int = 64
    intermediate_size: int = 704
    num_key_value_heads: int | None = None
    rope_theta: float = 10000.0
    sliding_window: int | None = None
    norm_before_residual: bool = False
    use_gate: bool = True
    conv_size: int = 4
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    norm_output: bool = False
    feature_norm: str = "none"

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size vocab_size draft_vocab_size num_heads head_dim intermediate_size conv_size".split()
        )
        for name in (*sizes, "num_key_value_heads", "sliding_window"):
            value = getattr(self, name)
            if value is None and name not in sizes:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
                raise ValueError(f"{name} of a drafter must be an integer >= 1, got {value!r}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be at most the target's vocab_size {self.vocab_size}, "
                f"got {self.draft_vocab_size}"
            )
        for name, allowed in (("mixer", MIXERS), ("feature_norm", FEATURE_NORMS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("use_gate", "qk_norm", "norm_before_residual", "norm_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 64:
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
        ids = self.layer_ids
        if not ids or len(set(ids)) < len(ids) or any(type(i) is not int or i < 0 for i in ids):
            raise ValueError(f"layer_ids must be one or several different layer numbers, got {list(ids)}")
        if self.mixer == "attention" and (self.num_heads % self.key_value_heads or self.head_dim % 2):
            raise ValueError(
                f"num_key_value_heads must divide num_heads and head_dim be even, got {self.key_value_heads}, "
                f"{self.num_heads} and {self.head_dim}"
            )

    @property
    def key_value_heads(self) -> int:
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    def delta(self) -> GatedDeltaNetConfig:
        """The mixer's configuration in flash-linear-attention's terms."""
        return GatedDeltaNetConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=1, num_heads=self.num_heads,
            head_dim=self.head_dim, expand_v=1.0, use_gate=self.use_gate,
            use_short_conv=self.conv_size > 1, conv_size=self.conv_size,
            intermediate_size=self.intermediate_size, norm_eps=self.rms_norm_eps, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip

    def attention(self) -> AttentionConfig:
        return AttentionConfig(
            layers=(0,), num_heads=self.num_heads, num_kv_heads=self.key_value_heads,
            qk_norm=self.qk_norm, window_size=self.sliding_window, rope_theta=self.rope_theta,
        )  # fmt: skip


class EagleLayer(nn.Module):
    """Mixes `[norm(embedding), norm(hidden)]` into the hidden state, then a SwiGLU MLP."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        if config.mixer == "delta":
            self.mixer: nn.Module = DeltaMixer(config.delta(), 0, 2 * hidden)
        else:
            self.mixer = AttentionMixer(hidden, config.attention(), 0, 2 * hidden, config.head_dim, eps)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size)

    def forward(self, embeds: Tensor, hidden: Tensor, past: Past) -> Tensor:
        normed = self.hidden_norm(hidden)
        x = self.mixer(torch.cat([self.input_norm(embeds), normed], -1), past)
        x = x + (normed if self.norm_before_residual else hidden)
        return x + self.mlp(self.mlp_norm(x))


class DraftNetwork(nn.Module):
    """What all trained drafters are. `embeddings` and, if the drafter has no head of its own, `lm_head` are the
    target's; `token_ids` `[draft vocabulary]` says which tokens of the target the drafter's are, ascending.
    """

    name: str
    config: EagleConfig
    embeddings: nn.Embedding
    norm: RMSNorm
    lm_head: Linear
    token_ids: Tensor

    def fuse(self, features: Tensor) -> Tensor:
        """`[B, T, len(layer_ids) * hidden]` to `[B, T, hidden]`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the draft vocabulary `[..., draft_vocab_size]`, for the token after the next one."""
        raise NotImplementedError


class Eagle(DraftNetwork):
    """An EAGLE-3 drafter. Parameters are uninitialised until `reset_parameters` or a checkpoint fills them."""

    name = "eagle"

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        streams, hidden, eps = len(config.layer_ids), config.hidden_size, config.rms_norm_eps
        self.embeddings = nn.Embedding(config.vocab_size, hidden)
        normed = {"none": [], "joint": [streams * hidden], "each": [hidden] * streams}[config.feature_norm]
        self.feature_norms = nn.ModuleList([RMSNorm(size, eps) for size in normed])
        self.fc = Linear(streams * hidden, hidden)
        self.layer = EagleLayer(config)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = Linear(hidden, config.draft_vocab_size)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def forward(self, next_ids: Tensor, hidden: Tensor, past: Past) -> Tensor:
        """The next state `[B, T, hidden]` from the state `hidden` at each token and the id of the token after it.

        `hidden` is `fuse(features)` where the target has read the token, else this function's own output there.
        """
        embeds = self.embeddings(next_ids).to(hidden.dtype)
        output = self.layer(embeds, hidden, past)
        return self.norm(output) if self.config.norm_output else output

    def fuse(self, features: Tensor) -> Tensor:
        """`[B, T, len(layer_ids) * hidden]` to `[B, T, hidden]`."""
        if self.feature_norms:
            parts = features.chunk(len(self.feature_norms), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.feature_norms, parts, strict=True)], -1)
        return self.fc(features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the draft vocabulary `[..., draft_vocab_size]`, for the token after the next one."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights; embeddings and head are to be taken from the target."""
        draw_weights(self, 0.02, generator)
