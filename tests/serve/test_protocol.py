"""What goes over the wire: server-sent events, disconnects, metrics."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}


def wait_running(live, count: int) -> None:
    deadline = time.monotonic() + 10
    while live.engine.snapshot().running < count and time.monotonic() < deadline:
        time.sleep(0.005)
    assert live.engine.snapshot().running == count


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_frames(live, path):
    body = {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    body |= {"stream": True, "max_tokens": 50, "ignore_eos": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", live.base + path, json=body) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        raw = reply.read().decode()
    frames = raw.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-2])
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks[:-1])
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 50


def test_a_client_that_leaves_a_stream_frees_its_pages(live):
    before = live.engine.snapshot().output_tokens
    with httpx.stream("POST", live.base + TEXT, json={**ENDLESS, "stream": True}) as reply:
        lines = reply.iter_lines()  # dropped, it would close the connection
        next(lines)
        wait_running(live, 1)
    live.wait_idle(3)
    assert live.engine.snapshot().output_tokens - before < 8000


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
def test_a_client_that_leaves_without_a_reply_frees_its_pages(live, prompt):
    before = live.engine.snapshot().output_tokens
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.base + TEXT, json={**ENDLESS, "prompt": prompt}, timeout=0.3)
    live.wait_idle(3)
    assert 0 < live.engine.snapshot().output_tokens - before < 8000


def test_health(live):
    assert httpx.get(live.base + "/health").json() == {"status": "ok"}


def scrape(live) -> dict[tuple[str, str], float]:
    """All samples, by name and the label besides the model's name."""
    reply = httpx.get(live.base + "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            samples[sample.name, ",".join(labels.values())] = sample.value
    return samples


def test_metrics(live):
    before = scrape(live)
    for n in (5, 7, 9):
        body = {"prompt": [9] * n, "max_tokens": 10 + n, "ignore_eos": True}
        assert httpx.post(live.base + TEXT, json=body).status_code == 200
    with httpx.stream("POST", live.base + TEXT, json={**ENDLESS, "stream": True}) as reply:
        lines = reply.iter_lines()  # dropped, it would close the connection
        next(lines)
        wait_running(live, 1)
        during = scrape(live)
    live.wait_idle(3)
    after = scrape(live)

    def grown(name: str, label: str = "") -> float:
        return after[f"jbatch:{name}", label] - before[f"jbatch:{name}", label]

    assert during["jbatch:num_requests_running", ""] == 1
    assert 0 < during["jbatch:kv_cache_usage_perc", ""] < 1
    assert after["jbatch:num_requests_running", ""] == after["jbatch:kv_cache_usage_perc", ""] == 0
    assert grown("request_success_total", "length") == 3
    assert grown("request_success_total", "abort") == 1
    assert grown("prompt_tokens_total") == 5 + 7 + 9 + 1
    assert grown("generation_tokens_total") > 15 + 17 + 19
    assert grown("request_generation_tokens_sum") == 15 + 17 + 19
    assert grown("request_prompt_tokens_sum") == 5 + 7 + 9
    assert grown("time_to_first_token_seconds_count") == 4
    assert grown("e2e_request_latency_seconds_count") == 3
    assert grown("request_time_per_output_token_seconds_count") == 3
    assert grown("inter_token_latency_seconds_count") >= 14 + 16 + 18
    assert grown("computed_rows_total") >= grown("decode_tokens_total") + grown("prefill_tokens_total") > 0
    assert grown("recomputed_tokens_total") == after["jbatch:num_pages_pinned", ""] == 0
    assert after["jbatch:running_limit", ""] == live.engine.config.max_running
    assert after["jbatch:chunk_limit", ""] >= 1
    assert after["jbatch:compiled_buckets", ""] >= 1
    assert after["jbatch:num_requests_stalled_by_reason", "pages"] == 0
    assert after["jbatch:e2e_request_latency_seconds_bucket", "0.3"] >= 0


def test_many_that_leave_at_once(live):
    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.base + TEXT, json=ENDLESS, timeout=0.5)

    threads = [threading.Thread(target=leave) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.wait_idle(2)
