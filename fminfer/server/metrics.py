"""What a server tells Prometheus: vLLM's names where they mean the same, else `fminfer:…`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fminfer.engine.engine_core import Finished
from fminfer.runtime.engine_api import Engine


@dataclass(slots=True, frozen=True)
class RequestTimes:
    """A finished request: how much was asked and drawn, and how long it took."""

    num_prompt_tokens: int
    num_generated_tokens: int
    finish_reasons: tuple[str, ...]  # one a choice
    queue_s: float
    first_token_s: float | None  # since it came; None: it draws nothing
    total_s: float

    @classmethod
    def of(cls, finished: Finished, total_s: float) -> RequestTimes:
        """Return those of an answer.

        Args:
            total_s: from its coming to its end, as the server saw it. What the engine did not see
                of that, such as tokenizing, counts as time in the queue.
        """
        times, usage = finished.times, finished.usage
        queue_s = max(0.0, total_s - times["batch_time"])
        num_drawn = usage.get("completion_tokens", 0)
        return cls(
            usage["prompt_tokens"],
            num_drawn,
            tuple(choice["finish_reason"] for choice in finished.choices)
            if finished.part == "choices"
            else ("stop",),
            queue_s,
            queue_s + times["prefill_time"] if num_drawn else None,
            total_s,
        )


class Metrics:
    """The metrics of one server, in a registry of its own.

    All methods may be called from any thread.

    Args:
        engine: is read when `render` is called.
        model_name: the label of every metric that is about the model.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._model_name = model_name
        registry.register(_EngineMetrics(engine, model_name))
        ProcessCollector(registry=registry)
        self._queue_s = self._histogram(
            "vllm:request_queue_time_seconds", "From a request's coming to its admission.", SECONDS
        )
        self._first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's coming to its first token.",
            SECONDS,
        )
        self._gap_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a streamed choice.", SECONDS
        )
        self._total_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's coming to its end.", SECONDS
        )
        self._prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS
        )
        self._generated_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens that a finished request has drawn.", TOKENS
        )
        self._finished = self._counter(
            "vllm:request_success", "Choices that have ended, by their reason.", "finished_reason"
        )
        self._refused = self._counter(
            "fminfer:requests_refused", "Requests without an answer, by HTTP status.", "status"
        )
        for reason in ("stop", "length", "abort"):  # a rate needs the 0 before the first one
            self._finished.labels(model_name, reason)

    def register(self, collector: Collector) -> None:
        """Have something else told, too."""
        self._registry.register(collector)

    def observe(self, answered: RequestTimes) -> None:
        """Count a request that was answered."""
        self._prompt_tokens.observe(answered.num_prompt_tokens)
        self._generated_tokens.observe(answered.num_generated_tokens)
        self._queue_s.observe(answered.queue_s)
        self._total_s.observe(answered.total_s)
        if answered.first_token_s is not None:
            self._first_token_s.observe(answered.first_token_s)
        for reason in answered.finish_reasons:
            self._finished.labels(self._model_name, reason).inc()

    def observe_gap(self, seconds: float) -> None:
        """Note the time between two tokens of a streamed choice."""
        self._gap_s.observe(seconds)

    def count_cancelled(self) -> None:
        """Count a request whose client left before its end."""
        self._finished.labels(self._model_name, "abort").inc()

    def count_refused(self, status: int) -> None:
        """Count a request that was answered with an error of this HTTP status."""
        self._refused.labels(self._model_name, str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """Return what `/metrics` answers: the body, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _counter(self, name: str, meaning: str, label: str) -> Counter:
        return Counter(name, meaning, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(name, meaning, ["model_name"], buckets=buckets, registry=self._registry)
        return metric.labels(self._model_name)


class _EngineMetrics:
    """Reads an engine each time that somebody asks for the metrics."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine has counted, and how it stands."""
        stats, state = self._engine.stats, self._engine.state
        # Those that were fed or found in the cache: it never falls, as a counter must not.
        num_prompt_tokens = stats.num_prompt_tokens + stats.num_cached_tokens
        cache = self._engine.runs.cache
        num_asked, num_found = (0, 0) if cache is None else (cache.num_asked, cache.num_found)
        for name, value in {
            "vllm:num_requests_running": state.num_running,
            "vllm:num_requests_waiting": state.num_waiting,
            "vllm:kv_cache_usage_perc": state.kv_usage,
            "fminfer:kv_cache_tokens": stats.num_kv_tokens,
        }.items():
            yield self._add_value(GaugeMetricFamily(name, GAUGES[name], labels=LABELS), value)
        yield self._weights()
        yield from self._memory()
        for name, value in {
            "vllm:prompt_tokens": num_prompt_tokens,
            "vllm:generation_tokens": stats.num_generated_tokens,
            "vllm:prefix_cache_queries": num_prompt_tokens,
            "vllm:prefix_cache_hits": stats.num_cached_tokens,
            "vllm:num_preemptions": stats.num_put_back,
            "fminfer:tokens_fed_again": stats.num_again_tokens,
            "fminfer:engine_steps": stats.num_steps,
            "fminfer:result_cache_queries": num_asked,
            "fminfer:result_cache_hits": num_found,
        }.items():
            yield self._add_value(CounterMetricFamily(name, COUNTERS[name], labels=LABELS), value)

    def _weights(self) -> GaugeMetricFamily:
        """Return what the weights take, with the format that most of them have."""
        name, facts = "fminfer:weight_bytes", self._engine.facts
        family = GaugeMetricFamily(name, GAUGES[name], labels=[*LABELS, "format", "dtype"])
        family.add_metric([self._model_name, facts.weight_dtype, facts.dtype], facts.weight_bytes)
        return family

    def _memory(self) -> Iterator[GaugeMetricFamily]:
        """Yield the peaks of all ranks, and the forecast of the memory that it is of."""
        families: dict[str, GaugeMetricFamily] = {}
        for each in self._engine.memory:
            found = {"fminfer:peak_memory_bytes": each.peak.host_bytes}
            if each.is_on_gpu:
                found["fminfer:gpu_peak_memory_bytes"] = each.peak.gpu_reserved_bytes
                found["fminfer:gpu_peak_tensor_bytes"] = each.peak.gpu_bytes
            where = "gpu_" * each.is_on_gpu
            found[f"fminfer:{where}foreseen_memory_bytes"] = each.foreseen_bytes
            for name, value in found.items():
                new = GaugeMetricFamily(name, GAUGES[name], labels=[*LABELS, "rank"])
                family = families.setdefault(name, new)
                family.add_metric([self._model_name, str(each.rank)], value)
        yield from families.values()

    def _add_value(self, family: Family, value: float) -> Family:
        family.add_metric([self._model_name], value)
        return family


def _steps(first: int, last: int) -> tuple[float, ...]:
    """Return 1, 2 and 5 times each power of ten from 10^first to 10^last."""
    return tuple(float(f"{m}e{power}") for power in range(first, last + 1) for m in (1, 2, 5))


LABELS = ["model_name"]
SECONDS = _steps(-3, 2)  # limits of buckets
TOKENS = _steps(0, 5)
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)
GAUGES = {
    "vllm:num_requests_running": "Sequences that run.",
    "vllm:num_requests_waiting": "Prompts that have not begun.",
    "vllm:kv_cache_usage_perc": "Part of the KV cache that running sequences hold, from 0 to 1.",
    "fminfer:kv_cache_tokens": "Tokens that the KV cache can hold.",
    "fminfer:peak_memory_bytes": "Most memory of a rank's process so far.",
    "fminfer:foreseen_memory_bytes": "Memory that was forecast for a rank's process, on a CPU.",
    "fminfer:weight_bytes": "Weights in memory. format: of most of them; dtype: of the arithmetic.",
    "fminfer:gpu_peak_memory_bytes": "Most memory that a rank has taken of its GPU so far.",
    "fminfer:gpu_peak_tensor_bytes": "Most of it that tensors had.",
    "fminfer:gpu_foreseen_memory_bytes": "Memory of its GPU that was forecast for a rank.",
}
COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens that were computed, or found in the prefix cache.",
    "vllm:generation_tokens": "Tokens that were drawn.",
    "vllm:prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens that the prefix cache had.",
    "vllm:num_preemptions": "Rows that were preempted and fed again.",
    "fminfer:tokens_fed_again": "Prompt tokens that were fed a second time for these.",
    "fminfer:engine_steps": "Steps that were computed.",
    "fminfer:result_cache_queries": "Requests that were looked up among the kept answers.",
    "fminfer:result_cache_hits": "Requests that a kept answer was taken for.",
}
