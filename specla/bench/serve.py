"""What the server costs: streams of one server against the engine alone on the same prompts, in turns.

The server is a process of its own, and so is its engine. Its clients are as light as clients can be, since they share
the machine with it: they keep the bytes and when they came, and look at them once all have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import torch

from specla import __version__
from specla.bench.prompts import read_prompts
from specla.bench.report import cpu_name
from specla.engine.params import SamplingParams
from specla.flags import FIELDS, load_llm

START = 300  # seconds that a server may take to load its model
READ = 1 << 16


@dataclass
class Streamed:
    """What came of one request, and when, in seconds from the moment all were sent."""

    data: bytearray = field(default_factory=bytearray)
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    error: str | None = None


def measure_all(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Everything `specla bench serve` measures, JSON-ready."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    prompts = [each.prompt for each in read_prompts(args.prompts)]
    prompts = [prompts[n % len(prompts)] for n in range(args.streams)]
    llm = load_llm(args, max_num_seqs=args.streams, seed=args.seed)
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed, ignore_eos=True
    )
    asked = {
        "temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    alone: list[float] = []
    served: list[float] = []
    streams: list[Streamed] = []
    different = failed = 0
    with _server(args) as url:
        for again in range(-1, args.repeat):  # the first warms both up
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            middle = time.perf_counter()
            answers = _stream(url, [{**asked, "prompt": prompt} for prompt in prompts])
            end = max(answer.arrivals[-1] for answer in answers if answer.arrivals)
            for output, answer in zip(outputs, answers, strict=True):
                failed += answer.error is not None
                different += answer.error is None and answer.text != output.outputs[0].text
            if again >= 0:
                alone.append(middle - start)
                served.append(end)
                streams += answers
    tokens = args.streams * args.max_tokens
    engine, server = tokens / median(alone), tokens / median(served)
    first = [1000 * answer.arrivals[0] for answer in streams if answer.arrivals]
    between = [1000 * (b - a) for s in streams for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]
    return {
        "benchmark": "serve",
        "model": llm.model_path.name,
        "device": torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else "cpu",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "verify": args.verify,
        "num_speculative_tokens": llm.config.num_speculative_tokens,
        "drafter": llm.drafter.name,
        "streams": args.streams,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "repeat": args.repeat,
        "engine": {"tokens_per_s": round(engine, 1), "seconds": [round(s, 4) for s in alone]},
        "server": {
            "tokens_per_s": round(server, 1),
            "seconds": [round(s, 4) for s in served],
            "first_token_ms": _spread(first),
            "between_chunks_ms": _spread(between),
        },
        "overhead": round(1 - server / engine, 4),
        "requests": (args.repeat + 1) * args.streams,
        "failed": failed,
        "different": different,
        "errors": sorted({answer.error for answer in streams if answer.error}),
        "versions": {
            "specla": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "uvicorn": version("uvicorn"),
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["specla", *argv[1:]]),
    }


def print_tables(report: dict[str, Any]) -> None:
    """What a person reads."""
    engine, server = report["engine"]["tokens_per_s"], report["server"]["tokens_per_s"]
    what = f"{report['dtype']} weights, drafts {report['num_speculative_tokens']} by {report['drafter']}"
    print(
        f"{report['streams']} streams of {report['max_tokens']} tokens, median of {report['repeat']}: {what}"
    )
    print(f"  engine alone  {engine:>9,.1f} tokens/s")
    share = 100 * report["overhead"]
    print(f"  server        {server:>9,.1f} tokens/s, {abs(share):.1f} % {'less' if share >= 0 else 'more'}")
    for name in ("first_token_ms", "between_chunks_ms"):
        each = report["server"][name]
        print(f"  {name[:-3].replace('_', ' '):<14}{each['median']:>7.1f} ms, 95 %: {each['p95']:.1f} ms")


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """A server as the flags ask for it, and its address."""
    flags = [
        "--port", "0", "--max-num-seqs", str(args.streams), "--prefix-cache-bytes", "0", "--seed", str(args.seed),
        "--device", args.device, "--dtype", args.dtype, "--verify", args.verify,
    ]  # fmt: skip
    for name in ("drafter", "threads", *FIELDS):
        if getattr(args, name) is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    model = [] if args.model is None else [args.model]
    command = [sys.executable, "-m", "specla", "serve", *model, *flags]
    open_to_all = {name: value for name, value in os.environ.items() if name != "SPECLA_API_KEY"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=open_to_all)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if " at http://" not in line:
            raise ValueError(f"the server did not start: {line.strip()}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def _stream(url: str, bodies: list[dict[str, Any]]) -> list[Streamed]:
    """Send requests at once and read their streams to the end."""
    where = urlsplit(url)
    answers = [Streamed() for _ in bodies]
    with selectors.DefaultSelector() as selector:
        start = time.perf_counter()
        for body, answer in zip(bodies, answers, strict=True):
            data = json.dumps(body).encode()
            connection = socket.create_connection((where.hostname or "", where.port or 80))
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
                + data
            )
            selector.register(connection, selectors.EVENT_READ, (connection, answer))
        while selector.get_map():
            for key, _ in selector.select():
                connection, answer = key.data
                data = connection.recv(READ)
                if data:
                    answer.data += data
                    answer.arrivals.append(time.perf_counter() - start)
                else:
                    selector.unregister(connection)
                    connection.close()
    for answer in answers:
        _read(answer)
    return answers


def _read(answer: Streamed) -> None:
    """The text of a stream's chunks, or what went wrong instead."""
    head, _, body = bytes(answer.data).partition(b"\r\n\r\n")
    if head and not head.startswith(b"HTTP/1.1 200 "):
        answer.error = body.decode(errors="replace")[:300]
        return
    events = _unchunked(body).decode(errors="replace").split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        answer.error = "the stream broke off"
        return
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    broken = next((chunk["error"]["message"] for chunk in chunks if "error" in chunk), None)
    answer.error = broken
    if broken is None:
        answer.text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def _unchunked(body: bytes) -> bytes:
    """The content of a body that was sent in chunks, as far as it came."""
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        parts.append(rest[:count])
        body = rest[count + 2 :] if count else b""
    return b"".join(parts)


def _spread(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=20) if len(values) > 1 else values * 19
    return {"median": round(median(values), 2), "p95": round(cuts[18], 2)}
