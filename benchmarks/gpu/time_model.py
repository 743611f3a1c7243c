"""Phase 6: steps of a whole model with random weights: how long, how busy, how much memory."""

from __future__ import annotations

import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.profiler import profile

import fminfer
from benchmarks.gpu import results
from benchmarks.gpu.cases import Case, Figures, Setting, expect
from benchmarks.gpu.profiles import count_work, start_profiler
from fminfer.core.config import EngineConfig
from fminfer.core.messages import StepTrace
from fminfer.worker.footprint import measure_footprints
from fminfer.worker.opening import open_model

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
MODEL = {"cuda": LLAMA_8B, "cpu": TINY}
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
PROFILED_STEPS = 3
WARM_STEPS = 4  # of rows that all decode, before the profiler


@dataclass(slots=True, frozen=True)
class Run:
    """Rows of random prompts; one new token each measures the prompts alone."""

    rows: int
    tokens: int
    new_tokens: int

    @property
    def is_decode(self) -> bool:
        return self.new_tokens > 1

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "prefill"
        return f"{kind} {self.rows} x {self.tokens}"


# New tokens: as many as steps that prompts take, for the first rows wait for the last ones, and 20.
RUNS = {
    "cuda": (Run(64, 450, 28), Run(256, 450, 50), Run(1024, 250, 85), Run(16, 512, 1)),
    "cpu": (Run(4, 40, 24), Run(4, 40, 1)),
}


def cases(setting: Setting) -> Iterator[Case]:
    for run in RUNS[setting.device]:
        yield Case(str(run), partial(time_run, setting, run))
    yield Case("memory", partial(compare_memory, setting))


def options(setting: Setting) -> dict[str, Any]:
    """Return the options of the engine, with a KV cache for the largest run."""
    path = setting.scratch / "config.json"
    path.write_text(json.dumps(MODEL[setting.device]))
    runs = RUNS[setting.device]
    budget = max(run.rows * -(-(run.tokens + run.new_tokens) // 32) * 32 for run in runs)
    return {
        "random_init": str(path),
        "dtype": DTYPE[setting.device],
        "device": setting.device,
        "kernels": "require",
        "budget": budget,
        "max_rows": max(run.rows for run in runs),
        "prefix_cache": False,
    }


@cache
def start_engine(setting: Setting) -> fminfer.Engine:
    """Load the model once for all runs."""
    return fminfer.Engine(**options(setting))


@dataclass(slots=True)
class Watch:
    """Takes the time of full decode steps, and profiles some of them."""

    rows: int
    device: str
    ends: list[float] = field(default_factory=list)  # of full decode steps, in the engine's thread
    span_s: list[float] = field(default_factory=list)  # the stage's own, of prompts' steps
    profiler: profile | None = None
    profiled_s: float = 0.0
    _begun: float = 0.0

    def on_step(self, step: StepTrace) -> None:
        if step.num_decode_rows == 0:
            self.span_s += [span.end_s - span.start_s for span in step.spans]
        if step.phase != "decode" or step.num_decode_rows != self.rows:
            return
        count = len(self.ends)
        if count == WARM_STEPS:
            self.profiler = start_profiler(self.device)
            self._begun = time.perf_counter()
        elif count == WARM_STEPS + PROFILED_STEPS:
            self.profiled_s = time.perf_counter() - self._begun
            assert self.profiler is not None, "begun some steps ago"
            self.profiler.stop()
        self.ends.append(time.perf_counter())

    def step_s(self) -> float:
        """Return a decode step's seconds, the profiled ones left out."""
        gaps = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        rest = gaps[:WARM_STEPS] + gaps[WARM_STEPS + PROFILED_STEPS + 1 :]
        return statistics.median(rest)


def time_run(setting: Setting, run: Run) -> Figures:
    """Answer the rows and watch the steps."""
    engine = start_engine(setting)
    expect(
        engine.facts.has_kernel and not engine.facts.why_slower,
        engine.facts.why_slower or "plain torch",
    )
    rng = random.Random(run.rows)
    vocab = MODEL[setting.device]["vocab_size"]
    how = {"max_tokens": run.new_tokens, "temperature": 0, "ignore_eos": True}
    rows = [
        {"prompt": [rng.randrange(vocab) for _ in range(run.tokens)]} | how for _ in range(run.rows)
    ]
    watch = Watch(run.rows, setting.device)
    engine.follow(on_step=watch.on_step)
    started = time.perf_counter()
    for record in engine.run(rows):
        expect(record.error is None, f"a row failed: {record.error}")
    figures: Figures = {"run s": time.perf_counter() - started}
    figures |= {"prompts' ms": 1000 * sum(watch.span_s)}
    if not run.is_decode:
        rate = run.rows * run.tokens / sum(watch.span_s)
        return figures | {"tokens/s": rate} | _product_share(setting, engine, rate)
    expect(watch.profiled_s > 0, f"only {len(watch.ends)} steps had all rows", figures)
    assert watch.profiler is not None, "some steps were profiled"
    figures |= {"ms a step": 1000 * watch.step_s(), "tokens/s": run.rows / watch.step_s()}
    figures |= count_work(watch.profiler, watch.profiled_s, PROFILED_STEPS)
    return figures | _read_share(setting, engine, run, watch.step_s())


def _read_share(setting: Setting, engine: fminfer.Engine, run: Run, step_s: float) -> Figures:
    """Return the share of the copy's roof: each step reads weights once, and all keys."""
    roof = results.find_roof(setting.results, "copy")
    if roof is None:
        return {}
    keys = run.rows * (run.tokens + run.new_tokens) * engine.facts.kv_bytes_per_token
    least_s = (_used_bytes(setting, engine) + keys) / roof
    return {"roof ms": 1000 * least_s, "share of the roof": least_s / step_s}


def _product_share(setting: Setting, engine: fminfer.Engine, rate: float) -> Figures:
    roof = results.find_roof(setting.results, DTYPE[setting.device])
    if roof is None:
        return {}
    flops = 2 * _used_bytes(setting, engine) / engine.dtype.itemsize  # a token's, but attention's
    return {"share of the roof": rate * flops / roof}


def _used_bytes(setting: Setting, engine: fminfer.Engine) -> int:
    """Return the weights' bytes but for the embedding, of which a step reads a few rows."""
    config = MODEL[setting.device]
    embedding = config["vocab_size"] * config["hidden_size"] * engine.dtype.itemsize
    used: int = engine.facts.weight_bytes - embedding
    return used


def compare_memory(setting: Setting) -> Figures:
    """Put the peak of all runs beside what `fminfer check` foresees."""
    config = EngineConfig(**options(setting))
    engine = start_engine(setting)
    where = (engine.device, engine.dtype)
    (print_,) = measure_footprints(config, open_model(config), 1, *where)
    kv_bytes = engine.stats.num_kv_tokens * print_.kv_token
    figures: Figures = {"forecast GiB": (print_.weights + print_.work + kv_bytes) / 2**30}
    if setting.device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return figures | {"process GiB": peak / 2**30}
    free, total = torch.cuda.mem_get_info()
    figures |= {"allocated GiB": torch.cuda.max_memory_allocated() / 2**30}
    figures |= {"reserved GiB": torch.cuda.max_memory_reserved() / 2**30}
    return figures | {"device GiB": (total - free) / 2**30}
