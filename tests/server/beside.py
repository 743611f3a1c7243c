"""A client that behaves well beside hostile loads: `scripts/abuse --beside`."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path

from tests.vector_models import save_bert

from . import live_client
from .demo_server import running
from .hostile_loads import COMPLETIONS, LOADS, MARK
from .hostile_vectors import VECTOR_LOADS
from .outside_view import look

LEAST_S = 1.5  # a load that ends sooner is repeated
CALM_S = 0.6  # before a load
FREED_S = 12.0  # after a load, in which its memory must be given back
P95_S = 0.3
LONGEST_S = 1.0
MEMORY_MB = 50.0
QUESTION = {
    "prompt": "Question: How do you go there?\nAnswer:",
    "max_tokens": 4,
    "temperature": 0,
}
# What the client asks, by the loads beside it: its path and its fields.
ASKED = dict.fromkeys(LOADS, (COMPLETIONS, QUESTION)) | dict.fromkeys(
    VECTOR_LOADS, ("/v1/embeddings", {"input": "w1 w2 w3"})
)


@dataclass(slots=True, frozen=True)
class Beside:
    """What a live client met beside a load."""

    name: str
    num_asked: int
    num_refused: int
    p95_s: float
    longest_s: float
    calm_s: float  # median before the load; nan: no request was over by then
    grown_mb: float  # when it was given back, or as long as was waited for that

    @property
    def problems(self) -> list[str]:
        """What is not as it should be."""
        found = []
        if self.num_refused:
            found.append(f"{self.num_refused} of {self.num_asked} were refused")
        if self.p95_s > P95_S:
            found.append(f"p95 is {self.p95_s:.2f} s")
        if self.longest_s > LONGEST_S:
            found.append(f"the longest is {self.longest_s:.2f} s")
        if self.grown_mb > MEMORY_MB:
            found.append(f"memory has grown by {self.grown_mb:.0f} MB")
        return [f"{self.name}: {problem}" for problem in found]


def measure(name: str, port: int, pid: int) -> Beside:
    """Put a load on a server beside a live client."""
    path, fields = ASKED[name]
    client = subprocess.Popen(
        [sys.executable, live_client.__file__, str(port), path, dumps(fields)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    time.sleep(CALM_S)
    before_mb = look(pid).rss_mb
    began_s = time.time()
    while True:
        (LOADS | VECTOR_LOADS)[name](port)
        if time.time() - began_s > LEAST_S:
            break
    ended_s = time.time()
    told, _ = client.communicate(b"")
    while (grown_mb := look(pid).rss_mb - before_mb) > MEMORY_MB:
        if time.time() > ended_s + FREED_S:
            break
        time.sleep(0.1)
    asked = loads(told)
    calm = sorted(took_s for at_s, took_s, _ in asked if at_s < began_s - 0.1)
    meanwhile = [
        (took_s, status)
        for at_s, took_s, status in asked
        if at_s + took_s > began_s and at_s < ended_s
    ]
    times = sorted(took_s for took_s, _ in meanwhile)
    return Beside(
        name,
        num_asked=len(times),
        num_refused=sum(status != 200 for _, status in meanwhile),
        p95_s=times[int(0.95 * (len(times) - 1))],
        longest_s=times[-1],
        calm_s=calm[len(calm) // 2] if calm else math.nan,
        grown_mb=grown_mb,
    )


def warm_up(port: int) -> None:
    """Have the server touch the memory that it may have, and fill its caches."""
    for name in ("many_choices", "long_prompts", "scored_long_prompts", "large_bodies"):
        LOADS[name](port)


def print_besides(names: Iterable[str], port: int, pid: int) -> list[str]:
    """Measure and print loads; return what was wrong."""
    problems: list[str] = []
    print(f"{'load':34}{'asked':>6}{'calm':>7}{'p95':>7}{'longest':>9}{'MB':>6}")
    for name in names:
        found = measure(name, port, pid)
        problems += found.problems
        figures = f"{found.calm_s:7.3f}{found.p95_s:7.3f}{found.longest_s:9.3f}"
        mark = " !" if found.problems else ""
        print(
            f"{name:34}{found.num_asked:6}{figures}{found.grown_mb:6.0f}{mark}",
            flush=True,
        )
    return problems


def run_beside(
    names: Iterable[str], folder: Path, *, warms_up: bool = True
) -> list[str]:
    """Measure loads beside a live client, each on a server with its model.

    Returns:
        What was wrong.
    """
    names = [*names]
    problems: list[str] = []
    if of_demo := [name for name in names if name in LOADS]:
        with running(folder / "stderr", state=folder / "state") as (server, port):
            if warms_up:
                warm_up(port)
            problems += print_besides(of_demo, port, server.pid)
    if of_vectors := [name for name in names if name in VECTOR_LOADS]:
        save_bert(folder / "bert")
        with running(folder / "stderr of vectors", model=folder / "bert") as (
            server,
            port,
        ):
            if warms_up:
                VECTOR_LOADS["many_texts_to_embed"](port)
            problems += print_besides(of_vectors, port, server.pid)
    told = "".join(each.read_text(errors="replace") for each in folder.glob("stderr*"))
    if MARK in told:
        problems.append(
            f"the log quotes a prompt: {told[max(0, told.find(MARK) - 300) :][:600]}"
        )
    return problems
