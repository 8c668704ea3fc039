"""`model.generate(..., custom_generate=speculative)`: the decoding loop that transformers calls instead of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specla.engine.engine import Engine
from specla.engine.params import SamplingParams, SpeculativeConfig
from specla.engine.sequence import Sequence
from specla.hf.adoption import adopt
from specla.hf.caller import arguments_of_generate
from specla.hf.options import check_arguments, check_config, check_model_kwargs
from specla.hf.processors import Plan, ProcessedTarget, Row, of_row, plan
from specla.hf.stops import Batch


class Speculative:
    """A decoding method for `generate` of transformers.

    Args:
        drafter: a drafter's directory, "mtp", "ngram" or "none"; None takes the one in the directory that the model was
            loaded from, as `LLM` does, or "ngram".
        speculative_config: fields of `SpeculativeConfig`.

    Raises:
        ValueError: for an unknown field or a value out of range.
    """

    def __init__(self, drafter: str | Path | None = None, **speculative_config: Any):
        if drafter is not None and not isinstance(drafter, (str, Path)):
            raise ValueError(f"drafter must be a name or a directory, got {drafter!r}")
        self.drafter = None if drafter is None else str(drafter)
        self.config = SpeculativeConfig.from_dict(speculative_config)
        if drafter == "synthetic" or self.config.synthetic_acceptance_rate is not None:
            raise ValueError("drafter synthetic is not for generate: it is told what will be said")

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What `generate` calls; it returns what that returns.

        Raises:
            ValueError: for an option that is not honoured, named, and for a model that is not supported.
            FloatingPointError: when the model's logits are not finite.
        """
        arguments = arguments_of_generate(model)
        check_config(generation_config)
        check_arguments(arguments, generation_config)
        streamer = model_kwargs.pop("streamer", arguments.get("streamer"))
        starts = check_model_kwargs(model_kwargs, input_ids)
        planned = plan(logits_processor or (), bool(generation_config.do_sample), starts)
        batch = Batch(input_ids, stopping_criteria, _pad(stopping_criteria, generation_config))
        adoption = adopt(model)
        with adoption.lock:
            setting = (self.drafter, self.config)
            engine = adoption.engine(setting, bool(planned.processors), len(starts))
            run = Run(engine, batch, starts, planned)
            try:
                run.to_the_end(streamer)
            finally:
                run.release()
        if not generation_config.return_dict_in_generate:
            return batch.sequences
        from specla.hf.output import SpeculativeOutput

        return SpeculativeOutput(sequences=batch.sequences, metrics=[s.metrics for s in run.sequences])


class Run:
    """The rows of one batch as sequences of an engine."""

    def __init__(self, engine: Engine, batch: Batch, starts: list[int], planned: Plan):
        self.engine, self.batch = engine, batch
        self.sequences: list[Sequence] = []
        self.outputs: list[list[int]] = [[] for _ in starts]
        length = batch.prompt.shape[1]
        # end tokens below 0 are those that people name to have none
        ends = sorted(i for i in batch.end_ids if i >= 0) if batch.pad is not None else ()
        params = SamplingParams(
            **planned.sampling,  # type: ignore[arg-type]
            max_tokens=max(1, min(batch.limits) - length), ignore_eos=True, stop_token_ids=ends,
        )  # fmt: skip
        seeds: list[int | None] = [None] * len(starts)
        if params.temperature:  # by torch's generator, so that torch.manual_seed repeats a text
            seeds = torch.randint(2**63 - 1, (len(starts),)).tolist()
        try:
            for row, (ids, start) in enumerate(zip(batch.prompt.tolist(), starts, strict=True)):
                sequence = engine.add(ids[start:], replace(params, seed=seeds[row]))
                self.sequences.append(sequence)
                if isinstance(engine.target, ProcessedTarget):
                    engine.target.device = batch.prompt.device
                    engine.target.rows[sequence] = Row(of_row(planned.processors, row), ids[:start])
        except BaseException:
            self.release()
            raise

    def to_the_end(self, streamer: Any) -> None:
        """Run until every row has met a criterion."""
        batch = self.batch
        while any(batch.unfinished):
            column = batch.next_column(self.outputs)
            if column is None:
                self._step()
                continue
            if streamer is not None:
                streamer.put(torch.tensor(column))
            if batch.pad is not None:
                for sequence, goes_on in zip(self.sequences, batch.unfinished, strict=True):
                    if not goes_on and not sequence.finish_reason:
                        self.engine.release(sequence)
        if streamer is not None:
            streamer.end()

    def release(self) -> None:
        """Free what the rows hold in the engine."""
        for sequence in self.sequences:
            self.engine.release(sequence)
            if isinstance(self.engine.target, ProcessedTarget):
                self.engine.target.rows.pop(sequence, None)

    def _step(self) -> None:
        if self._collect():  # of rounds that a criterion has run, by generating with the same model
            return
        assert self.engine.has_work, "a row goes on, but its sequence has ended"
        self.engine.step()
        self._collect()

    def _collect(self) -> bool:
        """Whether there is anything new."""
        before = sum(map(len, self.outputs))
        for sequence, output in zip(self.sequences, self.outputs, strict=True):
            if sequence.failure is not None:
                raise sequence.failure
            output += sequence.tokens[sequence.prompt_length + len(output) :]
        return sum(map(len, self.outputs)) > before


def _pad(criteria: Any, config: Any) -> int | None:
    """What ended rows hold; None where no criterion knows an end token, and rows go on together to the end."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        return None
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None:
        raise ValueError("pad_token_id is needed where a stopping criterion has an eos_token_id")
    return int(pad)
