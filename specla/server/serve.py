"""Serves until it is told to end, and then lets what runs come to its end."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import torch
import uvicorn

from specla.engine.llm import LLM
from specla.engine.params import SamplingParams
from specla.flags import load_llm
from specla.server.app import create_app
from specla.server.heads import BoundedProtocol
from specla.server.runner import AsyncEngine

FLUSH = 10  # seconds that clients have to read what was sent to them, once nothing runs


def serve(args: argparse.Namespace) -> int:
    """Load what the flags of `specla serve` name and serve it.

    Returns:
        1 when sequences had to be ended before their end, else 0.

    Raises:
        ValueError, OSError: in one line, before anything is served.
    """
    listener = _bind(args.host, args.port)
    with listener:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        # a thread's OpenMP team ends with it; beside that of the engine's thread it would put both to sleep at barriers
        with ThreadPoolExecutor(1) as loader:
            llm = loader.submit(_load, args).result()
        engine = AsyncEngine(llm, args.max_waiting)
        try:
            app = create_app(
                engine,
                model_name=args.served_model_name,
                api_key=args.api_key,
                metrics_prefix=args.metrics_prefix,
                max_model_len=args.max_model_len,
                max_tokens=args.max_tokens,
                max_body_bytes=args.max_body_bytes,
            )
            config = uvicorn.Config(
                app,
                http=BoundedProtocol,
                lifespan="off",
                ws="none",
                log_level="info" if args.access_log else "warning",
                access_log=args.access_log,
                server_header=False,
                timeout_keep_alive=75,  # longer than the pools of clients keep a connection that is idle
                timeout_graceful_shutdown=FLUSH,
            )
            host, port = listener.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            server = _Server(
                config, engine, args.drain_timeout, f"serving {llm.model_path.name} at {address}"
            )
            server.run(sockets=[listener])
        finally:
            engine.close()
    return 1 if server.cut_short else 0


def _load(args: argparse.Namespace) -> LLM:
    llm = load_llm(
        args,
        max_num_seqs=args.max_num_seqs,
        seed=args.seed,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefix_cache_bytes=args.prefix_cache_bytes,
    )
    for temperature in (0.0, 1.0):
        llm._engine.prepare(SamplingParams(temperature))
    return llm


class _Server(uvicorn.Server):
    """The first signal drains: new requests are refused, and the end comes when nothing runs, or by a second one."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, timeout: float, ready: str):
        super().__init__(config)
        self._engine, self._timeout, self._ready = engine, timeout, ready
        self._deadline: float | None = None
        self.cut_short = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _tell(self._ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's own, which would end the process by the signal instead of by an exit status."""
        self._engine.draining = True
        again = self._deadline is not None
        self._deadline = 0.0 if again else time.monotonic() + self._timeout

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            running = self._engine.num_live
            if running and time.monotonic() > self._deadline:
                _tell(f"ending {running} sequences before their end")
                self.cut_short = True
                await asyncio.to_thread(self._engine.close)
            self.should_exit = self.should_exit or not running or self.cut_short
        return await super().on_tick(counter)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    return listener


def _tell(message: str) -> None:
    print(f"specla: {message}", file=sys.stderr, flush=True)
