"""Inputs that one run answers alone, one after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fminfer.batch.journaled_input import JournaledInput
from fminfer.batch.progress import write_beside_bar
from fminfer.batch.run_inputs import RunInput, add_files, sum_saved
from fminfer.batch.run_summary import JobSummary
from fminfer.batch.streamed_input import StreamedInput
from fminfer.core.errors import InUseError, UsageError
from fminfer.files.journal_head import Fingerprint
from fminfer.files.ordered_stdout import OrderedStream
from fminfer.files.output_paths import STDOUT
from fminfer.files.row_counts import Tally
from fminfer.files.run_facts import RunFacts
from fminfer.files.run_terms import CountLines, RunTerms


@dataclass(slots=True, frozen=True)
class NamedFiles:
    """The inputs of a run that answers all of them itself, one after another."""

    files: list[RunInput]
    num_rows: int | None  # left to answer; None: not known before the end of the inputs

    @property
    def is_finished(self) -> bool:
        return all(file.is_settled for file in self.files)

    @property
    def num_saved_rows(self) -> int | None:
        return sum_saved(self.files)

    def turns(self) -> Iterator[RunInput]:
        return iter(self.files)

    def give_up(self, file: RunInput, error: UsageError) -> None:
        """End the run: whoever named a file wants it answered."""
        raise error

    def check_kept(self) -> None:
        """Check that no other run has taken over an output and answers it.

        Raises:
            InUseError: one is.
        """
        for file in self.files:
            if file.is_lost and not file.is_finished:
                file.see_completed()
        lost = [str(file.path) for file in self.files if file.is_lost and not file.is_finished]
        if lost:
            raise InUseError(
                f"another run has taken over {', '.join(lost)}, since this one slept or did not "
                "reach the disk for a minute; what it had finished is kept. Run the same command "
                "again when the other has ended"
            )

    def abandon(self, error: BaseException) -> None:
        for file in self.files:
            file.abandon(error)

    def add_to(self, summary: JobSummary) -> None:
        add_files(self.files, sum((file.kept for file in self.files), Tally()), summary)


def open_files(
    inputs: list[Path],
    outputs: list[Path],
    fingerprint: Fingerprint,
    *,
    model: str,
    restart: bool,
    limit: int | None = None,
    count_lines: CountLines | None = None,
    facts: RunFacts | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> NamedFiles:
    """Open each input with the rows of earlier runs; write nothing if anything is wrong.

    Args:
        fingerprint: of the run: what must be the same for rows to be kept.
        model: its name, for people.
        restart: keep no rows.
        limit: of each input, answer the first so many lines.
        count_lines: begins to count a file's lines; None: no answers to an earlier form of a file
            are taken.
        facts: of the run, for the status files.
        tell: told how far it is where taking earlier answers takes long.

    Raises:
        UsageError: an output is another run's.
    """
    stream = OrderedStream(sys.stdout.buffer, write_beside_bar)
    facts = facts or RunFacts()
    terms = RunTerms(
        *(model, fingerprint, restart, limit), count_lines=count_lines, facts=facts, tell=tell
    )
    files: list[RunInput] = []
    journaled = []
    for source, (path, output) in enumerate(zip(inputs, outputs, strict=True)):
        if output == STDOUT:
            files.append(StreamedInput(path, source, stream, limit))
        else:
            file = JournaledInput(path, source, output, terms)
            journaled.append(file)
            files.append(file)
    for file in journaled:
        file.begin()
    left = [each.num_left for each in files]
    return NamedFiles(files, None if None in left else sum(n or 0 for n in left))
