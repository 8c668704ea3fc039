"""What `specla generate` and `specla info` print."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch

from specla import __version__
from specla.drafters import NoDrafter
from specla.engine.drafting import choose_drafter
from specla.engine.llm import BUNDLED_MODEL, LLM, resolve_device
from specla.engine.outputs import CompletionOutput, RequestOutput
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.models.language_model import LanguageModel
from specla.models.loader import load_target, resolve_dtype
from specla.modes import AUTO, MODES
from specla.ops.triton import use_kernels
from specla.state import AttentionSpec, RecurrentSpec, StatePool
from specla.tokenizer import load_tokenizer

DRAFTED, DIM, PLAIN = "\033[32m", "\033[2m", "\033[0m"
# a text must not move the cursor or recolour the terminal that shows it
CONTROLS = {c: "\ufffd" for c in [*range(0x20), *range(0x7F, 0xA0)] if chr(c) not in "\n\t"}


def has_colour(out: TextIO) -> bool:
    """Whether `out` is a terminal that wants colours."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def run_and_show(
    llm: LLM, prompt: str, params: SamplingParams, quiet: bool = False, colour: bool = False
) -> dict[str, Any]:
    """Generate, print the text as it comes (accepted drafts in colour) and the figures after it.

    Control characters of prompt and text are replaced when stdout is a terminal, coloured or not.

    Returns:
        the run as a JSON-ready dict.
    """
    run = Timed(llm.stream(prompt, params))
    terminal = colour or sys.stdout.isatty()
    if not quiet:
        told = prompt.translate(CONTROLS) if terminal else prompt
        print(f"{DIM}{told}{PLAIN}" if colour else told, end="", flush=True)
    shown = 0
    for output in run:
        if not quiet:
            news = _news(output.outputs[0], shown, colour)
            print(news if colour or not terminal else news.translate(CONTROLS), end="", flush=True)
        shown = len(output.outputs[0].text)
    report = _report(llm, run)
    if not quiet:
        print("\n")
        if colour and report["drafter"] != "none":
            print(
                f"{DRAFTED}green{PLAIN}{DIM}: drafted by {report['drafter']}, accepted by the target{PLAIN}"
            )
        print(summary(report), flush=True)
    return report


def compare(
    llm: LLM, prompt: str, params: SamplingParams, report: dict[str, Any], quiet: bool = False
) -> dict[str, Any]:
    """Decode the same prompt plainly on the same target, and say how the two runs relate.

    The speed-up is None when either run had one round: that one holds the prefill, so nothing is left to compare.
    """
    plain = llm.with_drafter(NoDrafter())
    run = Timed(plain.stream(prompt, params))
    for _ in run:
        pass
    theirs = _report(plain, run)
    a, b = report["token_ids"], theirs["token_ids"]
    identical = a == b
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    short = min(report["num_rounds"], theirs["num_rounds"]) < 2
    result = {
        "plain_tokens_per_s": theirs["tokens_per_s"],
        "plain_num_tokens": len(b),
        "speedup": None if short else round(report["tokens_per_s"] / theirs["tokens_per_s"], 3),
        "identical": identical,
        "first_difference": None if identical else same,
    }
    if not quiet:
        print(summary(theirs))
        verdict = "identical tokens" if identical else f"tokens DIFFER from number {same} on"
        speed = "too short to compare" if short else f"{result['speedup']:>8.2f}x"
        print(f"{'':<10}{speed}  {verdict}", flush=True)
    return result


def summary(report: dict[str, Any]) -> str:
    """The figures of a run, one line."""
    return (
        f"{'plain' if report['drafter'] == 'none' else report['drafter']:<10}{report['tokens_per_s']:>7.1f} tokens/s  "
        f"{report['num_tokens']} tokens in {report['num_rounds']} rounds, "
        f"acceptance length {report['acceptance_length']:.2f}, "
        f"verify {report['verify']}, {report['dtype']} on {report['device']}"
    )


def describe(model: str | None = None, device: str = "auto", dtype: str = "auto") -> dict[str, str | int]:
    """Versions, device, dtype and kernels that specla would use here, and the facts of a checkpoint.

    Raises:
        ValueError: when the checkpoint, the device or the dtype is unfit.
    """
    chosen = resolve_device(device)
    work = resolve_dtype(dtype, chosen)
    threads = torch.get_num_threads()
    kernels = use_kernels(torch.empty(0, device=chosen))
    auto = "serial, or hybrid where a table of the device says so" if kernels else AUTO
    facts: dict[str, str | int] = {
        "specla": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": version("safetensors"),
        "tokenizers": version("tokenizers"),
        "device": torch.cuda.get_device_name(chosen)
        if chosen.type == "cuda"
        else f"cpu, {threads} thread{'s' if threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()}",
        "dtype": f"{_name(work)} weights, {_name(torch.promote_types(work, torch.float32))} state",
        "kernels": f"triton {version('triton')}, torch" if kernels else "torch",
    }
    directory = BUNDLED_MODEL if model is None else Path(model)
    others = [mode for mode in MODES[1:] if mode != auto]
    about: dict[str, str | int] = {"model": "none bundled"}
    if model is not None or directory.is_dir():
        target = load_target(directory, chosen, work)
        pool = target.new_pool(1, 2)
        if not pool.takes_parallel:
            others.remove("parallel")
        about = _describe_model(directory, target, pool)
    return facts | {"verify": f"auto = {auto}; others: {', '.join(others)}"} | about


def _describe_model(directory: Path, target: LanguageModel, pool: StatePool) -> dict[str, str | int]:
    config = target.config
    layers = f"{config.num_hidden_layers} of hidden size {config.hidden_size}"
    specs = target.state_specs()
    for spec in dict.fromkeys(spec for spec in specs if isinstance(spec, AttentionSpec)):
        reach = "global" if spec.window is None else f"window {spec.window}"
        at = [str(i) for i, other in enumerate(specs) if other == spec]
        layers += f"; softmax attention ({reach}) at {', '.join(at)}"
    try:
        tokenizer = load_tokenizer(directory)
        told = (
            f"{tokenizer.vocab_size:,} tokens, end {', '.join(map(str, tokenizer.eos_token_ids)) or 'none'}"
        )
    except ValueError as error:
        told = str(error)
    try:
        chosen = choose_drafter(None, directory, SpeculativeConfig())
        drafter = {"mtp": "its mtp head", "ngram": "none of its own: ngram"}.get(str(chosen), "its own")
    except ValueError as error:
        drafter = str(error)
    recurrent = [spec for spec in dict.fromkeys(specs) if isinstance(spec, RecurrentSpec)]
    heads = [f"{s.num_heads} key x {s.head_dim}, {s.value_heads} value x {s.head_v_dim}" for s in recurrent]
    windows = sorted(
        {"none, token shift" if s.halves else f"width {s.conv_size}" for s in recurrent if s.conv_size > 1}
    )
    return {
        "model": str(directory),
        "parameters": sum(p.numel() for p in target.parameters()),
        "weight_bytes": sum(p.nbytes for p in target.parameters()),
        "layers": layers,
        "architecture": f"{config.architecture} ({config.model_type})",
        "heads": "; ".join(heads) or "none that recur",
        "convolution": ", ".join(windows) or "none",
        "output_gate": config.output_gate,
        "vocabulary": config.vocab_size,
        "tokenizer": told,
        "drafter": drafter,
        "state_bytes": pool.bytes_per_sequence(),
        "bytes_per_draft_node": pool.bytes_per_node(),
    }


class Timed:
    """A stream of outputs and the time spent inside it, not in what the reader does between two of them.

    Tokens a second are counted after the first round, which also holds the prefill.
    """

    def __init__(self, outputs: Iterator[RequestOutput]):
        self._outputs = outputs
        self._marks: list[tuple[float, int]] = []
        self.output: RequestOutput | None = None

    def __iter__(self) -> Iterator[RequestOutput]:
        seconds = 0.0
        while True:
            start = time.perf_counter()
            output = next(self._outputs, None)
            if output is None:
                return
            seconds += time.perf_counter() - start
            self._marks.append((seconds, len(output.outputs[0].token_ids)))
            self.output = output
            yield output

    @property
    def seconds_to_first_token(self) -> float:
        return round(self._marks[0][0], 4)

    @property
    def tokens_per_s(self) -> float:
        (first, before), (last, tokens) = self._marks[0], self._marks[-1]
        if len(self._marks) == 1:
            return round(tokens / last, 2)
        return round((tokens - before) / (last - first), 2)


def _news(completion: CompletionOutput, shown: int, colour: bool) -> str:
    """The text from character `shown` on; with colour, the parts that accepted drafts completed are marked."""
    text = completion.text
    if not colour:
        return text[shown:]
    parts, begin = [], 0
    for piece, drafted in zip(completion.pieces, completion.from_draft, strict=True):
        end = begin + len(piece)
        new = text[max(begin, shown) : max(end, shown)].translate(CONTROLS)
        parts.append(f"{DRAFTED}{new}{PLAIN}" if new and drafted else new)
        begin = end
    return "".join(parts)


def _report(llm: LLM, run: Timed) -> dict[str, Any]:
    assert run.output is not None, "a stream gives at least one output"
    completion, metrics = run.output.outputs[0], run.output.metrics
    return {
        "model": str(llm.model_path),
        "drafter": llm.drafter.name,
        "verify": AUTO if (llm.config.verify, llm.device.type) == ("auto", "cpu") else llm.config.verify,
        "device": str(llm.device),
        "dtype": _name(llm.dtype),
        "prompt": run.output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.token_ids),
        "num_rounds": metrics.num_spec_steps,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_draft_tokens": metrics.num_accepted_draft_tokens,
        "acceptance_length": round(metrics.acceptance_length, 4),
        "acceptance_histogram": metrics.acceptance_histogram,
        "tokens_per_s": run.tokens_per_s,
        "seconds_to_first_token": run.seconds_to_first_token,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
