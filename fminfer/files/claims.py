"""Which of several runs answers an output: a claim is a file beside it, kept young by its owner.

The claim of a dead process of this machine can be taken over at once, also one of its last boot.
One that a kill or a power cut has torn can be taken over after a second. Any other can once it
has not been touched for a minute. Claims stand in `<output>.claim`, by numbers: a later owner's
is higher.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fminfer.core.errors import InUseError, OutputError
from fminfer.files.disk import path_beside, raising_disk_errors
from fminfer.files.journal import journal_path
from fminfer.files.ordered_output import draft_path
from fminfer.files.streams import open_unblocked
from fminfer.machine.liveness import (
    Owner,
    create_file_once,
    describe_this_process,
    parse_owner,
    start_repeating,
)

CLAIM = ".claim"  # added to the output's name
NUMBER = re.compile("[1-9][0-9]{0,17}")  # a claim's name
BEAT_S = 5.0
WRITING_S = 1.0  # a claim that is not whole by then was torn by a kill or a power cut
STALE_S = 60.0  # without a beat: its owner is dead, or cannot reach the disk
TRUSTED_S = 20.0  # so long after its own last beat an owner need not look


@dataclass(slots=True, frozen=True)
class ClaimFile:
    """A claim that is there."""

    path: Path
    number: int
    owner: Owner | None  # None: it was not written to its end, or by another version
    is_whole: bool  # it was written to its end
    age_s: float  # since its last beat

    @property
    def is_dead(self) -> bool:
        if self.owner is not None and self.owner.is_near:
            return not self.owner.is_alive()  # also one that sleeps lives
        if self.owner is not None and self.owner.is_before_boot:
            return True
        return self.age_s > (STALE_S if self.is_whole else WRITING_S)


class Claim:
    """An output that is this process's to answer. `data` stands in the file."""

    def __init__(
        self, path: Path, data: bytes, on_end: Callable[[Claim], None]
    ) -> None:
        self.path = path
        self._data = data
        self._on_end = on_end
        self._beat_s = time.time()
        self._is_lost = False

    def beat(self) -> None:
        """Touch it, and then see whether another process has taken over.

        In this order: whoever looks for a dead one sees it young, or is seen.
        """
        try:
            os.utime(self.path)
            is_mine = _read_claim(self.path)[0] == self._data
            # none, if the folder was emptied just now
            newest = _list_numbers(self.path.parent)[-1:]
            self._is_lost = not is_mine or newest != [int(self.path.name)]
            self._beat_s = time.time()
        except FileNotFoundError:
            self._is_lost = True
        except OSError:
            pass  # the disk may come back

    def is_held(self) -> bool:
        """Tell whether the claim is still this process's; a long sleep may have lost it."""
        if not self._is_lost and not self._has_beaten_within(TRUSTED_S):
            self.beat()
            # The disk does not answer, and another machine may have taken over meanwhile.
            self._is_lost = self._is_lost or not self._has_beaten_within(STALE_S)
        return not self._is_lost

    def _has_beaten_within(self, time_s: float) -> bool:
        # After the clock was set back during a stop, nobody knows the time that has passed.
        return -time_s <= self._beat_s - time.time() <= 0

    def release(self) -> None:
        """Release the claim: remove its file."""
        self._on_end(self)
        with contextlib.suppress(OSError):
            if _read_claim(self.path)[0] == self._data:
                self.path.unlink()
            self.path.parent.rmdir()  # if nobody else has one there


class Claims:
    """The claims of this process, which a thread keeps young from the first on."""

    def __init__(self) -> None:
        self._held: set[Claim] = set()
        self._lock = threading.Lock()
        self._is_beating = False

    def acquire(self, output: Path) -> Claim | None:
        """Claim an output; None: it is another living process's.

        Claims of dead processes stay until `remove_dead_claims`. A process that slept must
        find its own.
        """
        claims = read_claims(output)
        if any(not claim.is_dead for claim in claims):
            return None
        number = 1 + max((claim.number for claim in claims), default=0)
        path = _claims_folder(output) / str(number)
        data = describe_this_process()
        with raising_disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            try:
                if not create_file_once(path, data, 0o666):
                    return None
            except FileNotFoundError:  # its folder is being removed
                return None
        # Two may have seen the same dead one at different times: both look again.
        later_claims = read_claims(output)
        rivals = [claim for claim in later_claims if claim.path != path]
        claim = Claim(path, data, self._held.discard)
        # Another process may have removed it as torn, because it was written slowly.
        if len(rivals) == len(later_claims) or any(
            rival.number > number or not rival.is_dead for rival in rivals
        ):
            claim.release()
            return None
        with self._lock:
            self._held.add(claim)
            if not self._is_beating:
                self._is_beating = True
                # with the process
                start_repeating(BEAT_S, self._beat_all, "claims", end=threading.Event())
        return claim

    def _beat_all(self) -> None:
        with self._lock:
            held = list(self._held)
        for claim in held:
            claim.beat()


def read_claims(output: Path, now_s: float | None = None) -> list[ClaimFile]:
    """Read an output's claims, the newest owner's last.

    `now_s` None: the time by the clock of the disk.
    """
    folder = _claims_folder(output)
    claims = []
    for number in _list_numbers(folder):
        path = folder / str(number)
        # it was released just now
        with raising_disk_errors(path), contextlib.suppress(FileNotFoundError):
            data, beat_s = _read_claim(path)
            owner = parse_owner(data)
            if now_s is None and not (owner and owner.is_near):
                now_s = read_disk_clock(output.parent)
            claims.append(
                ClaimFile(
                    path,
                    number,
                    owner,
                    data.endswith(b"\n"),
                    (now_s or beat_s) - beat_s,
                )
            )
    return claims


def find_claimed(outputs: Iterable[Path]) -> set[Path]:
    """Return the outputs that have a claim, alive or dead; each folder is listed once."""
    outputs = list(outputs)
    claim_folders = {
        folder / name
        for folder in {output.parent for output in outputs}
        if folder.is_dir()
        for name in os.listdir(folder)
        if name.endswith(CLAIM)
    }
    return {output for output in outputs if _claims_folder(output) in claim_folders}


def remove_dead_claims(output: Path) -> None:
    """Remove the claims of processes that are gone."""
    for claim in read_claims(output):
        if claim.is_dead:
            with contextlib.suppress(OSError):
                claim.path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        _claims_folder(output).rmdir()  # if it is empty


def remove_all_claims(output: Path) -> None:
    """Remove all claims of an output. The caller knows that no other process writes it."""
    shutil.rmtree(_claims_folder(output), ignore_errors=True)


def _claims_folder(output: Path) -> Path:
    return path_beside(output, CLAIM)


def _list_numbers(folder: Path) -> list[int]:
    try:
        return sorted(
            int(name) for name in os.listdir(folder) if NUMBER.fullmatch(name)
        )
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_claim(path: Path) -> tuple[bytes, float]:
    """Return a claim's bytes and last beat. To open it makes a network disk look again."""
    with open(path, "rb", opener=open_unblocked) as file:
        return file.read(), os.fstat(file.fileno()).st_mtime


def read_disk_clock(folder: Path) -> float:
    """Return the time by the clock that dates the folder's files."""
    probe = folder / f".fminfer-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:  # it may only be read
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


class Hold:
    """One output, which this run may write while it holds the claim; it may hold one already."""

    def __init__(
        self, output: Path, claims: Claims, claim: Claim | None = None
    ) -> None:
        self.claim = claim
        self.is_lost = False  # to another run, or given up: nothing more is written
        self._output = output
        self._claims = claims

    def check_free(self) -> None:
        """Raise an InUseError if another run has the output."""
        if self.claim is None and any(
            not claim.is_dead for claim in read_claims(self._output)
        ):
            raise self._in_use_error()

    def acquire(self) -> None:
        """Claim the output, if it is not claimed yet.

        Raises:
            InUseError: another run has it.
        """
        self.claim = self.claim or self._claims.acquire(self._output)
        if self.claim is None:
            raise self._in_use_error()

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Claim the output for a moment; a claim that was there before stays."""
        was_held = self.claim is not None
        self.acquire()
        try:
            yield
        finally:
            if not was_held:
                self.release()

    def remove_dead_claims(self) -> None:
        """Remove dead claims, once the journal is open.

        A process that slept with the journal open must find its own claim.
        """
        if self.claim is not None:
            remove_dead_claims(self._output)

    def is_held(self) -> bool:
        """Tell whether the claim is still this run's, which may have slept for long."""
        return self.claim is None or self.claim.is_held()

    def mark_lost(self) -> None:
        """Write no more; the output is another run's, or free for one."""
        self.is_lost = True
        self.release()

    def release(self) -> None:
        """Release the claim."""
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    def remove_leftovers(self) -> None:
        """Remove what a killed run may have left beside a complete output."""
        draft = draft_path(journal_path(self._output))
        # it may be read only
        with contextlib.suppress(InUseError, OutputError, OSError):
            if draft.exists():
                self.acquire()  # so that no other run is writing it
                draft.unlink(missing_ok=True)
        remove_dead_claims(self._output)
        self.release()

    def _in_use_error(self) -> InUseError:
        names = [
            f"process {claim.owner.pid} of {claim.owner.host}"
            for claim in read_claims(self._output)
            if claim.owner is not None and not claim.is_dead
        ]
        return InUseError(
            f"{self._output} is being written by {', '.join(names) or 'another process'}. "
            "Wait for it or end it; if it is gone, its claim ends within "
            f"{STALE_S:.0f} s. Finished rows are kept"
        )


@contextlib.contextmanager
def claiming_output(output: Path) -> Iterator[None]:
    """Let one command at a time write an output; raise an InUseError in others."""
    hold = Hold(output, Claims())
    with hold.acquired():
        hold.remove_dead_claims()
        yield
