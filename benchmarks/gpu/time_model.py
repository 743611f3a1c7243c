"""Phase 6: whole models with random weights: their steps, alone and captured, memory,
loading."""

from __future__ import annotations

import gc
import itertools
import json
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch.profiler import profile

from benchmarks.gpu import check_streams, results
from benchmarks.gpu.captured_step import time_step
from benchmarks.gpu.cases import Case, Figures, Setting, expect
from benchmarks.gpu.profiles import count_work, start_profiler
from fminfer import Engine
from fminfer.compute.values.step import StepTrace
from fminfer.core.config import EngineConfig
from fminfer.core.partition import Part
from fminfer.models.checkpoint import open_checkpoint, open_model
from fminfer.models.holding import Holding
from fminfer.models.layer_source import OnProgress, open_weights
from fminfer.plan.planning import plan_ahead
from fminfer.plan.run_plan import RunPlan
from fminfer.runtime.load.agreement import settle_plan
from fminfer.runtime.load.builder import LoadedPart, load_part
from fminfer.runtime.load.one_pipeline import OnePipeline
from fminfer.text.tokenizer import Tokenizer

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
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
MODELS = {
    "cuda": {"8B": LLAMA_8B, "1B": LLAMA_1B},
    "cpu": {"8B": TINY, "1B": TINY | {"tie_word_embeddings": True}},
}
STORED_LAYERS = 4  # of the larger model, with a small vocabulary: 1.7 GB
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
PROFILED_STEPS = 3
WARM_STEPS = 4  # of rows that all decode, before the profiler
CAPTURED = {"cuda": ((1, 8, 64, 256), 450), "cpu": ((1, 4), 40)}  # rows, keys of each


@dataclass(slots=True, frozen=True)
class Run:
    """Rows of random prompts. `new_tokens` 1 times the prompts alone; 0 scores them."""

    rows: int
    tokens: int
    new_tokens: int
    top_p: float = 0.0  # 0: greedy

    def __str__(self) -> str:
        kind = (
            "decode"
            if self.new_tokens > 1
            else "prefill"
            if self.new_tokens
            else "score"
        )
        how = f" top_p {self.top_p:g}" if self.top_p else ""
        return f"{kind} {self.rows} x {self.tokens}{how}"

    def requests(self, vocab: int) -> list[dict[str, Any]]:
        rng = random.Random(self.rows)
        how: dict[str, Any] = {"max_tokens": self.new_tokens, "ignore_eos": True}
        how |= (
            {"temperature": 1, "top_p": self.top_p}
            if self.top_p
            else {"temperature": 0}
        )
        if self.new_tokens == 0:
            how |= {"echo": True, "logprobs": 1}
        prompts = (
            [rng.randrange(vocab) for _ in range(self.tokens)] for _ in range(self.rows)
        )
        return [{"prompt": prompt} | how for prompt in prompts]


# New tokens: as many as steps that prompts take, for the first rows wait for the last
# ones, and 20.
RUNS = {
    "cuda": {
        "8B": (
            Run(64, 450, 28),
            Run(256, 450, 50),
            Run(16, 512, 1),
            Run(256, 450, 50, top_p=0.9),
            Run(32, 512, 0),
            Run(1024, 250, 85),
        ),
        "1B": (Run(8, 450, 24), Run(64, 450, 28), Run(256, 450, 50)),
    },
    "cpu": {
        "8B": (Run(4, 40, 24), Run(4, 40, 1), Run(4, 40, 24, top_p=0.9), Run(3, 40, 0)),
        "1B": (Run(4, 40, 24),),
    },
}


class Held:
    """Holds one large thing at a time: two models have no room beside each other."""

    def __init__(self) -> None:
        self._name = ""
        self._thing = None

    def take(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the named object. If another one is held, drop it before making this one."""
        if name != self._name:
            self.drop()
            self._thing = make()
            self._name = name
        return self._thing

    def drop(self) -> None:
        if isinstance(self._thing, Engine):
            self._thing.close()
        self._name = ""
        self._thing = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@dataclass(slots=True, frozen=True)
class Bench:
    """A model, and what the phase holds of it."""

    setting: Setting
    name: str
    held: Held

    @property
    def config(self) -> dict[str, Any]:
        return MODELS[self.setting.device][self.name]

    def options(self) -> dict[str, Any]:
        """Return the options of an engine, with a KV cache for the largest run."""
        path = self.setting.scratch / f"{self.name}.json"
        path.write_text(json.dumps(self.config))
        runs = RUNS[self.setting.device][self.name]
        return {
            "random_init": str(path),
            "dtype": DTYPE[self.setting.device],
            "device": self.setting.device,
            "kernels": "require",
            "budget": max(
                run.rows * -(-(run.tokens + run.new_tokens) // 32) * 32 for run in runs
            ),
            "max_rows": max(run.rows for run in runs),
            "prefix_cache": False,
        }

    def engine(self) -> Engine:
        """Return the engine, which is started once for all runs."""
        engine: Engine = self.held.take(
            f"engine {self.name}", lambda: Engine(**self.options())
        )
        return engine

    def part(self) -> LoadedPart:
        """Return the weights alone, without an engine."""

        def load() -> LoadedPart:
            config = EngineConfig(**self.options())
            return load_part(settle_plan(plan_ahead(config, open_model(config))))

        part: LoadedPart = self.held.take(f"part {self.name}", load)
        return part

    @property
    def embedding_bytes(self) -> int:
        """The bytes of an embedding, or of a head."""
        size: int = self.config["vocab_size"] * self.config["hidden_size"]
        return size * torch_type(self.setting).itemsize

    def used_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of weights that a step reads: all but an untied embedding."""
        is_tied = bool(self.config.get("tie_word_embeddings"))
        return weight_bytes if is_tied else weight_bytes - self.embedding_bytes


def torch_type(setting: Setting) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPE[setting.device])
    return dtype


def cases(setting: Setting) -> Iterator[Case]:
    held = Held()
    for name in MODELS[setting.device]:
        bench = Bench(setting, name, held)
        yield Case(f"{name} load", partial(time_start, bench))
        for run in RUNS[setting.device][name]:
            yield Case(f"{name} {run}", partial(time_run, bench, run))
        yield Case(f"{name} memory", partial(compare_memory, bench))
        rows, tokens = CAPTURED[setting.device]
        for number in rows:
            case = partial(time_captured, bench, number, tokens)
            yield Case(f"{name} captured {number} x {tokens}", case)
    yield Case("read a checkpoint", partial(read_checkpoint, setting, held))
    for place in check_streams.PLACES[setting.device]:
        timed = partial(check_streams.time_stream, setting, place)
        yield Case(f"layers streamed from {place}", timed)


def time_start(bench: Bench) -> Figures:
    """Start an engine from nothing."""
    started = time.perf_counter()
    torch.zeros(1, device=bench.setting.device).add_(1).item()
    marks = [time.perf_counter()]

    def mark(*_: object) -> None:
        marks.append(time.perf_counter())

    def compute(
        plan: RunPlan, tokenizer: Tokenizer, on_progress: OnProgress
    ) -> OnePipeline:
        mark()
        return OnePipeline(plan, tokenizer, on_progress, on_loaded=mark)

    bench.held.take(
        f"engine {bench.name}", lambda: Engine(**bench.options(), compute=compute)
    )
    mark()
    names = (
        "config and tokenizer s",
        "weights and trials s",
        "KV cache and first step s",
    )
    figures: Figures = {"device s": marks[0] - started, "ready s": marks[-1] - marks[0]}
    took = (b - a for a, b in itertools.pairwise(marks))
    figures |= dict(zip(names, took, strict=True))
    return figures | {"weights GiB": bench.engine().facts.measured.weight_bytes / 2**30}


@dataclass(slots=True)
class Watch:
    """Takes the time of full decode steps, and profiles some of them."""

    rows: int
    device: str
    # of full decode steps, in the engine's thread
    ends: list[float] = field(default_factory=list)
    # the stage's own, of prompts' steps
    span_s: list[float] = field(default_factory=list)
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
        gaps = [b - a for a, b in itertools.pairwise(self.ends)]
        rest = gaps[: WARM_STEPS - 1] + gaps[WARM_STEPS + PROFILED_STEPS + 1 :]
        return statistics.median(rest)


def time_run(bench: Bench, run: Run) -> Figures:
    """Answer the rows and watch the steps."""
    engine = bench.engine()
    path = bench.setting.results
    expect(
        engine.facts.measured.has_kernel and not engine.facts.measured.why_slower,
        engine.facts.measured.why_slower or "plain torch",
    )
    is_captured = engine.pipeline.graphs is not None or bench.setting.is_tiny
    expect(is_captured, "decode steps are not captured")
    watch = Watch(run.rows, bench.setting.device)
    engine.follow(on_step=watch.on_step)
    requests = run.requests(bench.config["vocab_size"])
    started = time.perf_counter()
    for record in engine.run(requests):
        expect(record.error is None, f"a row failed: {record.error}")
    figures: Figures = {"run s": time.perf_counter() - started}
    figures |= {"prompts' ms": 1000 * sum(watch.span_s)}
    used = bench.used_bytes(engine.facts.measured.weight_bytes)
    if run.new_tokens <= 1:
        rate = run.rows * run.tokens / sum(watch.span_s)
        figures |= {"tokens/s": rate}
        of_all = (
            used - bench.embedding_bytes if run.new_tokens else used
        )  # last tokens alone need the head
        flops = 2 * of_all / engine.dtype.itemsize * rate  # all but attention's
        return figures | results.share_of(path, flops, DTYPE[bench.setting.device])
    expect(watch.profiled_s > 0, f"only {len(watch.ends)} steps had all rows", figures)
    assert watch.profiler is not None, "some steps were profiled"
    step_s = watch.step_s()
    figures |= {"ms a step": 1000 * step_s, "tokens/s": run.rows / step_s}
    if engine.pipeline.graphs is not None:
        figures["graphs"] = len(engine.pipeline.graphs.graphs)
    # Each step reads weights once, and all keys.
    keys = (
        run.rows
        * (run.tokens + run.new_tokens)
        * engine.facts.plan.this_rank.takes.kv_token
    )
    figures |= results.share_of(path, (used + keys) / step_s, "copy")
    return figures | count_work(watch.profiler, watch.profiled_s, PROFILED_STEPS)


def time_captured(bench: Bench, rows: int, tokens: int) -> Figures:
    """Time a stage's decode step with its graph, and without."""
    part = bench.part()
    weights = bench.used_bytes(part.network.weight_bytes)
    return time_step(bench.setting.results, part, rows, tokens, weights)


def compare_memory(bench: Bench) -> Figures:
    """Put the peak of all runs beside what `fminfer check` foresees."""
    engine = bench.engine()
    takes = engine.pipeline.plan.this_rank.takes
    kv_bytes = engine.stats.num_kv_tokens * takes.kv_token
    figures: Figures = {"forecast GiB": (takes.weights + takes.work + kv_bytes) / 2**30}
    if bench.setting.device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return figures | {"process GiB": peak / 2**30}
    free, total = torch.cuda.mem_get_info()
    figures |= {"allocated GiB": torch.cuda.max_memory_allocated() / 2**30}
    figures |= {"reserved GiB": torch.cuda.max_memory_reserved() / 2**30}
    return figures | {"device GiB": (total - free) / 2**30}


def read_checkpoint(setting: Setting, held: Held) -> Figures:
    """Read some layers from a file that was just written, so that the host's memory has it."""
    held.drop()
    fields = MODELS[setting.device]["8B"] | {
        "num_hidden_layers": STORED_LAYERS,
        "vocab_size": 1000,
    }
    device = torch.device(setting.device)
    dtype = torch_type(setting)
    config = transformers.AutoConfig.for_model(**fields)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    folder = setting.scratch / "stored"
    model.save_pretrained(folder)
    started = time.perf_counter()
    checkpoint = open_checkpoint(str(folder))
    part = Part(0, 1, 0, STORED_LAYERS)
    tensors = open_weights(
        checkpoint, part, holding=Holding(dtype), device=device, seed=0
    )
    layers = list(tensors.load_layers())
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - started
    rate = tensors.num_bytes / took / 1e9
    return {
        "layers": len(layers),
        "GB": tensors.num_bytes / 1e9,
        "s": took,
        "GB/s": rate,
    }
