"""Sessions: several calls are one text, only what is new is read, and the slot comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specla import LLM, SamplingParams
from tests.checkpoints import save_checkpoint

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
COUNTS = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what graphs of prompts do not call")
DRAWN = replace(GREEDY, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory)
    return directory


def load(checkpoint: Path, drafter: str = "none", **options: Any) -> LLM:
    if drafter == "synthetic":
        options["speculative_config"] = {"synthetic_acceptance_rate": 0.7, "num_speculative_tokens": 8}
    return LLM(checkpoint, drafter=drafter, dtype="float32", **options)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> LLM:
    return load(checkpoint)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def count_prefilled(llm: LLM) -> list[int]:
    """The number of tokens of each prefill from now on."""
    counts: list[int] = []
    prefill = llm.target.prefill

    def counted(tokens: Any, *rest: Any) -> None:
        counts.append(len(tokens))
        prefill(tokens, *rest)

    llm.target.prefill = counted
    return counts


@COUNTS
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_session_goes_on_where_it_stopped(
    checkpoint: Path, plain: LLM, drafter: str, params: SamplingParams
):
    """Two calls of 20 tokens are one of 40, and the second reads nothing again."""
    (whole,) = plain.generate("the cat", replace(params, max_tokens=40))
    llm = load(checkpoint, drafter)
    read = count_prefilled(llm)
    with llm.session() as session:
        first = session.generate("the cat", replace(params, max_tokens=20))
        second = session.generate("", replace(params, max_tokens=20, seed=None))
        assert session.token_ids == whole.prompt_token_ids + whole.outputs[0].token_ids
    assert tokens([first])[0] + tokens([second])[0] == tokens([whole])[0]
    assert first.outputs[0].text + second.outputs[0].text == whole.outputs[0].text
    assert second.prompt_token_ids == whole.prompt_token_ids + tokens([first])[0]
    assert first.metrics.num_tokens == second.metrics.num_tokens == 20
    assert (first.finished, second.outputs[0].finish_reason) == (True, "length")
    assert read == [len(whole.prompt_token_ids) - 1]


@COUNTS
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_session_takes_more_text_in_between(checkpoint: Path, plain: LLM, drafter: str):
    llm, more = load(checkpoint, drafter, max_num_seqs=2), " on the mat"
    read = count_prefilled(llm)
    session = llm.session()
    first = session.generate("the cat", replace(GREEDY, max_tokens=20))
    (other,) = llm.generate("s", GREEDY)  # another request meanwhile
    second = session.generate(more, replace(GREEDY, max_tokens=20))
    ids = plain.tokenizer.encode(more, add_special_tokens=False)
    said = first.prompt_token_ids + tokens([first])[0] + ids
    assert second.prompt == more and second.prompt_token_ids == said
    assert tokens([second]) == tokens(plain.generate(said, replace(GREEDY, max_tokens=20)))
    assert tokens([other]) == tokens(plain.generate("s", GREEDY))
    assert read[-1] == len(ids), "the last token of the first answer and the text but its own last"
    third = session.generate([5, 6], replace(GREEDY, max_tokens=3))
    assert tokens([third]) == tokens(plain.generate(third.prompt_token_ids, replace(GREEDY, max_tokens=3)))
    assert llm._engine.pool.num_free == 1
    session.close()
    session.close()
    assert llm._engine.pool.num_free == 2 and not llm._engine.has_work
    with pytest.raises(ValueError, match="closed"):
        session.generate("x")


def test_a_token_that_begins_a_text_comes_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    llm = load(checkpoint)
    monkeypatch.setattr(llm.tokenizer, "_prefix", [5])
    with llm.session() as session:
        first = session.generate("the", replace(GREEDY, max_tokens=2))
        second = session.generate("the", replace(GREEDY, max_tokens=2))
    begin, *ids = first.prompt_token_ids
    assert begin == 5 and second.prompt_token_ids == [5, *ids, *tokens([first])[0], *ids]


def test_mistakes_leave_a_session_as_it_was(checkpoint: Path, plain: LLM):
    with pytest.raises(ValueError, match="synthetic"):
        load(checkpoint, "synthetic").session()
    llm = load(checkpoint, max_num_seqs=1)
    with llm.session() as session:
        with pytest.raises(ValueError, match="empty"):
            session.generate("")
        first = session.generate("the cat", GREEDY)
        for bad in ([90], [-1], "a\ud800b"):
            with pytest.raises(ValueError, match=r"token ids|surrogate"):
                session.generate(bad, GREEDY)
        for blocked in (lambda: llm.generate("s"), lambda: next(llm.stream("s"))):
            with pytest.raises(ValueError, match="no slot is free"):
                blocked()
        second = session.generate("", GREEDY)
    (whole,) = plain.generate("the cat", replace(GREEDY, max_tokens=48))
    assert tokens([first])[0] + tokens([second])[0] == tokens([whole])[0]
    assert len(llm.generate("s", GREEDY)) == 1, "the slot is free again"


def test_a_session_whose_round_fails_is_closed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    llm = load(checkpoint)
    session = llm.session()
    session.generate("the cat", GREEDY)

    def broken(*args: object) -> None:
        raise FloatingPointError("logits are not finite")

    monkeypatch.setattr("specla.engine.engine.run_round", broken)
    with pytest.raises(FloatingPointError):
        session.generate("", GREEDY)
    assert llm._engine.pool.num_free == 8
    with pytest.raises(ValueError, match="closed"):
        session.generate("", GREEDY)
