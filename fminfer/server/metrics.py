"""What Prometheus reads of a server: vLLM's names where they mean the same, else `fminfer:…`."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fminfer.core.messages import RankMemory
from fminfer.engine.engine_core import Finished
from fminfer.engine.stats import ObservableEngine
from fminfer.runtime.engine_api import Engine
from fminfer.server.batch_engine import BatchEngine
from fminfer.server.batches.batch_run import RowKind
from fminfer.server.batches.batch_work import BatchWork

WINDOW_S = 5.0  # of the means of tokens a second


def _make_bucket_limits(first: int, last: int) -> tuple[float, ...]:
    """Return 1, 2 and 5 times each power of ten from 10^first to 10^last."""
    return tuple(
        float(f"{m}e{power}") for power in range(first, last + 1) for m in (1, 2, 5)
    )


SECONDS = _make_bucket_limits(-3, 2)
TOKENS = _make_bucket_limits(0, 5)  # limits of buckets


# by name, then by the values of its labels
Values = dict[str, dict[tuple[str, ...], float]]
HELPS = {
    "vllm:request_queue_time_seconds": "From a request's coming to its admission.",
    "vllm:time_to_first_token_seconds": "From a request's coming to its first token.",
    "vllm:inter_token_latency_seconds": "Between two tokens of a streamed choice.",
    "vllm:e2e_request_latency_seconds": "From a request's coming to its end.",
    "vllm:request_prompt_tokens": "Prompt tokens of a finished request.",
    "vllm:request_generation_tokens": "Tokens that a finished request has drawn.",
    "vllm:request_success": "Choices that have ended, by their reason.",
    "fminfer:requests_refused": "Requests without an answer, by HTTP status.",
    "vllm:num_requests_running": "Sequences that run.",
    "vllm:num_requests_waiting": "Prompts that have not begun.",
    "vllm:kv_cache_usage_perc": "Part of the KV cache that running sequences hold, from 0 to 1.",
    "fminfer:kv_cache_tokens": "Tokens that the KV cache can hold.",
    "fminfer:same_answers": "1: answers do not depend on other rows. 0: they may.",
    "fminfer:peak_memory_bytes": "Most memory of a rank's process so far.",
    "fminfer:foreseen_memory_bytes": "Memory that was forecast for a rank's process, on a CPU.",
    "fminfer:weight_bytes": (
        "Weights in memory. format: of most of them; dtype: of the arithmetic."
    ),
    "fminfer:gpu_peak_memory_bytes": "Most memory that a rank has taken of its GPU so far.",
    "fminfer:gpu_peak_tensor_bytes": "Most of it that tensors had.",
    "fminfer:gpu_foreseen_memory_bytes": "Memory of its GPU that was forecast for a rank.",
    "vllm:prompt_tokens": "Prompt tokens that were computed, or found in the prefix cache.",
    "vllm:generation_tokens": "Tokens that were drawn.",
    "vllm:prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens that the prefix cache had.",
    "vllm:num_preemptions": "Rows that were preempted and fed again.",
    "fminfer:tokens_fed_again": "Prompt tokens that were fed a second time for these.",
    "fminfer:engine_steps": "Steps that were computed.",
    "fminfer:result_cache_queries": "Requests that were looked up among the kept answers.",
    "fminfer:result_cache_hits": "Requests that a kept answer was taken for.",
    "fminfer:batches_open": "Batches that are not over.",
    "fminfer:batch_rows": "Lines of batches that have their record, by its kind.",
}


class Metrics:
    """The metrics of one server, in a registry of its own. Any thread may call it."""

    def __init__(self, engine: Engine | BatchEngine, model_name: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = engine
        self.batches: BatchWork | None = None  # counted as well
        registry.register(self)
        ProcessCollector(registry=registry)
        self._queue_s = self._make_histogram("vllm:request_queue_time_seconds", SECONDS)
        self._first_token_s = self._make_histogram(
            "vllm:time_to_first_token_seconds", SECONDS
        )
        self._gap_s = self._make_histogram("vllm:inter_token_latency_seconds", SECONDS)
        self._total_s = self._make_histogram(
            "vllm:e2e_request_latency_seconds", SECONDS
        )
        self._prompt_tokens = self._make_histogram("vllm:request_prompt_tokens", TOKENS)
        self._generated_tokens = self._make_histogram(
            "vllm:request_generation_tokens", TOKENS
        )
        self._finished = self._make_counter("vllm:request_success", "finished_reason")
        self._refused = self._make_counter("fminfer:requests_refused", "status")
        # a rate needs the 0 before the first one
        for reason in ("stop", "length", "abort"):
            self._finished.labels(model_name, reason)

    def observe(self, finished: Finished, total_s: float) -> None:
        """Count a request that was answered.

        Args:
            total_s: from its coming to its end, as the server saw it. What the engine
                did not see of that, such as tokenizing, counts as time in the queue.
        """
        times = finished.times
        usage = finished.usage
        queue_s = max(0.0, total_s - times["batch_time"])
        num_drawn = usage.get("completion_tokens", 0)
        self._prompt_tokens.observe(usage["prompt_tokens"])
        self._generated_tokens.observe(num_drawn)
        self._queue_s.observe(queue_s)
        self._total_s.observe(total_s)
        if num_drawn:
            self._first_token_s.observe(queue_s + times["prefill_time"])
        choices = (
            finished.choices
            if finished.part == "choices"
            else [{"finish_reason": "stop"}]
        )
        for reason, number in Tally(each["finish_reason"] for each in choices).items():
            self._finished.labels(self._model_name, reason).inc(number)

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

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine and batches have counted, and how they stand."""
        stats = self._engine.stats
        state = self._engine.state
        labels = (self._model_name,)
        yield from _make_families(
            GaugeMetricFamily,
            {
                "vllm:num_requests_running": {labels: state.num_running},
                "vllm:num_requests_waiting": {labels: state.num_waiting},
            },
        )
        num_prompt_tokens = stats.num_prompt_tokens
        if not isinstance(self._engine, BatchEngine):
            yield from self._collect_model(self._engine)
            # Those that were fed or found in the cache: it never falls, as a counter must not.
            num_prompt_tokens += stats.num_cached_tokens
        cache = self._engine.runs.cache
        yield from _make_families(
            CounterMetricFamily,
            {
                "vllm:prompt_tokens": {labels: num_prompt_tokens},
                "vllm:generation_tokens": {labels: stats.num_generated_tokens},
                "vllm:prefix_cache_queries": {labels: num_prompt_tokens},
                "vllm:prefix_cache_hits": {labels: stats.num_cached_tokens},
                "vllm:num_preemptions": {labels: stats.num_put_back},
                "fminfer:tokens_fed_again": {labels: stats.num_again_tokens},
                "fminfer:engine_steps": {labels: stats.num_steps},
                "fminfer:result_cache_queries": {
                    labels: 0 if cache is None else cache.num_asked
                },
                "fminfer:result_cache_hits": {
                    labels: 0 if cache is None else cache.num_found
                },
            },
        )
        if self.batches is not None:
            yield from self._collect_batches(self.batches)

    def _collect_model(self, engine: Engine) -> Iterator[Metric]:
        """Yield the memory of a model in this process and its ranks."""
        facts = engine.facts
        labels = (self._model_name,)
        yield from _make_families(
            GaugeMetricFamily,
            {
                "vllm:kv_cache_usage_perc": {labels: engine.state.kv_usage},
                "fminfer:kv_cache_tokens": {labels: engine.stats.num_kv_tokens},
                "fminfer:same_answers": {labels: not facts.measured.why_dependent},
            },
        )
        formats = (*labels, facts.weight_dtype, facts.dtype)
        yield from _make_families(
            GaugeMetricFamily,
            {"fminfer:weight_bytes": {formats: facts.measured.weight_bytes}},
            "format",
            "dtype",
        )
        yield from _make_families(
            GaugeMetricFamily, self._make_memory_values(engine.memory), "rank"
        )

    def _collect_batches(self, batches: BatchWork) -> Iterator[Metric]:
        labels = (self._model_name,)
        yield from _make_families(
            GaugeMetricFamily, {"fminfer:batches_open": {labels: batches.num_open}}
        )
        rows: dict[tuple[str, ...], float] = {
            (self._model_name, kind): batches.done[kind] for kind in get_args(RowKind)
        }
        yield from _make_families(
            CounterMetricFamily, {"fminfer:batch_rows": rows}, "kind"
        )

    def _make_memory_values(self, ranks: Sequence[RankMemory]) -> Values:
        """Return the peaks of all ranks, and the forecast of the memory that it is of."""
        values: Values = {}
        for memory in ranks:
            bytes_by_name = {"fminfer:peak_memory_bytes": memory.peak.host_bytes}
            if memory.is_on_gpu:
                bytes_by_name["fminfer:gpu_peak_memory_bytes"] = (
                    memory.peak.gpu_reserved_bytes
                )
                bytes_by_name["fminfer:gpu_peak_tensor_bytes"] = memory.peak.gpu_bytes
            foreseen = "gpu_foreseen" if memory.is_on_gpu else "foreseen"
            bytes_by_name[f"fminfer:{foreseen}_memory_bytes"] = memory.foreseen_bytes
            for name, value in bytes_by_name.items():
                values.setdefault(name, {})[self._model_name, str(memory.rank)] = value
        return values

    def _make_counter(self, name: str, label: str) -> Counter:
        return Counter(
            name, HELPS[name], ["model_name", label], registry=self._registry
        )

    def _make_histogram(self, name: str, limits: Sequence[float]) -> Histogram:
        metric = Histogram(
            name, HELPS[name], ["model_name"], buckets=limits, registry=self._registry
        )
        return metric.labels(self._model_name)


def _make_families(
    kind: type[GaugeMetricFamily | CounterMetricFamily], values: Values, *labels: str
) -> Iterator[Metric]:
    for name, rows in values.items():
        family = kind(name, HELPS[name], labels=["model_name", *labels])
        for row, value in rows.items():
            family.add_metric(row, value)
        yield family


class Rates(NamedTuple):
    """Tokens a second."""

    prompt_tokens: float
    generation_tokens: float


class Throughput:
    """Computes tokens a second from an engine's counts, which it records now and then."""

    def __init__(self, engine: ObservableEngine) -> None:
        self._engine = engine
        self._started_s = time.monotonic()
        self._seen: deque[tuple[float, int, int]] = deque()
        self.record_counts()

    def record_counts(self) -> None:
        """Record the engine's counts."""
        stats = self._engine.stats
        now_s = time.monotonic()
        self._seen.append((now_s, stats.num_prompt_tokens, stats.num_generated_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def uptime_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._started_s

    @property
    def num_tokens(self) -> int:
        """Tokens so far, when the counts were last recorded."""
        return sum(self._seen[-1][1:])

    @property
    def rates(self) -> Rates:
        """The mean over the last seconds."""
        first_s, *first = self._seen[0]
        last_s, *last = self._seen[-1]
        passed_s = max(last_s - first_s, 1e-3)
        return Rates(
            *((now - then) / passed_s for then, now in zip(first, last, strict=True))
        )
