"""Prometheus metrics, with vLLM's names and buckets (vllm/v1/metrics/loggers.py) under the prefix `jbatch:`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jbatch.engine import Engine
from jbatch.request import FinishReason

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINISHED_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}
"""Ours to vLLM's."""


def token_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    series = (digit * 10**exponent for exponent in range(len(str(most))) for digit in (1, 2, 5))
    return [value for value in series if value <= most]


class Metrics:
    """The server's own registry. Not locked: all but `render` belongs to the event loop."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        self._model_name = model_name
        tokens = token_buckets(engine.config.max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a token.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_SECONDS
        )
        self.per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time for a token after its first.",
            TOKEN_SECONDS,
        )
        self.request_seconds = self._histogram(
            "e2e_request_latency_seconds", "From submission to the last token.", REQUEST_SECONDS
        )
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.request_generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", tokens
        )
        finished = Counter(
            "jbatch:request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.finished = {reason: finished.labels(model_name, theirs) for reason, theirs in FINISHED_REASONS.items()}

    def begin(self, prompt_tokens: int) -> Meter:
        """Starts the clock of a request."""
        return Meter(self, prompt_tokens)

    def render(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"jbatch:{name}", text, ("model_name",), registry=self._registry)
        return family.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] | list[int]) -> Histogram:
        family = Histogram(f"jbatch:{name}", text, ("model_name",), buckets=buckets, registry=self._registry)
        return family.labels(self._model_name)


class Meter:
    """Times one request."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._begun = time.perf_counter()
        self._first = self._last = self._begun

    def token(self) -> None:
        """A token came."""
        now = time.perf_counter()
        self._tokens += 1
        if self._tokens == 1:
            self._first = now
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
            self._metrics.first_token.observe(now - self._begun)
        else:
            self._metrics.inter_token.observe(now - self._last)
        self._last = now

    def finish(self, reason: FinishReason) -> None:
        """The request ended. Only those that ran to their end enter the histograms of requests."""
        self._metrics.finished[reason].inc()
        if reason not in ("stop", "length"):
            return
        self._metrics.request_seconds.observe(self._last - self._begun)
        self._metrics.request_prompt.observe(self._prompt_tokens)
        self._metrics.request_generation.observe(self._tokens)
        if self._tokens > 1:
            self._metrics.per_output_token.observe((self._last - self._first) / (self._tokens - 1))


class _EngineCollector(Collector):
    """The engine's snapshot, taken when Prometheus asks."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        now = self._engine.snapshot()
        used = 1 - now.pages_free / now.pages_total
        gauges = {
            "num_requests_running": ("Requests that hold pages of KV cache.", now.running),
            "num_requests_waiting": ("Requests that wait, on the device or the host.", now.waiting + now.queued),
            "kv_cache_usage_perc": ("Share of the KV cache in use; 1 is all of it.", used),
            "num_pages_cached": ("Free pages whose content a request may still share.", now.pages_cached),
            "num_pages_pinned": ("Free pages kept for requests that asked for it.", now.pages_pinned),
            "running_limit": ("Most requests that may run now.", now.running_limit),
            "chunk_limit": ("Most prefill rows in a step now.", now.chunk_limit),
            "padding_share": ("Share of computed token rows that held no token.", now.padding_share),
            "compiled_buckets": ("Step shapes ready to use.", len(now.buckets)),
        }
        for name, (text, value) in gauges.items():
            yield self._filled(GaugeMetricFamily(f"jbatch:{name}", text, labels=("model_name",)), value)
        counters = {
            "generation_tokens": ("Tokens generated.", now.output_tokens),
            "num_preemptions": ("Requests that lost their pages and start over.", now.preemptions),
            "recomputed_tokens": ("Tokens computed again after a request lost its pages.", now.recomputed_tokens),
            "prefix_cache_queries": ("Tokens of requests as they started.", now.prefix_queries),
            "prefix_cache_hits": ("Tokens of those that were in the prefix cache.", now.prefix_hits),
            "steps": ("Steps of the engine.", now.steps),
            "decode_tokens": ("Tokens computed in decode rows.", now.decode_tokens),
            "prefill_tokens": ("Tokens computed in chunk rows.", now.prefill_tokens),
            "computed_rows": ("Token rows computed, padding included.", now.computed_rows),
            "host_seconds": ("Time the engine's thread spent dispatching steps.", now.host_seconds),
            "wait_seconds": ("Time the engine's thread spent waiting for the device.", now.wait_seconds),
        }
        for name, (text, value) in counters.items():
            yield self._filled(CounterMetricFamily(f"jbatch:{name}", text, labels=("model_name",)), value)
        yield self._reasons({"slot": now.queued, **now.stalled_by_reason})

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric((self._model_name,), value)
        return family

    def _reasons(self, counts: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(
            "jbatch:num_requests_stalled_by_reason",
            "Requests that computed nothing in the last step, by what they lacked.",
            labels=("model_name", "reason"),
        )
        for reason, count in counts.items():
            family.add_metric((self._model_name, reason), count)
        return family
