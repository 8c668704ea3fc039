"""The thread that owns an engine, and what asyncio code asks of it: sequences in, deltas out after every round."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from specla.drafters import SyntheticDrafter
from specla.engine.engine import EngineStats
from specla.engine.llm import LLM
from specla.engine.params import SamplingParams
from specla.engine.sequence import RoundTrace, Sequence, TokenLogprobs, one_line
from specla.engine.text import TextStream, with_end_tokens


class QueueFullError(RuntimeError):
    """As many sequences as the limit allows are running and waiting."""


class UnavailableError(RuntimeError):
    """The engine has failed, drains or is closed: it takes nothing new."""


@dataclass(frozen=True)
class Job:
    """One sequence to run; `trace`: its deltas show the text token by token and the draft tree."""

    token_ids: list[int]
    params: SamplingParams
    trace: bool = False


@dataclass(slots=True)
class Delta:
    """What one round brought to one sequence; `text` joins, over all deltas, to its text."""

    index: int  # of its job
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_cached: int = 0  # tokens of the prompt that the prefix cache knew
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if asked for
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # with the first delta
    round: Round | None = None


@dataclass(slots=True)
class Round:
    """What a traced delta shows of its round; the pieces join to the delta's text."""

    number: int
    pieces: list[tuple[str, bool]]  # text of a token, and whether it was drafted
    trace: RoundTrace | None
    acceptance_length: float
    tokens_per_second: float


class AsyncEngine:
    """Steps the engine of an LLM in a thread of its own; any event loop may submit.

    Args:
        llm: its engine belongs to this thread from now on.
        max_waiting: sequences beyond those that can run together before `submit` refuses.

    Raises:
        ValueError: with the synthetic drafter, which must know the end before the start.
    """

    def __init__(self, llm: LLM, max_waiting: int = 512):
        if isinstance(llm.drafter, SyntheticDrafter):
            raise ValueError("drafter synthetic cannot serve: it drafts from a finished answer")
        self.llm, self.tokenizer, self.config = llm, llm.tokenizer, llm.target.config
        self._engine = llm._engine
        self.max_num_seqs = len(self._engine.pool.length)
        self.capacity = self.max_num_seqs + max_waiting
        self.num_live = 0  # sequences submitted and not yet ended
        self.draining = False
        self._broken: BaseException | None = None  # what has ended all that ran
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tracks: dict[Sequence, _Track] = {}
        self._thread = threading.Thread(target=self._run, name="specla-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """Why nothing new is taken, if that is so; after logits that are not finite, what runs goes on."""
        return self._broken or self._engine.failure

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    @property
    def has_prefix_cache(self) -> bool:
        return self._engine.prefixes is not None

    def stats(self) -> EngineStats:
        """The engine's counts, which may be those of a moment ago."""
        return self._engine.stats()

    @property
    def max_draft(self) -> int:
        """Drafts of a round at most."""
        return self._engine.config.max_draft

    async def submit(self, jobs: Items[Job]) -> Stream:
        """Queue sequences whose deltas come in one stream, which the caller must close.

        Raises:
            ValueError: for what the engine refuses; nothing of the request runs then.
            QueueFullError, UnavailableError: as they say.
        """
        stream = Stream(self, jobs)
        self._enter(stream)
        try:
            await stream._added
        except BaseException:
            stream.close()
            raise
        return stream

    async def drain(self, timeout: float | None = None) -> bool:
        """Take nothing new and wait for what runs; False when that took longer than `timeout` seconds."""
        self.draining = True
        end = None if timeout is None else time.monotonic() + timeout
        while self.num_live:
            if end is not None and time.monotonic() > end:
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self) -> None:
        """End the thread, and with it whatever still runs."""
        with self._lock:  # so that nobody is let in whom the thread would not see any more
            self.draining = True
            self._commands.put(None)
        self._thread.join()

    def _enter(self, stream: Stream) -> None:
        count = len(stream.jobs)
        with self._lock:
            self._check()
            if self.draining:
                raise UnavailableError("the server is shutting down")
            if self.num_live + count > self.capacity:
                raise QueueFullError(f"{self.num_live} sequences run and wait, {self.capacity} is the limit")
            self.num_live += count
            self._commands.put(lambda: self._add(stream))

    def _check(self) -> None:
        failure = self.failure
        if failure is not None:
            raise UnavailableError(f"the engine has failed: {one_line(failure)}")

    def _give_back(self, count: int) -> None:
        with self._lock:
            self.num_live -= count

    # what follows runs in the engine's thread

    def _run(self) -> None:
        engine, going = self._engine, True
        while going:
            try:
                going = self._obey()
                if going and self._busy:
                    self._deliver(engine.step())
            except BaseException as error:
                self._fail(error)
        self._end_all("the server is shutting down")

    @property
    def _busy(self) -> bool:
        return self._broken is None and self._engine.has_work

    def _obey(self) -> bool:
        """Run what was asked for, waiting for it if there is nothing else to do; False at the end."""
        while True:
            try:
                command = self._commands.get(block=not self._busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, stream: Stream) -> None:
        added: list[Sequence] = []
        try:
            self._check()
            for index, job in enumerate(stream.jobs):
                text = TextStream(self.tokenizer, job.params.stop_strings)
                params = with_end_tokens(job.params, self.tokenizer)
                sequence = self._engine.add(job.token_ids, params, text.push, trace=job.trace)
                added.append(sequence)
                self._tracks[sequence] = _Track(index, stream, sequence, text, job.trace)
        except (ValueError, RuntimeError) as error:
            for sequence in added:
                self._release(sequence)
            stream.answer(error if isinstance(error, ValueError) else UnavailableError(one_line(error)))
        else:
            stream.sequences = added
            stream.answer(None)

    def _release(self, sequence: Sequence) -> None:
        if self._tracks.pop(sequence, None) is not None:
            self._engine.release(sequence)

    def _deliver(self, changed: list[Sequence]) -> None:
        """One wake-up of each event loop for all that a round brought."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta]]] = {}
        for sequence in changed:
            track = self._tracks.get(sequence)
            if track is None:
                continue
            delta = track.advance()
            if delta.finish_reason is not None:
                del self._tracks[sequence]
            batches.setdefault(track.stream.loop, []).append((track.stream, delta))
        for loop, batch in batches.items():
            _call(loop, _put_all, batch)

    def _fail(self, error: BaseException) -> None:
        """The engine can no longer be trusted."""
        self._broken = self._broken or error
        self._end_all(f"the engine has failed: {one_line(error)}")

    def _end_all(self, why: str) -> None:
        for sequence, track in list(self._tracks.items()):
            track.stream.post([Delta(track.index, "", [], "error", why)])
            with suppress(RuntimeError):  # a device that has failed fails again
                self._release(sequence)


class Stream:
    """The deltas of one request's sequences: an asynchronous iterator of lists, each with all that has come."""

    def __init__(self, engine: AsyncEngine, jobs: Items[Job]):
        self.jobs = jobs
        self.loop = asyncio.get_running_loop()
        self.sequences: list[Sequence] = []
        self._engine, self._live = engine, len(jobs)
        self._ready: list[Delta] = []
        self._added: asyncio.Future[None] = self.loop.create_future()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._ready:
            if not self._live:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """End what still runs; closing again is fine."""
        if self._live:
            self._engine._give_back(self._live)
            self._live = 0
            self._engine._commands.put(self._abort)

    def answer(self, error: Exception | None) -> None:
        """From the engine's thread: whether the sequences were taken."""
        _call(self.loop, self._answer, error)

    def post(self, deltas: list[Delta]) -> None:
        """From the engine's thread: deltas outside of a round."""
        _call(self.loop, _put_all, [(self, delta) for delta in deltas])

    def put(self, delta: Delta) -> None:
        if not self._live:
            return  # closed
        self._ready.append(delta)
        if delta.finish_reason is not None:
            self._live -= 1
            self._engine._give_back(1)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _answer(self, error: Exception | None) -> None:
        if self._added.done():
            return  # the caller has gone
        if error is None:
            self._added.set_result(None)
        else:
            self._added.set_exception(error)

    def _abort(self) -> None:
        for sequence in self.sequences:
            self._engine._release(sequence)


class _Track:
    """How much of a sequence has been told."""

    def __init__(self, index: int, stream: Stream, sequence: Sequence, text: TextStream, trace: bool):
        self.index, self.stream, self.sequence, self.text, self.trace = index, stream, sequence, text, trace
        self._tokens = self._drafts = self._accepted = self._chars = 0
        self._piece = self._piece_start = 0  # the first piece that was not told to its end
        self._first: tuple[float, int] | None = None  # when the first tokens came, and how many

    def advance(self) -> Delta:
        sequence, metrics, text = self.sequence, self.sequence.metrics, self.text
        told = self._tokens
        new = sequence.tokens[sequence.prompt_length + told :]
        if sequence.finish_reason:
            text.finish()
        visible = text.text if sequence.finish_reason else text.visible
        delta = Delta(
            self.index,
            visible[self._chars :],
            new,
            sequence.finish_reason,
            sequence.error,
            metrics.num_draft_tokens - self._drafts,
            metrics.num_accepted_draft_tokens - self._accepted,
            sequence.num_cached,
            sequence.logprobs[told:],
            [] if told else sequence.prompt_logprobs,
        )
        self._tokens += len(new)
        self._drafts, self._accepted = metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
        if self.trace:
            delta.round = self._round(len(visible))
        self._chars = len(visible)
        return delta

    def _round(self, visible: int) -> Round:
        now, metrics = time.perf_counter(), self.sequence.metrics
        if self._first is None and self._tokens:
            self._first = (now, self._tokens)
        since, before = self._first or (now, 0)
        speed = (self._tokens - before) / (now - since) if now > since else 0.0
        return Round(
            metrics.num_spec_steps,
            self._new_pieces(visible),
            self.sequence.last_round,
            metrics.acceptance_length,
            speed,
        )

    def _new_pieces(self, visible: int) -> list[tuple[str, bool]]:
        """The pieces of the text from what was told up to `visible` characters."""
        new = []
        pieces, drafted = self.text.pieces, self.sequence.from_draft
        while self._piece < len(pieces):
            piece, start = pieces[self._piece], self._piece_start
            part = piece[max(0, self._chars - start) : max(0, visible - start)]
            if part:
                new.append((part, drafted[self._piece]))
            if start + len(piece) > visible or self._piece == len(pieces) - 1:
                break  # more of it is to come, or may be: the end of a text completes its last piece
            self._piece, self._piece_start = self._piece + 1, start + len(piece)
        return new


def _put_all(batch: list[tuple[Stream, Delta]]) -> None:
    for stream, delta in batch:
        stream.put(delta)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with suppress(RuntimeError):  # that loop is closed, so nobody waits for the answer
        loop.call_soon_threadsafe(function, *args)
