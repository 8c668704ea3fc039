"""The front door: text or tokens in, text and tokens out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specla.drafters import Drafter, NoDrafter, SyntheticDrafter
from specla.engine.choice import make_engine
from specla.engine.drafting import choose_drafter, load_network, make_drafter
from specla.engine.outputs import RequestOutput
from specla.engine.params import SamplingParams, SpeculativeConfig, check_integer, check_sampling
from specla.engine.sequence import RoundError, Sequence
from specla.engine.session import Session, advance, recover
from specla.engine.text import Prompt, TextStream, encode_prompt, make_output, with_end_tokens
from specla.models.loader import load_target, resolve_dtype
from specla.tokenizer import Tokenizer, load_tokenizer

BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "specla-mini"


class LLM:
    """A target and a drafter, ready to generate.

    Args:
        model: a checkpoint directory (config.json, safetensors, tokenizer), or None for the bundled specla-mini.
        drafter: a drafter's directory, "mtp", "ngram", "none" or "synthetic"; None takes the one that comes with the
            model, in its directory `drafter` or as its head "mtp", or "ngram" where none does.
        speculative_config: a SpeculativeConfig or its fields as a dict.
        device: "auto", "cpu", "cuda" or "cuda:N"; dtype: "auto", "float32", "bfloat16", "float16" or "float64".
        max_num_seqs: sequences that run together.
        seed: requests without a seed of their own get one derived from it.
        max_num_batched_tokens, prefix_cache_bytes: as `Engine` has them.

    Raises:
        ValueError: in one line, for anything that does not fit.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        drafter: str | Path | None = None,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        max_num_seqs: int = 8,
        seed: int = 0,
        max_num_batched_tokens: int | None = None,
        prefix_cache_bytes: int = 0,
    ):
        check_integer("max_num_seqs", max_num_seqs, 1, 4096)
        check_integer("seed", seed, -(2**40), 2**40)
        if isinstance(speculative_config, dict):
            speculative_config = SpeculativeConfig.from_dict(speculative_config)
        self.config = speculative_config or SpeculativeConfig()
        if not isinstance(self.config, SpeculativeConfig):
            raise ValueError(
                f"speculative_config must be a SpeculativeConfig or a dict, got {speculative_config!r}"
            )
        if model is not None and not isinstance(model, (str, Path)):
            raise ValueError(f"model must be a directory or None, got {model!r}")
        self.model_path = BUNDLED_MODEL if model is None else Path(model)
        chosen = choose_drafter(drafter, self.model_path, self.config)
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.target = load_target(self.model_path, self.device, self.dtype)
        self.tokenizer: Tokenizer = load_tokenizer(self.model_path)
        vocab_size = self.target.config.vocab_size
        for token in (self.tokenizer.bos_token_id, *self.tokenizer.eos_token_ids):
            if token is not None and token >= vocab_size:
                raise ValueError(f"{self.model_path} names token {token} for begin or end of text, but its model "
                                 f"has {vocab_size} tokens")  # fmt: skip
        network = load_network(chosen, self.target, self.model_path)
        self.drafter = make_drafter(network, self.config, vocab_size, seed, max_num_seqs)
        self._engine = make_engine(
            self.target,
            self.drafter,
            self.config,
            max_num_seqs,
            seed,
            max_num_batched_tokens,
            prefix_cache_bytes,
        )

    def generate(
        self, prompts: Prompt | list[str] | list[list[int]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt to its end; the outputs are in the prompts' order.

        Raises:
            ValueError: for an empty prompt or token ids outside the vocabulary, before anything runs.
            FloatingPointError: when the target's logits are not finite.
            RuntimeError: once the engine has failed in another way.
        """
        params = check_sampling(sampling_params)
        requests = [encode_prompt(self.tokenizer, prompt) for prompt in _as_list(prompts)]
        references = self._references([ids for _, ids in requests], params)
        runs: list[tuple[str | None, Sequence, TextStream]] = []
        try:
            for (text, ids), reference in zip(requests, references, strict=True):
                runs.append((text, *self._start(ids, params, reference)))
            while not all(sequence.finish_reason for _, sequence, _ in runs):
                advance(self._engine)
                for _, sequence, _ in runs:
                    if sequence.failure is not None:
                        raise sequence.failure
        finally:
            for _, sequence, _ in runs:
                self._engine.release(sequence)
        return [make_output(text, sequence, stream) for text, sequence, stream in runs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The output so far, after every round; several streams may take turns.

        Closing the iterator, or dropping it, ends the request and frees its slot.

        Raises:
            ValueError, FloatingPointError: as `generate`.
            RuntimeError: when a round failed that another stream or call had started.
        """
        return self._stream(*encode_prompt(self.tokenizer, prompt), check_sampling(sampling_params))

    def session(self) -> Session:
        """A text that grows over several calls; it holds a slot until it is closed.

        Raises:
            ValueError: with the synthetic drafter.
        """
        return Session(self._engine, self.tokenizer)

    def with_drafter(self, drafter: Drafter) -> LLM:
        """The same target and settings with another drafter and slots of its own."""
        other = copy.copy(self)
        other.drafter = drafter
        engine = self._engine
        other._engine = make_engine(
            self.target, drafter, self.config, len(engine.pool.length), engine.seed, engine.max_num_batched_tokens,
            0 if engine.prefixes is None else engine.prefixes.limit,
        )  # fmt: skip
        return other

    def _stream(self, text: str | None, ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        (reference,) = self._references([ids], params)
        sequence, stream = self._start(ids, params, reference)
        told = len(ids)
        try:
            while not sequence.finish_reason:
                advance(self._engine)
                if len(sequence.tokens) > told:  # it may still wait for a slot
                    told = len(sequence.tokens)
                    yield make_output(text, sequence, stream)
            if isinstance(sequence.failure, RoundError):
                raise RuntimeError(
                    "this stream was ended by an error in a round that another request had started"
                ) from sequence.failure
            if sequence.failure is not None:
                raise sequence.failure
            if len(sequence.tokens) > told:  # it ended while another stream had its turn
                yield make_output(text, sequence, stream)
        finally:
            self._engine.release(sequence)

    def _start(
        self, ids: list[int], params: SamplingParams, reference: list[int] | None
    ) -> tuple[Sequence, TextStream]:
        recover(self._engine)
        stream = TextStream(self.tokenizer, params.stop_strings)
        sequence = self._engine.add(ids, with_end_tokens(params, self.tokenizer), should_stop=stream.push)
        if reference is not None:
            assert isinstance(self.drafter, SyntheticDrafter)
            self.drafter.references[sequence.key] = reference
        return sequence, stream

    def _references(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]] | list[None]:
        """What plain decoding gives, for the synthetic drafter to draft from; None for all others."""
        if not isinstance(self.drafter, SyntheticDrafter):
            return [None] * len(prompts)
        plain = self.with_drafter(NoDrafter())
        plain._engine.num_requests = self._engine.num_requests
        return [
            output.prompt_token_ids + output.outputs[0].token_ids
            for output in plain.generate(prompts, params)
        ]


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is a CUDA GPU if there is one, else the CPU; ValueError for a device that is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but this torch sees no CUDA GPU")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device} was asked for, but there are {torch.cuda.device_count()} CUDA GPUs"
        )
    return chosen


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        return [prompts]
    if isinstance(prompts, list) and all(isinstance(p, (str, list)) for p in prompts):
        return prompts
    raise ValueError("prompts must be a str, a list of str, a list of token ids, or a list of such lists")
