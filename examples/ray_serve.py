"""specla's server as Ray Serve replicas: one engine each, requests spread over them, dead ones replaced.

pip install 'specla[server]' 'ray[serve]'
python examples/ray_serve.py --replicas 2                        # here
serve run ray_serve:build model=PATH max_replicas=8 num_gpus=1   # on a cluster that ray start has made
"""

from __future__ import annotations

import argparse
from typing import Any

from fastapi import FastAPI
from ray import serve

NAME = "specla"


def build(args: dict[str, Any]) -> serve.Application:
    """An application for `serve.run` and `serve run`.

    Args:
        args: model, drafter (as for `LLM`), max_num_seqs of a replica; replicas, or min_replicas and max_replicas to
            follow the load; num_cpus and num_gpus of a replica; api_key.
    """
    known = {
        "model",
        "drafter",
        "max_num_seqs",
        "replicas",
        "min_replicas",
        "max_replicas",
        "num_cpus",
        "num_gpus",
    }
    if unknown := sorted(set(args) - known - {"api_key"}):
        raise ValueError(f"unknown arguments {unknown}, allowed are {sorted(known | {'api_key'})}")
    slots = int(args.get("max_num_seqs", 8))
    if "max_replicas" in args:
        least, most = int(args.get("min_replicas", 1)), int(args["max_replicas"])
        # a replica whose slots are full is as fast as it gets: the next request is better off elsewhere
        scale = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": slots,
            }
        }
    else:
        scale = {"num_replicas": int(args.get("replicas", 2))}

    def make_app() -> FastAPI:
        """Runs in each replica."""
        from specla import LLM
        from specla.server.app import create_app
        from specla.server.runner import AsyncEngine

        llm = LLM(args.get("model"), args.get("drafter"), max_num_seqs=slots)
        engine = AsyncEngine(llm)
        app = create_app(engine, api_key=args.get("api_key"))
        app.state.engine = engine
        return app

    @serve.deployment(
        name=NAME,
        max_ongoing_requests=2 * slots,  # what is beyond waits in the proxy, for any replica
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=120,  # answers that were begun when a replica is taken away
        ray_actor_options={
            "num_cpus": float(args.get("num_cpus", 1)),
            "num_gpus": float(args.get("num_gpus", 0)),
        },
        **scale,
    )
    @serve.ingress(make_app)
    class Replica:
        app: FastAPI  # what make_app has made

        def check_health(self) -> None:
            """Serve replaces a replica for which this raises."""
            engine = self.app.state.engine
            if not engine.healthy:
                raise RuntimeError(f"the engine has died: {engine.failure}")

    return Replica.bind()


def main() -> None:
    parser = argparse.ArgumentParser(description="specla's server as Ray Serve replicas on this machine.")
    parser.add_argument("--model", help="a checkpoint; default: the bundled pair")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(build({"model": args.model, "replicas": args.replicas}), name=NAME, blocking=True)


if __name__ == "__main__":
    main()
