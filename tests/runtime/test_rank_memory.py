"""Every rank tells the most memory that it has had, and rank 0 sets it beside the forecast."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

import fminfer
from fminfer.core.messages import (
    MemoryPeak,
    RankMemory,
    describe_memory,
    make_memory_table,
)
from fminfer.machine import host_memory
from fminfer.machine.device import measure_peak_memory
from fminfer.machine.host_memory import measure_peak_host_bytes, touching_memory
from fminfer.pipeline import watch
from fminfer.pipeline.store import Store, StoreHolder
from fminfer.pipeline.watch import Watch
from fminfer.plan.machine_facts import measure_process_bytes
from tests.forked import run_forked

SECRET = "of these tests"
MIB = 1 << 20
GIB = 1 << 30
ROWS = [
    {"prompt": f"row {number}", "max_tokens": 9, "temperature": 0}
    for number in range(4)
]


def on_gpu(rank: int, size: int) -> RankMemory:
    return RankMemory(rank, True, 40 * GIB, MemoryPeak(3 * GIB, size - GIB, size))


def test_a_line_tells_each_rank_or_the_largest() -> None:
    alone = RankMemory(0, False, 300 * MIB, MemoryPeak(280 * MIB))
    assert describe_memory([alone]) == "CPU 280 MiB (300 MiB foreseen)"
    two = [alone, RankMemory(1, False, 400 * MIB, MemoryPeak(380 * MIB))]
    assert describe_memory(two) == (
        "rank 0: CPU 280 MiB (300 MiB foreseen); rank 1: CPU 380 MiB (400 MiB foreseen)"
    )
    eight = [on_gpu(rank, (38 if rank == 5 else 37) * GIB) for rank in range(8)]
    largest = (
        "rank 5: GPU 38.00 GiB (40.00 GiB foreseen), CPU 3.00 GiB; the most of 8 ranks"
    )
    assert describe_memory(eight) == largest


def test_a_table_tells_all_ranks() -> None:
    head, *rows = make_memory_table(
        [on_gpu(0, 38 * GIB), RankMemory(1, False, GIB, MemoryPeak(GIB))]
    )
    assert head.split() == [
        "rank",
        "CPU",
        "peak",
        "GPU",
        "peak",
        "GPU",
        "reserved",
        "foreseen",
    ]
    assert rows[0].split("  ")[-1].strip() == "40.00 GiB" and "37.00 GiB" in rows[0]
    assert rows[1].split() == ["1", "1.00", "GiB", "-", "-", "1.00", "GiB"]
    assert len({len(row) for row in (head, *rows)}) == 1


def test_a_peak_begins_with_the_process() -> None:
    """The system's older count begins with what the process had that started this one."""
    module = "fminfer.machine.host_memory"
    code = f"from {module} import measure_peak_host_bytes as peak; print(peak())"
    large = bytearray(300 * MIB)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert len(large) > 2 * int(done.stdout) > MIB
    assert measure_peak_memory().host_bytes >= len(large)


def test_memory_that_is_touched_ahead_is_no_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run's own work needs less, but its peak would have been this."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(host_memory, "measure_free_host_bytes", lambda: 4 * GIB)
    # a process that has run other tests may have more than that already
    touched = measure_process_bytes() + 500 * MIB
    with touching_memory(600 * MIB):
        until_s = time.monotonic() + 20
        while measure_process_bytes() < touched and time.monotonic() < until_s:
            time.sleep(0.02)
        during = measure_peak_host_bytes()
    assert during - measure_peak_host_bytes() > 200 * MIB


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        StoreHolder(listener, SECRET)
        yield listener.getsockname()[1]


def test_rank_0_hears_the_last_words_of_all(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peak between the last beat and the end would be missing."""
    monkeypatch.setattr(watch, "TURN_S", 1000.0)
    first, second = (
        Watch(
            Store("127.0.0.1", port, SECRET, 5),
            rank,
            2,
            timeout_s=30,
            parent=None,
            on_fault=lambda fault: None,
        )
        for rank in range(2)
    )
    assert first.find_peaks() == {}, "it has not looked yet"
    second.measure = lambda: MemoryPeak(7, gpu_bytes=2, gpu_reserved_bytes=3)
    second.beat_last()
    first.stop()
    first.read_last_beats()
    assert first.find_peaks() == {1: MemoryPeak(7, gpu_bytes=2, gpu_reserved_bytes=3)}
    first.disconnect()
    first.read_last_beats()  # of a store that is gone, it says nothing new
    assert first.find_peaks()[1].host_bytes == 7


def test_a_gpus_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 12345)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1234)
    peak = measure_peak_memory(torch.device("cuda"))
    assert (peak.gpu_bytes, peak.gpu_reserved_bytes) == (1234, 12345)
    assert measure_peak_memory().gpu_bytes == 0 < measure_peak_memory().host_bytes


def test_forecasts_count_the_kv_cache_that_was_used() -> None:
    with closing(fminfer.Engine(dtype="float32", budget=4096, kernels="off")) as engine:
        (before,) = engine.memory
        assert before.foreseen_bytes == engine.pipeline.plan.this_rank.takes.total(0)
        assert len([*engine.run(ROWS)]) == 4
        used = engine.stats.max_kv_tokens
        assert 32 <= used <= 4 * 32 and used % 32 == 0
        (after,) = engine.memory
        each = engine.facts.plan.this_rank.takes.kv_token
        assert after.foreseen_bytes - before.foreseen_bytes == used * each


def test_ranks_tell_an_engine_of_a_program() -> None:
    with closing(fminfer.Engine(dtype="float32", tensor_parallel_size=2)) as engine:
        assert len([*engine.run(ROWS)]) == 4
    ranks = engine.memory  # when all have ended
    assert [each.rank for each in ranks] == [0, 1]
    assert all(each.peak.host_bytes > 50 * MIB and not each.is_on_gpu for each in ranks)


@pytest.mark.parametrize(
    "flags", [(), ("--world-size", 4, "--tp", 2), ("--data-group-size", 2)]
)
def test_a_run_tells_all_ranks(flags: tuple[object, ...], tmp_path: Path) -> None:
    """`--stats` had rank 0's GPU alone, and the summary nothing."""
    source = tmp_path / "a.jsonl"
    stats = tmp_path / "stats.json"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = run_forked(["run", source, "--stats", stats, *flags])
    assert done.returncode == 0, done.stderr
    ranks = json.loads(stats.read_text())["ranks"]
    assert [each["rank"] for each in ranks] == [
        *range(int(str(flags[1])) if flags else 1)
    ]
    assert all(each["peak"]["host_bytes"] > 50 * MIB for each in ranks)
    assert all(each["foreseen_bytes"] > 50 * MIB for each in ranks)
    told = next(line for line in done.stderr.splitlines() if line.startswith("memory "))
    assert told.count("CPU") == len(ranks) and told.count("foreseen") == len(ranks)
