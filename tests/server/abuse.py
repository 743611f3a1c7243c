"""Abuses a server: `scripts/abuse`.

A third of the requests are good, and must be answered as the engine alone answers them. A third
leave before they have their answer, or never read it. A third are wrong. After the
first of them, which warm the server up, and again after all, the server is looked at
from outside: it must hold no KV block, no connection, no thread more, and no more
memory. SIGTERM must then end it in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from . import good_requests, leaving_clients, wrong_requests
from .beside import ASKED, run_beside
from .demo_server import DTYPE, GRACE_S, running
from .good_requests import Good, ask_good, make_good
from .outside_view import View, count_connections, look
from .raw_http import connect, get, write_post

SETTLE_S = 60.0
NUM_AT_ONCE = 32
WARM_UP = 0.2  # share of the requests
MEMORY_MB = 50.0  # that the server may have more in the end
FREED_S = 2.0  # after which memory that was freed must be given back
MOST_TOLD = 20
MOST_UNREAD = 16  # at once: the server holds what they do not take


@dataclass(slots=True)
class Report:
    """What has happened so far."""

    met: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def blame(self, problem: str) -> None:
        """Note what is wrong."""
        self.problems.append(problem)

    def require(self, is_right: bool, problem: str) -> None:
        """Note a problem unless all is right."""
        if not is_right:
            self.blame(problem)


@dataclass(slots=True, frozen=True)
class Task:
    """One request to come: what it is for, and in which way it is sent."""

    kind: str
    way: Any


def make_tasks(num_requests: int, rng: random.Random) -> list[Task]:
    """Return the requests in a random order, a third of each kind."""
    num_large = max(len(wrong_requests.BODIES), num_requests // 300)
    num_unread = max(1, num_requests // 100)
    third = num_requests // 3
    tasks = [
        Task("good", rng.choice(good_requests.WAYS))
        for _ in range(num_requests - 2 * third)
    ]
    tasks += [Task("unread", None)] * num_unread
    tasks += [
        Task("leaving", leaving_clients.WAYS[i % 5]) for i in range(third - num_unread)
    ]
    for number in range(third):
        known = wrong_requests.BODIES if number < num_large else wrong_requests.SMALL
        tasks.append(Task("wrong", known[number % len(known)]))
    rng.shuffle(tasks)
    return tasks


async def run_tasks(
    tasks: list[Task],
    port: int,
    good: list[Good],
    rng: random.Random,
    unread: list[socket.socket],
    report: Report,
) -> None:
    """Run requests, some at once.

    Args:
        unread: gets the connections that nobody reads.
    """
    waiting = iter(tasks)

    async def run_one(task: Task) -> None:
        if task.kind == "good":
            await ask_good(port, rng.choice(good), task.way, rng)
        elif task.kind == "leaving":
            await leaving_clients.leave(port, task.way, rng)
        elif task.kind == "unread":
            unread.append(leaving_clients.open_unread(port, rng))
            if len(unread) > MOST_UNREAD:
                unread.pop(0).close()
        else:
            await wrong_requests.ask_wrong(port, task.way, rng)

    async def work() -> None:
        for task in waiting:
            way = task.way.name if task.kind == "wrong" else task.way
            try:
                await run_one(task)
                report.met[task.kind] += 1
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                told = (
                    f"{type(error).__name__} {error} "
                    f"({Path(last.filename).name}:{last.lineno})"
                )
                report.blame(f"{task.kind}, {way}: {told[:600]}")

    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))


async def settle(port: int, pid: int) -> tuple[dict[str, Any], int, View]:
    """Wait until nothing is left of past requests; return the last figures, left or not."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        stats: dict[str, Any] = (await get(port, "/stats")).json
        await asyncio.sleep(0.2)  # its own connection goes
        num_open = count_connections(port)
        busy = [stats[name] for name in ("num_running", "num_waiting", "kv_usage")]
        if not (any(busy) or num_open) or time.monotonic() > deadline:
            await asyncio.sleep(FREED_S)
            return stats, num_open, look(pid)


def compare(
    stats: dict[str, Any], num_open: int, before: View, after: View, to: Report
) -> None:
    """Note what a server holds that it must not."""
    for name in ("num_running", "num_waiting", "kv_usage"):
        to.require(
            stats[name] == 0, f"{name} is {stats[name]} when all clients have left"
        )
    to.require(
        num_open == 0, f"{num_open} connections are open when all clients have left"
    )
    for name in ("num_sockets", "num_files", "num_threads"):
        one = getattr(before, name)
        other = getattr(after, name)
        to.require(other <= one, f"{name} was {one}, and is {other}")
    more = after.rss_mb - before.rss_mb
    to.require(more <= MEMORY_MB, f"memory has grown by {more:.0f} MB")


async def stop(port: int, server: subprocess.Popen[bytes], report: Report) -> float:
    """End the server in the middle of a stream; return how many seconds it took."""
    fields = {"prompt": [5], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    async with connect(port) as wire:
        await wire.send(write_post(good_requests.PATH, json.dumps(fields).encode()))
        await wire.reader.readuntil(b"data:")
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        rest = b""
        with contextlib.suppress(asyncio.TimeoutError):
            rest = await asyncio.wait_for(wire.reader.read(-1), GRACE_S + 10)
    try:
        server.wait(GRACE_S + 10)
    except subprocess.TimeoutExpired:
        report.blame(
            f"SIGTERM has not ended it after {time.monotonic() - started:.0f} s"
        )
    took_s = time.monotonic() - started
    report.require(
        took_s < GRACE_S + 5, f"SIGTERM took {took_s:.1f} s; the grace is {GRACE_S} s"
    )
    report.require(b"[DONE]" in rest, f"the stream has no end: {rest[-300:]!r}")
    status = 143 if b'"error"' in rest else 0  # 0: what ran has its answer
    told = f"SIGTERM ended it with status {server.returncode}, not {status}"
    report.require(server.returncode == status, told)
    return took_s


async def abuse(
    server: subprocess.Popen[bytes],
    port: int,
    num_requests: int,
    seed: int,
    report: Report,
) -> dict[str, Any]:
    """Run everything against a server that is ready; return the figures."""
    rng = random.Random(seed)
    good = make_good(seed, DTYPE)
    tasks = make_tasks(num_requests, rng)
    num_first = max(len(wrong_requests.BODIES), round(WARM_UP * len(tasks)))
    started = time.monotonic()
    views: list[View] = []
    for some in (tasks[:num_first], tasks[num_first:]):
        unread: list[socket.socket] = []
        await run_tasks(some, port, good, rng, unread, report)
        for wire in unread:
            wire.close()
        stats, num_open, view = await settle(port, server.pid)
        views.append(view)
    took_s = time.monotonic() - started
    compare(stats, num_open, views[0], views[1], report)
    status = (await get(port, "/metrics")).status
    report.require(status == 200, f"/metrics is {status}")
    await run_tasks(
        [Task("good", way) for way in good_requests.WAYS], port, good, rng, [], report
    )
    stop_s = await stop(port, server, report)
    before, after = map(asdict, views)
    return {"took_s": took_s, "stop_s": stop_s, "before": before, "after": after}


def run_abuse(num_requests: int, seed: int, report: Report) -> dict[str, Any]:
    """Start a server, abuse it and end it; return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        with running(errors) as (server, port):
            figures = asyncio.run(abuse(server, port, num_requests, seed, report))
        told = errors.read_text(errors="replace")
    for word in ("Traceback", "Exception in"):
        first = told.find(word)
        report.require(
            first < 0, f"stderr has a {word}: {told[max(0, first - 200) :][:3000]}"
        )
    return figures


@click.command()
@click.option("--requests", "num_requests", default=300, show_default=True)
@click.option(
    "--beside", is_flag=True, help="Measure a live client beside hostile loads instead."
)
@click.option("--load", "loads", multiple=True, help="Of these, only such a load.")
@click.option(
    "--seed", default=0, help="Of which requests come when.", show_default=True
)
def main(num_requests: int, seed: int, *, beside: bool, loads: tuple[str, ...]) -> None:
    """Abuse a server; end with status 1 if anything is off."""
    if beside:
        with tempfile.TemporaryDirectory() as folder:
            problems = run_beside(loads or ASKED, Path(folder))
        print(json.dumps({"problems": problems}))
        sys.exit(1 if problems else 0)
    report = Report()
    figures = run_abuse(num_requests, seed, report)
    print(f"{'':14}{'after warm-up':>14}{'in the end':>14}")
    for name, before in figures["before"].items():
        print(f"{name:14}{before:14,.0f}{figures['after'][name]:14,.0f}")
    print(f"{num_requests} requests in {figures['took_s']:.0f} s; ", end="")
    print(
        "as they should be: "
        + ", ".join(f"{n} {kind}" for kind, n in report.met.items())
    )
    print(f"SIGTERM in the middle of a stream: {figures['stop_s']:.1f} s")
    for problem in report.problems[:MOST_TOLD]:
        print(f"! {problem}")
    summary = {"requests": num_requests, "seed": seed, "met": report.met}
    print(json.dumps(summary | figures | {"problems": report.problems}))
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
