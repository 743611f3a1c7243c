"""The servers of serve.py: their commands, their start and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
START_S = 900.0
STOP_S = 60.0
MAX_MODEL_LEN = 2048
SETTINGS = {  # vLLM's, as peers.py has them
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(slots=True, frozen=True)
class Side:
    """A server: its name, its command without a port, and what it needs around it."""

    name: str
    command: list[str]
    environ: dict[str, str]


def make_sides(python: dict[str, str], model: Path, dtype: str) -> list[Side]:
    """Return the servers that can run here."""
    sides = []
    if "fminfer" in python:
        command = [sys.executable, "-m", "fminfer", "serve", "--model-name", str(model)]
        paths = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        sides.append(
            Side("fminfer", [*command, "--dtype", dtype], {"PYTHONPATH": paths})
        )
    if "vllm" in python:
        command = [
            python["vllm"],
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
        ]
        command += [str(model), "--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN)]
        command += [
            "--host",
            "127.0.0.1",
            "--enable-prefix-caching",
            "--disable-log-stats",
        ]
        command += ["--disable-uvicorn-access-log"]
        sides.append(Side("vllm", command, SETTINGS))
    return sides


def find_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_healthy(port: int) -> bool:
    """Tell whether /health is 200; before that it is 503, or nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until /health is 200.

    Raises:
        click.ClickException: the server ended, or is not ready in time.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise click.ClickException(
                f"the server ended with status {server.returncode}"
            )
        if is_healthy(port):
            return
        time.sleep(0.05)
    raise click.ClickException(f"the server was not ready within {START_S:.0f} s")


@contextlib.contextmanager
def running(side: Side, folder: Path) -> Iterator[tuple[int, int, float]]:
    """Start a server; give its port, its pid and the seconds until it was ready; end it."""
    port = find_port()
    started = time.monotonic()
    with (folder / f"{side.name}.log").open("wb") as log:
        server = subprocess.Popen(
            [*side.command, "--port", str(port)],
            env=os.environ | side.environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until_ready(server, port)
        yield port, server.pid, time.monotonic() - started
    except click.ClickException as error:
        said = (folder / f"{side.name}.log").read_text(errors="replace")[-3000:]
        raise click.ClickException(f"{side.name}: {error.message}\n{said}") from error
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # those that outlive it
        server.wait()


def session_cpu_s(leader: int) -> float:
    """Return the CPU seconds of a server's processes so far."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
