"""Runs a program within a time; what it has started ends with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

END_S = 5.0  # for a program to end those that it has started


@dataclass(slots=True, frozen=True)
class Ended:
    """How a program ended; `status` is None if its time was over."""

    status: int | None
    out: str
    err: str


def run_within(
    command: list[str], seconds: float, environ: Mapping[str, str] | None = None
) -> Ended:
    """Run a program, and interrupt it when its time is over."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        out, err = process.communicate(timeout=max(0.0, seconds))
        return Ended(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        # Python then ends a program that it waits for
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        out, err = process.communicate(timeout=END_S)
        return Ended(None, out, err)
    process.kill()
    out, err = process.communicate()
    return Ended(None, out, err)
