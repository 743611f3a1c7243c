"""`fminfer serve` starts, stops and spreads its engine as `fminfer run` does, without
any HTTP."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.conftest import more
from tests.forked import Forked, run_forked
from tests.runtime.test_apart import free_port

# In place of HTTP: a server that answers one request, tells the answer, and waits.
SERVER = """
import json
from fminfer.server import http

def run_http(engine, settings, stopper, *_):
    told = []
    with stopper.forwarding_stop(told.append):
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
"""


ANSWER = " south\n"


class Server:
    """The command with SERVER, which Python imports from a folder in its path."""

    def __init__(self, folder: Path, *flags: str, **variables: str) -> None:
        (folder / "sitecustomize.py").write_text(SERVER)
        environ = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        reading, writing = os.pipe()
        flags = ("serve", "--device", "cpu", *flags)
        self.process = Forked(flags, environ, files=(None, writing, None))
        os.close(writing)
        self.out: TextIO = os.fdopen(reading)

    def answer(self) -> dict[str, Any]:
        line = self.out.readline()
        assert line, self.process.said()
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        assert self.out.read() == "stopped with 10.0\n"
        return err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Give what starts servers, and kill those that are left."""
    started: list[Server] = []

    def start_one(*flags: str, **variables: str) -> Server:
        started.append(Server(tmp_path, *flags, **variables))
        return started[-1]

    yield start_one
    for server in started:
        server.process.kill()


# Those that test_serve_command.py has over HTTP are more of the same.
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", marks=more),
        "--tp 2",
        pytest.param("--data-group-size 2", marks=more),
    ],
)
def test_it_serves_with_all_its_processes_until_told_to_stop(
    start: Callable[..., Server], flags: str
) -> None:
    server = start("--port", "0", *flags.split())
    assert server.answer()["text"] == ANSWER
    assert "Traceback" not in server.stop()


def test_ranks_that_are_started_apart_serve_too(start: Callable[..., Server]) -> None:
    """Only rank 0 has the server; the other one ends with it."""
    flags = ["--port", "0", "--world-size", "2"]
    flags += ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--rank"]
    second = start(*flags, "1", "--host", "0.0.0.0", FMINFER_SECRET="a")
    first = start(*flags, "0", FMINFER_SECRET="a")
    assert first.answer()["text"] == ANSWER
    first.stop()
    _, err = second.process.communicate(timeout=60)
    assert (second.process.returncode, second.out.read()) == (0, ""), err
    assert "without a key" not in err, "rank 1 talks to nobody"


def test_the_file_is_read_by_the_first_process_alone(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """Those that it starts have their options from it, also where they could not read
    the file."""
    file = tmp_path / "fminfer.toml"
    file.write_text("modle = 1\n")
    wrong = {"FMINFER_CONFIG": str(file), "FMINFER_RANKS": "x", "FMINFER_MAX_ROWS": "x"}
    bad = run_forked(["serve-part", "x"], environ=os.environ | wrong)
    assert (bad.returncode, bad.stderr) == (0, "")
    port = free_port()
    file.write_text(f"port = {port}\nworld-size = 2\n")
    server = start(FMINFER_CONFIG=str(file))
    assert server.answer()["port"] == port
    server.stop()
