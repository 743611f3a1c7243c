"""Phase 7: two ranks on one device, a rank that is killed, and budgets that are too large.

NCCL needs a GPU a rank: one GPU proves all but that, over gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import results
from benchmarks.gpu.cases import Case, Figures, Setting, Skipped, Wrong, expect
from benchmarks.gpu.processes import run_within

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
SIZE = "llama-160m"  # whose logits need more than is left, in the last case
LEFT_BYTES = 300 << 20
CONTEXT_BYTES = 800 << 20  # of CUDA and cuBLAS, in the run's own process
END_S = 10.0  # in which a run with a dead rank must end
START_S = 90.0
BUDGET = 65536  # tokens: 64 MB of KV cache in float32
WAIT_S = 30.0  # for the other cases to free their memory


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("two ranks answer as one", partial(compare_ranks, setting))
    yield Case("a rank is killed", partial(kill_a_rank, setting))
    yield Case("a budget beyond all memory", partial(ask_too_much, setting))
    yield Case("a budget that leaves too little", partial(leave_little, setting))


def command(
    setting: Setting, rows: list[dict[str, Any]], name: str, *flags: str
) -> list[str]:
    """Return the command of a run, its input and config written."""
    folder = setting.scratch / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    how = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lines = [json.dumps(row | how) + "\n" for row in rows]
    (folder / "in.jsonl").write_text("".join(lines))
    start = [sys.executable, "-m", "fminfer", "run", str(folder / "in.jsonl")]
    start += ["--output", str(folder / "out.jsonl"), "--device", setting.device, "-q"]
    if "--random-init" not in flags:
        start += ["--random-init", str(folder / "config.json")]
    if "--budget" not in flags:  # other processes have memory of the same device
        start += ["--budget", str(BUDGET)]
    return [
        *start,
        "--kernels",
        "require",
        "--stats",
        str(folder / "stats.json"),
        *flags,
    ]


def make_rows(count: int, prompt: int, **fields: Any) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [
        {"prompt": [rng.randrange(1000) for _ in range(prompt)]} | fields
        for _ in range(count)
    ]


def compare_ranks(setting: Setting) -> Figures:
    """Answer the same rows with one process, with two stages, and with two ranks of one
    stage."""
    rows = make_rows(6, 30, max_tokens=8, logprobs=1)

    def answer(flags: tuple[str, ...]) -> list[dict[str, Any]]:
        name = "ranks" + "".join(flags)
        _run(command(setting, rows, name, "--dtype", "float32", *flags), setting)
        lines = (setting.scratch / name / "out.jsonl").read_text().splitlines()
        return [json.loads(line)["result"]["choices"][0] for line in lines]

    ways = {"stages": ("--world-size", "2"), "shards": ("--tensor-parallel-size", "2")}
    with ThreadPoolExecutor() as pool:
        whole, *found = pool.map(answer, ((), *ways.values()))
    figures: Figures = {}
    for way, rows_of in zip(ways, found, strict=True):
        worst = 0.0
        for one, two in zip(whole, rows_of, strict=True):
            expect(one["token_ids"] == two["token_ids"], f"other tokens with two {way}")
            pairs = zip(
                *(each["logprobs"]["token_logprobs"] for each in (one, two)),
                strict=True,
            )
            worst = max(worst, *(abs(a - b) for a, b in pairs))
        figures[f"error of {way}"] = worst
        expect(worst < 1e-4, f"logprobs differ with two {way}", figures)
    return figures


def kill_a_rank(setting: Setting) -> Figures:
    """Kill the second rank while rows are generated; the run must end by itself, and say why."""
    rows = make_rows(1, 10, max_tokens=4) + make_rows(8, 10, max_tokens=3000)
    asked = command(setting, rows, "killed", "--world-size", "2", "--dtype", "float32")
    run = subprocess.Popen(
        asked, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        limit = min(START_S, setting.seconds / 2)
        _wait_for_a_row(run, setting.scratch / "killed" / "out.jsonl.journal", limit)
        os.kill(_second_rank(run.pid), signal.SIGKILL)
        started = time.monotonic()
        _, told = run.communicate(timeout=3 * END_S)
        took = time.monotonic() - started
    except subprocess.TimeoutExpired:
        raise Wrong(
            f"it has not ended {3 * END_S:g} s after its rank was killed"
        ) from None
    finally:
        run.kill()
    figures: Figures = {"ended after s": took, "status": run.returncode}
    expect(run.returncode != 0 and "rank 1" in told, f"it said: {told[-500:]}", figures)
    expect(took <= END_S, "too late", figures)
    return figures | {"told": told.strip().splitlines()[-1][:120]}


def _wait_for_a_row(run: subprocess.Popen[str], journal: Path, limit_s: float) -> None:
    """Wait until the short row has its answer: both ranks compute."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and run.poll() is None:
        if journal.exists() and b"token_ids" in journal.read_bytes():
            return
        time.sleep(0.05)
    text = run.communicate()[1] if run.poll() is not None else ""
    raise Wrong(f"no row was answered in {limit_s:.0f} s {text[-500:]}")


def _second_rank(pid: int) -> int:
    """Return the process of rank 1, which rank 0 has started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if (
                parent == pid
                and b"serve-part" in path.with_name("cmdline").read_bytes()
            ):
                return int(path.parent.name)
    raise Wrong("rank 0 has no process that it started")


def ask_too_much(setting: Setting) -> Figures:
    """Ask for a KV cache of petabytes: it must be refused, with the remedy."""
    asked = command(
        setting, make_rows(1, 4, max_tokens=1), "too-much", "--budget", "1000000000000"
    )
    started = time.monotonic()
    found = run_within(asked, setting.seconds)
    figures: Figures = {"status": found.status, "s": time.monotonic() - started}
    expect(found.status == 2 and "--budget" in found.err, found.err[-800:], figures)
    return figures


def leave_little(setting: Setting) -> Figures:
    """Leave a GPU 300 MB for steps that want more: they are halved, and all rows answered."""
    if setting.is_tiny:
        raise Skipped("the memory of a host is not taken whole for this")
    import torch

    from fminfer.models.known_sizes import SIZES

    size = SIZES[SIZE]
    width = size["hidden_size"]
    layer = 4 * width**2 + 3 * width * size["intermediate_size"]
    weights = 4 * (size["num_hidden_layers"] * layer + 2 * size["vocab_size"] * width)
    end = time.monotonic() + WAIT_S
    while _count_running(setting) > 1 and time.monotonic() < end:
        time.sleep(0.2)
    free, _ = torch.cuda.mem_get_info()
    room = free - weights - CONTEXT_BYTES - LEFT_BYTES
    budget = room // (2 * size["num_hidden_layers"] * width * 4)
    rows = make_rows(64, 500, max_tokens=0, echo=True, logprobs=5)
    flags = ("--random-init", SIZE, "--dtype", "float32", "--budget", str(budget))
    _run(command(setting, rows, "little", *flags), setting)
    stats = json.loads((setting.scratch / "little" / "stats.json").read_text())
    figures: Figures = {"budget": budget, "errors": stats["num_errors"]}
    figures["tokens at once"] = stats["engine"]["stages"][0]["max_tokens"]
    expect(
        stats["num_errors"] == 0 and stats["num_rows"] == len(rows),
        "rows failed",
        figures,
    )
    return figures


def _count_running(setting: Setting) -> int:
    """Count the cases of this phase that are running now."""
    lines = [line for line in results.read(setting.results) if line["phase"] == 7]
    states = {line["case"]: line["state"] for line in lines if "case" in line}
    return list(states.values()).count("running")


def _run(asked: list[str], setting: Setting) -> None:
    found = run_within(asked, setting.seconds)
    expect(found.status == 0, f"status {found.status}: {found.err[-1500:]}")
