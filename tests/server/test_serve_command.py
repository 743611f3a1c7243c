"""`fminfer serve` as a user starts it: alone, over several ranks, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import fminfer
from tests.server.running import WAIT_S

QUESTION = {
    "prompt": "Question: How do you go from the porch to the den?\nAnswer:",
    "max_tokens": 6,
    "seed": 3,
    "logit_bias": {"0": -100},
}


@contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command; give the process and its address."""
    command = [sys.executable, "-m", "fminfer", "serve", "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        while " at http://" not in said:
            line = process.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        assert re.search(
            r"Ready after [\d.]+ s: float32 on \w+, (\d+ ranks of )?\d+ threads?, ", said
        ), said
        yield process, said.rsplit(" at ", 1)[1].strip()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def post(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode())
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


@pytest.mark.parametrize("flags", [(), ("--world-size", "2"), ("--data-group-size", "2")])
def test_it_answers_as_a_file_does_and_ends_when_told(expected: str, flags: list[str]) -> None:
    with serving(*flags) as (process, url):
        assert post(url, QUESTION)["choices"][0]["text"] == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None and "Traceback" not in (told := process.stderr.read())
        assert "Ending: open requests (0) have 10 s to finish (--grace). Ctrl-C ends" in told
        assert told.endswith("Ended; every open request has its answer.\n"), "it was silent"


def test_a_dead_rank_ends_the_server_with_the_reason() -> None:
    with serving("--world-size", "2") as (process, url):
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(children[0]), signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < started_s + WAIT_S:
                post(url, QUESTION)
        assert process.wait(WAIT_S) == 1
        assert process.stderr is not None
        assert "rank 1" in process.stderr.read()


def test_requests_that_the_grace_cuts_make_the_status_143() -> None:
    with serving("--grace", "0.2") as (process, url):
        long = QUESTION | {"max_tokens": 1000, "n": 64, "ignore_eos": True}
        asking = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import urllib.request as r; r.urlopen({url!r} + "
                f"'/v1/completions', {json.dumps(long).encode()!r})",
            ],
            stderr=subprocess.DEVNULL,
        )
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
        assert asking.wait(WAIT_S) != 0
