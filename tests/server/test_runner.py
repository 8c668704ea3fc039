"""The engine's thread: what streams bring is what the engine alone gives, whoever comes, goes or breaks beside it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from specla import LLM, SamplingParams
from specla.server.runner import AsyncEngine, Delta, Job, QueueFullError, Stream, UnavailableError

STEPS = 30


@pytest.fixture(scope="module")
def alone(model: Path) -> LLM:
    return LLM(model)


def run(model: Path, scenario: Callable[[AsyncEngine], Awaitable[None]], max_waiting: int = 512) -> None:
    """A scenario on an engine of its own, which must be left empty."""
    engine = AsyncEngine(LLM(model, max_num_seqs=3), max_waiting)
    try:
        asyncio.run(asyncio.wait_for(scenario(engine), 120))  # type: ignore[arg-type]
    finally:
        engine.close()
    stats = engine.stats()
    assert engine.num_live == stats.num_running == stats.num_waiting == 0
    assert stats.num_free_slots == stats.num_slots == 3


async def collect(stream: Stream) -> list[Delta]:
    found = [delta async for deltas in stream for delta in deltas]
    stream.close()
    return found


def random_job(random: random.Random) -> Job:
    params = SamplingParams(
        temperature=random.choice([0.0, 0.9]),
        max_tokens=random.randint(1, STEPS),
        seed=random.randint(0, 99),
        stop=random.choice([None, ["e"], ["the", " c"]]),
        num_speculative_tokens=random.choice([None, 0, 3]),
    )
    prompt = [random.randint(2, 60) for _ in range(random.randint(1, 40))]
    return Job(prompt, params, trace=random.random() < 0.5)


def test_every_stream_is_what_its_sequences_give_alone(model: Path, alone: LLM):
    async def one(engine: AsyncEngine, seed: int) -> None:
        draw = random.Random(seed)
        jobs = [random_job(draw) for _ in range(draw.randint(1, 3))]
        await asyncio.sleep(draw.random() / 10)
        deltas = await collect(await engine.submit(jobs))
        for index, job in enumerate(jobs):
            (expected,) = alone.generate(job.token_ids, job.params)[0].outputs
            mine = [delta for delta in deltas if delta.index == index]
            assert "".join(delta.text for delta in mine) == expected.text
            assert [token for delta in mine for token in delta.token_ids] == expected.token_ids
            assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [
                expected.finish_reason
            ]
            for delta in mine:
                assert (delta.round is not None) == job.trace
                if delta.round is not None:
                    assert "".join(text for text, _ in delta.round.pieces) == delta.text
                    assert delta.round.trace is not None

    async def scenario(engine: AsyncEngine) -> None:
        await asyncio.gather(*(one(engine, seed) for seed in range(16)))

    run(model, scenario)


def test_streams_closed_at_any_moment_leave_the_others_alone(model: Path, alone: LLM):
    job = Job([5, 9, 30, 7], SamplingParams(max_tokens=40, ignore_eos=True))

    async def one(engine: AsyncEngine, seed: int) -> None:
        draw = random.Random(seed)
        await asyncio.sleep(draw.random() / 5)
        stays = seed % 4 == 0
        task = asyncio.create_task(engine.submit([job] * 2))
        if not stays and seed % 3 == 0:
            await asyncio.sleep(draw.random() / 50)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            return
        stream = await task
        if stays:
            expected = alone.generate(job.token_ids, job.params)[0].outputs[0].token_ids
            deltas = await collect(stream)
            assert [t for delta in deltas if delta.index == 1 for t in delta.token_ids] == expected
        else:
            for _ in range(draw.randint(0, 3)):
                await anext(aiter(stream), None)
            stream.close()
            stream.close()
            assert [delta async for deltas in stream for delta in deltas if delta.finish_reason] == []

    async def scenario(engine: AsyncEngine) -> None:
        await asyncio.gather(*(one(engine, seed) for seed in range(16)))

    run(model, scenario)


def test_what_the_engine_refuses_is_raised_and_nothing_of_it_runs(model: Path):
    good = Job([5, 9], SamplingParams(max_tokens=4))

    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="token ids must be integers"):
            await engine.submit([good, Job([10**6], SamplingParams())])
        assert engine.num_live == 0
        assert len(await collect(await engine.submit([good]))) > 0

    run(model, scenario)


def test_a_full_queue_refuses_until_there_is_room(model: Path):
    job = Job([5], SamplingParams(max_tokens=400, ignore_eos=True))

    async def scenario(engine: AsyncEngine) -> None:
        streams = [await engine.submit([job]) for _ in range(4)]  # 3 run and 1 waits
        with pytest.raises(QueueFullError):
            await engine.submit([job])
        streams.pop().close()
        streams.append(await engine.submit([job]))
        for stream in streams:
            stream.close()

    run(model, scenario, max_waiting=1)


def test_draining_finishes_what_runs_and_takes_nothing_new(model: Path):
    job = Job([5], SamplingParams(max_tokens=50, ignore_eos=True))

    async def scenario(engine: AsyncEngine) -> None:
        running = asyncio.create_task(collect(await engine.submit([job] * 5)))
        assert not await engine.drain(timeout=0)
        with pytest.raises(UnavailableError):
            await engine.submit([job])
        assert await engine.drain()
        assert sum(len(delta.token_ids) for delta in await running) == 250

    run(model, scenario)


def test_closing_ends_what_runs_with_an_error(model: Path):
    job = Job([5], SamplingParams(max_tokens=10**6, ignore_eos=True))

    async def scenario(engine: AsyncEngine) -> None:
        stream = await engine.submit([job] * 5)
        await anext(aiter(stream), None)
        await asyncio.to_thread(engine.close)
        deltas = await collect(stream)
        assert sorted(d.index for d in deltas if d.finish_reason == "error" and d.error) == [0, 1, 2, 3, 4]

    run(model, scenario)


def test_whoever_submits_while_it_closes_gets_an_answer(model: Path):
    job = Job([5], SamplingParams(max_tokens=10**6, ignore_eos=True))

    async def one(engine: AsyncEngine) -> None:
        with suppress(UnavailableError):
            assert (await collect(await engine.submit([job])))[-1].finish_reason == "error"

    async def scenario(engine: AsyncEngine) -> None:
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        for _ in range(50):
            await asyncio.gather(one(engine), one(engine))
        await closing

    run(model, scenario)


def test_a_dead_engine_ends_all_streams_and_says_why(model: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job([5], SamplingParams(max_tokens=10**6, ignore_eos=True))

    async def scenario(engine: AsyncEngine) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("the device is gone")

        streams = [await engine.submit([job] * 2) for _ in range(3)]
        monkeypatch.setattr(engine.llm.target, "verify", broken)
        for stream in streams:
            ends = [delta for delta in await collect(stream) if delta.finish_reason is not None]
            assert all(
                delta.finish_reason == "error" and "the device is gone" in (delta.error or "")
                for delta in ends
            )
            assert len(ends) == 2
        assert not engine.healthy
        with pytest.raises(UnavailableError, match="the device is gone"):
            await engine.submit([job])

    run(model, scenario)


def test_logits_that_are_not_finite_end_their_own_request_and_nothing_new_is_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    job = Job([5], SamplingParams(max_tokens=40, ignore_eos=True))

    async def scenario(engine: AsyncEngine) -> None:
        target, poisoned = engine.llm.target, [True]
        verify = target.verify

        def poison(*args: object, **kwargs: object) -> torch.Tensor:
            logits = verify(*args, **kwargs)  # type: ignore[arg-type]
            if poisoned and len(logits) == 2:
                poisoned.clear()
                logits = logits.clone()
                logits[1] = torch.nan
            return logits

        monkeypatch.setattr(target, "verify", poison)
        deltas = await collect(await engine.submit([job, job]))
        ends = sorted(delta.finish_reason for delta in deltas if delta.finish_reason)
        assert ends == ["error", "length"]
        assert not engine.healthy
        with pytest.raises(UnavailableError, match="not finite"):
            await engine.submit([job])

    run(model, scenario)


def test_a_drafter_that_must_know_the_end_cannot_serve(model: Path):
    with pytest.raises(ValueError, match="synthetic"):
        AsyncEngine(LLM(model, "synthetic", {"synthetic_acceptance_rate": 0.5}))
