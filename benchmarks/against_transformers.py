#!/usr/bin/env python
"""fminfer beside transformers `generate`, the same work, in turns.

Workloads, on a random-init llama of 12 layers × 768 (vocabulary 32,000), no EOS, greedy:
  a gen      64 rows, prompts of 16–191 tokens, 16–128 new tokens each
  b score    96 rows of 64–511 tokens, every prompt token's logprob
  c fewshot  128 rows alternating over two 600-token prefixes + 40–99 own tokens, 8 new tokens

Each side runs in a process of its own, sides taking turns, so that both meet the same machine;
only ratios within one call count. A run's time excludes loading; `steady` leaves out fminfer's
first pass over the workload, which compiles. transformers runs as its users run it:
rows sorted by length, batches of 32, left padding, sdpa; its rows of a batch run as
long as the longest asks.

    python benchmarks/against_transformers.py --workload a --repeats 3

A table comes first, one JSON line last.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import click

SIZE = "llama-160m"
BATCH = 32
Row = dict[str, Any]


def make_workload(name: str, scale: float) -> list[Row]:
    """Return requests with token-id prompts; `scale` shortens the file, not the rows."""
    rng = random.Random(2026)

    def ids(count: int) -> list[int]:
        return [rng.randrange(32000) for _ in range(count)]

    if name == "a":
        rows = [
            {"prompt": ids(rng.randint(16, 191)), "max_tokens": rng.randint(16, 128)}
            for _ in range(64)
        ]
    elif name == "b":
        rows = [
            {
                "prompt": ids(rng.randint(64, 511)),
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
            }
            for _ in range(96)
        ]
    else:
        prefixes = [ids(600), ids(600)]
        rows = [
            {"prompt": prefixes[i % 2] + ids(rng.randint(40, 99)), "max_tokens": 8}
            for i in range(128)
        ]
    return [
        row | {"temperature": 0} for row in rows[: max(1, round(len(rows) * scale))]
    ]


def run_fminfer(
    workload: list[Row], dtype: str, kernels: str, passes: int
) -> dict[str, Any]:
    """Answer the workload `passes` times with one engine; the last pass is the steady state."""
    import fminfer

    started = time.perf_counter()
    engine = fminfer.Engine(random_init=SIZE, dtype=dtype, kernels=kernels)
    ready_s = time.perf_counter() - started
    times = []
    for number in range(passes):
        # Other ids each pass: the prefix cache outlives a run, and must not have seen them.
        fresh = [
            row | {"prompt": [(i + number) % 32000 for i in row["prompt"]]}
            for row in workload
        ]
        started = time.perf_counter()
        records = list(engine.run(fresh))
        times.append(time.perf_counter() - started)
        assert not [record.error for record in records if record.error]
    engine.close()
    extra_mb = peak_mb() - engine.facts.measured.weight_bytes / 2**20
    stats = engine.stats
    return {
        "first_s": times[0],
        "run_s": times[-1],
        "ready_s": ready_s,
        "peak_mb": peak_mb(),
        "peak_less_weights_mb": extra_mb,
        "kv_bytes_per_token": engine.facts.plan.this_rank.takes.kv_token,
        "saved_tokens": stats.num_counted_cached / passes,
        "savable_tokens": stats.num_counted_shareable / passes,
        "busy_s": sum(stage.busy_s for stage in stats.stages) / passes,
    }


def run_transformers(workload: list[Row], dtype: str) -> dict[str, Any]:
    """Run the workload as transformers' users do: sorted, padded batches of 32."""
    import torch
    import transformers

    from fminfer.models.known_sizes import SIZES

    transformers.logging.set_verbosity_error()
    started = time.perf_counter()
    fields = dict(SIZES[SIZE])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype)
    )
    model.eval()
    ready_s = time.perf_counter() - started
    started = time.perf_counter()
    rows = sorted(workload, key=lambda row: len(row["prompt"]) + row["max_tokens"])
    with torch.inference_mode():
        for first in range(0, len(rows), BATCH):
            batch = rows[first : first + BATCH]
            longest = max(len(row["prompt"]) for row in batch)
            ids = torch.tensor(
                [[0] * (longest - len(r["prompt"])) + r["prompt"] for r in batch]
            )
            mask = torch.tensor(
                [
                    [0] * (longest - len(r["prompt"])) + [1] * len(r["prompt"])
                    for r in batch
                ]
            )
            new = max(row["max_tokens"] for row in batch)
            if new:
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=new,
                    do_sample=False,
                    pad_token_id=0,
                )
            else:
                score_padded(model, ids, mask)
    run_s = time.perf_counter() - started
    return {"first_s": run_s, "run_s": run_s, "ready_s": ready_s, "peak_mb": peak_mb()}


def score_padded(model: Any, ids: Any, mask: Any) -> Any:
    """Return each token's logprob, row by row so that the float32 logits stay small."""
    import torch

    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    return [
        torch.log_softmax(row[:-1].float(), -1).gather(-1, target[1:, None])
        for row, target in zip(logits, ids, strict=True)
    ]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def gemm_gflops(dtype: str) -> float:
    """Measure a 512 × 768 × 3072 product, the machine's roof for this model."""
    import torch

    left = torch.randn(512, 768, dtype=getattr(torch, dtype))
    right = torch.randn(3072, 768, dtype=getattr(torch, dtype))
    times = []
    for _ in range(12):
        started = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - started)
    return 2 * 512 * 768 * 3072 / statistics.median(times) / 1e9


def call_side(side: str, arguments: list[str]) -> dict[str, Any]:
    """Run one side in a process of its own and read its JSON."""
    command = [sys.executable, __file__, "--side", side, *arguments]
    found = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env=os.environ | {}
    )
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


@click.command()
@click.option(
    "--workload", type=click.Choice(["a", "b", "c"]), default="a", show_default=True
)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option(
    "--kernels",
    default="off",
    show_default=True,
    help="Of fminfer: auto, off or require.",
)
@click.option(
    "--passes", default=1, show_default=True, help="fminfer's; the last one counts."
)
@click.option("--repeats", default=1, show_default=True, help="Turns of both sides.")
@click.option("--scale", default=1.0, show_default=True, help="Share of the rows.")
@click.option("--side", type=click.Choice(["fminfer", "transformers"]), hidden=True)
def main(
    workload: str,
    dtype: str,
    kernels: str,
    passes: int,
    repeats: int,
    scale: float,
    side: str | None,
) -> None:
    """Time both sides and print their ratio."""
    rows = make_workload(workload, scale)
    if side == "fminfer":
        print(json.dumps(run_fminfer(rows, dtype, kernels, passes)))
        return
    if side == "transformers":
        print(json.dumps(run_transformers(rows, dtype)))
        return
    arguments = ["--workload", workload, "--dtype", dtype, "--scale", str(scale)]
    arguments += ["--kernels", kernels, "--passes", str(passes)]
    found: dict[str, list[dict[str, Any]]] = {"fminfer": [], "transformers": []}
    for _ in range(repeats):
        for name, results in found.items():
            results.append(call_side(name, arguments))
            print(
                f"  {name:<13} {results[-1]['run_s']:7.1f} s",
                file=sys.stderr,
                flush=True,
            )
    median = {
        name: {key: statistics.median(r[key] for r in results) for key in results[0]}
        for name, results in found.items()
    }
    ratio = median["transformers"]["run_s"] / median["fminfer"]["run_s"]
    tokens = sum(len(row["prompt"]) + row["max_tokens"] for row in rows)
    print(
        f"\nworkload {workload}: {len(rows)} rows, {tokens:,} tokens, {dtype}, kernels {kernels}"
    )
    print(f"{'':<14}{'run s':>8}{'tokens/s':>10}{'ready s':>9}{'peak MB':>9}")
    for name, m in median.items():
        rate = tokens / m["run_s"]
        print(
            f"{name:<14}{m['run_s']:8.1f}{rate:10.0f}{m['ready_s']:9.1f}{m['peak_mb']:9.0f}"
        )
    print(f"{'ratio':<14}{ratio:8.2f}")
    summary = {"workload": workload, "dtype": dtype, "kernels": kernels, "ratio": ratio}
    print(json.dumps(summary | median | {"gemm_gflops": gemm_gflops(dtype)}))


if __name__ == "__main__":
    main()
