"""Tiny random EAGLE-3 drafters, written and run by speculators: `python make.py`, with speculators 0.9.0 installed."""

import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
VOCAB, DRAFT, LENGTH, STEPS, LAYERS = 64, 16, 7, 3, [2, 4, 5]
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"]}
# the kind of the layer, its further fields, the drafter's fields
DRAFTERS = {
    "llama": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}),
    "llama_whole_vocabulary": (LlamaConfig, {"rms_norm_eps": 1e-2}, {"draft_vocab_size": VOCAB}),
    "llama_norm_before_fc": (LlamaConfig, {}, {"norm_before_fc": True, "norm_before_residual": True}),
    "llama_eagle31": (LlamaConfig, {}, {"fc_norm": True, "norm_output": True}),
    "qwen3": (Qwen3Config, {"rms_norm_eps": 1e-2}, {"norm_before_residual": True}),
    "qwen3_window": (Qwen3Config, WINDOW, {}),
}


def make(name: str, verifier: str) -> None:
    kind, further, flags = DRAFTERS[name]
    layer = kind(num_hidden_layers=1, **{**SHAPE, **further})
    layer._attn_implementation = "eager"
    plan = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(verifier),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=plan,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        **{"draft_vocab_size": DRAFT, **flags},
    )
    model = Eagle3DraftModel(config=config).eval()
    noise = torch.Generator().manual_seed(1)
    chosen = torch.randperm(VOCAB, generator=noise)[:DRAFT].sort().values
    if config.draft_vocab_size < VOCAB:
        marks = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
        model.load_vocab_mappings(marks, chosen - torch.arange(DRAFT))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            centre, spread = (1, 0.3) if "norm" in key else (0, 0.2)
            weight.copy_(centre + spread * torch.randn(weight.shape, generator=noise))
    model.save_pretrained(HERE / name)
    (HERE / name / "config.py").unlink(missing_ok=True)
    path = HERE / name / "config.json"
    path.write_text(path.read_text().replace(json.dumps(verifier), '"verifier"') + "\n")
    (HERE / name / "model.safetensors").chmod(0o644)
    save_file(reference(model, noise), HERE / name / "reference.safetensors")


def reference(model: Eagle3DraftModel, noise: torch.Generator) -> dict[str, torch.Tensor]:
    """What the model computes of a random text and random features, in three steps with the text's own tokens."""
    ids = torch.randint(0, VOCAB, (1, LENGTH), generator=noise)
    features = torch.randn(1, LENGTH, model.fc.in_features, generator=noise)
    seen: dict[str, list[torch.Tensor]] = {"hidden": [], "logits": []}
    model.layers[0].register_forward_hook(lambda _, args, out: seen["hidden"].append(out.clone()))
    model.lm_head.register_forward_hook(lambda _, args, out: seen["logits"].append(out.clone()))
    with torch.no_grad():
        model(hidden_states=features, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=STEPS)
    outputs = {f"{key}.{step}": value for key, values in seen.items() for step, value in enumerate(values)}
    return {"input_ids": ids, "features": features, **outputs}


def main() -> None:
    shape = Qwen3Config(num_hidden_layers=8, **SHAPE)
    with tempfile.TemporaryDirectory() as verifier:
        Qwen3ForCausalLM(shape).save_pretrained(verifier)
        for name in DRAFTERS:
            make(name, verifier)


if __name__ == "__main__":
    main()
