"""The head that comes with a Qwen checkpoint drafts what its own layers say, and changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla import LLM, SamplingParams
from specla.drafters import EagleDrafter, NoDrafter
from specla.drafters.base import DraftRow
from specla.drafters.mtp import Mtp, has_mtp, load_mtp
from specla.engine.drafting import choose_drafter, load_network
from specla.engine.params import SpeculativeConfig
from specla.models.experts import Experts
from specla.models.language_model import LanguageModel
from specla.models.loader import load_target
from specla.models.past import FullText
from specla.models.target import Tap
from tests.checkpoints import save_checkpoint
from tests.data.qwen.make import COMMITTED, WITH_MTP
from tests.models.test_loader import shard
from tests.models.test_qwen import DATA, copy
from tests.targets import run

CONFIG = SpeculativeConfig(num_speculative_tokens=4)


def features_of(target: LanguageModel, ids: Tensor) -> Tensor:
    seen: list[Tensor] = []
    with torch.no_grad():
        target(ids, tap=Tap((target.config.num_hidden_layers,), seen.append))
    return seen[0]


def load(directory: Path, dtype: str = "float32") -> tuple[LanguageModel, Mtp]:
    target = load_target(directory, dtype=dtype)
    return target, load_mtp(directory, target)


@pytest.mark.parametrize("variant", WITH_MTP)
def test_logits_are_those_of_the_layers_it_is_made_of(variant: str):
    target, network = load(DATA / variant)
    answer = load_file(DATA / variant / "expected.safetensors")
    ids = answer["input_ids"]
    features = features_of(target, ids)[:, :-1]
    with torch.no_grad():
        hidden = network(ids[:, 1:], network.fuse(features), FullText(2, 40, ids.device))
        torch.testing.assert_close(network.logits(hidden), answer["mtp_logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", WITH_MTP)
def test_a_chain_of_drafts_is_the_heads_own_greedy_text(variant: str):
    target, network = load(DATA / variant)
    answer = load_file(DATA / variant / "expected.safetensors")
    texts = answer["input_ids"].tolist()
    drafter = EagleDrafter(network, 4, 4, 1)
    for key, features in enumerate(features_of(target, answer["input_ids"])):
        drafter.observe(key, features[:-1], texts[key][1:])
    proposal = drafter.propose([DraftRow(key, text, 4) for key, text in enumerate(texts)])
    assert torch.equal(proposal.tokens[:, 1:], answer["mtp_drafts"])
    assert proposal.tree.parent.tolist() == [[-1, 0, 1, 2, 3]] * 2


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("variant", WITH_MTP)
def test_tokens_are_those_of_plain_decoding(variant: str, topk: int, temperature: float, batch: int):
    target = load_target(DATA / variant, dtype="float32")
    network = load_network("mtp", target, DATA / variant)
    assert isinstance(network, Mtp)
    drafter = EagleDrafter(network, 6, 4, topk)
    texts = load_file(DATA / variant / "expected.safetensors")["input_ids"].tolist()
    prompts = [text[start : start + 12] for text in texts for start in (0, 14)][:batch]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    want = run(target, NoDrafter(), prompts, params, drafts=0)
    got = run(target, drafter, prompts, params, drafts=6)
    assert got.outputs == want.outputs
    assert sum(s.metrics.num_draft_tokens for s in got.sequences) > 20


def test_a_head_with_experts_is_not_recorded_as_a_program():
    """Which experts a token reads depends on the token, so the same shapes do not mean the same calls."""
    for variant in ("next", "images"):
        target = load_target(DATA / variant, dtype="float32")
        network = load_network("mtp", target, DATA / variant)
        assert isinstance(network, Mtp)
        drafter = EagleDrafter(network, 4, 4, 2)
        chooses = any(isinstance(part, Experts) for part in network.modules())
        assert chooses == (variant == "next")
        assert not chooses or drafter._step == drafter._beam_step


def test_embeddings_and_head_are_the_targets_own():
    for variant in ("next", "dense_tied"):
        target, network = load(DATA / variant)
        head = target.embeddings.weight if target.lm_head is None else target.lm_head.weight
        assert network.embeddings.weight.data_ptr() == target.embeddings.weight.data_ptr()
        assert network.lm_head.weight.data_ptr() == head.data_ptr()
        assert network.target_norm.weight.data_ptr() == target.norm.weight.data_ptr()
        assert (network.name, EagleDrafter(network, 4).name) == ("mtp", "mtp")


def test_it_comes_with_the_model_unless_another_is_asked_for(tmp_path: Path):
    assert {name for name in COMMITTED if has_mtp(DATA / name)} == set(WITH_MTP)
    assert (
        choose_drafter(None, DATA / "next", CONFIG) == choose_drafter("mtp", DATA / "dense", CONFIG) == "mtp"
    )
    assert choose_drafter("ngram", DATA / "next", CONFIG) == choose_drafter(None, DATA / "dense", CONFIG)
    pruned = SpeculativeConfig(num_speculative_tokens=4, prune_threshold=2.0)
    assert choose_drafter(None, DATA / "next", pruned) == "mtp"
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    copy("images", tmp_path)
    assert choose_drafter(None, tmp_path, CONFIG) == tmp_path / "drafter"
    assert not has_mtp(tmp_path / "drafter")
    before = load(tmp_path)[1].state_dict()
    shard(tmp_path)
    after = load(tmp_path)[1].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_without_a_head_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match=r"dense has no mtp\.\* weights"):
        load_mtp(DATA / "dense", load_target(DATA / "dense"))
    save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"has no mtp\.\* weights"):
        LLM(tmp_path, drafter="mtp", device="cpu")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mtp.norm.weight", None, "1 missing (mtp.norm.weight)"),
        ("mtp.layers.1.norm.weight", torch.ones(24), "1 unexpected (mtp.layers.1.norm.weight)"),
        (
            "mtp.fc.weight",
            torch.ones(24, 24),
            "mtp.fc.weight has shape [24, 24], config.json asks for [24, 48]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(name: str, change: Tensor | None, words: str, tmp_path: Path):
    weights = copy("dense_tied", tmp_path)
    target = load_target(tmp_path)
    weights.pop(name, None)
    save_file(weights | ({} if change is None else {name: change}), tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_mtp(tmp_path, target)
    assert words in str(caught.value) and "\n" not in str(caught.value)
