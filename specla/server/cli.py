"""`specla serve`: its flags, and the mistakes in them. Needs neither torch nor the extra `server`."""

from __future__ import annotations

import argparse
import os
import re
from importlib.util import find_spec
from typing import Any

from specla.flags import add_model, add_speculation

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client", "jinja2")


def add_serve(commands: Any) -> None:
    """Add the `serve` command to the command line."""
    p = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="Serve a model over HTTP: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, "
        "/detokenize, /health and /metrics, and a page at /. SIGTERM or Ctrl-C ends it once what runs has ended; a "
        "second one ends it at once.",
    )
    add_model(p)
    where = p.add_argument_group("where")
    where.add_argument(
        "--host", default="127.0.0.1", metavar="NAME", help="default: %(default)s; 0.0.0.0: all"
    )
    where.add_argument(
        "--port", type=int, default=8000, metavar="N", help="default: %(default)s; 0: a free one"
    )
    where.add_argument(
        "--api-key",
        default=os.environ.get("SPECLA_API_KEY") or None,
        metavar="KEY",
        help="what clients must show; default: $SPECLA_API_KEY, else nothing",
    )
    where.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model; default: its directory's name",
    )
    where.add_argument(
        "--metrics-prefix",
        default="specla",
        metavar="NAME",
        help="default: %(default)s; vllm: as vLLM's tools expect",
    )
    limits = p.add_argument_group("limits")
    limits.add_argument(
        "--max-num-seqs",
        type=int,
        default=8,
        metavar="N",
        help="sequences that run together; default: %(default)s",
    )
    limits.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N",
        help="tokens of prompts that are read between two rounds; default: 256 on a CPU, 2048 on a GPU",
    )  # fmt: skip
    limits.add_argument(
        "--prefix-cache-bytes", type=int, default=256 << 20, metavar="N",
        help="for states from which prompts that begin alike go on, 0: none; default: %(default)s",
    )  # fmt: skip
    limits.add_argument(
        "--max-waiting", type=int, default=512, metavar="N",
        help="sequences that wait, before 429 is the answer; default: %(default)s",
    )  # fmt: skip
    limits.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="tokens of prompt and answer together; default: max_position_embeddings of config.json",
    )  # fmt: skip
    limits.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens of an answer; default: as far as the context reaches",
    )
    limits.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, metavar="N", help="of a request; default: %(default)s"
    )
    limits.add_argument(
        "--drain-timeout", type=float, default=60, metavar="S",
        help="seconds that what runs may take to end after SIGTERM; default: %(default)s",
    )  # fmt: skip
    p.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of which requests without one get theirs; default: %(default)s",
    )
    p.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own choice)")
    p.add_argument("--access-log", action="store_true", help="a line for each request, on stdout")
    add_speculation(
        p.add_argument_group("speculation"),
        drafter="the one that comes with the model, else ngram",
        told=False,
    )
    p.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 when all that ran could end, 1 when the time for that was over."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"serve needs {', '.join(missing)}: pip install -e '.[server]', in a clone of specla"
        )
    for name, least, most in (("port", 0, 65535), ("max_waiting", 0, 10**6), ("max_model_len", 1, None),
                              ("max_tokens", 1, None), ("max_body_bytes", 1, None), ("drain_timeout", 0, 10**6),
                              ("threads", 1, 4096)):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not least <= value <= (value if most is None else most):
            allowed = f"at least {least}" if most is None else f"in {least}..{most}"
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {value}")
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", args.metrics_prefix):
        raise ValueError(f"--metrics-prefix must be letters, digits and _, got {args.metrics_prefix!r}")
    if args.api_key is not None and not args.api_key.strip():
        raise ValueError("--api-key must not be empty")

    from specla.server.serve import serve

    return serve(args)
