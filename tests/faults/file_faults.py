"""Fails calls on files, one by one, and sees that nothing is lost: `scripts/torture --faults`.

A command is run once to count its calls of each kind. Then each case is a kind of call,
the number of the call, an error, and whether the error lasts. The command must end by a
sentence. What it calls done must be right. The same command without a fault must then
give what an undisturbed one gives.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fminfer.files.claims import WRITING_S
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import parse_row
from tests.faults.commands import Command, Result
from tests.faults.preload import ERRORS_OF, KINDS, ONCE_ONLY, Outcome, Plan, Warm

RAW = re.compile(
    r"Traceback|panicked at|Exception ignored|Exception in thread|Error: \["
)
KNOWN = (0, 1, 2, 3, 75)  # exit statuses after a fault


def kept_records(output: Path) -> set[bytes]:
    """Return the records of the whole rows of a journal."""
    with journal_path(output).open("rb") as file:
        rows = [parse_row(line) for line in file]
    return {row.record for row in rows if row is not None and not row.is_ours}


class WrongError(Exception):
    """What a case shows to be wrong."""


@dataclass(slots=True)
class Ready:
    """A command's folder as it begins, what it leaves, and how many calls it makes."""

    command: Command
    template: Path
    result: Result
    names: set[str]
    counts: dict[str, int]

    def plans(self) -> Iterator[Plan]:
        """Yield all cases."""
        return plans_of(self.counts)


def plans_of(counts: dict[str, int]) -> Iterator[Plan]:
    """Yield each fault of each call."""
    for kind in KINDS:
        for nth in range(1, counts[kind] + 1):
            for error in (*ERRORS_OF[kind], "kill"):
                yield Plan(kind, nth, error)
                if error not in ONCE_ONLY:
                    yield Plan(kind, nth, error, is_lasting=True)


class Loop:
    """Tries cases of commands in one folder."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folder = place / "work"
        scratch = place / "scratch"
        scratch.mkdir()
        self.warm = Warm(self.folder, scratch)

    def make_ready(self, command: Command) -> Ready:
        """Prepare a command's folder, run it without a fault, and count its calls."""
        template = self.place / f"template-{command.name}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        command.prepare(self.warm)
        shutil.copytree(self.folder, template, symlinks=True)
        done = self.run(command)
        assert done.status in command.statuses, done
        return Ready(
            command,
            template,
            command.read(self.folder),
            self._names(command),
            done.counts,
        )

    def run(self, command: Command, plan: Plan | None = None) -> Outcome:
        """Run a command, and what runs beside it."""
        beside = [command.beside(self.folder)] if command.beside else []
        return self.warm.run(command.words(self.folder), plan, beside=beside)

    def begin(self, ready: Ready) -> None:
        """Put a command's folder back as it was."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(ready.template, self.folder, symlinks=True)

    def try_case(self, ready: Ready, plan: Plan) -> Outcome:
        """Run a command by a plan, and then without; raise a WrongError."""
        self.begin(ready)
        found = self.run(ready.command, plan)
        self.check_end(ready, found, plan)
        if found.status in ready.command.statuses:
            self.check_result(ready, "it ended well, and", found)
        # What another process seems to have locked is its own, and stays.
        self.repeat(
            ready, found, is_shared=(plan.kind, plan.error) == ("lock", "EAGAIN")
        )
        return found

    def repeat(
        self, ready: Ready, before: Outcome | None = None, *, is_shared: bool = False
    ) -> None:
        """Run a command without a fault, and see that all is as if there had been none."""
        command = ready.command
        kept = {path: kept_records(path) for path in self._outputs()}
        is_whole = self._is_whole(ready)
        for claim in self.folder.rglob("*.claim/*"):
            # who repeats a command takes a second
            if not claim.read_bytes().endswith(b"\n"):
                os.utime(claim, (claim.stat().st_mtime - 2 * WRITING_S,) * 2)
        again = self.run(command)
        said = f"{before.text if before else ''}\nREPEAT: {again.text}"
        if again.status is None:
            raise WrongError(f"the repeat hangs: {said}")
        if "Traceback" in again.text:
            raise WrongError(f"the repeat has a traceback: {said}")
        if again.status not in command.statuses and not is_whole:
            raise WrongError(f"the repeat ends with {again.status}: {said}")
        self.check_result(ready, "the repeat ended well, and", again)
        for output, rows in kept.items():
            if not output.exists():
                continue  # the command only looks, or what it has left is wrong anyway
            errors = output.with_name(
                output.name.removesuffix(".jsonl") + ".errors.jsonl"
            )
            finished = set(output.read_bytes().splitlines())
            if errors.exists():
                finished |= set(errors.read_bytes().splitlines())
            if command.name != "grown" and not rows <= finished:
                raise WrongError(
                    f"rows that were in {output.name}.journal have changed: {said}"
                )
        more = self._names(command) - ready.names
        if more and not is_shared:
            raise WrongError(f"left over: {sorted(more)}: {said}")

    def check_end(self, ready: Ready, found: Outcome, plan: Plan) -> None:
        """See that a command under a fault ended, and said why."""
        if found.status is None:
            raise WrongError(f"hangs: {found.text}")
        if match := RAW.search(found.text):
            raise WrongError(f"says {match.group()}: {found.text}")
        if found.status < 0 and (plan.error != "kill" or found.status != -9):
            raise WrongError(f"ended by signal {-found.status}: {found.text}")
        if found.status >= 0 and found.status not in (*KNOWN, *ready.command.statuses):
            raise WrongError(f"exit status {found.status}: {found.text}")
        if found.status in (1, 2) and not found.text.strip():
            raise WrongError(f"ended with {found.status} and not a word")

    def check_result(self, ready: Ready, when: str, found: Outcome | None) -> None:
        """See that a command has left what an undisturbed one leaves."""
        text = "" if found is None else found.text
        try:
            result = ready.command.read(self.folder)
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise WrongError(
                f"{when} {type(error).__name__}: {error}: {text}"
            ) from error
        if result != ready.result:
            keys = result.keys() | ready.result.keys()
            others = sorted(
                key for key in keys if result.get(key) != ready.result.get(key)
            )
            raise WrongError(f"{when} {others} differ: {text}")

    def _is_whole(self, ready: Ready) -> bool:
        try:
            return ready.command.read(self.folder) == ready.result
        except (OSError, ValueError, KeyError, AssertionError):
            return False

    def _outputs(self) -> list[Path]:
        journals = self.folder.rglob("*.jsonl.journal")
        return [path.with_name(path.name.removesuffix(".journal")) for path in journals]

    def _names(self, command: Command) -> set[str]:
        paths = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        return {
            name for name in paths if not name.startswith(command.leaves or ("\0",))
        }
