"""Batches go on after their server was killed or told to end; the command, end to end."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.torture_server import send_batch, serving, wait_for_output
from tests.server.batch_calls import long_lines


def test_kill_9_in_the_middle(tmp_path: Path) -> None:
    """Three rounds of `scripts/torture_server`: killed twice, nothing lost or doubled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.torture_server", "--rounds", "2", "--kills", "2"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 rounds lost nothing" in done.stdout


def test_sigterm_and_the_next_server(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state) as server:
        batch = send_batch(server, long_lines(400, 200))
        while server.get(f"/v1/batches/{batch}")["request_counts"]["completed"] < 5:
            time.sleep(0.02)
        other = subprocess.run(
            [sys.executable, "-m", "fminfer", "serve", "--port", "0", "--state", str(state)],
            capture_output=True,
            text=True,
        )
        assert other.returncode == 2 and "is in use by another server" in other.stderr
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        files = [path for path in state.rglob("*") if path.is_file()]
        assert any(path.name.endswith(".journal") for path in files)
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, "no live request was open"
    (journal,) = state.glob("batches/*/*.journal")
    kept = len(journal.read_bytes().splitlines()) - 1
    assert kept >= 5
    with serving(state) as server:
        found = wait_for_output(server, batch)
        ids = [record["custom_id"] for record in found]
        assert ids == [f"r{number}" for number in range(400)]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
