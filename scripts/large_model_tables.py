#!/usr/bin/env python
"""Writes the tables of docs/large_models.md, as `fminfer check` predicts them; it runs no model.

scripts/large_model_tables.py                       # all of them: some minutes
scripts/large_model_tables.py --check published     # ends with 1 if this table differs
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from fminfer.cli.app import main

PAGE = Path(__file__).parents[1] / "docs" / "large_models.md"
END = "<!-- end -->"
MODELS = ["bloom-176b", "opt-175b", "llama-70b", "llama-405b", "deepseek-v3"]
A100 = "--device-kind a100-80gb"
MACHINES = {
    "one GPU": A100,
    "eight GPUs": f"{A100} --num-devices 8 --host-memory 512G",
    "two nodes": f"{A100} --num-devices 8 --num-nodes 2 --host-memory 512G",
}
BATCHES = [1, 8, 16, 32, 64, 128]
OOM = "oom"
# Milliseconds a token by batch, and seconds until ready, on 8 A100-80GB with 512 GB of RAM: from
# the README of Hugging Face's first scripts for BLOOM. "": not told there.
PUBLISHED = {
    "accelerate": (["230.38", "31.78", "17.84", "10.89", OOM, OOM], "113–121"),
    "ds-inference": (["40.57", "5.23", "", "", "2.77", "0.66"], "654–685"),
    "ds-zero": (["283", "34.88", *[OOM] * 4], "462–463"),
}
OURS = {  # our nearest way to each
    "accelerate": f"{MACHINES['eight GPUs']} --pipeline-group-size 8",
    "ds-inference": f"{MACHINES['eight GPUs']} --tp 8",
    "ds-zero": f"{A100} --host-memory 512G --offload cpu",
}


def make_lines(count: int, prompt: int) -> str:
    """Make requests of random token ids, each with 100 tokens to draw."""
    rng = random.Random(1)
    rows = ([rng.randrange(300) for _ in range(prompt)] for _ in range(count))
    return "".join(
        json.dumps({"prompt": row, "max_tokens": 100}) + "\n" for row in rows
    )


def check(flags: str, *, count: int = 1024, prompt: int = 100) -> dict[str, Any]:
    """Return the report of `fminfer check` on made-up lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        path.write_text(make_lines(count, prompt))
        found = CliRunner().invoke(
            main, ["check", str(path), "--json", *shlex.split(flags)]
        )
    assert found.exit_code in (0, 1), found.output
    report: dict[str, Any] = json.loads(found.stdout)
    return report


def show_ms(value: float) -> str:
    """Write milliseconds with two digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def machine_table(machine: str) -> str:
    """Return each model's fastest way on a machine, with weights in 16, 8 and 4 bits."""
    lines = ["| model | 16 bits | ms a token | 8 bits | ms | 4 bits | ms |"]
    lines += ["|---|---|--:|---|--:|---|--:|"]
    for model in MODELS:
        report = check(f"--random-init {model} --plan {MACHINES[machine]}")
        cells = [model]
        for bits in ("bfloat16", "int8", "int4"):
            runs = [
                r
                for r in report["plans"]["runs"]
                if r.get("weight_dtype", "").endswith(bits)
            ]
            if not runs:
                cells += ["does not fit", ""]
                continue
            best = min(runs, key=lambda run: run["ms_token"])
            flags = best["flags"].replace(f"--quantize {bits}", "").split()
            cells.append(f"`{' '.join(flags)}`" if flags else "")
            cells.append(f"{show_ms(best['ms_token'])}, {best['bound']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def published_table() -> str:
    """Return BLOOM-176B's published times, each with our predictions below."""
    lines = [f"| ms a token | {' | '.join(map(str, BATCHES))} | until ready, s |"]
    lines += [f"|---|{'--:|' * (len(BATCHES) + 1)}"]
    for name, (told, ready) in PUBLISHED.items():
        lines.append(f"| {name}, published | {' | '.join(told)} | {ready} |")
        runs = []
        for size in BATCHES:
            report = check(
                f"--random-init bloom-176b --plan {OURS[name]}", count=size, prompt=8
            )
            own = (
                run
                for run in report["plans"]["runs"]
                if run.get("weight_dtype") == "bfloat16"
            )
            runs.append(next(own))
        kept = OURS[name].split("GPUs")[-1].split("512G ")[-1]
        times = " | ".join(show_ms(run["ms_token"]) for run in runs)
        lines.append(f"| `{kept}`, predicted | {times} | {runs[0]['load_s']:,.0f} |")
    return "\n".join(lines)


def memory_table() -> str:
    """Return EnergonAI's published memory of BLOOM-176B on 8 GPUs, and ours."""
    lines = [
        "| weights | published, GB a GPU | weights, GiB | a step | 512 tokens of KV | together |"
    ]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    int8 = f"--quantize int8 {A100.replace('80gb', '40gb')}"  # where floats do not fit
    for bits, told, flags in (("bfloat16", 42.88, A100), ("int8", 21.68, int8)):
        report = check(
            f"--random-init bloom-176b --tp 8 --chunk-size 512 {flags}", count=1
        )
        most = max(report["memory"]["processes"], key=lambda each: each["weights"])
        parts = [most["weights"], most["work"], 512 * most["kv_token"]]
        shown = " | ".join(f"{size / 2**30:.2f}" for size in (*parts, sum(parts)))
        lines.append(f"| {bits} | {told} | {shown} |")
    return "\n".join(lines)


def opt_table() -> str:
    """Return OPT-175B on 8 ranks with the budget of the first runner."""
    flags = f"{MACHINES['eight GPUs']} --pipeline-group-size 8 --num-layers 12 --budget 26800"
    (best, *_) = check(f"--random-init opt-175b --plan {flags}")["plans"]["runs"]
    return (
        "| flags | KV tokens | GiB a rank | load, s | ms a token | bound by |\n"
        "|---|--:|--:|--:|--:|---|\n"
        f"| `--world-size 8 --num-layers 12 --budget 26800` | {best['kv_tokens']:,} | "
        f"{best['rank_bytes'] / 2**30:.1f} | {best['load_s']:,.0f} | "
        f"{show_ms(best['ms_token'])} | "
        f"{best['bound']} |"
    )


TABLES: dict[str, Callable[[], str]] = {
    "memory": memory_table,
    "published": published_table,
    "opt": opt_table,
    **{name: partial(machine_table, name) for name in MACHINES},
}


def fill(text: str, names: list[str]) -> str:
    """Return the page with what stands between the marks of some tables replaced by them."""
    for name in names:
        start = f"<!-- table: {name} -->\n"
        before, found, rest = text.partition(start)
        assert found, f"the page has the mark {start.strip()}"
        text = before + start + f"{TABLES[name]()}\n" + END + rest.partition(END)[2]
    return text


if __name__ == "__main__":
    text = PAGE.read_text()
    words = sys.argv[1:]
    names = [word for word in words if word in TABLES] or [*TABLES]
    if "--check" not in words:
        PAGE.write_text(fill(text, names))
    elif text != fill(text, names):
        sys.exit(f"{PAGE} differs from what fminfer check predicts; run {__file__}")
