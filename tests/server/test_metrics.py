"""What Prometheus reads: right after known work, and of two servers in one process."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

import fminfer
from fminfer.core.messages import MemoryPeak, RankMemory
from fminfer.engine.engine_core import Finished
from fminfer.engine.stats import EngineState, EngineStats
from fminfer.server.metrics import Metrics
from tests.server.server_needs import needs_server
from tests.streams import events_of

pytestmark = needs_server(engine={"max_rows": 4})

PROMPT = list(range(40, 80))
Samples = dict[str, float]


def read(metrics: Metrics) -> Samples:
    """Return every sample by its name, and the labels beside model_name."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            if sample.name.startswith("process_"):
                continue
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "demo", sample
            told = "".join(f"{{{key}={value}}}" for key, value in labels.items())
            assert sample.name + told not in found
            found[sample.name + told] = sample.value
    return found


class Still:
    """An engine that does nothing, on a GPU."""

    stats = EngineStats(num_put_back=3, num_again_tokens=70, num_kv_tokens=4096)
    state = EngineState(num_waiting=7, num_running=5, kv_usage=0.25)
    runs = SimpleNamespace(cache=None)
    facts = SimpleNamespace(
        measured=SimpleNamespace(weight_bytes=4096, why_dependent="a GPU computes"),
        weight_dtype="Q4_K",
        dtype="bfloat16",
    )
    memory = [  # noqa: RUF012
        *(
            RankMemory(r, True, 2**32, MemoryPeak(2**28 + r, 2**30, 2**31))
            for r in range(2)
        ),
        RankMemory(2, False, 2**29, MemoryPeak(2**28)),
    ]


def test_values_after_known_work(engine: fminfer.Engine) -> None:
    metrics = Metrics(engine, "demo")
    before = read(metrics)
    assert (
        before["vllm:num_requests_running"]
        == before["vllm:request_success_total{finished_reason=stop}"]
        == 0
    )
    # The second one finds the prompt of the first one in the cache, but for its last token.
    for fields in ({"max_tokens": 6, "n": 2}, {"max_tokens": 4, "echo": True}):
        started = time.perf_counter()
        engine.add({"prompt": PROMPT, "ignore_eos": True, "seed": 1} | fields)
        events = events_of(engine)
        finished = events[-1]
        assert isinstance(finished, Finished)
        metrics.observe(finished, time.perf_counter() - started)
    after = read(metrics)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert (
        grown("vllm:prompt_tokens_total")
        == grown("vllm:prefix_cache_queries_total")
        == 80
    )
    assert grown("vllm:prefix_cache_hits_total") == 39
    assert grown("vllm:generation_tokens_total") == 6 * 2 + 4
    assert grown("vllm:request_success_total{finished_reason=length}") == 3
    assert grown("vllm:request_success_total{finished_reason=stop}") == 0
    assert (
        grown("vllm:num_preemptions_total")
        == grown("fminfer:tokens_fed_again_total")
        == 0
    )
    assert grown("fminfer:engine_steps_total") >= 6 + 4
    assert after["vllm:request_prompt_tokens_sum"] == 80
    assert after["vllm:request_generation_tokens_sum"] == 16
    assert after["vllm:e2e_request_latency_seconds_count"] == 2
    assert after["vllm:num_requests_waiting"] == after["vllm:kv_cache_usage_perc"] == 0
    assert after["fminfer:kv_cache_tokens"] == engine.stats.num_kv_tokens > 0
    (memory,) = engine.memory
    assert (
        2**24
        < after["fminfer:peak_memory_bytes{rank=0}"]
        <= memory.peak.host_bytes
        < 2**36
    )
    assert (
        after["fminfer:foreseen_memory_bytes{rank=0}"] == memory.foreseen_bytes > 2**24
    )
    (weights,) = (
        value for name, value in after.items() if "fminfer:weight_bytes" in name
    )
    assert weights == engine.facts.measured.weight_bytes > 0
    assert after["fminfer:same_answers"] == (not engine.facts.measured.why_dependent)
    assert not [name for name in after if "gpu" in name], "this engine is on a CPU"


def test_values_while_it_works(engine: fminfer.Engine) -> None:
    metrics = Metrics(engine, "demo")
    ids = [
        engine.add({"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True})
        for _ in range(6)
    ]
    assert read(metrics)["vllm:num_requests_waiting"] == 6
    while engine.state.num_running < 4:
        engine.step()
    found = read(metrics)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (
        4,
        2,
    )
    assert 0 < found["vllm:kv_cache_usage_perc"] == engine.state.kv_usage < 1
    for request_id in ids:
        engine.cancel(request_id)
        metrics.count_cancelled()
    events_of(engine)
    found = read(metrics)
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:request_success_total{finished_reason=abort}"] == 6


def answer(
    num_prompt: int,
    num_drawn: int,
    reasons: list[str],
    *,
    batch_s: float,
    prefill_s: float = 0.0,
) -> Finished:
    """Return an answer whose times in the engine are known."""
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_drawn}
    times = {"batch_time": batch_s, "queue_time": 0.5, "prefill_time": prefill_s}
    return Finished(1, [{"finish_reason": reason} for reason in reasons], usage, times)


def test_histograms_hold_what_was_observed() -> None:
    metrics = Metrics(Still(), "demo")
    metrics.observe(
        answer(10, 3, ["stop", "length"], batch_s=1.75, prefill_s=0.25), 2.0
    )
    metrics.observe(answer(300, 0, ["length"], batch_s=0.75), 1.0)
    for seconds in (0.001, 0.004, 0.3):
        metrics.observe_gap(seconds)
    found = read(metrics)
    for name, expected in {
        "request_queue_time_seconds": (2, 0.5),
        "time_to_first_token_seconds": (1, 0.5),
        "e2e_request_latency_seconds": (2, 3.0),
        "inter_token_latency_seconds": (3, 0.305),
        "request_prompt_tokens": (2, 310),
        "request_generation_tokens": (2, 3),
    }.items():
        told = found[f"vllm:{name}_count"], found[f"vllm:{name}_sum"]
        assert told == pytest.approx(expected), name
    gaps = {
        limit: found[f"vllm:inter_token_latency_seconds_bucket{{le={limit}}}"]
        for limit in ("0.001", "0.005", "0.2", "+Inf")
    }
    assert gaps == {"0.001": 1, "0.005": 2, "0.2": 2, "+Inf": 3}
    assert found["vllm:request_success_total{finished_reason=length}"] == 2


def test_times_that_the_engine_did_not_see_are_of_the_queue() -> None:
    metrics = Metrics(Still(), "demo")
    metrics.observe(answer(5, 2, ["stop"], batch_s=1.0, prefill_s=0.25), 2.0)
    metrics.observe(answer(5, 0, ["stop"], batch_s=1.0), 1.0)
    found = read(metrics)
    assert found["vllm:request_queue_time_seconds_sum"] == 1.0
    first_token = "vllm:time_to_first_token_seconds"
    assert (found[f"{first_token}_sum"], found[f"{first_token}_count"]) == (1.25, 1)
    assert found["vllm:e2e_request_latency_seconds_sum"] == 3.0


def test_two_servers_in_one_process_count_for_themselves() -> None:
    first = Metrics(Still(), "demo")
    second = Metrics(Still(), "demo")
    first.count_refused(429)
    first.count_refused(429)
    second.count_refused(400)
    assert read(first)["fminfer:requests_refused_total{status=429}"] == 2
    assert "fminfer:requests_refused_total{status=429}" not in read(second)
    assert not [name for name in REGISTRY._names_to_collectors if "vllm" in name]


def test_state_of_an_engine_on_a_gpu() -> None:
    found = read(Metrics(Still(), "demo"))
    for rank in range(2):
        assert found[f"fminfer:peak_memory_bytes{{rank={rank}}}"] == 2**28 + rank
        assert found[f"fminfer:gpu_peak_memory_bytes{{rank={rank}}}"] == 2**31
        assert found[f"fminfer:gpu_peak_tensor_bytes{{rank={rank}}}"] == 2**30
        assert found[f"fminfer:gpu_foreseen_memory_bytes{{rank={rank}}}"] == 2**32
    on_cpu = [name for name in found if name.startswith("fminfer:foreseen")]
    assert on_cpu == ["fminfer:foreseen_memory_bytes{rank=2}"]
    assert found["vllm:num_preemptions_total"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["fminfer:same_answers"] == 0


class NoBatches:
    """The work of a server to which no batch came."""

    num_open = 0
    done = Counter[str]()  # noqa: RUF012


def test_the_docs_name_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    told = re.findall(r"^\| `((?:vllm|fminfer):\w+)` \| (\w+) \|", text, re.MULTILINE)
    metrics = Metrics(Still(), "demo")
    metrics.batches = NoBatches()
    body, _ = metrics.render()
    is_counter = {"counter": "_total"}
    found = [
        (family.name + is_counter.get(family.type, ""), family.type)
        for family in text_string_to_metric_families(body.decode())
        if ":" in family.name and not family.name.endswith("_created")
    ]
    assert sorted(told) == sorted(found)


def test_a_models_name_may_hold_any_character() -> None:
    name = 'a "b"\\c\n€'
    body, _ = Metrics(Still(), name).render()
    families = text_string_to_metric_families(body.decode())
    labels = {
        sample.labels["model_name"]
        for family in families
        for sample in family.samples
        if "model_name" in sample.labels
    }
    assert labels == {name}
