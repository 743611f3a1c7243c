"""Kills servers in the middle of batches, and sees that nothing is lost.

`scripts/torture_server` calls it. A round sends three batches to a server: sampled
lines with equal ones among them, scored lines, and lines of which some are wrong.
Several times the server is killed with SIGKILL, at a random moment, and another one
goes on in the same state folder. One batch is cancelled in some rounds.

In the end every line must be there once, in the order of the input, with the record of a server
that was never disturbed; and every record that was on disk at a kill must be in the
output in the very same bytes.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tests.forked import Forked

BOUNDARY = "aBoundary"
NUM_LINES = 50
URL = "/v1/completions"
READY_S = 120.0
WAIT_S = 120.0
OVER = ("completed", "cancelled")


@dataclass(slots=True)
class Served:
    """A server that is a process of its own."""

    process: Forked
    port: int

    def call(
        self, path: str, body: bytes | None = None, content_type: str = ""
    ) -> bytes:
        """Send a request, a POST if it has a body; return what came."""
        headers = {"Content-Type": content_type} if content_type else {}
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers), timeout=30
        ) as got:
            found: bytes = got.read()
        return found

    def get(self, path: str) -> dict[str, Any]:
        """Return the object that a path has."""
        found: dict[str, Any] = json.loads(self.call(path))
        return found


@contextlib.contextmanager
def serving(state: Path) -> Iterator[Served]:
    """Start a server with the demo model; wait until it answers; kill it in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [
        "--port",
        str(port),
        "--state",
        str(state),
        "--max-rows",
        "8",
        "--dtype",
        "float32",
    ]
    process = Forked(["serve", "-q", *flags])
    server = Served(process, port)
    try:
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(urllib.error.URLError):
                server.call("/health")
                break
            assert process.poll() is None, f"the server has ended: {process.said()}"
            assert time.monotonic() < deadline, "the server is not ready"
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


def send_batch(server: Served, lines: list[bytes]) -> str:
    """Upload lines, and start a batch of them; return its id."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    form = f'{head}purpose"\r\n\r\nbatch\r\n{head}file"; filename="a"\r\n\r\n'.encode()
    form += b"\n".join(lines) + f"\r\n--{BOUNDARY}--\r\n".encode()
    file = json.loads(
        server.call("/v1/files", form, f"multipart/form-data; boundary={BOUNDARY}")
    )
    wish = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    return str(json.loads(server.call("/v1/batches", json.dumps(wish).encode()))["id"])


def wait_for_output(server: Served, batch_id: str) -> list[dict[str, Any]]:
    """Wait until a batch is over; return the records of its answers."""
    deadline = time.monotonic() + WAIT_S
    while (batch := server.get(f"/v1/batches/{batch_id}"))["status"] not in OVER:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return [json.loads(line) for line in read_file(server, batch["output_file_id"])]


def read_file(server: Served, file_id: str | None) -> list[bytes]:
    """Return a file's lines; None: it has none."""
    if file_id is None:
        return []
    return server.call(f"/v1/files/{file_id}/content").splitlines()


def make_lines(kind: int) -> list[bytes]:
    """Return lines: sampled ones that are equal in groups, scored ones, or some that
    are wrong."""
    lines = []
    for number in range(NUM_LINES):
        body: dict[str, Any] = {
            "prompt": f"room {number % 5}",
            "max_tokens": 8 + number % 40,
        }
        body |= {"ignore_eos": True, "temperature": 0.9 if number % 2 else 0}
        if kind == 1:
            body |= {"echo": True, "logprobs": 1, "max_tokens": 4}
        if kind == 2 and number % 3 == 0:
            body["prompt"] = 5
        line = {"custom_id": f"r{number}", "method": "POST", "url": URL, "body": body}
        lines.append(json.dumps(line).encode())
    return [*lines, b"no json"] if kind == 2 else lines


def plain(records: list[bytes]) -> list[Any]:
    """Return records without what depends on when they were answered, and beside what."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            left_out = ("created", "prompt_tokens_details")
            return {k: strip(each) for k, each in value.items() if k not in left_out}
        if isinstance(value, list):
            return [strip(each) for each in value]
        return round(value, 3) if isinstance(value, float) else value

    return [strip(json.loads(record)) for record in records]


def kept_records(state: Path) -> set[bytes]:
    """Return the records in the whole lines of the journals that a killed server has left."""
    found: set[bytes] = set()
    for journal in state.glob("batches/*/*.journal"):
        lines = journal.read_bytes().splitlines(keepends=True)[1:]
        found |= {
            line[line.index(b'"record":') + 9 : -2]
            for line in lines
            if line.endswith(b"}\n")
        }
    return found


def answer_alone(folder: Path) -> list[tuple[list[Any], list[Any]]]:
    """Answer the batches by a server that nothing disturbs; return outputs and errors."""
    with serving(folder / "whole") as server:
        found = []
        for batch_id in [send_batch(server, make_lines(kind)) for kind in range(3)]:
            wait_for_output(server, batch_id)
            batch = server.get(f"/v1/batches/{batch_id}")
            files = (batch["output_file_id"], batch["error_file_id"])
            output, errors = (plain(read_file(server, file_id)) for file_id in files)
            found.append((output, errors))
        return found


def one_round(
    number: int, num_kills: int, whole: list[tuple[list[Any], list[Any]]], folder: Path
) -> Counter[str]:
    """Kill servers at moments that follow from the round's number; return what kills met."""
    source = random.Random(number)
    state = folder / f"state_{number}"
    met: Counter[str] = Counter()
    kept: set[bytes] = set()
    batches: list[str] = []
    cancelled = ""
    for life in range(num_kills + 1):
        with serving(state) as server:
            if not batches:
                batches = [send_batch(server, make_lines(kind)) for kind in range(3)]
            if life == num_kills - 1 and source.random() < 0.5:
                cancelled = source.choice(batches)
                with contextlib.suppress(urllib.error.HTTPError):  # it is over
                    server.call(f"/v1/batches/{cancelled}/cancel", b"")
            if life == num_kills:
                check(server, batches, whole, kept, number)
                break
            time.sleep(
                source.choice((0.0, source.uniform(0, 0.3), source.uniform(0, 1.2)))
            )
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
        kept |= kept_records(state)
        num_open = len([*state.glob("batches/*/*.journal")])
        met[f"with {num_open} of 3 journals"] += 1
    left = [
        path
        for path in state.rglob("*")
        if path.suffix in (".journal", ".ordered", ".new")
    ]
    assert not left, f"round {number}: {left}"
    return met


def check(
    server: Served,
    batches: list[str],
    whole: list[tuple[list[Any], list[Any]]],
    kept: set[bytes],
    number: int,
) -> None:
    """See that every batch has every line once, and what it had on disk."""
    finished: set[bytes] = set()
    for batch_id, (output, errors) in zip(batches, whole, strict=True):
        wait_for_output(server, batch_id)
        batch = server.get(f"/v1/batches/{batch_id}")
        answers = read_file(server, batch["output_file_id"])
        refused = read_file(server, batch["error_file_id"])
        finished |= {*answers, *refused}
        counts = batch["request_counts"]
        assert (len(answers), len(refused)) == (
            counts["completed"],
            counts["failed"],
        ), batch
        if batch["status"] == "cancelled":
            assert is_part(plain(answers), output) and is_part(
                plain(refused), errors
            ), batch_id
        else:
            assert plain(answers) == output, (
                f"round {number}: {batch_id} has other answers"
            )
            assert plain(refused) == errors, (
                f"round {number}: {batch_id} has other errors"
            )
    assert kept <= finished, f"round {number}: a row that was on disk has changed"


def is_part(some: list[Any], whole: list[Any]) -> bool:
    """Tell whether values stand among others, in their order, each once."""
    others = iter(whole)
    return all(any(each == other for other in others) for each in some)


@click.command()
@click.option("--rounds", default=20, show_default=True)
@click.option("--kills", default=3, show_default=True, help="In each round.")
@click.option(
    "--first", default=0, help="Number of the first round.", show_default=True
)
def main(rounds: int, kills: int, first: int) -> None:
    """Kill servers at random moments; end with status 1 at the first line that is lost."""
    met: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = answer_alone(folder)
        for number in range(first, first + rounds):
            found = one_round(number, kills, whole, folder)
            met += found
            print(f"round {number}: kills {dict(found)}", flush=True)
    print(f"{rounds} of {rounds} rounds lost nothing")
    print(
        "kills met servers "
        + "; ".join(f"{name}: {count}" for name, count in met.items())
    )


if __name__ == "__main__":
    main()
