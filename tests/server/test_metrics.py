"""/metrics: what was asked for and made, counted once and under vLLM's names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.serving import MAX_DRAFT, Serving, save_model, serving

TEXT = "the cat sat on the mat, the cat sat on the mat, the cat sat on"
LABELS = {"model_name": "tiny", "engine": "0"}


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(save_model(tmp_path_factory.mktemp("metrics") / "tiny"), metrics_prefix="vllm") as made:
        yield made


def read(server: Serving) -> dict[str, float]:
    """Every sample that is no bucket, by name and the labels that tell it from its like."""
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            more = {k: v for k, v in sample.labels.items() if k not in LABELS}
            assert {k: v for k, v in sample.labels.items() if k in LABELS} == LABELS
            if "le" not in more:
                found["/".join([sample.name.removeprefix("vllm:"), *more.values()])] = sample.value
    return found


def test_counts_add_up(fresh: Serving):
    before = read(fresh)
    assert {
        name: value for name, value in before.items() if value and not name.split("/")[0].endswith("_created")
    } == {}
    asked = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    events = fresh.events("/v1/completions", prompt=TEXT, stream_rounds=True, **asked)
    answer = fresh.complete(prompt=[TEXT, "12 + 34"], n=2, **asked)
    fresh.complete(prompt=TEXT, stop_token_ids=list(range(89)), max_tokens=5)
    found = read(fresh)

    length = answer["usage"]["prompt_tokens"] - len(fresh.alone.tokenizer.encode("12 + 34"))
    assert found["prompt_tokens_total"] == length + 2 * answer["usage"]["prompt_tokens"] + length
    assert found["generation_tokens_total"] == 30 + 4 * 30 + 1
    assert found["request_success_total/length"] == 5
    assert found["request_success_total/stop"] == 1
    assert found["request_success_total/abort"] == found["request_success_total/error"] == 0
    assert found["e2e_request_latency_seconds_count"] == found["time_to_first_token_seconds_count"] == 6
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["prefix_cache_queries_total"] == found["prompt_tokens_total"]
    assert found["prefix_cache_hits_total"] <= found["prefix_cache_queries_total"]

    accepted = found["spec_decode_num_accepted_tokens_total"]
    positions = [found[f"spec_decode_num_accepted_tokens_per_pos_total/{n}"] for n in range(MAX_DRAFT)]
    assert sum(positions) == accepted > 0
    assert positions == sorted(positions, reverse=True)
    assert (
        positions[0] <= found["spec_decode_num_drafts_total"] <= found["spec_decode_num_draft_tokens_total"]
    )
    drafted = [event["specla"]["tree"]["tokens"][1:] for event in events]
    assert found["spec_decode_num_draft_tokens_total"] >= sum(map(len, drafted)) > 0
    # every token but those of the first rounds came some time after the one before
    assert found["inter_token_latency_seconds_count"] <= found["generation_tokens_total"] - 6


def test_running_waiting_and_aborted_are_seen(fresh: Serving):
    asked = {"prompt": TEXT, "n": 6, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with fresh.client.stream("POST", "/v1/completions", json=asked) as response:
        stream = response.iter_bytes()  # which closes the connection when it goes
        next(stream)
        found = read(fresh)
        assert found["num_requests_running"] + found["num_requests_waiting"] == 6
        assert 1 <= found["num_requests_running"] <= 4
    fresh.idle()
    found = read(fresh)
    assert found["request_success_total/abort"] == 6
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0


def test_who_leaves_before_the_engine_has_heard_of_it_is_counted_too(fresh: Serving):
    heard = threading.Event()
    fresh.engine._commands.put(heard.wait)  # type: ignore[arg-type]
    try:
        with pytest.raises(httpx.ReadTimeout):
            fresh.client.post("/v1/completions", json={"prompt": TEXT}, timeout=0.3)
        end = time.monotonic() + 30
        while fresh.engine.num_live:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        heard.set()
    fresh.idle()
    assert read(fresh)["request_success_total/abort"] == 1


def test_a_prompt_seen_before_hits_the_prefix_cache(fresh: Serving):
    prompt = list(range(2, 60)) * 10
    for _ in range(3):
        fresh.complete(prompt=prompt, max_tokens=1)
    found = read(fresh)
    assert found["prefix_cache_queries_total"] == 3 * len(prompt)
    fresh.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=0)  # scored, and so read in full
    assert read(fresh)["prefix_cache_queries_total"] == 3 * len(prompt)
    assert found["prefix_cache_hits_total"] > 400
    assert found["prefix_cache_bytes"] > 0
