"""Tiny random targets of every kind, and test doubles around them: a scripted drafter, a recorder of logits."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from specla.drafters import Drafter, DraftRow, NoDrafter, Proposal
from specla.drafters.base import Draft, TokenDrafter, pack
from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.sequence import Sequence
from specla.models.architectures import ARCHITECTURES
from specla.models.config import GatedDeltaNetConfig, ModelConfig
from specla.models.language_model import LanguageModel
from specla.models.qwen_config import QwenConfig
from specla.models.rwkv7_config import Rwkv7Config
from specla.models.target import Tap
from specla.state import AttentionState, StatePool
from specla.tree import Tree

VOCAB = 48
_ATTENTION: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_v_heads": 4},
    "grouped_wide": {"num_heads": 1, "num_v_heads": 3, "expand_v": 2.0},
    "no_gate": {"use_gate": False},
    "sigmoid_gate": {"output_gate_activation": "sigmoid"},
    "no_conv": {"use_short_conv": False},
    "conv_1": {"conv_size": 1},
    "conv_2": {"conv_size": 2, "conv_bias": True},
    "conv_3": {"conv_size": 3},
    "neg_eigval": {"allow_neg_eigval": True},
    "tied": {"tie_word_embeddings": True},
    "default_mlp": {"intermediate_size": None, "hidden_ratio": 1},
    "hybrid_global": {"num_hidden_layers": 3, "attn": {**_ATTENTION, "layers": [1], "qk_norm": True}},
    "hybrid_window": {"num_hidden_layers": 3, "attn": {**_ATTENTION, "layers": [0, 2], "window_size": 7}},
    "hybrid_narrow": {"attn": {**_ATTENTION, "layers": [1], "window_size": 2, "qkv_bias": True}},
    "hybrid_two_kinds": {
        "num_hidden_layers": 3,
        "attn": [{**_ATTENTION, "layers": [0]}, {**_ATTENTION, "layers": [2], "window_size": 5}],
    },
}
# Qwen's, smallest: dense, with experts, and with both
QWEN: dict[str, dict[str, Any]] = {
    "qwen_dense": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "qwen_experts": {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "full_attention_interval": 2},
    "qwen_next": {"model_type": "qwen3_next", "num_hidden_layers": 3, "full_attention_interval": 3,
                  "mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True},
}  # fmt: skip
# Models of the family, each with what changes its computation.
FAMILY: dict[str, dict[str, Any]] = {
    "delta_net": {"model_type": "delta_net"},
    "delta_net_relu": {"model_type": "delta_net", "qk_activation": "relu", "use_gate": True, "expand_k": 0.5},
    "delta_net_elu": {
        "model_type": "delta_net", "qk_activation": "elu", "qk_norm": "sum", "allow_neg_eigval": True, "expand_v": 2.0,
    },
    "delta_net_bare": {
        "model_type": "delta_net", "use_short_conv": False, "use_beta": False, "tie_word_embeddings": True,
        "intermediate_size": None, "hidden_ratio": 1,
    },
    "delta_net_still": {
        "model_type": "delta_net", "qk_activation": "identity", "use_beta": False, "allow_neg_eigval": True,
        "conv_size": 2,
    },
    "delta_net_hybrid": {"model_type": "delta_net", "num_hidden_layers": 3, "attn": {**_ATTENTION, "layers": [1]}},
    "gla": {"model_type": "gla"},
    "gla_conv": {
        "model_type": "gla", "use_short_conv": True, "num_kv_heads": 1, "clamp_min": -0.03, "feature_map": "relu",
        "expand_k": 1.0,
    },
    "gla_ungated": {
        "model_type": "gla", "use_output_gate": False, "elementwise_affine": False, "feature_map": "sigmoid",
        "expand_v": 2.0,
    },
    "gla_hybrid": {"model_type": "gla", "attn": {**_ATTENTION, "layers": [0], "window_size": 7}},
    "retnet": {"model_type": "retnet"},
    "retnet_grouped": {
        "model_type": "retnet", "num_kv_heads": 1, "use_output_gate": False, "feature_map": "swish", "expand_v": 1.0,
    },
    "retnet_hybrid": {"model_type": "retnet", "attn": {**_ATTENTION, "layers": [1]}, "tie_word_embeddings": True},
}  # fmt: skip
# Those of which flash-linear-attention is not the only library, each with what changes its computation.
FURTHER: dict[str, dict[str, Any]] = {
    "mamba2": {
        "model_type": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
    },
    "mamba2_odd": {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 5, "n_groups": 1, "norm_eps": 1e-5,
        "use_bias": True, "use_conv_bias": False, "conv_kernel": 2, "norm_before_gate": True, "D_has_hdim": True,
        "dt_limit": [0.01, 0.7], "tie_word_embeddings": True,
    },
    "mamba2_bare": {
        "model_type": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 4, "norm_eps": 1e-5,
        "rmsnorm": False, "conv_kernel": 1,
    },
    "kda": {"model_type": "kda", "head_dim": 8},
    "kda_grouped": {
        "model_type": "kda", "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5, "safe_gate": True, "lower_bound": -5,
        "allow_neg_eigval": True, "conv_size": 3,
    },
    "kda_hybrid": {
        "model_type": "kda", "head_dim": 8, "use_short_conv": False, "attn": {**_ATTENTION, "layers": [1]},
    },
    "kimi": {
        "model_type": "kimi_linear", "num_attention_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 6, "linear_num_heads": 2, "linear_head_dim": 8, "num_experts": 6,
        "layer_types": ["linear_attention", "full_attention"], "num_experts_per_token": 2, "num_expert_group": 2,
        "moe_intermediate_size": 24, "routed_scaling_factor": 2.4,
    },
}  # fmt: skip
RWKV7: dict[str, dict[str, Any]] = {
    "rwkv7": {},
    "rwkv7_bare": {"norm_first": False, "norm_bias": False, "fuse_norm": False, "tie_word_embeddings": True},
    "rwkv7_wide": {"value_dim": 64, "num_hidden_layers": 3, "head_dim": 16},
}
RECURRENT = [name for name in VARIANTS if not name.startswith("hybrid")]


def make_config(variant: str = "plain", **changes: Any) -> GatedDeltaNetConfig:
    raw: dict[str, Any] = {
        "model_type": "gated_deltanet", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
        "num_heads": 2, "head_dim": 8, "expand_v": 1.0, "intermediate_size": 40, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return GatedDeltaNetConfig.from_dict({**raw, **VARIANTS[variant], **changes})


def make_qwen_config(variant: str, **changes: Any) -> QwenConfig:
    raw: dict[str, Any] = {
        "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "initializer_range": 0.3,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    return QwenConfig.from_dict({**raw, **QWEN[variant], **changes})


def family_raw(variant: str, **changes: Any) -> dict[str, Any]:
    """The content of a config.json for a model of the family."""
    raw: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 40,
        "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return {**raw, **(FAMILY | FURTHER)[variant], **changes}


def make_family_config(variant: str, **changes: Any) -> ModelConfig:
    raw = family_raw(variant, **changes)
    return ARCHITECTURES[raw["model_type"]].config(raw)


def make_rwkv7_config(variant: str = "rwkv7", **changes: Any) -> Rwkv7Config:
    raw: dict[str, Any] = {
        "model_type": "rwkv7", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "decay_low_rank_dim": 6, "gate_low_rank_dim": 10, "a_low_rank_dim": 5, "v_low_rank_dim": 4,
        "intermediate_size": 40, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return Rwkv7Config.from_dict({**raw, **RWKV7[variant], **changes})


@cache
def make_target(variant: str = "plain", dtype: torch.dtype = torch.float32, seed: int = 0) -> LanguageModel:
    """A random target, shared between tests: never write to it. Decay is slowed so that states remember."""
    makers = dict.fromkeys(QWEN, make_qwen_config) | dict.fromkeys(RWKV7, make_rwkv7_config)
    makers |= dict.fromkeys(FAMILY | FURTHER, make_family_config)
    return build_target(makers.get(variant, make_config)(variant), dtype, seed)


def build_target(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> LanguageModel:
    """A random target of its own. As in the loader, `dtype` is that of the matrices, float64 that of all."""
    model = ARCHITECTURES[config.model_type].model(config)
    generator = torch.Generator().manual_seed(seed)
    model.reset_parameters(generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3, 1, generator=generator)
            elif name.endswith(("_bias", "r_k")) and not name.endswith("dt_bias"):
                weight.normal_(0, 0.3, generator=generator)
            elif name.endswith(".mix"):
                weight.uniform_(0, 1, generator=generator)
            elif name.endswith("decay.bias"):
                weight.uniform_(-6, 0, generator=generator)
            elif name.endswith(".bias"):
                weight.normal_(0, 0.3, generator=generator)
            is_matrix = weight.dim() > 1 and not name.endswith("conv_weight")
            if is_matrix or dtype == torch.float64:
                weight.data = weight.data.to(dtype)
    return model.requires_grad_(False).eval()


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(f"prompt {seed} {length}")
    return [rng.randrange(vocab) for _ in range(length)]


def pairs(*axes: Tokens[Any]) -> list[tuple[Any, ...]]:
    """So few points of a grid that each value of an axis still meets each value of every other."""

    def of(point: tuple[int, ...]) -> set[tuple[Any, ...]]:
        return set(combinations(enumerate(point), 2))

    points = list(product(*(range(len(axis)) for axis in axes)))
    left, chosen = set().union(*map(of, points)), []
    while left:
        best = max(points, key=lambda point: len(of(point) & left))
        left -= of(best)
        chosen.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
    return chosen


class ScriptedDrafter(TokenDrafter):
    """A test double that drafts random trees around the truth, right with probability `right` at each node.

    Draft counts change from 0 up in every round and row, branches and sibling duplicates come at random. Set
    `references[key]` to the tokens that plain decoding gives, prompt included; a key without one gets wrong
    guesses only.
    """

    name = "scripted"

    def __init__(self, seed: int = 0, right: float = 0.7, idle: float = 0.25, vocab: int = VOCAB):
        self.random = random.Random(seed)
        self.right, self.idle, self.vocab = right, idle, vocab
        self.references: dict[int, list[int]] = {}
        self.forgotten: list[int] = []
        self.counts: list[list[int]] = []  # drafts of every row in every round

    def propose(self, rows: Tokens[DraftRow]) -> Proposal:
        drafts = [self._draft(row) for row in rows]
        self.counts.append([len(draft.tokens) - 1 for draft in drafts])
        return pack(drafts)

    def forget(self, key: int) -> None:
        self.forgotten.append(key)

    def _draft(self, row: DraftRow) -> Draft:
        rng = self.random
        reference = self.references.get(row.key, [])
        ahead = reference[len(row.tokens) :] if reference[: len(row.tokens)] == row.tokens else []
        count = 0 if rng.random() < self.idle else rng.randint(0, row.limit)
        tokens, parents = [row.tokens[-1]], [-1]
        depth, true = [0], [True]  # of every node; true: its whole path is what plain decoding says
        for i in range(1, count + 1):
            parent = i - 1 if rng.random() < 0.6 else rng.randrange(i)
            truth = ahead[depth[parent]] if true[parent] and depth[parent] < len(ahead) else None
            hit = truth is not None and rng.random() < self.right
            token = truth if hit else rng.choice([t for t in range(self.vocab) if t != truth])
            assert token is not None
            # of equal siblings only the first counts
            twin = any(p == parent and t == token for p, t in zip(parents, tokens, strict=True))
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
            true.append(hit and not twin)
        return Draft(tokens, parents)


class Recorder:
    """A target that keeps the logits of every position that became part of a sequence.

    `logits[key][p]` are those that draw token p + 1 of the sequence. Call `settle` after every engine step.
    """

    def __init__(self, target: LanguageModel):
        self.target = target
        self.logits: dict[int, dict[int, Tensor]] = {}
        self.rounds: list[tuple[Tensor, Tree, list[int], Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def verify(
        self,
        tokens: Tensor,
        tree: Tree,
        slots: list[int],
        pool: StatePool,
        mode: str = "auto",
        tap: Tap | None = None,
    ) -> Tensor:
        logits = self.target.verify(tokens, tree, slots, pool, mode, tap)
        self.rounds.append((tokens, tree, list(slots), logits))
        return logits

    def settle(self, batch: list[Sequence], lengths: dict[int, int]) -> None:
        """Walk the last round's trees along what the sequences took; `lengths` as they were before it."""
        tokens, tree, _, logits = self.rounds.pop()
        for b, sequence in enumerate(batch):
            start = lengths[sequence.key]
            kept = self.logits.setdefault(sequence.key, {})
            node: int | None = 0
            for place in range(start, len(sequence.tokens)):
                assert node is not None, "a token that no node drew"
                kept[place - 1] = logits[b, node].clone()
                children = (tree.parent[b] == node).nonzero().flatten().tolist()
                node = next((c for c in children if int(tokens[b, c]) == sequence.tokens[place]), None)


@dataclass
class Run:
    """What an engine made of some requests."""

    sequences: list[Sequence]
    logits: list[dict[int, Tensor]] = field(default_factory=list)

    @property
    def outputs(self) -> list[list[int]]:
        return [sequence.output for sequence in self.sequences]

    @property
    def tokens(self) -> list[list[int]]:
        return [sequence.tokens for sequence in self.sequences]


def run(
    target: Any,
    drafter: Drafter | None,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    *,
    drafts: int = 9,
    mode: str = "hybrid",
    slots: int = 5,
    references: list[list[int]] | None = None,
    seed: int = 0,
) -> Run:
    """Run requests to their end and keep the logits; `references` go to a drafter that wants them."""
    drafter = drafter or NoDrafter()
    recorder = Recorder(target)
    config = SpeculativeConfig(num_speculative_tokens=drafts, verify=mode)
    engine = Engine(recorder, drafter, config, max_num_seqs=slots, seed=seed)
    params = params if isinstance(params, list) else [params] * len(prompts)
    sequences = [engine.add(p, s) for p, s in zip(prompts, params, strict=True)]
    if references is not None:
        wanted: dict[int, list[int]] = drafter.references  # type: ignore[attr-defined]
        wanted.update((s.key, list(tokens)) for s, tokens in zip(sequences, references, strict=True))
    while engine.has_work:
        lengths = {s.key: len(s.tokens) for s in sequences}
        recorder.settle(engine.step(), lengths)
    assert engine.pool.num_free == slots
    return Run(sequences, [recorder.logits[s.key] for s in sequences])


def same_bits(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    """Whether two records hold the same positions with the same logits, bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[place], b[place]) for place in a)


def committed(pool: StatePool, slot: int) -> list[Tensor]:
    """Copies of all that a slot has committed: states, convolution windows, visible key/value rows by position."""
    kept = []
    for layer in pool.layers:
        if isinstance(layer, AttentionState):
            length, capacity = pool.length[slot], layer.cache.shape[2]
            first = 0 if layer.window is None else max(0, length - layer.window + 1)
            kept.append(layer.cache[:, slot, torch.arange(first, length) % capacity].clone())
        else:
            kept += [layer.state[slot].clone(), layer.conv_state[slot].clone()]
    return kept


def reach(pool: StatePool, slot: int) -> int:
    """Tokens that a slot has committed or holds as pending."""
    return pool.length[slot] + int(pool.count[slot])


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True) if x.numel()]
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs)


def take(pool: StatePool, slots: list[int], path: list[list[int]]) -> None:
    """Accept these nodes of the last verification, the root included; an empty path takes none."""
    width = max(1, *map(len, path)) if len(path) > 1 else max(1, len(path[0]))
    rows = [row + [-1] * (width - len(row)) for row in path]
    pool.accept(slots, torch.tensor(rows).clamp(min=0), [len(row) - 1 for row in path])


def read_one_by_one(target: LanguageModel, tokens: list[int], pool: StatePool, slot: int) -> Tensor:
    """Decode a text plainly, a token a round: the logits `[T, vocab]`, with the state flushed at the end."""
    logits = []
    for token in tokens:
        logits.append(target.verify(torch.tensor([[token]]), Tree([[-1]]), [slot], pool)[0, 0])
        take(pool, [slot], [[0]])
    pool.flush([slot])
    return torch.stack(logits)
