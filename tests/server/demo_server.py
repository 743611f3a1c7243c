"""Starts `fminfer serve` with the demo model, as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .raw_http import HOST, get

START_S = 120.0
GRACE_S = 5
# KV tokens: few, so that some wait, and memory that is touched late is no growth
BUDGET = 16384
DTYPE = "float32"  # in which answers do not depend on what is computed beside them


@contextlib.contextmanager
def running(
    errors: Path, state: Path | None = None, model: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a server with a model, or the demo model; give it with its port when it is ready."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "fminfer",
        "serve",
        "--port",
        str(port),
        "--dtype",
        DTYPE,
    ]
    command += ["--budget", str(BUDGET), "--grace", str(GRACE_S)]
    command += [] if state is None else ["--state", str(state)]
    command += [] if model is None else ["--model-name", str(model)]
    with errors.open("wb") as file:
        server = subprocess.Popen(command, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(port):
            told = errors.read_text(errors="replace")
            assert server.poll() is None, (
                f"the server ended with {server.returncode}: {told}"
            )
            assert time.monotonic() < deadline, f"the server is not ready: {told}"
            time.sleep(0.1)
        yield server, port
    finally:
        if server.poll() is None:
            os.kill(server.pid, signal.SIGKILL)
            server.wait()


def _is_ready(port: int) -> bool:
    try:
        return asyncio.run(get(port, "/health")).status == 200
    except ConnectionError:
        return False
