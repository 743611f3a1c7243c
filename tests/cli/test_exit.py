"""A program that ends in the middle of a run ends as it would without us."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fminfer.cli.app import main
from tests.faults.torture import is_alive

# Two processes, of one import: one ends by an error of its own; the other tells how,
# and ends, too.
OPEN_RUN = """
import os
import signal

import fminfer
from fminfer.machine.library_imports import import_transformers

fminfer.Engine
import_transformers()
other = os.fork()
signal.alarm(100)
if other:
    print(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
engine = fminfer.Engine(dtype="float32", kernels="off", max_rows=8)
records = engine.run([{"prompt": "north", "max_tokens": 40, "ignore_eos": True}] * 300)

def first():
    yield from records

kept = first()
next(kept)
if not other:
    raise ValueError('boom')
"""


def test_a_run_that_is_open_at_exit_does_not_hang_or_crash() -> None:
    """The run used to wait for its thread while Python was ending, which had stopped
    that thread: the program hung for ever, or died with `terminate called` in place of
    the user's own error.
    """
    command = [sys.executable, "-c", OPEN_RUN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count("ValueError: boom") == 1


def test_a_rank_ends_after_who_started_it() -> None:
    """Also while it imports, when nothing else watches."""
    rank = "import os, time; from fminfer.runtime.launch.processes import end_after; "
    rank += "end_after(os.getppid()); "
    rank += "print(os.getpid(), flush=True); time.sleep(100)"
    launcher = (
        "import subprocess as s, sys; r = s.Popen([sys.executable, '-c', sys.argv[1]], "
    )
    launcher += "stdout=s.PIPE, text=True); print(r.stdout.readline())"
    told = subprocess.run(
        [sys.executable, "-c", launcher, rank], capture_output=True, timeout=60
    )
    until_s = time.monotonic() + 30
    while is_alive(int(told.stdout)):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_ctrl_c_ends_every_command_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But for `run` and `serve` they said Aborted, with the status of a failure."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fminfer.models.checkpoint.open_model", interrupt)
    told = CliRunner().invoke(main, ["quantize", "--output", str(tmp_path / "q")])
    assert (told.exit_code, told.output) == (130, "Interrupted.\n")
