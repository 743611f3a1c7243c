"""`fminfer serve` as a user starts it: alone, over several ranks, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import fminfer
from tests.forked import Forked
from tests.server.running import WAIT_S, until

QUESTION = {
    "prompt": "Question: How do you go from the porch to the den?\nAnswer:",
    "max_tokens": 6,
    "seed": 3,
    "logit_bias": {"0": -100},
}


@contextmanager
def serving(*flags: str) -> Iterator[tuple[Forked, str]]:
    """Start the command; give the process and its address."""
    process = Forked(["serve", "--port", "0", "--dtype", "float32", *flags])
    try:
        until(
            lambda: "Ctrl-C" in process.said() or process.poll() is not None,
            "it serves",
        )
        said = re.search(
            r"Ready after [\d.]+ s: float32 on \w+, (\d+ ranks of )?\d+ threads?, .*; "
            r"answers (are the same|may depend on other rows: ).*\n"
            r"Serving .* at (.*)\n",
            process.said(),
        )
        assert said, process.said()
        yield process, said[3]
    finally:
        process.kill()
        process.wait()


def post(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(fields).encode()
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        found: dict[str, Any] = json.load(response)
        return found


@pytest.fixture(scope="module")
def expected() -> str:
    engine = fminfer.Engine(dtype="float32")
    try:
        (record,) = engine.run([QUESTION])
    finally:
        engine.close()
    assert record.result is not None
    text: str = record.result["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    "flags", [(), ("--world-size", "2"), ("--data-group-size", "2")]
)
def test_it_answers_as_a_file_does_and_ends_when_told(
    expected: str, flags: list[str]
) -> None:
    with serving(*flags) as (process, url):
        assert post(url, QUESTION)["choices"][0]["text"] == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert "Traceback" not in (told := process.said())
        assert (
            "Ending: open requests (0) have 10 s to finish (--grace). Ctrl-C ends"
            in told
        )
        assert told.endswith("Ended; every open request has its answer.\n"), (
            "it was silent"
        )


def test_a_dead_rank_ends_the_server_with_the_reason() -> None:
    with serving("--world-size", "2") as (process, url):
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)],
            capture_output=True,
            text=True,
        ).stdout.split()
        os.kill(int(children[0]), signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < started_s + WAIT_S:
                post(url, QUESTION)
        assert process.wait(WAIT_S) == 1
        assert "rank 1" in process.said()


def test_requests_that_the_grace_cuts_make_the_status_143() -> None:
    with serving("--grace", "0.2") as (process, url), ThreadPoolExecutor() as asking:
        long = QUESTION | {"max_tokens": 1000, "n": 64, "ignore_eos": True}
        asked = asking.submit(post, url, long)

        def is_running() -> bool:
            with urllib.request.urlopen(f"{url}/stats", timeout=WAIT_S) as response:
                return bool(json.load(response)["num_running"])

        until(is_running, "it runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
        with pytest.raises(OSError):
            asked.result()
