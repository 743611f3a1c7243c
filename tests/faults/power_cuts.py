"""Builds what a disk may hold after a power cut, and sees what the next run makes of it.

`scripts/torture --cuts` calls it. A command's changes to its folder are recorded. After each of
them the power may fail. Then what was synced is there; of the rest, a disk may have anything:

lost      none of the other bytes and names
names     all names, and none of the other bytes
zeros     all names and sizes, and zeros in the place of the other bytes
data      all bytes, and none of the other names
torn      all, and of each file's last write only some sectors of 512 bytes
random    some names, whatever came before them; some writes, some in part, some as zeros
all       all

A synced file has its bytes, and a name is there once its folder was synced. (As in ext4, XFS and
btrfs, a synced folder is there, too.)
"""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fminfer.machine.liveness import make_machine_name
from tests.faults.file_faults import Loop, Ready

MODES = ("lost", "names", "zeros", "data", "torn", "random", "all")
ENTRY = struct.Struct("<BiqIII")
SECTOR = 512
PAGE = 4096
FOLDER = -1  # in the place of a file's number
CREATE = 0o100
TRUNCATE = 0o1000


@dataclass(slots=True)
class Change:
    """Of one file: bytes at a place, or, without bytes, another length."""

    place: int
    data: bytes | None
    is_synced: bool = False


@dataclass(slots=True)
class Naming:
    """A change of names; `number` is the file's, or FOLDER."""

    what: Literal["create", "mkdir", "rename", "link", "unlink", "rmdir"]
    path: str
    other: str = ""
    number: int = 0
    is_synced: bool = False


@dataclass(slots=True)
class Entry:
    """A recorded call that changed something."""

    what: str
    fd: int
    place: int
    path: str
    other: str
    data: bytes
    end: int = 0  # of the recording


@dataclass(slots=True)
class Disk:
    """Files by number, and the changes since the recording began."""

    base: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # as the process sees them
    begun: dict[str, int] = field(default_factory=dict)
    changes: dict[int, list[Change]] = field(default_factory=dict)
    namings: list[Naming] = field(default_factory=list)
    # of descriptors; a folder's path
    numbers: dict[int, int | str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, seen_as: Path) -> Disk:
        """Read a folder as it begins, which the recorded process sees by another name."""
        disk = cls()
        for path in sorted(folder.rglob("*")):
            name = str(seen_as / path.relative_to(folder))
            number = FOLDER
            if path.is_file():
                number = len(disk.base)
                disk.base[number] = path.read_bytes()
            disk.begun[name] = number
        disk.begun[str(seen_as)] = FOLDER
        disk.names = dict(disk.begun)
        return disk

    def take(self, entry: Entry) -> None:
        """Do what a recorded call did."""
        match entry.what:
            case "O":
                self._open(entry)
            case "P":
                self.numbers[entry.place] = self.numbers[entry.fd]
            case "C":
                self.numbers.pop(entry.fd, None)
            case "W":
                self._change(entry.fd, Change(entry.place, entry.data))
            case "T":
                self._change(entry.fd, Change(entry.place, None))
            case "S":
                self._sync(self.numbers[entry.fd])
            case "R":
                self._name(Naming("rename", entry.path, entry.other))
            case "L":
                self._name(Naming("link", entry.path, entry.other))
            case "U":
                self._name(Naming("unlink", entry.path))
            case "D":
                self._name(Naming("rmdir", entry.path))
            case "M":
                self._name(Naming("mkdir", entry.path, number=FOLDER))

    def _open(self, entry: Entry) -> None:
        number = self.names.get(entry.path)
        if number == FOLDER:
            self.numbers[entry.fd] = entry.path
            return
        if number is None:
            assert entry.place & CREATE, entry
            number = len(self.base)
            self.base[number] = b""
            self._name(Naming("create", entry.path, number=number))
        self.numbers[entry.fd] = number
        if entry.place & TRUNCATE:
            self.changes.setdefault(number, []).append(Change(0, None))

    def _change(self, fd: int, change: Change) -> None:
        number = self.numbers[fd]
        assert isinstance(number, int), "a folder has no bytes"
        self.changes.setdefault(number, []).append(change)

    def _name(self, naming: Naming) -> None:
        self.namings.append(naming)
        apply_naming(self.names, naming)

    def _sync(self, synced: int | str) -> None:
        if isinstance(synced, int):
            for change in self.changes.get(synced, []):
                change.is_synced = True
            return
        for naming in self.namings:
            folders = {naming.path.rpartition("/")[0], naming.other.rpartition("/")[0]}
            is_above = naming.what == "mkdir" and f"{synced}/".startswith(
                f"{naming.path}/"
            )
            naming.is_synced |= synced in folders or is_above


def apply_naming(names: dict[str, int], naming: Naming) -> None:
    """Change names, if a disk that lost others can."""
    target = naming.other or naming.path
    if target.rpartition("/")[0] not in names and naming.what not in (
        "unlink",
        "rmdir",
    ):
        return
    match naming.what:
        case "create" | "mkdir":
            names.setdefault(naming.path, naming.number)
        case "unlink":
            names.pop(naming.path, None)
        case "rmdir":
            if not any(name.startswith(f"{naming.path}/") for name in names):
                names.pop(naming.path, None)
        case "link":
            if naming.path in names:
                names[naming.other] = names[naming.path]
        case "rename":
            start = f"{naming.path}/"
            inside = [
                name for name in names if name == naming.path or name.startswith(start)
            ]
            for name in inside:
                names[naming.other + name.removeprefix(naming.path)] = names.pop(name)


def read_log(path: Path) -> Iterator[Entry]:
    """Yield what faults.c has recorded."""
    raw = path.read_bytes()
    place = 0
    while place < len(raw):
        what, fd, where, num_bytes, num_path, num_other = ENTRY.unpack_from(raw, place)
        place += ENTRY.size
        name = raw[place : place + num_path]
        other = raw[place + num_path :][:num_other]
        place += num_path + num_other
        data = raw[place : place + num_bytes]
        place += num_bytes
        yield Entry(chr(what), fd, where, name.decode(), other.decode(), data, place)


def write_at(data: bytearray, change: Change) -> None:
    """Change a file's bytes."""
    end = change.place + len(change.data or b"")
    data.extend(bytes(max(0, end - len(data))))
    if change.data is None:
        del data[change.place :]
    else:
        data[change.place : end] = change.data


def torn(change: Change, source: random.Random) -> Change:
    """Return a write of which only the sectors up to some one were written."""
    assert change.data is not None
    first = (change.place // SECTOR + 1) * SECTOR - change.place
    ends = [0, *range(first, len(change.data), SECTOR)]
    return Change(change.place, change.data[: source.choice(ends)])


def bytes_after(disk: Disk, number: int, mode: str, source: random.Random) -> bytes:
    """Return a file's bytes after a power cut."""
    data = bytearray(disk.base[number])
    changes = disk.changes.get(number, [])
    loose = [change for change in changes if not change.is_synced]
    for change in changes:
        if change.is_synced or mode in ("data", "all"):
            write_at(data, change)
        elif mode == "torn":
            is_cut = change is loose[-1] and change.data is not None
            write_at(data, torn(change, source) if is_cut else change)
        elif mode == "zeros" and change.data is not None:
            write_at(data, Change(change.place, bytes(len(change.data))))
        elif mode == "zeros":
            write_at(data, change)
        elif mode == "random":
            fate = source.choice(("lost", "whole", "torn", "zeros"))
            if fate == "whole" or (fate == "torn" and change.data is None):
                write_at(data, change)
            elif fate == "torn":
                write_at(data, torn(change, source))
            elif fate == "zeros" and change.data is not None:
                start = min(
                    change.place // PAGE * PAGE + PAGE, change.place + len(change.data)
                )
                page = start if source.random() < 0.5 else change.place
                zeros = bytes(change.place + len(change.data) - page)
                write_at(
                    data,
                    Change(change.place, change.data[: page - change.place] + zeros),
                )
    return bytes(data)


def build(
    disk: Disk, folder: Path, mode: str, source: random.Random, *, is_new_boot: bool
) -> None:
    """Write a folder as it may be after a power cut."""
    names = dict(disk.begun)
    for naming in disk.namings:
        is_there = naming.is_synced or mode in ("names", "zeros", "torn", "all")
        if is_there or (mode == "random" and source.random() < 0.5):
            apply_naming(names, naming)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    boot = make_machine_name("pid").partition(" ")[0].encode()
    for name in sorted(names):
        path = Path(name)
        number = names[name]
        if number == FOLDER:
            path.mkdir(parents=True, exist_ok=True)
        elif path.parent.is_dir():
            is_claim = path.parent.name.endswith(".claim")
            is_kept = is_claim and not is_new_boot
            data = bytes_after(disk, number, "all" if is_kept else mode, source)
            if is_claim and is_new_boot:
                data = data.replace(boot, b"00000000-0000-4000-8000-000000000000")
            path.write_bytes(data)


@dataclass(slots=True)
class Cut:
    """The power fails after so many changes, and the disk has what a mode says."""

    num_changes: int
    mode: str

    def __str__(self) -> str:
        return f"{self.num_changes}:{self.mode}"

    @classmethod
    def read(cls, text: str) -> Cut:
        """Read what str() gives."""
        number, _, mode = text.partition(":")
        return cls(int(number), mode)


def cuts_of(entries: list[Entry]) -> Iterator[Cut]:
    """Yield a cut before the first change, after each, and at the end, for each mode."""
    # Opening to read, closing and copies of descriptors change nothing.
    points = [
        place for place, entry in enumerate(entries, 1) if entry.what in "WTSRLUDM"
    ]
    for num_changes in sorted({0, *points, len(entries)}):
        for mode in MODES:
            yield Cut(num_changes, mode)


def with_unseen_renames(
    entries: list[Entry], disk: Disk, folder: Path
) -> Iterator[Entry]:
    """Yield entries, and the renames of a library that asks the kernel by itself, as
    Rust's does.

    The command has just ended: its folder tells the new names, which are known by their bytes.
    """
    left = {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    moved = {entry.path for entry in entries if entry.what in "RUL"}
    for entry in entries:
        number = disk.numbers.get(entry.fd)
        yield entry
        disk.take(entry)
        if entry.what != "C" or not isinstance(number, int):
            continue
        for name in [name for name, other in disk.names.items() if other == number]:
            path = Path(name)
            if path.name in left or name in moved:
                continue
            data = bytes_after(disk, number, "all", random.Random())
            new = next(other for other, found in left.items() if found == data)
            rename = Entry("R", -1, 0, name, str(path.with_name(new)), b"", entry.end)
            disk.take(rename)
            yield rename


class CutLoop:
    """Tries power cuts of one command."""

    def __init__(
        self, loop: Loop, ready: Ready, seed: int, *, is_new_boot: bool
    ) -> None:
        self.loop = loop
        self.ready = ready
        self.seed = seed
        self.is_new_boot = is_new_boot
        log = loop.place / "log"
        log.unlink(missing_ok=True)
        loop.begin(ready)
        done = loop.warm.run(ready.command.words(loop.folder), log=log)
        assert done.status in ready.command.statuses, done
        entries = [entry for entry in read_log(log) if entry.what != "m"]
        disk = Disk.of(ready.template, loop.folder)
        self.entries = list(with_unseen_renames(entries, disk, loop.folder))

    def cuts(self) -> Iterator[Cut]:
        """Yield all cuts."""
        return cuts_of(self.entries)

    def try_cut(self, cut: Cut) -> None:
        """Build the state after a cut, and repeat the command; raise a WrongError."""
        loop = self.loop
        ready = self.ready
        disk = Disk.of(ready.template, loop.folder)
        for entry in self.entries[: cut.num_changes]:
            disk.take(entry)
        source = random.Random(f"{self.seed} {cut}")
        build(disk, loop.folder, cut.mode, source, is_new_boot=self.is_new_boot)
        if cut.num_changes == len(self.entries) and ready.command.is_synced:
            nothing = "it had ended well, and after a power cut"
            loop.check_result(ready, nothing, None)
        loop.repeat(ready)
