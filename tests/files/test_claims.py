"""Claims: an output is one living process's to write; those of dead ones are in nobody's way."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fminfer.core.errors import InUseError
from fminfer.files import claims
from fminfer.files.claims import (
    Claim,
    Claims,
    Hold,
    read_claims,
    remove_all_claims,
    remove_dead_claims,
)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def folder_of(output: Path) -> Path:
    (folder,) = [each for each in output.parent.iterdir() if each.is_dir()]
    return folder


def take(output: Path) -> Claim:
    claim = Claims().acquire(output)
    assert claim is not None
    return claim


def test_an_output_is_claimed_once(output: Path) -> None:
    claim = take(output)
    assert claim.is_held() and claim.path.name == "1"
    assert Claims().acquire(output) is None
    with pytest.raises(InUseError, match="is being written by process"):
        Hold(output, Claims()).check_free()
    with pytest.raises(InUseError, match="is being written by process"):
        Hold(output, Claims()).acquire()
    claim.release()
    assert os.listdir(output.parent) == []
    assert take(output).path.name == "1"


def test_a_dead_claim_is_passed_over_and_stays_until_it_is_removed(
    output: Path,
) -> None:
    dead = take(output)
    dead.path.write_bytes(b"of another version")
    os.utime(dead.path, (1, 1))
    (found,) = read_claims(output)
    assert (
        found.is_dead
        and found.number == 1
        and found.owner is None
        and found.age_s > 10**8
    )
    claim = take(output)
    assert claim.path.name == "2" and dead.path.exists()
    dead.beat()
    assert not dead.is_held(), "another process has taken over"
    claim.beat()
    assert claim.is_held()
    remove_dead_claims(output)
    assert not dead.path.exists() or read_claims(output)[0].age_s < 10, (
        "its beat has made it young"
    )
    os.utime(dead.path, (1, 1)) if dead.path.exists() else None
    remove_dead_claims(output)
    assert [each.number for each in read_claims(output)] == [2]
    remove_all_claims(output)
    assert os.listdir(output.parent) == []
    claim.beat()
    assert not claim.is_held(), "its folder is gone"
    claim.release()  # nothing is there to remove


def test_a_beat_keeps_a_claim_young(output: Path) -> None:
    claim = take(output)
    os.utime(claim.path, (1, 1))
    claim.beat()
    assert time.time() - claim.path.stat().st_mtime < 60 and claim.is_held()
    claim.path.write_bytes(b"another's")
    claim.beat()
    assert not claim.is_held()
    claim.release()
    assert claim.path.exists(), "it is another's"


@pytest.mark.parametrize(("slept_s", "holds"), [(1, True), (25, True), (10**6, False)])
def test_who_slept_looks_again(
    slept_s: float, holds: bool, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer leaves it in doubt, and after long enough it is another's."""

    def fail(*_: Any) -> None:
        raise OSError(5, "x")

    claim = take(output)
    monkeypatch.setattr(os, "utime", fail)
    slept = time.time() + slept_s
    monkeypatch.setattr(claims.time, "time", lambda: slept)
    assert claim.is_held() is holds


def test_a_hold_takes_for_a_moment_and_gives_back(output: Path) -> None:
    hold = Hold(output, Claims())
    hold.check_free()
    with hold.acquired():
        assert hold.claim is not None and hold.is_held()
        with pytest.raises(InUseError), Hold(output, Claims()).acquired():
            pass
    assert hold.claim is None and os.listdir(output.parent) == []
    hold.acquire()
    with hold.acquired():
        pass
    assert hold.claim is not None, "it was there before"
    hold.mark_lost()
    assert hold.is_lost and hold.claim is None and os.listdir(output.parent) == []


def test_what_is_removed_may_be_gone(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_dead_claims(output)
    remove_all_claims(output)
    take(output)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: shutil.disk_usage("/no/such"))
    os.utime(folder_of(output) / "1", (1, 1))
    (folder_of(output) / "1").write_bytes(b"")
    os.utime(folder_of(output) / "1", (1, 1))
    remove_dead_claims(output)
    assert [each.number for each in read_claims(output)] == [1], (
        "the disk did not let it"
    )
