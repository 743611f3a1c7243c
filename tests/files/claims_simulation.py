"""Machines that share a folder, in one process: their clocks, their views of the disk,
their stops.

Each worker answers files as a run does, with a word instead of a model. A seed says when one is
stopped, for how long, and at which step of its work; who dies; how far clocks are off; how late
attributes and names are seen; and whether the disk has locks.

    python -m tests.files.claims_simulation 0 1000
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import orjson

from fminfer.contract.envelope import parse_envelope
from fminfer.contract.record import Record
from fminfer.core.errors import InUseError, OutputError, StoppedError, UsageError
from fminfer.files import claims, disk, ordered_output
from fminfer.files.claims import CLAIM, Claim, Claims
from fminfer.files.journal import JOURNAL, Journal
from fminfer.job import journaled_input, shared_folder
from fminfer.job.shared_folder import SharedFiles
from fminfer.machine import liveness
from tests.shards.answer_shards import share

START_S = 1_700_000_000.0
MOST_S = 40_000.0  # of the disk's clock, until all must be answered
real_stat = Path.stat
real_exists = Path.exists
real_touch = Path.touch
real_replace = os.replace
real_listdir = os.listdir
real_utime = os.utime


class Killed(BaseException):
    """Ends a worker at once."""


class Host:
    """A machine with one worker."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"machine {number}"
        self.skew_s = world.rng.choice([0.0, 0.0, 3600.0, -3600.0, 5 * 86400.0])
        self.work: Iterator[None] | None = None
        self.files: SharedFiles | None = None
        self.journals: list[Journal] = []  # that it has opened
        self.is_stopped = self.is_running = False
        # until when, and what
        self.seen: dict[tuple[str, Path], tuple[float, Any]] = {}

    def start(self) -> None:
        self.work = self._work()

    def _work(self) -> Iterator[None]:
        files = self.files = share(self.world.folder)
        if not files.scan():
            return
        for file in files.iterate_files():
            if file is None:
                yield
                continue
            try:
                for line in file.read_lines(lambda line: None):
                    yield
                    # What two machines say differs, so that none may write into the
                    # other's rows.
                    by = "x" * self.world.rng.randint(0, 9)
                    result = {"said": line.number, "by": by, "choices": []}
                    file.add(Record(line, parse_envelope(line), result=result))
            except UsageError as error:
                files.abandon_file(file, error)
            file.abandon(StoppedError("the end"))

    def go_on(self) -> None:
        """Do some work, as this machine."""
        if self.is_running:
            return
        if self.work is None:  # a job's next run on this machine
            self.start()
        before = self.world.host
        self.world.host = self
        self.is_running = True
        try:
            assert self.work is not None
            next(self.work)
        except StopIteration:
            self.work = None
        except (Killed, OutputError, InUseError) as error:
            self.world.ends.append(f"{type(error).__name__}: {str(error)[-60:]}")
            self.work = None
            self._close()
        finally:
            self.world.host = before
            self.is_running = False

    def beat(self) -> None:
        before = self.world.host
        self.world.host = self
        if self.files is not None and self.work is not None:
            self.files._terms.claims._beat_all()
        self.world.host = before

    def _close(self) -> None:
        """Close what a dead process had open."""
        self.name += ", started again"  # none of its processes is the dead one
        for journal in self.journals:
            journal._stop.set()
            if journal._thread is not None:
                journal._thread.join()
            if journal._fd >= 0:
                os.close(journal._fd)
                journal._fd = -1
        self.files = None

    def look(self, kind: str, path: Path, ask: Callable[[], Any]) -> Any:
        """Return what this machine sees of a path, which may be late."""
        until_s, value = self.seen.get((kind, path), (0.0, None))
        if self.world.now_s >= until_s:
            lag_s = self.world.rng.uniform(0, self.world.lag_s)
            value = ask()
            self.seen[kind, path] = (self.world.now_s + lag_s, value)
        return value

    def forget(self, path: Path) -> None:
        """See anew what this machine has changed itself."""
        for kind, other in [*self.seen]:
            if other in (path, path.parent):
                del self.seen[kind, other]


class World:
    """The disk, its clock, and the machines."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.thread = threading.get_ident()
        self.folder = folder
        self.now_s = START_S
        self.has_locks = self.rng.random() < 0.5
        self.lag_s = self.rng.choice([0.0, 3.0, 30.0, 60.0])
        self.share_of_stops = self.rng.choice([0.0, 0.02, 0.1, 0.3])
        self.share_of_deaths = self.rng.choice([0.0, 0.0, 0.01])
        self.num_rows = self.rng.randint(1, 6)
        self.ends: list[str] = []
        self.depth = 0
        self.hosts = [
            Host(self, number) for number in range(self.rng.choice([2, 2, 3]))
        ]
        self.host = self.hosts[0]
        folder.mkdir()
        for number in range(self.rng.randint(1, 3)):
            rows = (
                orjson.dumps({"prompt": [number, row]}) for row in range(self.num_rows)
            )
            (folder / f"{number}.jsonl").write_bytes(
                b"".join(row + b"\n" for row in rows)
            )

    def run(self) -> None:
        while not all(map(real_exists, self.outputs)):
            self.turn()
        # Who runs now ends, and whoever comes later finds nothing left.
        self.share_of_stops = self.share_of_deaths = 0.0
        self.now_s += 2 * claims.STALE_S + self.lag_s
        for host in self.hosts:
            while host.work is not None:
                self.turn()
        self.hosts[-1].start()
        while self.hosts[-1].work is not None:
            self.turn()
        self.check()

    def turn(self) -> None:
        assert self.now_s < START_S + MOST_S, "it never ends"
        self.now_s += self.rng.uniform(0, 3)
        for host in self.hosts:
            if not host.is_stopped and self.rng.random() < 0.5:
                host.beat()
        is_over = all(map(real_exists, self.outputs))
        able = [
            each
            for each in self.hosts
            if not (each.is_stopped or (is_over and not each.work))
        ]
        if able:
            self.rng.choice(able).go_on()

    def pause(self) -> None:
        """Stop the machine that works, perhaps, while others go on; or kill its worker."""
        if not self.host.is_running or self.is_elsewhere:
            return  # its claims are touched
        if self.rng.random() < self.share_of_deaths:
            raise Killed
        others = [
            host for host in self.hosts if not host.is_stopped and host is not self.host
        ]
        if self.rng.random() >= self.share_of_stops or not others or self.depth > 3:
            return
        host = self.host
        self.host.is_stopped = True
        self.depth += 1
        end_s = self.now_s + self.rng.choice([5, 30, 65, 130, 300])
        while self.now_s < end_s:
            self.turn()
        self.depth -= 1
        host.is_stopped = False
        if self.rng.random() < 0.2:  # its clock is set meanwhile
            host.skew_s += self.rng.choice([-3600.0, -100.0, 3600.0])
        self.host = host

    @property
    def is_elsewhere(self) -> bool:
        """Whether a thread calls that is not of the simulation: an older test's claims."""
        return threading.get_ident() != self.thread

    @property
    def outputs(self) -> list[Path]:
        inputs = sorted(self.folder.glob("[0-9].jsonl"))
        return [path.with_name(f"output_{path.name}") for path in inputs]

    def check(self) -> None:
        """Each row is answered once, in order; nothing lies about."""
        for output in self.outputs:
            said = [orjson.loads(line)["result"]["said"] for line in output.open("rb")]
            assert said == [*range(1, self.num_rows + 1)], f"{output.name}: {said}"
            request = orjson.loads(output.open("rb").readline())["request"]["prompt"]
            assert request == [int(output.name[7]), 0], "another file's rows"
        left = [
            name
            for name in real_listdir(self.folder)
            if JOURNAL in name or ".ordered" in name
        ]
        assert not left, left

    def check_claim(self, claim: Claim) -> None:
        """Nobody else who is alive has claimed what is claimed now."""
        for host in self.hosts:
            if host is self.host or host.files is None or host.work is None:
                continue
            for other in host.files._terms.claims._held:
                if other.path.parent != claim.path.parent or not real_exists(
                    other.path
                ):
                    continue
                # and not a later owner's of this name
                if other.path.read_bytes() == other._data:
                    age_s = self.now_s - real_stat(other.path).st_mtime
                    assert age_s > claims.STALE_S, (
                        "two that live have claimed one output"
                    )

    # The disk, as the machine that works sees it

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        def is_late(path: Path) -> bool:
            return path.is_relative_to(self.folder) and self.lag_s > 0

        def stat(path: Path, **options: Any) -> Any:
            # Who opens a file asks for its attributes, and so is not late.
            if path.parent.name.endswith(CLAIM) and is_late(path):
                return self.host.look("stat", path, lambda: real_stat(path))
            return real_stat(path, **options)

        def exists(path: Path) -> Any:
            if is_late(path) and path.suffix in (".jsonl", JOURNAL):
                return self.host.look("exists", path, lambda: real_exists(path))
            return real_exists(path)

        def listdir(folder: Path) -> Any:
            if self.is_elsewhere:
                return real_listdir(folder)
            self.pause()
            return self.host.look("names", Path(folder), lambda: real_listdir(folder))

        def utime(path: Path) -> None:
            if self.is_elsewhere:
                real_utime(path)
                return
            real_utime(path, (self.now_s, self.now_s))
            self.host.forget(path)

        def touch(path: Path) -> None:
            real_touch(path)
            real_utime(path, (self.now_s, self.now_s))

        def create_once(path: Path, data: bytes, mode: int) -> bool:
            self.pause()
            is_first = liveness.create_file_once(path, data, mode)
            if is_first:
                utime(path)
                self.pause()
            return is_first

        def replace(source: Path, target: Path) -> None:
            self.pause()
            real_replace(source, target)
            self.host.forget(Path(target))

        def fsync(fd: int) -> None:
            self.pause()

        def flock(fd: int, kind: int) -> None:
            if not self.has_locks:
                raise OSError(errno.ENOLCK, "no locks")
            real_flock(fd, kind)

        real_flock = fcntl.flock
        real_append = Journal.append
        real_init = Journal.__init__
        real_acquire = Claims.acquire
        real_order = ordered_output.write_ordered_output

        def init(journal: Journal, *arguments: Any, **options: Any) -> None:
            real_init(journal, *arguments, **options)
            self.host.journals.append(journal)

        def acquire(own: Claims, output: Path) -> Claim | None:
            claim = real_acquire(own, output)
            if claim is not None:
                self.ends += ["taken over"] * (claim.path.name != "1")
                self.check_claim(claim)
            return claim

        def append(journal: Journal, row: Any) -> None:
            self.pause()
            real_append(journal, row)
            self.pause()

        def write_in_steps(journal: Journal, **options: Any) -> Any:
            self.pause()
            seals = real_order(journal, **options)
            self.pause()
            return seals

        def clock() -> float:
            return self.now_s + self.host.skew_s

        for owner, name, value in (
            (liveness, "make_machine_name", lambda namespace: self.host.name),
            (claims, "time", SimpleNamespace(time=clock)),
            (claims, "start_repeating", lambda *arguments, **options: None),
            (claims, "create_file_once", create_once),
            (claims, "os", _Os(listdir=listdir, utime=utime)),
            (
                shared_folder,
                "time",
                SimpleNamespace(time=clock, monotonic=lambda: self.now_s),
            ),
            (ordered_output, "os", _Os(replace=replace)),
            (disk, "os", _Os(replace=replace, fsync=fsync)),
            (journaled_input, "write_ordered_output", write_in_steps),
            (Claims, "acquire", acquire),
            (Journal, "append", append),
            (Journal, "__init__", init),
            (fcntl, "flock", flock),
            (Path, "stat", stat),
            (Path, "touch", touch),
            (Path, "exists", exists),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, value))
        yield

    def __enter__(self) -> World:
        self._stack = contextlib.ExitStack()
        self._stack.__enter__()
        self._stack.enter_context(self.patched())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Os(SimpleNamespace):
    """The system, but for some functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def simulate(seed: int) -> list[str]:
    """Run one simulation; return why workers ended before their work was done."""
    with (
        tempfile.TemporaryDirectory() as folder,
        World(seed, Path(folder, "in")) as world,
    ):
        world.run()
    return world.ends


def main(first: int, last: int) -> None:
    """Print the seeds that fail."""
    num_failed = 0
    ends = Counter[str]()
    for seed in range(first, last):
        try:
            ends.update(simulate(seed))
        except Exception as error:
            num_failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{last - first} simulations; {num_failed} failed; ends {dict(ends)}")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
