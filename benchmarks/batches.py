#!/usr/bin/env python
"""What a batch costs live requests, and what a server costs a batch.

The model is that of peers.py. Live: one client asks for streamed completions, one after another,
alone and with a batch of many lines behind them, in turns. Its times to the first token stand
beside the mean step, of which each time counts its steps. Rate: the same lines as a batch of a
server and by `fminfer run`, in turns; both without loading.

    python benchmarks/batches.py --lines 10000 --requests 200 --rounds 2
    python benchmarks/batches.py --part rate --lines 200 --rounds 3

A table comes first, one JSON line last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE))  # scripts find each other, however this one is started

from peers import find_sides, make_rows, run_fminfer, write_model  # noqa: E402
from serve import run_client  # noqa: E402
from serve_sides import Side, make_sides, running  # noqa: E402

BOUNDARY = "aBoundary"
OVER = ("completed", "failed", "expired", "cancelled")
URL = "/v1/completions"


def call(
    port: int, path: str, body: bytes | None = None, content_type: str = ""
) -> Any:
    """Send a request, a POST if it has a body; return the JSON that came."""
    headers = {"Content-Type": content_type} if content_type else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


def count_steps(port: int) -> float:
    """Return how many steps a server has computed."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=60
    ) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("fminfer:engine_steps_total"):
                return float(line.split()[-1])
    raise click.ClickException("/metrics tells no steps")


def start_batch(port: int, rows: list[dict[str, Any]]) -> str:
    """Send rows as a batch; return its id."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    form = f'{head}purpose"\r\n\r\nbatch\r\n{head}file"; filename="a"\r\n\r\n'.encode()
    for number, row in enumerate(rows):
        line = {"custom_id": str(number), "method": "POST", "url": URL, "body": row}
        form += json.dumps(line).encode() + b"\n"
    form += f"\r\n--{BOUNDARY}--\r\n".encode()
    file = call(port, "/v1/files", form, f"multipart/form-data; boundary={BOUNDARY}")
    wish = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    return str(call(port, "/v1/batches", json.dumps(wish).encode())["id"])


def wait_for_end(port: int, batch_id: str) -> None:
    """Wait until a batch is over, by few calls."""
    while (batch := call(port, f"/v1/batches/{batch_id}"))["status"] not in OVER:
        time.sleep(0.2)
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise click.ClickException(f"the batch is {batch}")


def spread_out(rows: list[dict[str, Any]], num: int) -> list[dict[str, Any]]:
    """Return so many rows, of whose token ids the first one tells them apart."""
    found = []
    for number in range(num):
        row = rows[number % len(rows)]
        found.append(
            row
            | {"prompt": [1000 + number % 20000, number // 20000, *row["prompt"][2:]]}
        )
    return found


def ask_live(
    port: int, rows: list[dict[str, Any]], num: int, first: int, folder: Path
) -> dict[str, float]:
    """Ask one request after another; return times to the first token and the mean step, ms."""
    live = [
        {
            "prompt": [7, first + number, *range(40, 88)],
            "max_tokens": 8,
            "ignore_eos": True,
        }
        | {"model": rows[0]["model"]}
        for number in range(num)
    ]
    before = count_steps(port)
    started = time.monotonic()
    answers = run_client(port, live, 1, True, folder)["answers"]
    wall_s = time.monotonic() - started
    num_steps = count_steps(port) - before
    # A step without text has no event: the whole answer then tells nothing of the first token.
    times = sorted(
        1000 * answer["event_s"][0] for answer in answers if answer["event_s"]
    )
    return {
        "p50_ms": statistics.median(times),
        "p99_ms": times[min(len(times) - 1, round(0.99 * len(times)))],
        "step_ms": 1000 * wall_s / max(1.0, num_steps),
        "num": len(times),
    }


def measure_live(
    side: Side,
    rows: list[dict[str, Any]],
    lines: int,
    requests: int,
    rounds: int,
    folder: Path,
) -> list[dict[str, dict[str, float]]]:
    """Ask live requests alone and beside a batch, in turns."""
    found = []
    with running(side, folder) as (port, _, _):
        ask_live(port, rows, 10, 1000, folder)  # what is slow at first use
        for number in range(rounds):
            first = 2000 + 2 * number * requests
            alone = ask_live(port, rows, requests, first, folder)
            batch_id = start_batch(port, spread_out(rows, lines))
            time.sleep(3)  # so that it has all rows
            beside = ask_live(port, rows, requests, first + requests, folder)
            status = call(port, f"/v1/batches/{batch_id}")
            if status["status"] != "in_progress":
                raise click.ClickException(
                    "the batch ended before the requests; give more --lines"
                )
            call(port, f"/v1/batches/{batch_id}/cancel", b"")
            wait_for_cancel(port, batch_id)
            found.append({"alone": alone, "beside": beside})
            print(f"  live {found[-1]}", file=sys.stderr, flush=True)
    return found


def wait_for_cancel(port: int, batch_id: str) -> None:
    """Wait until a batch is cancelled."""
    while call(port, f"/v1/batches/{batch_id}")["status"] != "cancelled":
        time.sleep(0.1)


def measure_rate(
    side: Side, rows: list[dict[str, Any]], dtype: str, rounds: int, folder: Path
) -> list[dict[str, float]]:
    """Answer rows as a batch and as a file, in turns; each server is new."""
    found = []
    for _ in range(rounds):
        with running(side, folder) as (port, _, _):
            ask_live(port, rows, 3, 1000, folder)
            started = time.monotonic()
            wait_for_end(port, start_batch(port, rows))
            batch_s = time.monotonic() - started
        job = {"rows": rows, "model": str(folder), "dtype": dtype, "device": "cpu"}
        shown = [row | {"return_token_ids": True} for row in rows]
        run_s = run_fminfer(job | {"rows": shown}, folder)["run_s"]
        found.append({"batch_s": batch_s, "run_s": run_s, "ratio": run_s / batch_s})
        print(f"  rate {found[-1]}", file=sys.stderr, flush=True)
    return found


@click.command()
@click.option("--model", default="llama-160m", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--workload", default="a", show_default=True, help="a, or ROWSxIN+OUT.")
@click.option("--lines", default=10_000, show_default=True, help="Of the batch behind.")
@click.option(
    "--rate-lines", default=128, show_default=True, help="Of the batch alone."
)
@click.option(
    "--requests", default=100, show_default=True, help="Live ones, in each turn."
)
@click.option("--rounds", default=1, show_default=True)
@click.option("--part", type=click.Choice(["live", "rate", "both"]), default="both")
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("/tmp/fminfer-peers")
)
def main(
    model: str,
    dtype: str,
    workload: str,
    lines: int,
    rate_lines: int,
    requests: int,
    rounds: int,
    part: str,
    folder: Path,
) -> None:
    """Measure live requests beside a batch, and a batch beside a file run."""
    folder = folder / f"{model}-{dtype}"
    write_model(folder, model, dtype, "cpu")
    also = {"ignore_eos": True, "model": str(folder)}
    rows = [row | also for row in make_rows(workload, 1.0)]
    (side,) = make_sides(find_sides(None, ("fminfer",)), folder, dtype)
    state = folder / f"state-{time.time_ns()}"
    side = Side(side.name, [*side.command, "--state", str(state)], side.environ)
    summary: dict[str, Any] = {"model": model, "dtype": dtype, "workload": workload}
    if part != "rate":
        summary["live"] = found = measure_live(
            side, rows, lines, requests, rounds, folder
        )
        print(f"\n{'first token, ms':24}{'p50':>9}{'p99':>9}{'mean step':>11}")
        for name in ("alone", "beside"):
            values = [
                statistics.median(turn[name][key] for turn in found)
                for key in ("p50_ms", "p99_ms", "step_ms")
            ]
            print(f"{name:24}{values[0]:9.1f}{values[1]:9.1f}{values[2]:11.1f}")
        grown = statistics.median(
            t["beside"]["p99_ms"] - t["alone"]["p99_ms"] for t in found
        )
        step_ms = statistics.median(turn["beside"]["step_ms"] for turn in found)
        summary["p99_grows_by_steps"] = grown / step_ms
        print(
            f"p99 grows by {grown:.1f} ms, {grown / step_ms:.2f} steps beside a batch"
        )
    if part != "live":
        rate_rows = spread_out(rows, rate_lines)
        summary["rate"] = rates = measure_rate(side, rate_rows, dtype, rounds, folder)
        ratio = statistics.median(turn["ratio"] for turn in rates)
        print(
            f"a batch has {ratio:.3f} of the rate of fminfer run ({rate_lines} lines)"
        )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
