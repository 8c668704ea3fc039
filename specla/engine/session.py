"""A text that grows over several calls, each going on from the state that the one before left in its slot."""

from __future__ import annotations

from specla.drafters import SyntheticDrafter
from specla.engine.engine import Engine
from specla.engine.outputs import RequestOutput
from specla.engine.params import SamplingParams, check_sampling
from specla.engine.sequence import Sequence, SequenceMetrics
from specla.engine.text import (
    Prompt,
    TextStream,
    check_token_list,
    encode_prompt,
    make_output,
    with_end_tokens,
)
from specla.tokenizer import Tokenizer


class Session:
    """Holds one slot from its first call until `close`; also a context manager. Made by `LLM.session`.

    Raises:
        ValueError: with the synthetic drafter, which must know the end before the start.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        if isinstance(engine.drafter, SyntheticDrafter):
            raise ValueError("a session cannot have drafter synthetic, which drafts from a finished answer")
        self._engine, self._tokenizer = engine, tokenizer
        self._sequence: Sequence | None = None
        self._closed = False

    @property
    def token_ids(self) -> list[int]:
        """All that was said so far, by both sides."""
        return [] if self._sequence is None else list(self._sequence.tokens)

    def generate(self, prompt: Prompt = "", sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Append `prompt` to what was said so far and continue; after the first call it may be empty.

        Only what is new is read. The output's `prompt_token_ids` are all tokens before the continuation, its
        metrics those of this call. A request without a seed keeps the seed of the first one.

        Raises:
            ValueError: for an empty first prompt, token ids outside the vocabulary, a closed session, or when other
                sessions hold every slot.
            FloatingPointError: when the target's logits are not finite; the session is closed then.
        """
        if self._closed:
            raise ValueError("the session is closed")
        params = with_end_tokens(check_sampling(sampling_params), self._tokenizer)
        stream = TextStream(self._tokenizer, params.stop_strings)
        text, ids = self._encode(prompt)
        try:
            recover(self._engine)
            if self._sequence is None:
                self._sequence = self._engine.add(ids, params, stream.push, keep_slot=True)
            else:
                self._engine.resume(self._sequence, ids, params, stream.push)
                self._sequence.metrics = SequenceMetrics()
            while not self._sequence.finish_reason:
                advance(self._engine)
            if self._sequence.failure is not None:
                raise self._sequence.failure
        except BaseException:
            sequence = self._sequence
            if sequence is not None and (sequence.slot is None or sequence.finish_reason is None):
                self.close()  # its state is lost or between two rounds
            raise
        return make_output(text, self._sequence, stream)

    def close(self) -> None:
        """Free the slot; closing again is fine."""
        self._closed = True
        if self._sequence is not None:
            self._engine.release(self._sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if self._sequence is None:
            return encode_prompt(self._tokenizer, prompt)
        if isinstance(prompt, str):  # goes on from earlier text, so no token that begins one
            return prompt, self._tokenizer.encode(prompt, add_special_tokens=False)
        return None, check_token_list(prompt)


def advance(engine: Engine) -> None:
    """One step; ValueError when those who wait can get no slot, because sessions that are idle hold all of them."""
    if not engine.step() and engine.waiting and not (engine.reading or engine.running):
        raise ValueError(
            f"no slot is free: open sessions hold all {len(engine.pool.length)}; close one or raise max_num_seqs"
        )


def recover(engine: Engine) -> None:
    """Let an engine go on that has seen logits which are not finite: whoever made them has been told, and is gone."""
    if isinstance(engine.failure, FloatingPointError):
        engine.failure = None
