"""A sample of the fault loops: `scripts/torture --faults` and `--cuts` try thousands of
cases."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import IS_ALL
from tests.faults.loops import NAMES, READERS
from tests.faults.power_cuts import Disk, Entry, build
from tests.faults.preload import library_path

CASES = "25" if IS_ALL else "3"
SAMPLES = {"--faults": ("run", "kept", "quantize"), "--cuts": ("run", "merge")}
# Opens a file, reads, writes, syncs and renames; says at which call the plan has hit it.
CHILD = """
import ctypes, os, sys
from tests.faults.preload import ERRORS, KINDS, Plan, library_path
folder, text = sys.argv[1:]
plan, library = Plan.read(text), ctypes.CDLL(str(library_path()))
what = (KINDS.index(plan.kind), ctypes.c_long(plan.nth), ERRORS[plan.error], plan.is_lasting)
library.fault_plan(os.fsencode(folder), *what, None)
for number in range(3):
    try:
        with open(f"{folder}/a", "wb", buffering=0) as file:
            print("wrote", file.write(b"12345678"))
            os.fsync(file.fileno())
        os.rename(f"{folder}/a", f"{folder}/b")
        open("/dev/null").close()
    except OSError as error:
        print(number, error.strerror)
"""


def child(folder: Path, plan: str) -> tuple[int, list[str]]:
    """Run the child by a plan; return its status and its lines."""
    words = [sys.executable, "-c", CHILD, str(folder), plan]
    variables = os.environ | {"LD_PRELOAD": str(library_path())}
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_faults_hit_the_call_of_the_plan(tmp_path: Path) -> None:
    whole = ["wrote 8"] * 3
    assert child(tmp_path, "rename:9:EIO") == (0, whole)
    assert child(tmp_path, "rename:2:EIO") == (
        0,
        [*whole[:2], "1 Input/output error", whole[0]],
    )
    full = [
        "0 No space left on device",
        "1 No space left on device",
        "2 No space left on device",
    ]
    assert child(tmp_path, "open:1:ENOSPC:on") == (0, full)
    assert child(tmp_path, "write:3:short") == (0, ["wrote 8", "wrote 8", "wrote 4"])
    assert child(tmp_path, "fsync:1:kill")[0] == -9
    assert (tmp_path / "a").read_bytes() == b"12345678", "killed before the rename"


def entry(
    what: str, fd: int = 3, place: int = 0, path: str = "", other: str = ""
) -> Entry:
    return Entry(what, fd, place, path, other, b"x" * 1000 if what == "W" else b"")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("lost", {"b": b"old"}),
        ("names", {"b": b""}),
        ("zeros", {"b": bytes(1000)}),
        ("data", {"b": b"old"}),
        ("all", {"b": b"x" * 1000}),
    ],
)
def test_a_draft_without_syncs_can_be_anything(
    tmp_path: Path, mode: str, expected: dict[str, bytes]
) -> None:
    """The file of an old name is replaced, and neither bytes nor names are synced."""
    begun = tmp_path / "begun"
    folder = tmp_path / "seen"
    begun.mkdir()
    (begun / "b").write_bytes(b"old")
    disk = Disk.of(begun, folder)
    for each in (
        entry("O", place=0o101, path=f"{folder}/a"),
        entry("W"),
        entry("C"),
        entry("R", path=f"{folder}/a", other=f"{folder}/b"),
    ):
        disk.take(each)
    build(disk, folder, mode, random.Random(1), is_new_boot=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def test_what_was_synced_is_there_after_every_cut(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    (tmp_path / "begun").mkdir()
    disk = Disk.of(tmp_path / "begun", folder)
    for each in (
        entry("O", place=0o101, path=f"{folder}/a"),
        entry("W"),
        entry("S"),
        entry("R", path=f"{folder}/a", other=f"{folder}/b"),
        entry("O", fd=4, path=str(folder)),
        entry("S", fd=4),
        entry("W", place=1000),
    ):
        disk.take(each)
    found = set()
    modes = ("lost", "names", "zeros", "data", "torn", "all", *["random"] * 20)
    for number, mode in enumerate(modes):
        build(disk, folder, mode, random.Random(number), is_new_boot=True)
        assert [path.name for path in folder.iterdir()] == ["b"]
        data = (folder / "b").read_bytes()
        assert data[:1000] == b"x" * 1000
        found.add(data[1000:])
    assert {b"", bytes(1000), b"x" * 1000} < found, "torn ones, too"


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_sample_of_commands_holds(kind: str) -> None:
    names = [
        name for name in (NAMES if IS_ALL else SAMPLES[kind]) if name not in READERS
    ]
    words = ["--cases", CASES, *(["--cuts"] if kind == "--cuts" else []), *names]
    command = [sys.executable, "-m", "tests.faults.loops", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| sum |" in done.stdout
