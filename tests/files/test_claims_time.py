"""Claims of machines whose clocks differ, which are stopped, or see the disk late."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fminfer.core.errors import OutputError
from fminfer.files import claims
from fminfer.files.claims import STALE_S, Claims
from fminfer.files.journal import find_fingerprint, inspect_journal
from fminfer.machine import liveness
from tests.conftest import IS_ALL
from tests.files.claims_simulation import simulate

NUM_SEEDS = 1000 if IS_ALL else 20
PART = 20
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PART))
def test_machines_that_share_a_folder_answer_each_row_once(first: int) -> None:
    for seed in range(first, first + PART):
        simulate(seed)


def judge_ages_by_the_own_clock(patch: Patch) -> None:
    patch.setattr(
        claims,
        "read_disk_clock",
        lambda folder: sys.modules[claims.__name__].time.time(),
    )


def claim_what_is_claimed(patch: Patch) -> None:
    patch.setattr(claims.ClaimFile, "is_dead", property(lambda found: True))


FAULTS = [judge_ages_by_the_own_clock, claim_what_is_claimed]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, OutputError)):
        for seed in range(100):
            assert "OutputError" not in "".join(simulate(seed))


@pytest.mark.parametrize("skew_s", [-400 * 86400.0, -3600.0, 3600.0, 400 * 86400.0])
def test_a_claim_is_as_old_as_the_disks_clock_says(
    tmp_path: Path, monkeypatch: Patch, skew_s: float
) -> None:
    """A machine whose clock is off neither takes a young claim over nor waits for an old one."""
    output = tmp_path / "out.jsonl"
    first = Claims().acquire(output)
    assert first is not None
    now_s = time.time()
    monkeypatch.setattr(liveness, "make_machine_name", lambda namespace: "another")
    monkeypatch.setattr(
        claims, "time", SimpleNamespace(time=lambda: time.time() + skew_s)
    )
    assert Claims().acquire(output) is None
    os.utime(first.path, (now_s - STALE_S - 5,) * 2)
    assert Claims().acquire(output) is not None


def test_a_journal_that_is_given_up_as_it_is_opened_is_none(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Names are seen late: a run ended, and told its user to put the folder back."""
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert find_fingerprint(output) is None
    assert inspect_journal(output, {}, restart=False) is None


@pytest.mark.parametrize("set_back_s", [30.0, 3600.0])
def test_an_owner_whose_clock_was_set_back_looks_again(
    tmp_path: Path, monkeypatch: Patch, set_back_s: float
) -> None:
    """It was stopped, another took over, and its own last beat seemed young."""
    output = tmp_path / "out.jsonl"
    claim = Claims().acquire(output)
    assert claim is not None and claim.is_held()
    (claim.path.parent / "2").write_bytes(liveness.describe_this_process())
    assert claim.is_held(), "it has just looked"
    monkeypatch.setattr(
        claims, "time", SimpleNamespace(time=lambda: time.time() - set_back_s)
    )
    assert not claim.is_held()


@pytest.mark.parametrize(
    ("later_s", "is_held"), [(30.0, True), (70.0, False), (-30.0, False)]
)
def test_an_owner_whose_disk_is_gone_gives_up(
    tmp_path: Path, monkeypatch: Patch, later_s: float, is_held: bool
) -> None:
    claim = Claims().acquire(tmp_path / "out.jsonl")
    assert claim is not None

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "utime", fail)
    monkeypatch.setattr(
        claims, "time", SimpleNamespace(time=lambda: time.time() + later_s)
    )
    assert claim.is_held() == is_held
