"""Apps around tiny random models on a real port, in a thread of this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from specla import LLM
from specla.server.app import create_app
from specla.server.heads import BoundedProtocol
from specla.server.runner import AsyncEngine
from tests.checkpoints import save_checkpoint

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MAX_DRAFT = 6  # of every server: a fixed number, as what pays would differ from run to run


@dataclass
class Serving:
    """A server at `url`; `alone` is the same model, to ask without one."""

    url: str
    engine: AsyncEngine
    alone: LLM
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that must end well."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            blocks = "".join(response.iter_text()).split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]

    def idle(self) -> None:
        """Wait until nothing runs, and check that nothing is left behind."""
        end = time.monotonic() + 30
        while self.engine.num_live or self.engine.stats().num_free_slots < self.engine.max_num_seqs:
            assert time.monotonic() < end, (self.engine.num_live, self.engine.stats())
            time.sleep(0.01)
        assert self.engine.stats().num_running == self.engine.stats().num_waiting == 0


def save_model(directory: Path, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """A tiny random checkpoint that never ends by itself, with a chat template."""
    save_checkpoint(directory, **changes)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@contextmanager
def serving(directory: Path | None, max_waiting: int = 512, **options: Any) -> Iterator[Serving]:
    """Serve a checkpoint; `options` are those of `create_app`."""
    drafts = {"num_speculative_tokens": MAX_DRAFT}
    llm = LLM(directory, speculative_config=drafts, max_num_seqs=4, prefix_cache_bytes=1 << 20)
    engine = AsyncEngine(llm, max_waiting)
    app = create_app(engine, **options)
    server = uvicorn.Server(
        uvicorn.Config(app, http=BoundedProtocol, log_level="critical", lifespan="off", ws="none")
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        key = options.get("api_key")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
                yield Serving(url, engine, LLM(directory), client)
        finally:
            server.should_exit = True
            thread.join()
            engine.close()
