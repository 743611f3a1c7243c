"""`fminfer serve` starts, stops and spreads its engine as `fminfer run` does, without any HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_apart import free_port

# The command, with a server that answers one request, tells the answer, and waits.
COMMAND = """
import json, sys
from fminfer.cli.app import main
from fminfer.server import http

def run_http(engine, settings, stopper, *_):
    told = []
    with stopper.telling(told.append):
        engine.add({"prompt": "Question: How do you go from the den to the porch?\\nAnswer:",
                    "max_tokens": 6, "temperature": 0})
        events = []
        while engine.has_work:
            events += engine.step()
        text = events[-1].result["choices"][0]["text"]
        print(json.dumps({"text": text, "port": settings.port}), flush=True)
        while not told:
            engine.wait(0.05)
    print("stopped with", *told, flush=True)

http.run_http = run_http
main()
"""


ANSWER = " south\n"


def start(*flags: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--device", "cpu", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer_of(server: subprocess.Popen[str]) -> dict[str, Any]:
    assert server.stdout is not None and server.stderr is not None
    line = server.stdout.readline()
    assert line, server.stderr.read()
    found: dict[str, Any] = json.loads(line)
    return found


def stop(server: subprocess.Popen[str]) -> str:
    server.send_signal(signal.SIGTERM)
    out, err = server.communicate(timeout=60)
    assert server.returncode == 0, err
    assert out == "stopped with 10.0\n"
    return err


@pytest.mark.parametrize("flags", ["", "--tp 2", "--data-group-size 2"])
def test_it_serves_with_all_its_processes_until_told_to_stop(flags: str) -> None:
    server = start("--port", "0", *flags.split())
    assert answer_of(server)["text"] == ANSWER
    err = stop(server)
    assert "Traceback" not in err


def test_ranks_that_are_started_apart_serve_too() -> None:
    """Only rank 0 has the server; the other one ends with it."""
    flags = ["--port", "0", "--world-size", "2"]
    flags += ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--rank"]
    second = start(*flags, "1", "--host", "0.0.0.0", FMINFER_SECRET="a")
    first = start(*flags, "0", FMINFER_SECRET="a")
    assert answer_of(first)["text"] == ANSWER
    stop(first)
    out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, ""), err
    assert "without a key" not in err, "rank 1 talks to nobody"


def test_the_file_is_read_by_the_first_process_alone(tmp_path: Path) -> None:
    """Those that it starts have their options from it, also where they could not read the file."""
    file = tmp_path / "fminfer.toml"
    file.write_text("modle = 1\n")
    bad = subprocess.run(
        [sys.executable, "-m", "fminfer", "serve-part", "x"],
        env=os.environ
        | {"FMINFER_CONFIG": str(file), "FMINFER_RANKS": "x", "FMINFER_MAX_ROWS": "x"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (bad.returncode, bad.stderr) == (0, "")
    port = free_port()
    file.write_text(f"port = {port}\nworld-size = 2\n")
    server = start(FMINFER_CONFIG=str(file))
    assert answer_of(server)["port"] == port
    stop(server)
