"""Prometheus metrics by vLLM's names, so that its dashboards and benchmarks read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specla.server.runner import AsyncEngine, Delta, Job

# vLLM's buckets, in seconds
_SLOW = (0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_SLOW, 160, 640, 2560)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_SLOW)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """The metrics of one app, in a registry of their own."""

    def __init__(self, engine: AsyncEngine, model_name: str, prefix: str):
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, [*labels, *more], registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"{prefix}:{name}", text, list(labels), buckets=buckets, registry=self.registry)
            return made.labels(**labels)

        self.registry.register(_Scheduler(engine, prefix, labels))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.").labels(**labels)
        self.generation_tokens = counter("generation_tokens", "Tokens generated.").labels(**labels)
        self.prefix_queries = counter("prefix_cache_queries", "Tokens of prompts looked up.").labels(**labels)
        self.prefix_hits = counter("prefix_cache_hits", "Tokens of prompts found.").labels(**labels)
        self.has_prefix_cache = engine.has_prefix_cache
        self.drafts = counter("spec_decode_num_drafts", "Rounds that verified drafts.").labels(**labels)
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens drafted.").labels(**labels)
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafts accepted.").labels(**labels)
        per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted by depth in their tree.", "position"
        )
        self.at_position = [
            per_position.labels(**labels, position=str(position)) for position in range(engine.max_draft)
        ]
        success = counter("request_success", "Sequences that ended, by how.", "finished_reason")
        self.success = {reason: success.labels(**labels, finished_reason=reason) for reason in REASONS}
        self.first = histogram("time_to_first_token_seconds", "From a request to its first token.", FIRST)
        self.between = histogram(
            "inter_token_latency_seconds", "Between the rounds of a sequence, for each token.", BETWEEN
        )
        self.whole = histogram("e2e_request_latency_seconds", "From a request to its end.", WHOLE)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class RequestMetrics:
    """Counts what one request brings, from now on."""

    def __init__(self, metrics: Metrics, jobs: Sequence[Job]):
        self._metrics = metrics
        self._start = time.perf_counter()
        self._jobs, self._last = jobs, [0.0] * len(jobs)
        self._running = set(range(len(jobs)))

    def observe(self, deltas: Sequence[Delta]) -> None:
        """Record deltas that have just arrived."""
        now, metrics = time.perf_counter(), self._metrics
        for delta in deltas:
            count, last = len(delta.token_ids), self._last[delta.index]
            if count and not last:
                metrics.first.observe(now - self._start)
                job = self._jobs[delta.index]
                length = len(job.token_ids)
                metrics.prompt_tokens.inc(length)
                if metrics.has_prefix_cache and job.params.prompt_logprobs is None:  # else all of it is read
                    metrics.prefix_queries.inc(length)
                    metrics.prefix_hits.inc(delta.num_cached)
            elif count:
                for _ in range(count):
                    metrics.between.observe((now - last) / count)
            if count:
                self._last[delta.index] = now
                metrics.generation_tokens.inc(count)
            if delta.num_draft_tokens:
                metrics.drafts.inc()
                metrics.draft_tokens.inc(delta.num_draft_tokens)
                metrics.accepted.inc(delta.num_accepted)
                for position in range(delta.num_accepted):
                    metrics.at_position[position].inc()
            if delta.finish_reason is not None:
                self._end(delta.index, delta.finish_reason)

    def end(self) -> None:
        """Nothing more will come: what has not ended was aborted."""
        for index in list(self._running):
            self._end(index, "abort")

    def _end(self, index: int, reason: str) -> None:
        self._running.discard(index)
        self._metrics.success[reason].inc()
        self._metrics.whole.observe(time.perf_counter() - self._start)


class _Scheduler(Collector):
    """What the engine itself counts, read when asked for."""

    def __init__(self, engine: AsyncEngine, prefix: str, labels: dict[str, str]):
        self._engine, self._prefix, self._labels = engine, prefix, labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        waiting = max(0, self._engine.num_live - stats.num_running)
        yield self._gauge("num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait or are being read.", waiting)
        yield self._gauge(
            "prefix_cache_bytes", "Size of the states that the prefix cache keeps.", stats.prefix_bytes
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
