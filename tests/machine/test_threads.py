"""How many threads compute, and how they wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fminfer
from fminfer.cli.app import main
from fminfer.core.errors import UsageError
from fminfer.core.quantities import with_noun
from fminfer.machine import control_groups, library_imports, processor, threads
from fminfer.machine.threads import (
    ThreadCount,
    choose_num_threads,
    count_cores,
    shorten_openmp_waits,
)


@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_those_of_the_affinity_and_of_the_control_groups_quota(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with 2 of 64 cores as a quota, 64 threads took the place of 2."""
    monkeypatch.setattr(control_groups, "SYSTEM", tmp_path)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(8)), raising=False
    )
    assert count_cores() == 8, "no groups"
    (tmp_path / "proc/self").mkdir(parents=True)
    group = (
        "5:memory:/other\n4:cpu,cpuacct:/job/step\n"
        if version == 1
        else "0::/job/step\n"
    )
    (tmp_path / "proc/self/cgroup").write_text(group)
    top = tmp_path / "sys/fs/cgroup" / ("cpu,cpuacct" if version == 1 else "")

    def limit(folder: Path, quota: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{quota} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")

    limit(top / "job/step", "max" if version == 2 else "-1")
    assert count_cores() == 8, "no limit"
    limit(top / "job", "350000")
    assert count_cores() == 4, "the group above; a part of a core counts as one"
    limit(top / "job/step", "20000")
    assert count_cores() == 1


def test_ranks_share_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "count_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose_num_threads(None, 64, 1) == 8, "torch counts without the quota"
    assert choose_num_threads(None, 64, 3) == 2
    assert choose_num_threads(None, 64, 9) == 1
    assert choose_num_threads(None, 2, 1) == 2, "torch was told so"
    assert choose_num_threads(5, 64, 8) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_num_threads(None, 3, 8) == 3


def test_threads_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    fminfer.Engine(threads=3).close()
    assert told == [3]
    with pytest.raises(UsageError, match="threads is 0; it must be at least 1"):
        fminfer.Engine(threads=0)


def test_threads_soon_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenMP's threads spun for each other: beside a busy process a run took six times
    as long."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    shorten_openmp_waits()
    assert os.environ["GOMP_SPINCOUNT"] == str(threads.SPINS)
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    shorten_openmp_waits()
    assert os.environ["GOMP_SPINCOUNT"] == "77"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    shorten_openmp_waits()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("command", ["run", "bench"])
def test_threads_are_settled_before_openmp_is_loaded(command: str) -> None:
    """OpenMP reads its settings once, when torch is imported."""
    code = f"""
import os, sys
from fminfer.cli import app as cli
from fminfer.machine import library_imports
def look():
    print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules, flush=True)
    os._exit(0)
library_imports.import_transformers = look
cli.main(["{command}", "-"] if "{command}" == "run" else ["{command}"])
"""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_WAIT"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(threads.SPINS), "False"], done.stderr
    assert library_imports.shorten_openmp_waits is shorten_openmp_waits


def test_speed_counts_the_tokens_that_were_computed(tmp_path: Path) -> None:
    """One run showed 276 tokens/s as it went and 643 at its end, where shared ones were
    counted."""
    path = tmp_path / "a.jsonl"
    head = "Question: How do you go from the bathroom to the office? "
    rows = [
        {"prompt": head * 3 + f"{i}", "max_tokens": 2, "temperature": 0}
        for i in (1, 2, 2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["run", str(path), "--stats", str(tmp_path / "stats.json")]
    found = CliRunner().invoke(main, flags)
    assert found.exit_code == 0, found.output
    stats = json.loads((tmp_path / "stats.json").read_text())
    engine = stats["engine"]
    wall_s = stats["wall_s"]
    computed = engine["num_prompt_tokens"] + engine["num_generated_tokens"]
    assert stats["tokens_per_s"] * wall_s == pytest.approx(computed)
    assert stats["generated_per_s"] * wall_s == pytest.approx(
        engine["num_generated_tokens"]
    )
    answered = stats["prompt_tokens"] + stats["completion_tokens"]
    assert (
        stats["answered_per_s"] * wall_s == pytest.approx(answered)
        and answered > computed
    )
    assert (
        "tokens/s computed" in found.output
        and "with those that were shared" in found.output
    )
    assert "Loading fminfer-demo (" in found.output and "\nReady after" in found.output
    assert "answering 3 rows." in found.output
    assert stats["num_threads"] == torch.get_num_threads() > 0
    assert f", {with_noun(stats['num_threads'], 'thread')}" in found.output
    assert stats["cpu_limit"] == processor.read_chosen_name()


def test_threads_follow_the_cores_but_never_the_users_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run whose cores were cut kept all its threads, which then waited for each other."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = [8]
    now_s = [0.0]
    monkeypatch.setattr(threads, "count_cores", lambda: cores[0])
    monkeypatch.setattr(threads.time, "monotonic", lambda: now_s[0])
    used: list[int] = []
    count = ThreadCount(None, 64, 2, used.append)
    fixed = ThreadCount(3, 64, 2, used.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    also_fixed = ThreadCount(None, 4, 2, used.append)
    assert used == [4, 3, 4]
    del used[:]

    def look_with(num_cores: int, after_s: float) -> list[int]:
        cores[0] = num_cores
        now_s[0] += after_s
        for each in (count, fixed, also_fixed):
            each.follow_cores()
        return used

    monkeypatch.delenv("OMP_NUM_THREADS")
    assert look_with(2, threads.CHECK_INTERVAL_S / 2) == [], "it looked a moment ago"
    assert look_with(2, threads.CHECK_INTERVAL_S) == [1]
    assert look_with(1, threads.CHECK_INTERVAL_S) == [1], "still one"
    assert look_with(6, threads.CHECK_INTERVAL_S) == [1, 3]
    assert look_with(64, threads.CHECK_INTERVAL_S) == [1, 3, 4], (
        "no more than at the start"
    )
    assert 2 * threads.CHECK_INTERVAL_S <= 1.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no Linux")
def test_cores_are_those_of_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`taskset -p` without -a moves the first thread only; OpenMP may bind each to a core."""
    for name in threads.BINDS_THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_read_quotas", lambda: iter(()))
    own = threading.get_native_id()
    cores = {own: {0}, 1: {1, 2}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[pid or own])
    monkeypatch.setattr(os, "listdir", lambda path: [str(own), "1"])
    assert count_cores() == 3

    def refuse(path: str) -> list[str]:
        raise PermissionError(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert count_cores() == 1, "those of the calling thread are known all the same"
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert count_cores() == 8
