"""Makes the journal of a run over an input that has changed, from the answers to its old form.

The answers stand in a complete output, or in the journal of a run that has not ended. Both stay
until the new journal, and later the new output, take their places.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fminfer.contract.envelope import Line, open_envelope
from fminfer.contract.record import make_key
from fminfer.core.errors import UsageError, row_error
from fminfer.files.completed import find_completed
from fminfer.files.disk import lock, told
from fminfer.files.earlier_answers import EarlierAnswers, JournalAnswers, OutputAnswers, Pace
from fminfer.files.journal import Journal, journal_path
from fminfer.files.journal_rows import INPUT, Fingerprint, Row, is_of_other_input, read_fingerprint
from fminfer.files.line_reader import read_lines
from fminfer.files.reopening import check_unchanged, put_journal
from fminfer.files.run_terms import LineCounter, RunTerms
from fminfer.files.streams import Digest

MAX_REPEATS = 1 << 17  # lines left to answer whose equal ones are kept in memory, about 12 MB


@dataclass(slots=True)
class CarriedOver:
    """What became of the answers to an earlier form of an input."""

    num_rows: int = 0  # lines to answer of the new form
    last_number: int = 0
    num_taken: int = 0  # of them, those that have an answer already
    num_left_out: int = 0  # answers to lines that are gone
    num_beyond: int = 0  # answers that only lines beyond the limit ask for
    # Equal lines before each one that is left to answer, by its number. None: that is not known of
    # all, and lines are to be counted as they are passed over.
    repeats: dict[int, int] | None = field(default_factory=dict)

    @property
    def has_answers(self) -> bool:
        """Whether there were any, taken or not."""
        return self.num_taken + self.num_left_out > 0

    def repeats_for(self, journal: Journal) -> dict[int, int] | None:
        """Return `repeats` if the lines that it is about are those without a row in the journal.

        Another run may have worked on the journal since, or begun it anew.
        """
        repeats = self.repeats
        if not self.num_taken or repeats is None:
            return None
        num_known = journal.num_rows + len(repeats)
        is_about_all = num_known == self.num_rows and not any(n in journal for n in repeats)
        return repeats if is_about_all else None


def carry_over(
    source: Path, output: Path, fingerprint: Fingerprint, terms: RunTerms
) -> CarriedOver | None:
    """Write the journal of an input from the answers that there are to an earlier form of it.

    The caller has claimed the output. Return None if another run has done so meanwhile.

    Args:
        fingerprint: of the run, with that of its input.

    Raises:
        UsageError: no answer can be taken, or what was written has changed since.
        OutputError: the disk is full or gone.
    """
    assert terms.count_lines is not None, "a run that takes no earlier answers"
    with _open(output, fingerprint, terms) as (earlier, old_input):
        if earlier is None:
            return None
        found = CarriedOver()
        inputs, counter = (old_input, fingerprint[INPUT]), terms.count_lines()
        rows = _take_rows(source, terms.limit, inputs, earlier, counter, found)
        put_journal(output, fingerprint, rows)
    return found


def drop_answerless(output: Path, fingerprint: Fingerprint, terms: RunTerms) -> None:
    """Remove an output to an earlier form of an input if it has no answers that could be taken.

    Otherwise it would pass for one that another run has completed meanwhile.
    """
    completed = find_completed(output) if output.exists() else None
    if completed is None or completed.counts.num_completed:
        return
    if terms.takes_over(completed.fingerprint, fingerprint):
        with told(output):
            output.unlink(missing_ok=True)


@contextmanager
def _open(
    output: Path, fingerprint: Fingerprint, terms: RunTerms
) -> Iterator[tuple[EarlierAnswers | None, str]]:
    """Open the answers to an earlier form of an input; with them comes what it was."""
    path, pace = journal_path(output), Pace(terms.tell)
    if not path.exists():
        completed = find_completed(output)
        if completed is None or not is_of_other_input(completed.fingerprint, fingerprint):
            yield None, ""
            return
        with told(output), output.open("rb") as file:
            check_unchanged(output, completed.seals, has_changed_input=True)
            assert terms.count_lines is not None, "a run that takes no earlier answers"
            earlier = OutputAnswers(output, file, terms.count_lines(), pace)
            yield earlier, completed.fingerprint[INPUT]
        return
    with told(path), path.open("rb+") as file:  # NFS locks only what may be written
        lock(file.fileno(), path, output)
        old = read_fingerprint(path, file.readline())
        if not is_of_other_input(old, fingerprint):
            yield None, ""
            return
        file.seek(0)
        yield JournalAnswers(path, file, pace), old[INPUT]


def _take_rows(
    source: Path,
    limit: int | None,
    inputs: tuple[str, str],
    earlier: EarlierAnswers,
    counter: LineCounter,
    found: CarriedOver,
) -> Iterator[Row]:
    """Yield the rows of a new form of an input that have an answer already, and count all.

    Args:
        inputs: what the input was, and what it is.

    Raises:
        UsageError: there are none, or the limit would leave some out, or the input was edited.
    """
    digest = Digest()
    num_unasked: int | None = None  # answers that no line within the limit asks for
    for line in read_lines(source, 0, digest):
        is_beyond = found.num_rows == limit
        if is_beyond and num_unasked is None:
            num_unasked = earlier.num_left_out
        row, repeat = _row_of(line, earlier, counter, found)
        if is_beyond:
            continue
        found.num_rows += 1
        found.last_number = line.number
        if row is not None:
            found.num_taken += 1
            earlier.pace.look("Taking them", found.num_taken, earlier.num_answers)
            yield row
        elif found.repeats is not None:
            found.repeats[line.number] = repeat
            if len(found.repeats) > MAX_REPEATS:
                found.repeats = None
    old_input, input_digest = inputs
    if str(digest) != input_digest:
        raise UsageError(f"{source} was changed just now; run the same command again")
    if num_unasked is not None:
        found.num_beyond = num_unasked - earlier.num_left_out
    if earlier.num_answers and not found.num_taken + found.num_beyond:
        raise UsageError(
            f"{earlier.path} belongs to a run that differs: the input was {old_input}, is "
            f"{input_digest}, and none of the answers ({earlier.num_answers:,}) belongs to a line "
            f"of it. Give --restart to replace them by answers to {source}, or give another "
            "--output"
        )
    if found.num_beyond:
        raise UsageError(
            f"an earlier run has answered lines of {source} beyond the first {limit} "
            f"({found.num_beyond:,}); give a larger --limit or none to keep these answers, or "
            "--restart"
        )
    found.num_left_out = earlier.num_left_out


def _row_of(
    line: Line, earlier: EarlierAnswers, counter: LineCounter, found: CarriedOver
) -> tuple[Row | None, int]:
    """Return a line's row, if there is an answer to it, and how many equal lines came before it."""
    envelope = open_envelope(line)
    try:
        repeat = counter.count(line, envelope) or 0
    except Exception as error:
        refused = row_error(error, f"line {line.number}")
        if refused.code == "duplicate_custom_id":  # it depends on another line
            found.repeats = None
        return None, 0
    key = make_key(envelope, repeat)
    answer = earlier.find(line, envelope, key)
    if answer is None:
        return None, repeat
    record, tokens = answer
    return Row(line.number, False, tokens, zlib.crc32(line.raw), record, key=key), repeat
