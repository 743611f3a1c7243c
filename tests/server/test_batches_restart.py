"""Batches go on after their server was killed or told to end; the command, end to end."""

from __future__ import annotations

import signal
import stat
import time
from pathlib import Path

from click.testing import CliRunner

from tests.conftest import IS_ALL
from tests.faults import torture_server
from tests.faults.torture_server import send_batch, serving, wait_for_output
from tests.forked import run_forked
from tests.server.batch_calls import long_lines


def test_kill_9_in_the_middle() -> None:
    """A round of `scripts/torture_server`: killed twice, nothing lost or doubled."""
    rounds = 2 if IS_ALL else 1
    done = CliRunner().invoke(
        torture_server.main, ["--rounds", str(rounds), "--kills", "2"]
    )
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert f"{rounds} of {rounds} rounds lost nothing" in done.output


def test_sigterm_and_the_next_server(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state) as server:
        batch = send_batch(server, long_lines(80, 60))
        while server.get(f"/v1/batches/{batch}")["request_counts"]["completed"] < 5:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGSTOP)
        other = run_forked(["serve", "--port", "0", "--state", state])
        assert other.returncode == 2 and "is in use by another server" in other.stderr
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        files = [path for path in state.rglob("*") if path.is_file()]
        assert any(path.name.endswith(".journal") for path in files)
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(30) == 0, "no live request was open"
    (journal,) = state.glob("batches/*/*.journal")
    kept = len(journal.read_bytes().splitlines()) - 1
    assert kept >= 5
    with serving(state) as server:
        found = wait_for_output(server, batch)
        ids = [record["custom_id"] for record in found]
        assert ids == [f"r{number}" for number in range(80)]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
