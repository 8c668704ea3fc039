"""The front door: text or tokens in, text and tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specla.drafters import Drafter, NgramDrafter, NoDrafter, SyntheticDrafter
from specla.engine.engine import Engine
from specla.engine.outputs import CompletionOutput, RequestOutput
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.sequence import Sequence
from specla.engine.text import TextStream
from specla.models.loader import load_target
from specla.tokenizer import Tokenizer, load_tokenizer

BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "specla-mini"

Prompt = str | list[int]


class LLM:
    """A target and a drafter, ready to generate.

    Args:
        model: a checkpoint directory (config.json, safetensors, tokenizer), or None for the bundled specla-mini.
        drafter: "ngram", "none" or "synthetic"; None takes the one that comes with the model, else "ngram".
        speculative_config: a SpeculativeConfig or its fields as a dict.
        device: "auto", "cpu", "cuda" or "cuda:N"; dtype: "auto", "float32", "bfloat16", "float16" or "float64".
        max_num_seqs: sequences that run together.
        seed: requests without a seed of their own get one derived from it.

    Raises:
        ValueError: in one line, for anything that does not fit.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        drafter: str | None = None,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        max_num_seqs: int = 8,
        seed: int = 0,
    ):
        if isinstance(speculative_config, dict):
            speculative_config = SpeculativeConfig.from_dict(speculative_config)
        self.config = speculative_config or SpeculativeConfig()
        self.model_path = BUNDLED_MODEL if model is None else Path(model)
        self.device = resolve_device(device)
        self.target = load_target(self.model_path, self.device, dtype)
        self.tokenizer: Tokenizer = load_tokenizer(self.model_path)
        self.drafter = _make_drafter(drafter or "ngram", self.config, self.target.config.vocab_size, seed)
        self._engine = Engine(self.target, self.drafter, self.config, max_num_seqs, seed)

    def generate(
        self, prompts: Prompt | list[str] | list[list[int]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt to its end, in the order given."""
        params = sampling_params or SamplingParams()
        requests = [self._encode(prompt) for prompt in _as_list(prompts)]
        references = self._references([ids for _, ids in requests], params)
        runs = []
        try:
            for (text, ids), reference in zip(requests, references, strict=True):
                runs.append((text, *self._start(ids, params, reference)))
            while self._engine.has_work:
                self._engine.step()
        finally:
            for _, sequence, _ in runs:
                self._engine.release(sequence)
        return [_output(text, sequence, stream) for text, sequence, stream in runs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The output so far, after every round."""
        params = sampling_params or SamplingParams()
        text, ids = self._encode(prompt)
        (reference,) = self._references([ids], params)
        sequence, stream = self._start(ids, params, reference)
        try:
            while self._engine.has_work and not sequence.finish_reason:
                self._engine.step()
                yield _output(text, sequence, stream)
        finally:
            self._engine.release(sequence)

    def _start(self, ids: list[int], params: SamplingParams, reference: list[int] | None):
        stream = TextStream(self.tokenizer, params.stop_strings)
        sequence = self._engine.add(ids, params, should_stop=stream.push)
        if reference is not None:
            assert isinstance(self.drafter, SyntheticDrafter)
            self.drafter.references[sequence.key] = reference
        return sequence, stream

    def _references(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]] | list[None]:
        """What plain decoding gives, for the synthetic drafter to draft from; None for all others."""
        if not isinstance(self.drafter, SyntheticDrafter):
            return [None] * len(prompts)
        plain = Engine(
            self.target, NoDrafter(), SpeculativeConfig(num_speculative_tokens=0), len(self._engine.pool.length),
            self._engine.seed,
        )  # fmt: skip
        plain.num_requests = self._engine.num_requests
        sequences = [plain.add(ids, params, TextStream(self.tokenizer, params.stop_strings).push) for ids in prompts]
        while plain.has_work:
            plain.step()
        return [sequence.tokens for sequence in sequences]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty")
            return prompt, self.tokenizer.encode(prompt)
        return None, list(prompt)


def _make_drafter(name: str, config: SpeculativeConfig, vocab_size: int, seed: int) -> Drafter:
    rate = config.synthetic_acceptance_rate
    if rate is not None and name != "synthetic":
        raise ValueError(f"synthetic_acceptance_rate is for drafter synthetic, not {name}")
    if config.prune_threshold is not None:
        raise ValueError(f"prune_threshold needs a drafter that gives probabilities, which {name} does not")
    if name == "none" or (config.max_draft == 0 and name in ("ngram", "synthetic")):
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter(config.max_draft, config.num_steps, config.topk)
    if name == "synthetic":
        if rate is None:
            raise ValueError("drafter synthetic needs synthetic_acceptance_rate")
        return SyntheticDrafter(rate, config.max_draft, config.num_steps, config.topk, vocab_size, seed)
    raise ValueError(f"drafter must be ngram, none or synthetic, got {name!r}")


def _output(prompt: str | None, sequence: Sequence, stream: TextStream) -> RequestOutput:
    if sequence.finish_reason:
        stream.finish()
    text = stream.text if sequence.finish_reason else stream.visible
    completion = CompletionOutput(text, sequence.output, sequence.finish_reason, list(sequence.from_draft))
    return RequestOutput(prompt, sequence.tokens[: sequence.prompt_length], [completion], sequence.metrics)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        return [prompts]
    if isinstance(prompts, list) and all(isinstance(p, (str, list)) for p in prompts):
        return prompts
    raise ValueError("prompts must be a str, a list of str, a list of token ids, or a list of such lists")


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but this torch sees no CUDA GPU")
    return chosen
