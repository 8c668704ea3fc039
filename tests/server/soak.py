"""Many clients at once, of all kinds, who leave when they like: `python -m tests.server.soak 60` for a minute.

What must hold: no answer is an error of ours, those who stay get the text of the model alone, no slot is left taken,
and memory does not grow.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from specla import SamplingParams
from tests.server.serving import Serving, save_model, serving

TEXTS = ("the cat sat on", "def add(first, second):", "naïve café", "12 + 34 = " * 8)
GOOD_ENDS = {"stop", "length"}
WRONG = ({"max_tokens": -1}, {"model": "gpt-9"}, {"temperature": "hot"}, {"prompt": []}, {"tools": [1]},
         {"max_tokens": 10**6}, {"prompt": [10**9]})  # fmt: skip


@dataclass
class Outcome:
    """What became of all requests."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)  # after each quarter of the time

    def fail(self, kind: str, detail: object) -> None:
        self.counts["failed"] += 1
        self.errors.append(f"{kind}: {detail}"[:500])


class _Left(Exception):  # noqa: N818
    """This client has had enough."""


def soak(server: Serving, seconds: float, clients: int, seed: int = 0) -> Outcome:
    """`clients` at a time for so long, each with one request after another."""
    expected = {
        (text, seed): server.alone.generate(text, _params(seed))[0].outputs[0].text
        for text in TEXTS
        for seed in range(3)
    }
    return asyncio.run(_soak(server, seconds, clients, seed, expected))


def _params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.7, seed=seed, max_tokens=24)


async def _soak(
    server: Serving, seconds: float, clients: int, seed: int, expected: dict[tuple[str, int], str]
) -> Outcome:
    outcome, start = Outcome(), time.monotonic()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120) as client:

        async def one(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            while time.monotonic() - start < seconds:
                try:
                    await _request(client, draw, expected, outcome)
                except _Left:
                    outcome.counts["left"] += 1
                except Exception as error:
                    outcome.fail("client", repr(error))

        async def watch() -> None:
            for _ in range(4):
                await asyncio.sleep(seconds / 4)
                gc.collect()
                outcome.memory_mb.append(_resident_mb())

        await asyncio.gather(watch(), *(one(number) for number in range(clients)))
    return outcome


async def _request(
    client: httpx.AsyncClient, draw: random.Random, expected: dict[tuple[str, int], str], outcome: Outcome
) -> None:
    """One request of some kind."""
    kind = draw.choice(
        ["whole", "stream", "stream", "chat", "many", "wrong", "leave", "leave early", "other"]
    )
    text, seed = draw.choice(TEXTS), draw.randrange(3)
    asked: dict[str, Any] = {"prompt": text, "temperature": 0.7, "seed": seed, "max_tokens": 24}
    path = "/v1/completions"
    if kind == "wrong":
        answer = await client.post(path, json=asked | draw.choice(WRONG))
        if answer.status_code not in (400, 404):
            outcome.fail(kind, answer.text)
    elif kind == "other":
        answer = await client.get(draw.choice(["/metrics", "/health", "/v1/models"]))
        if answer.status_code != 200:
            outcome.fail(kind, answer.text)
    elif kind in ("whole", "many"):
        n = draw.randint(2, 4) if kind == "many" else 1
        answer = await client.post(path, json=asked | {"n": n, "logprobs": draw.choice([None, 2])})
        if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected[text, seed]:
            outcome.fail(kind, answer.text)
    elif kind == "leave early":
        try:
            await asyncio.wait_for(client.post(path, json=asked | {"max_tokens": 1500}), draw.random() / 2)
        except (asyncio.TimeoutError, TimeoutError):
            raise _Left from None
    else:
        await _stream(client, draw, kind, asked, expected[text, seed], outcome)
    outcome.counts[kind] += 1


async def _stream(
    client: httpx.AsyncClient,
    draw: random.Random,
    kind: str,
    asked: dict[str, Any],
    expected: str,
    outcome: Outcome,
) -> None:
    path = "/v1/completions"
    if kind == "chat":
        path, text = "/v1/chat/completions", asked.pop("prompt")
        asked["messages"] = [{"role": "user", "content": text}]
    more = {
        "stream": True,
        "stream_rounds": draw.random() < 0.5,
        "max_tokens": 1500 if kind == "leave" else 24,
    }
    patience = draw.randint(1, 20) if kind == "leave" else 10**9
    pieces, last = [], ""
    async with client.stream("POST", path, json=asked | more) as answer:
        if answer.status_code != 200:
            outcome.fail(kind, (await answer.aread()).decode())
            return
        async for line in answer.aiter_lines():
            if line:
                pieces.append(line.removeprefix("data: "))
                last = pieces[-1]
            if len(pieces) >= patience:
                raise _Left
    chunks = [json.loads(piece) for piece in pieces[:-1]]
    if last != "[DONE]" or not chunks or "error" in chunks[-1]:
        outcome.fail(kind, pieces[-2:])
    elif kind == "stream" and "".join(chunk["choices"][0]["text"] for chunk in chunks) != expected:
        outcome.fail(kind, "another text than alone")
    elif chunks[-1]["choices"][0]["finish_reason"] not in GOOD_ENDS:
        outcome.fail(kind, chunks[-1])


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def main() -> int:
    """Soak for the seconds of the command line; one JSON line last."""
    seconds = float(sys.argv[1])
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    with tempfile.TemporaryDirectory() as made, serving(save_model(Path(made) / "tiny")) as server:
        outcome = soak(server, seconds, clients)
        server.idle()
        stats = server.engine.stats()._asdict()
    for error in outcome.errors[:20]:
        print(error)
    told = {
        "seconds": seconds,
        "clients": clients,
        "requests": outcome.counts.total() - outcome.counts["failed"],
    }
    print(json.dumps({**told, **outcome.counts, "failed": outcome.counts["failed"],
                      "memory_mb": [round(m, 1) for m in outcome.memory_mb], "stats": stats}))  # fmt: skip
    return 1 if outcome.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
