"""Which drafter runs, and that a trained one in the front door changes when tokens come, not which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specla import LLM, SamplingParams, SpeculativeConfig
from specla.drafters import EagleDrafter, LookupFirst, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.drafters.network import Eagle
from specla.engine.drafting import COMPANION, choose_drafter, load_network, make_drafter
from specla.engine.outputs import RequestOutput
from specla.models.layers import Linear
from specla.ops.int8 import quantize
from tests.checkpoints import save_checkpoint, save_companion
from tests.drafters.eagles import make_eagle
from tests.targets import VOCAB, make_target

ANY = SpeculativeConfig()
SYNTHETIC = SpeculativeConfig(synthetic_acceptance_rate=0.5)
PRUNED = SpeculativeConfig(prune_threshold=2.0)
SIZES = {"num_heads": 2, "head_dim": 16, "intermediate_size": 32}  # whole vectors, as eight bits need them


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that comes with a drafter of its own."""
    directory = tmp_path_factory.mktemp("with_drafter")
    target = save_checkpoint(directory)
    save_companion(directory, target, draft_vocab_size=target.config.vocab_size, **SIZES)
    return directory


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target without one."""
    directory = tmp_path_factory.mktemp("without_drafter")
    save_checkpoint(directory)
    return directory


def test_by_default_the_drafter_of_the_model_is_chosen_else_ngrams(checkpoint: Path, alone: Path) -> None:
    assert choose_drafter(None, checkpoint, ANY) == checkpoint / COMPANION
    assert choose_drafter(None, alone, ANY) == "ngram"


@pytest.mark.parametrize("model", ["checkpoint", "alone"])
def test_a_name_or_a_directory_is_taken_at_its_word(model: str, checkpoint: Path, alone: Path) -> None:
    path = checkpoint if model == "checkpoint" else alone
    assert choose_drafter("ngram", path, ANY) == "ngram"
    assert choose_drafter("none", path, ANY) == "none"
    assert choose_drafter("synthetic", path, SYNTHETIC) == "synthetic"
    for directory in (checkpoint / COMPANION, str(checkpoint / COMPANION)):
        assert choose_drafter(directory, path, ANY) == checkpoint / COMPANION


@pytest.mark.parametrize(
    "asked", ["eagle", "", "nowhere/at/all", Path("nowhere"), "x" * 5000, "config.json", 5, b"ngram"]
)
def test_what_is_neither_is_refused(asked: Any, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="drafter must be"):
        choose_drafter(asked, checkpoint, ANY)


def test_a_directory_in_which_a_drafter_is_not_written_yet_is_refused_unless_another_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / COMPANION).mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json.* name another drafter"):
        choose_drafter(None, tmp_path, ANY)
    assert choose_drafter("ngram", tmp_path, ANY) == "ngram"


def test_settings_that_a_drafter_has_no_use_for_are_refused(checkpoint: Path, alone: Path) -> None:
    own = checkpoint / COMPANION
    for name in ("ngram", "none", None):
        with pytest.raises(ValueError, match="prune_threshold"):
            choose_drafter(name, alone, PRUNED)
    with pytest.raises(ValueError, match="prune_threshold"):
        choose_drafter("synthetic", alone, replace(SYNTHETIC, prune_threshold=2.0))
    for asked in ("ngram", "none", own, None):
        with pytest.raises(ValueError, match="synthetic_acceptance_rate"):
            choose_drafter(asked, checkpoint, SYNTHETIC)
    with pytest.raises(ValueError, match="synthetic_acceptance_rate"):
        choose_drafter("synthetic", checkpoint, ANY)
    assert choose_drafter(own, alone, PRUNED) == choose_drafter(None, checkpoint, PRUNED) == own


def test_a_name_needs_no_network_and_a_directory_gives_one_ready_to_draft(checkpoint: Path) -> None:
    target = LLM(checkpoint, drafter="none", dtype="float32").target
    assert load_network("ngram", target, checkpoint) == "ngram"
    network = load_network(checkpoint / COMPANION, target, checkpoint)
    assert isinstance(network, Eagle)
    linears = [part for part in network.modules() if isinstance(part, Linear)]
    assert [part.int8 is None for part in linears] == [quantize(part.weight) is None for part in linears]
    assert not any(weight.requires_grad for weight in network.parameters())


def test_drafters_are_made_as_large_as_the_configuration_allows() -> None:
    network = make_eagle(make_target())
    for size in ("auto", 5):
        config = SpeculativeConfig(size, num_steps=3, topk=2, prune_threshold=1.5)
        made = make_drafter(network, config, VOCAB, 0, max_num_seqs=3)
        assert isinstance(made, LookupFirst) == (size == "auto")
        inner = made.other if isinstance(made, LookupFirst) else made
        assert isinstance(inner, EagleDrafter)
        assert made.name == ("eagle+ngram" if size == "auto" else "eagle")
        assert made.layer_ids == network.config.layer_ids
        sizes = inner.num_speculative_tokens, inner.num_steps, inner.topk, inner.prune_threshold
        assert sizes == (config.max_draft, 3, 2, 1.5) and len(inner._free) == 3
    kinds = {"none": NoDrafter, "ngram": NgramDrafter, "synthetic": SyntheticDrafter}
    for name, kind in kinds.items():
        config = SYNTHETIC if name == "synthetic" else ANY
        assert type(make_drafter(name, config, VOCAB, 0, 1)) is kind
    for source in (network, *kinds):
        assert (
            type(make_drafter(source, replace(SYNTHETIC, num_speculative_tokens=0), VOCAB, 0, 1)) is NoDrafter
        )


PROMPTS = ["the cat", "café", "on the mat, and the cat sat on the mat"]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=7)
HOT = replace(GREEDY, temperature=60.0, seed=3)  # noise decides, which the drafter knows
WAYS = {"auto": {}, "tree": {"num_speculative_tokens": 9, "topk": 3}, "chain": {"num_speculative_tokens": 4, "topk": 1},
        "pruned": {"num_speculative_tokens": 9, "prune_threshold": 1.0}}  # fmt: skip


def load(checkpoint: Path, way: str = "auto", drafter: str | Path | None = None, **options: Any) -> LLM:
    return LLM(checkpoint, drafter, WAYS[way], dtype="float32", **options)


def trained(llm: LLM) -> EagleDrafter:
    drafter = llm.drafter.other if isinstance(llm.drafter, LookupFirst) else llm.drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> LLM:
    return load(checkpoint, drafter="none")


@pytest.fixture(scope="module")
def drafting(checkpoint: Path) -> dict[str, LLM]:
    """One for each way, with fewer slots than there are prompts."""
    return {way: load(checkpoint, way, max_num_seqs=2) for way in WAYS}


def test_the_default_is_the_trained_drafter_behind_lookup(checkpoint: Path, alone: Path) -> None:
    assert load(checkpoint).drafter.name == "eagle+ngram"
    assert load(checkpoint, "tree").drafter.name == "eagle"
    assert load(checkpoint, drafter="ngram").drafter.name == load(alone).drafter.name == "ngram"
    assert load(alone, drafter=checkpoint / COMPANION).drafter.name == "eagle+ngram"


CASES = [("auto", DRAWN), *((way, params) for way in WAYS for params in (GREEDY, HOT))]


@pytest.mark.parametrize(
    ("way", "params"), CASES, ids=lambda x: x if isinstance(x, str) else f"{x.temperature:g}"
)
def test_a_trained_drafter_changes_no_token(
    drafting: dict[str, LLM], plain: LLM, way: str, params: SamplingParams
) -> None:
    answer, llm = tokens(plain.generate(PROMPTS, params)), drafting[way]
    outputs = llm.generate(PROMPTS, params)
    assert tokens(outputs) == answer
    assert tokens(llm.generate(PROMPTS[::-1], params)) == answer[::-1], "and again, in slots that others had"
    if way != "auto":  # which may find that nothing pays here
        assert any(output.metrics.num_draft_tokens for output in outputs)
    if params is HOT and way in ("tree", "chain"):
        assert all(output.metrics.acceptance_length > 1.5 for output in outputs)


@pytest.mark.parametrize(("way", "params"), [("auto", HOT), ("tree", GREEDY)], ids=["auto", "tree"])
def test_sessions_and_streams_with_a_trained_drafter_say_what_plain_ones_say(
    drafting: dict[str, LLM], plain: LLM, way: str, params: SamplingParams
) -> None:
    llm, told = drafting[way], []
    for each in (plain, llm):
        with each.session() as session:
            said = [session.generate(text, params) for text in ("the cat", " sat on the mat", "", "def add(")]
            told.append((tokens(said), session.token_ids))
    assert told[0] == told[1]
    whole = plain.generate(PROMPTS[:2], params)
    streams = [llm.stream(text, params) for text in PROMPTS[:2]]
    next(streams[0])
    last = [list(stream)[-1] for stream in (streams[1], streams[0])]  # in turns, the second first
    assert tokens(last[::-1]) == tokens(whole)
    assert llm._engine.pool.num_free == 2 and len(trained(llm)._free) == 2


def test_a_lower_prune_threshold_drafts_less(checkpoint: Path) -> None:
    drafted = []
    for threshold in (0.0, 1.0, None):
        config = {"num_speculative_tokens": 40, "num_steps": 4, "prune_threshold": threshold}
        outputs = LLM(checkpoint, speculative_config=config, dtype="float32").generate(PROMPTS, GREEDY)
        drafted.append(sum(output.metrics.num_draft_tokens for output in outputs))
    assert 0 < drafted[0] < drafted[1] < drafted[2]


@pytest.mark.parametrize("changes", [{"hidden_size": 64}, {"num_hidden_layers": 1}], ids=str)
def test_a_drafter_of_another_target_is_one_clear_line(
    checkpoint: Path, tmp_path: Path, changes: dict[str, int]
) -> None:
    save_checkpoint(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"the target") as error:
        load(tmp_path, drafter=checkpoint / COMPANION)
    assert "\n" not in str(error.value) and str(checkpoint / COMPANION) in str(error.value)
