"""Streamers and stopping criteria meet the same calls as in `generate` itself, though drafts arrive many at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specla.hf import speculative
from tests.checkpoints import save_tokenizer
from tests.hf.loaded import prompts, qwen, told, transformers

library = transformers.generation
ASKED = {"max_new_tokens": 24, "pad_token_id": 0}


class Keeper(library.streamers.BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.given.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.given.append("end")


class Asked(library.StoppingCriteria):
    """Stops rows by `stops(input_ids)`, and keeps what it was asked."""

    def __init__(self, stops: Any):
        self.stops, self.asked = stops, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        assert scores is None
        self.asked.append(input_ids.tolist())
        return self.stops(input_ids)


CRITERIA = {
    "never": lambda ids: torch.zeros(len(ids), dtype=torch.bool),
    "by row": lambda ids: (ids[:, 12:] % 7 == 3).any(1),
    "all at once by one row": lambda ids: int(ids[1, -1]) % 5 == 2,  # a bool of Python, as older code returns
    "by length": lambda ids: torch.full((len(ids),), ids.shape[1] >= 17),
}


@pytest.mark.parametrize("end", [{}, {"eos_token_id": [46, 13, 2]}])
@pytest.mark.parametrize("name", CRITERIA)
def test_criteria_and_streamers_are_called_alike(name: str, end: dict[str, Any]):
    """Without an end token, rows that a criterion has stopped go on until all have stopped."""
    asked, model = ASKED | prompts(seed=1) | end, qwen()
    whole = model.generate(**asked | {"eos_token_id": None})

    def run(**more: Any) -> tuple[Any, ...]:
        criterion, streamer = Asked(CRITERIA[name]), Keeper()
        text = model.generate(**asked, **more, stopping_criteria=[criterion], streamer=streamer)
        return text.tolist(), criterion.asked, streamer.given

    expected = run()
    assert run(custom_generate=speculative) == expected
    with told(model, whole, asked["attention_mask"]) as setting:
        assert run(custom_generate=setting) == expected
    assert expected[2][-1] == "end" and len(expected[2]) > 3


def test_a_criterion_cuts_within_a_block_of_accepted_drafts():
    model, asked = qwen(), {"input_ids": torch.tensor([[3, 5, 8]])}
    whole = model.generate(**asked, max_new_tokens=24)
    with told(model, whole) as setting:
        for length in range(4, 27):
            criterion = Asked(lambda ids, length=length: ids[:, 0] == (3 if ids.shape[1] >= length else -1))
            text = model.generate(
                **asked, max_new_tokens=24, custom_generate=setting, stopping_criteria=[criterion]
            )
            assert torch.equal(text, whole[:, :length])


def test_stop_strings_by_their_criterion(tmp_path: Path):
    save_tokenizer(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    model, asked = qwen(), ASKED | prompts(seed=1)
    whole = model.generate(**asked)
    text = tokenizer.decode(whole[2, 12:])
    for stop in (text[3:5], text[7:10]):
        criteria = [library.StopStringCriteria(tokenizer, [stop])]
        expected = model.generate(**asked, stopping_criteria=criteria, eos_token_id=60)
        assert expected.shape[1] <= whole.shape[1]
        with told(model, whole, asked["attention_mask"]) as setting:
            got = model.generate(
                **asked, stopping_criteria=criteria, eos_token_id=60, custom_generate=setting
            )
        assert torch.equal(got, expected)


def test_text_streamers_print_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_tokenizer(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    said = []
    for more in ({}, {"custom_generate": speculative}):
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
        qwen().generate(torch.tensor([[3, 5, 8]]), max_new_tokens=24, streamer=streamer, **more)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_time_runs_out():
    """The pass that is under way is finished, and its first token is kept."""
    text = qwen().generate(
        **prompts(), max_new_tokens=500, pad_token_id=0, max_time=1e-6, custom_generate=speculative
    )
    assert text.shape[1] == 13


def test_time_that_has_run_out_before():
    criterion = library.MaxTimeCriteria(max_time=5.0, initial_timestamp=time.time() - 6)
    text = qwen().generate(**ASKED, **prompts(), stopping_criteria=[criterion], custom_generate=speculative)
    assert text.shape[1] == 13


def test_lengths_that_a_criterion_has_beyond_the_configuration():
    for length in (10, 15):
        criteria = [library.MaxLengthCriteria(length)]
        expected = qwen().generate(**ASKED, **prompts(), stopping_criteria=criteria)
        got = qwen().generate(**ASKED, **prompts(), stopping_criteria=criteria, custom_generate=speculative)
        assert torch.equal(got, expected)


def test_an_error_of_a_streamer_or_criterion_is_raised_and_leaves_nothing_behind():
    def fail(*_: Any) -> None:
        raise KeyError("mine")

    streamer = Keeper()
    streamer.put = fail  # type: ignore[method-assign]
    for more in ({"stopping_criteria": [Asked(fail)]}, {"streamer": streamer}):
        with pytest.raises(KeyError, match="mine"):
            qwen().generate(**ASKED, **prompts(), custom_generate=speculative, **more)
    expected = qwen().generate(**ASKED, **prompts())
    assert torch.equal(qwen().generate(**ASKED, **prompts(), custom_generate=speculative), expected)


def test_an_answer_for_other_than_each_row_is_refused():
    def by_column(ids: Tensor, *_: Any) -> Tensor:
        return torch.ones(len(ids), 1, dtype=torch.bool) * (ids.shape[1] > 14)

    with pytest.raises(ValueError, match=r"Asked must say yes or no for each of 3 rows.*\[3, 1\]"):
        qwen().generate(
            **ASKED, **prompts(), custom_generate=speculative, stopping_criteria=[Asked(by_column)]
        )


def test_a_criterion_may_generate_with_the_same_model():
    inner = qwen().generate(torch.tensor([[9]]), max_new_tokens=4)

    def generates(ids: Tensor) -> Tensor:
        text = qwen().generate(torch.tensor([[9]]), max_new_tokens=4, custom_generate=speculative)
        assert torch.equal(text, inner)
        return torch.zeros(len(ids), dtype=torch.bool)

    asked = prompts() | {"max_new_tokens": 6, "pad_token_id": 0}
    text = qwen().generate(**asked, custom_generate=speculative, stopping_criteria=[Asked(generates)])
    assert torch.equal(text, qwen().generate(**asked))


def test_a_directory_that_is_named_as_custom_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    examples, streamers = Path(__file__).parent.parent.parent / "examples", (Keeper(), Keeper())
    asked = ASKED | prompts(seed=1)
    expected = qwen().generate(**asked, streamer=streamers[0])
    got = qwen().generate(
        **asked, streamer=streamers[1], custom_generate=str(examples), trust_remote_code=True
    )
    assert torch.equal(got, expected) and streamers[0].given == streamers[1].given
    with pytest.raises(ValueError, match="num_beams=2"):
        qwen().generate(**asked, num_beams=2, custom_generate=str(examples), trust_remote_code=True)
