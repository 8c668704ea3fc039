"""What `specla generate` prints: one JSON document, colours for accepted drafts alone, both speeds and the verdict."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from specla.cli import main
from specla.drafters import NoDrafter
from specla.engine.llm import LLM
from specla.engine.params import SamplingParams
from specla.show import DIM, DRAFTED, PLAIN, Timed, compare, has_colour, run_and_show
from tests.checkpoints import save_checkpoint

PROMPT = "the cat"
ESCAPE = re.compile(r"\033\[\d+m")
MARKED = re.compile(re.escape(DRAFTED) + "(.*?)" + re.escape(PLAIN), re.DOTALL)
KEYS = {"model", "drafter", "verify", "device", "dtype", "prompt", "text", "token_ids", "finish_reason", "num_tokens",
        "num_rounds", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_length", "acceptance_histogram",
        "tokens_per_s", "seconds_to_first_token"}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    config = {"synthetic_acceptance_rate": 0.6, "num_speculative_tokens": 6, "num_steps": 3, "topk": 2}
    return LLM(checkpoint, "synthetic", config, dtype="float32", max_num_seqs=1)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 30, "ignore_eos": True} | fields))  # type: ignore[arg-type]


def test_json_is_one_document_and_nothing_else(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    for flags in ([], ["--compare"]):
        argv = [
            "generate",
            str(checkpoint),
            "-p",
            PROMPT,
            "--max-tokens",
            "12",
            "--ignore-eos",
            "--json",
            *flags,
        ]
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.count("\n") == 1
        report = json.loads(out)
        assert report.keys() == (KEYS | {"compare"} if flags else KEYS)
        assert report["num_tokens"] == len(report["token_ids"]) == 12
        assert report["prompt"] == PROMPT
    assert report["compare"]["identical"] is True
    assert report["compare"]["first_difference"] is None
    speeds = report["tokens_per_s"], report["compare"]["plain_tokens_per_s"]
    assert report["compare"]["speedup"] == pytest.approx(speeds[0] / speeds[1], abs=1e-3)


def test_plain_output_is_the_prompt_and_the_text_and_the_figures(
    capsys: pytest.CaptureFixture[str], llm: LLM
):
    report = run_and_show(llm, PROMPT, params())
    out = capsys.readouterr().out
    assert not ESCAPE.search(out)
    shown, _, figures = out.rpartition("\n\n")
    assert shown == PROMPT + report["text"]
    assert figures.count("\n") == 1
    rounds, length = report["num_rounds"], report["acceptance_length"]
    for part in (f"{report['tokens_per_s']:.1f} tokens/s", f"30 tokens in {rounds} rounds", "verify hybrid",
                 f"acceptance length {length:.2f}", "float32 on cpu", "synthetic "):  # fmt: skip
        assert part in figures
    assert length == pytest.approx(30 / rounds, abs=1e-4)


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str], llm: LLM):
    report = run_and_show(llm, PROMPT, params(), quiet=True)
    compare(llm, PROMPT, params(), report, quiet=True)
    assert capsys.readouterr().out == ""


def coloured(capsys: pytest.CaptureFixture[str], llm: LLM, sampling: SamplingParams) -> tuple[str, str]:
    """The text as printed in colour, without prompt and figures, and the text of the run."""
    report = run_and_show(llm, PROMPT, sampling, colour=True)
    out = capsys.readouterr().out
    prompt = f"{DIM}{PROMPT}{PLAIN}"
    assert out.startswith(prompt)
    return out.removeprefix(prompt).rsplit("\n\n", 1)[0], report["text"]


def test_colour_marks_exactly_the_accepted_drafts(capsys: pytest.CaptureFixture[str], llm: LLM):
    (whole,) = llm.generate(PROMPT, params())
    shown, text = coloured(capsys, llm, params())
    last = list(llm.stream(PROMPT, params()))[-1].outputs[0]
    assert ESCAPE.sub("", shown) == text == whole.outputs[0].text
    assert text == "".join(last.pieces)
    assert 0 < sum(last.from_draft) < 30
    # the drafts of this very run: a synthetic drafter draws anew for every request of an engine
    spoken: list[tuple[str, bool]] = []

    class Spy(LLM):
        def _stream(self, *args):  # type: ignore[no-untyped-def]
            for output in super()._stream(*args):
                completion = output.outputs[0]
                spoken[:] = zip(completion.pieces, completion.from_draft, strict=True)
                yield output

    spy = llm.with_drafter(llm.drafter)
    spy.__class__ = Spy
    shown, _ = coloured(capsys, spy, params())
    marked = [piece for piece, drafted in spoken if drafted and piece]
    assert MARKED.findall(shown) == marked
    assert MARKED.sub("", shown) == "".join(piece for piece, drafted in spoken if not drafted)


def test_colour_never_runs_past_a_stop_string(capsys: pytest.CaptureFixture[str], llm: LLM):
    text = llm.generate(PROMPT, params())[0].outputs[0].text
    tried = 0
    for at in range(4, len(text) - 3, 3):
        stop = text[at : at + 3]
        end = text.find(stop)
        if "\ufffd" in stop:
            continue
        tried += 1
        for sampling in (params(stop=stop), params(stop=[stop, stop[:2] + "never"])):
            shown, final = coloured(capsys, llm, sampling)
            assert final == text[:end]
            assert ESCAPE.sub("", shown) == final
    assert tried >= 5


def test_control_characters_reach_no_terminal(capsys: pytest.CaptureFixture[str], llm: LLM):
    run_and_show(llm, "the\033[2J\x9b\r\x07cat\n\tsat", params(max_tokens=2), colour=True)
    out = ESCAPE.sub("", capsys.readouterr().out)
    assert out.startswith("the\ufffd[2J\ufffd\ufffd\ufffdcat\n\tsat")


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")], ids=lambda pair: pair[0])
def test_a_terminal_without_colour_gets_no_control_characters_either(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, llm: LLM, variable: tuple[str, str]
):
    monkeypatch.setenv(*variable)
    bad = "the\033[2J\x9b\rcat\n"
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert main(["generate", str(checkpoint), "-p", bad, "--max-tokens", "3"]) == 0
    assert terminal.getvalue().startswith("the\ufffd[2J\ufffd\ufffdcat\n")
    monkeypatch.setattr("specla.show._news", lambda *args: "\033]0;title\x07")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    run_and_show(llm, "the", params(max_tokens=3))
    assert "\033" not in terminal.getvalue() and "\ufffd]0;title\ufffd" in terminal.getvalue()
    monkeypatch.setattr("sys.stdout", file := io.StringIO())
    run_and_show(llm, bad, params(max_tokens=3))
    assert file.getvalue().startswith(bad), "a file gets what was said"


def test_one_round_is_too_short_to_compare(capsys: pytest.CaptureFixture[str], llm: LLM, checkpoint: Path):
    certain = LLM(
        checkpoint,
        "synthetic",
        {"synthetic_acceptance_rate": 1.0, "num_speculative_tokens": 6},
        dtype="float32",
    )
    for model, tokens in ((llm, 1), (certain, 5)):
        report = run_and_show(model, PROMPT, params(max_tokens=tokens))
        assert report["num_rounds"] == 1
        result = compare(model, PROMPT, params(max_tokens=tokens), report)
        assert result["speedup"] is None and result["identical"]
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.strip() == "too short to compare  identical tokens"


def test_legend_names_the_drafter_and_is_for_colour_only(capsys: pytest.CaptureFixture[str], llm: LLM):
    run_and_show(llm, PROMPT, params(), colour=True)
    assert "drafted by synthetic" in capsys.readouterr().out
    run_and_show(llm, PROMPT, params())
    assert "drafted by" not in capsys.readouterr().out
    run_and_show(llm.with_drafter(NoDrafter()), PROMPT, params(), colour=True)
    out = capsys.readouterr().out
    assert "drafted by" not in out
    assert DRAFTED not in out


def test_compare_prints_both_speeds_aligned_and_the_verdict(capsys: pytest.CaptureFixture[str], llm: LLM):
    report = run_and_show(llm, PROMPT, params())
    result = compare(llm, PROMPT, params(), report)
    ours, theirs, verdict = capsys.readouterr().out.splitlines()[-3:]
    assert ours.startswith("synthetic ")
    assert theirs.startswith("plain ")
    assert ours.index("tokens/s") == theirs.index("tokens/s") == len(f"{'':<10}{0:>7.1f} ")
    assert f" {result['plain_tokens_per_s']:.1f} tokens/s" in theirs
    assert "30 tokens in 30 rounds, acceptance length 1.00" in theirs
    assert verdict.split() == [f"{result['speedup']:.2f}x", "identical", "tokens"]
    assert result["plain_num_tokens"] == 30


@pytest.mark.parametrize(
    ("change", "place"), [(lambda ids: [*ids[:4], ids[4] + 1, *ids[5:]], 4), (lambda ids: ids[:7], 7)]
)
def test_compare_sees_a_difference(capsys: pytest.CaptureFixture[str], llm: LLM, change, place: int):  # type: ignore[no-untyped-def]
    report = run_and_show(llm, PROMPT, params())
    result = compare(llm, PROMPT, params(), report | {"token_ids": change(report["token_ids"])})
    assert result["identical"] is False
    assert result["first_difference"] == place
    assert f"DIFFER from number {place} on" in capsys.readouterr().out


def test_a_difference_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, checkpoint: Path):
    monkeypatch.setattr("specla.show.compare", lambda *args, **kwargs: {"identical": False})
    assert main(["generate", str(checkpoint), "-p", PROMPT, "--max-tokens", "2", "--compare"]) == 1
    assert main(["generate", str(checkpoint), "-p", PROMPT, "--max-tokens", "2"]) == 0


def test_time_between_outputs_is_not_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("specla.show.time.perf_counter", lambda: now[0])
    real = llm.with_drafter(NoDrafter()).stream(PROMPT, params(max_tokens=5))

    def slow_rounds():  # type: ignore[no-untyped-def]
        for number, output in enumerate(real):
            now[0] += 10.0 if number == 0 else 0.5
            yield output

    run = Timed(slow_rounds())
    for _ in run:
        now[0] += 1000.0
    assert run.seconds_to_first_token == 10.0
    assert run.tokens_per_s == 2.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(Terminal())
    assert not has_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Terminal())


def test_a_terminal_gets_colour_and_json_none(monkeypatch: pytest.MonkeyPatch, checkpoint: Path):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for flags in ([], ["--json"]):
        monkeypatch.setattr("sys.stdout", terminal := Terminal())
        main(["generate", str(checkpoint), "-p", PROMPT, "--max-tokens", "3", *flags])
        shown.append(terminal.getvalue())
    assert shown[0].startswith(DIM + PROMPT)
    assert "\033" not in shown[1]
    assert json.loads(shown[1])
