"""specla's server as Ray Serve replicas: one engine each, requests spread over them, dead ones replaced.

pip install -e '.[server]' 'ray[serve]'                         # in a clone
python examples/ray_serve.py --replicas 2                        # here
cd examples && serve run --working-dir . ray_serve:build max_replicas=8 num_gpus=1 model=/ABSOLUTE/PATH
                                                                 # on a cluster that `ray start` has made
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from ray import serve

NAME = "specla"
DEFAULTS = {
    "model": None,  # and drafter: as for `LLM`
    "drafter": None,
    "max_num_seqs": 8,  # of a replica
    "prefix_cache_bytes": 256 << 20,  # of a replica
    "replicas": 2,
    "min_replicas": 1,
    "max_replicas": None,  # if given, their number follows the load, and `replicas` has no say
    "num_cpus": 1,  # of a replica
    "num_gpus": 0,
    "api_key": None,
}


def build(args: dict[str, Any]) -> serve.Application:
    """For `serve.run` and `serve run`: `args` override DEFAULTS."""
    return deploy(args, make_app)


def make_app(args: dict[str, Any]) -> FastAPI:
    """What a replica serves; runs there."""
    from specla import LLM
    from specla.server.app import create_app
    from specla.server.runner import AsyncEngine

    llm = LLM(
        args["model"],
        args["drafter"],
        max_num_seqs=int(args["max_num_seqs"]),
        prefix_cache_bytes=int(args["prefix_cache_bytes"]),
    )
    engine = AsyncEngine(llm)
    app = create_app(engine, api_key=args["api_key"])
    app.state.engine = engine
    return app


def deploy(args: dict[str, Any], make_app: Callable[[dict[str, Any]], FastAPI]) -> serve.Application:
    """Replicas of what `make_app` makes."""
    if unknown := sorted(set(args) - set(DEFAULTS)):
        raise ValueError(f"unknown arguments {unknown}, allowed are {list(DEFAULTS)}")
    args = DEFAULTS | args
    slots = int(args["max_num_seqs"])
    scale: dict[str, Any] = {"num_replicas": int(args["replicas"])}
    if args["max_replicas"] is not None:
        # a replica whose slots are full is as fast as it gets: the next request is better off elsewhere
        bounds = {"min_replicas": int(args["min_replicas"]), "max_replicas": int(args["max_replicas"])}
        scale = {"autoscaling_config": bounds | {"target_ongoing_requests": slots}}

    @serve.deployment(
        name=NAME,
        max_ongoing_requests=2 * slots,  # what is beyond waits in the proxy, for any replica
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=120,  # for answers that were begun when a replica is taken away
        ray_actor_options={"num_cpus": float(args["num_cpus"]), "num_gpus": float(args["num_gpus"])},
        **scale,
    )
    @serve.ingress(lambda: make_app(args))
    class Replica:
        app: FastAPI  # what make_app has made

        def check_health(self) -> None:
            """Serve replaces a replica for which this raises."""
            engine = self.app.state.engine
            if not engine.healthy:
                raise RuntimeError(f"the engine has failed: {engine.failure}")

    return Replica.bind()


def main() -> None:
    parser = argparse.ArgumentParser(description="specla's server as Ray Serve replicas on this machine.")
    parser.add_argument("--model", help="a checkpoint; default: the bundled pair")
    parser.add_argument("--replicas", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    args = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    with suppress(KeyboardInterrupt):
        serve.run(build({"model": args.model, "replicas": args.replicas}), name=NAME, blocking=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
