"""Makes the journal of a run from answers that an earlier run has completed or begun.

Their input has changed since (`carry_answers_over`), or rows of it failed (`rebuild_journal`).
The old output and journal stay until the new journal, and later the new output, replace them.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fminfer.answers.earlier_answers import (
    EarlierAnswers,
    JournalAnswers,
    OutputAnswers,
    PacedProgress,
)
from fminfer.answers.line_counter import LineCounter
from fminfer.contract.envelope import Envelope, Line, parse_envelope
from fminfer.contract.record import (
    AnsweredRecord,
    make_line_id,
    make_record_key,
    parse_record,
)
from fminfer.core.errors import RequestError, UsageError, line_error
from fminfer.files.claims import Claims
from fminfer.files.completed import (
    BATCH_RECORD,
    CompletedOutput,
    Edit,
    edited_error,
    find_completed,
    is_retryable,
    read_records,
)
from fminfer.files.disk import lock_file, raising_disk_errors, replacing_file
from fminfer.files.journal import Journal, journal_path
from fminfer.files.journal_rows import (
    INPUT,
    Fingerprint,
    Row,
    is_of_other_input,
    make_head_line,
    parse_fingerprint,
)
from fminfer.files.line_reader import read_lines
from fminfer.files.ordered_output import VectorReader, draft_path, errors_path
from fminfer.files.run_facts import CurrentRun
from fminfer.files.streams import Digest
from fminfer.files.tables.row_template import RowTemplate
from fminfer.files.tables.table_writer import TableOutput

# lines left to answer whose equal ones are kept in memory, about 12 MB
MAX_REPEATS = 1 << 17
_LINE = re.compile(rb'\{"line":(\d{1,18}),')


@dataclass(slots=True, frozen=True)
class RunTerms:
    """What holds for every input of a run."""

    model: str  # its name, for people
    # what must be the same for rows to be kept, without the inputs' own
    fingerprint: Fingerprint
    restart: bool = False  # answer all lines again, whatever earlier runs have done
    limit: int | None = None  # of each input, answer the first so many lines
    claims: Claims = field(default_factory=Claims)
    # Begins to count a file's lines; None: answers to a changed file are not used.
    count_lines: Callable[[], LineCounter] | None = None
    # prints how far a long task is
    print_progress: Callable[[str], None] = lambda text: None
    # for each output's status file
    current_run: CurrentRun = field(default_factory=CurrentRun)
    # In time.time(). What has failed since then was tried beside this run, and is not
    # tried again.
    started_s: float = field(default_factory=time.time)
    table: TableOutput | None = None  # that is written beside the only output
    has_line_numbers: bool = False  # records name their lines
    row_template: RowTemplate | None = (
        None  # inputs are tables, and it makes their lines
    )

    def can_carry_over(self, old: Fingerprint, new: Fingerprint) -> bool:
        """Tell whether answers of a run are used for equal lines of a changed input."""
        return self.count_lines is not None and is_of_other_input(old, new)


@dataclass(slots=True)
class CarriedOver:
    """What became of the answers to an earlier form of an input."""

    num_rows: int = 0  # lines to answer of the new form
    last_number: int = 0
    num_answered: int = 0  # lines with an earlier answer
    num_left_out: int = 0  # answers to lines that are gone
    # Equal lines before each one that is left to answer, by its number. None: that is
    # not known of all, and lines are to be counted as they are passed over.
    repeats: dict[int, int] | None = field(default_factory=dict)

    @property
    def has_answers(self) -> bool:
        """Whether there were any, used or not."""
        return self.num_answered + self.num_left_out > 0

    def note_unanswered(self, number: int, repeat: int | RequestError) -> None:
        """Note a line that is left to answer, and its equal lines before it, if known."""
        if self.repeats is None:
            return
        self.repeats[number] = 0 if isinstance(repeat, RequestError) else repeat
        if len(self.repeats) > MAX_REPEATS:
            self.repeats = None

    def find_repeats(self, journal: Journal) -> dict[int, int] | None:
        """Return `repeats` if the lines that it is about are those without a row in the journal.

        Another run may have worked on the journal since, or begun it anew.
        """
        repeats = self.repeats
        if not self.num_answered or repeats is None:
            return None
        num_known = journal.num_rows + len(repeats)
        is_about_all = num_known == self.num_rows and not any(
            n in journal for n in repeats
        )
        return repeats if is_about_all else None


def carry_answers_over(
    source: Path, output: Path, fingerprint: Fingerprint, terms: RunTerms
) -> CarriedOver | None:
    """Write the journal of an input, whose output is claimed, from earlier answers.

    They are answers to an earlier form of the input. None: another run has done so meanwhile.

    Raises:
        UsageError: no answer can be used, or what was written has changed since.
    """
    assert terms.count_lines is not None, "a run that takes no earlier answers"
    with _open_earlier_answers(output, fingerprint, terms) as earlier:
        if earlier is None:
            return None
        carried = CarriedOver()
        counter = terms.count_lines()
        rows = _carry_rows(source, terms, fingerprint[INPUT], earlier, counter, carried)
        _write_journal(output, fingerprint, rows)
    return carried


def remove_answerless_output(
    output: Path, fingerprint: Fingerprint, terms: RunTerms
) -> None:
    """Remove an output to an earlier form of an input if no answer of it could be used.

    Otherwise it would pass for one that another run has completed meanwhile.
    """
    completed = find_completed(output) if output.exists() else None
    if completed is None or completed.counts.num_completed:
        return
    if terms.can_carry_over(completed.fingerprint, fingerprint):
        with raising_disk_errors(output):
            output.unlink(missing_ok=True)


def rebuild_journal(
    source: Path, completed: CompletedOutput, fingerprint: Fingerprint, terms: RunTerms
) -> None:
    """Write the journal from which `files.ordered_output` would make a claimed output again.

    Raises:
        UsageError: the output is not what a run has written for the lines of `source`.
    """
    with raising_disk_errors(completed.output):
        if (edit := completed.find_edit(is_read=True)) is not None:
            raise edited_error(
                completed.output, edit, can_stay=edit.path != completed.output
            )
        counter = None if terms.count_lines is None else terms.count_lines()
        rows = _read_output_rows(source, completed, counter, terms.row_template)
        _write_journal(completed.output, fingerprint, rows)


def _write_journal(output: Path, fingerprint: Fingerprint, rows: Iterable[Row]) -> None:
    """Write an output's journal, and put it in the place of the one that may be there."""
    path = journal_path(output)
    with raising_disk_errors(path), replacing_file(path, draft_path(path)) as file:
        file.write(make_head_line(fingerprint))
        for row in rows:
            file.write(row.to_line())


@contextmanager
def _open_earlier_answers(
    output: Path, fingerprint: Fingerprint, terms: RunTerms
) -> Iterator[EarlierAnswers | None]:
    """Open the answers to an earlier form of an input; None: there are none."""
    path = journal_path(output)
    progress = PacedProgress(terms.print_progress)
    if path.exists():
        # NFS locks only files that are open for writing.
        with raising_disk_errors(path), path.open("rb+") as file:
            lock_file(file.fileno(), path, output)
            old = parse_fingerprint(path, file.readline())
            file.seek(0)
            is_other = is_of_other_input(old, fingerprint)
            yield JournalAnswers(path, file, old[INPUT], progress) if is_other else None
        return
    completed = find_completed(output)
    if completed is None or not is_of_other_input(completed.fingerprint, fingerprint):
        yield None
        return
    with raising_disk_errors(output), output.open("rb") as file:
        if (edit := completed.find_edit(is_read=True)) is not None:
            raise edited_error(output, edit)
        assert terms.count_lines is not None, "a run that takes no earlier answers"
        input_was = completed.fingerprint[INPUT]
        yield OutputAnswers(output, file, input_was, progress, terms.count_lines())


def _carry_rows(
    source: Path,
    terms: RunTerms,
    input_is: str,
    earlier: EarlierAnswers,
    counter: LineCounter,
    carried: CarriedOver,
) -> Iterator[Row]:
    """Yield the rows of a new form of an input that have an answer already, and count all.

    Raises:
        UsageError: there are none, or the limit would leave some out, or the input was edited.
    """
    limit = terms.limit
    digest = Digest()
    num_unasked: int | None = None  # answers that no line within the limit asks for
    for read in read_lines(source, 0, digest, row_template=terms.row_template):
        line = replace(read, shows_number=terms.has_line_numbers)
        is_beyond = carried.num_rows == limit
        if is_beyond and num_unasked is None:
            num_unasked = earlier.num_left_out

        envelope = parse_envelope(line)
        repeat = _count_equal_lines(line, envelope, counter)
        answer = None
        key = b""
        if not isinstance(repeat, RequestError):
            key = make_record_key(envelope, repeat)
            answer = earlier.find(line, envelope, key)
        elif repeat.code == "duplicate_custom_id":  # it depends on another line
            carried.repeats = None
        if is_beyond:
            continue

        carried.num_rows += 1
        carried.last_number = line.number
        if answer is None:
            carried.note_unanswered(line.number, repeat)
            continue
        carried.num_answered += 1
        earlier.progress.print_if_due(
            "Taking them", carried.num_answered, earlier.num_answers
        )
        crc = zlib.crc32(line.raw)
        yield Row(line.number, False, answer.tokens, crc, answer.record, key=key)

    if not input_is.startswith(str(digest)):
        raise UsageError(f"{source} was changed just now; run the same command again")
    carried.num_left_out = earlier.num_left_out
    num_beyond = 0 if num_unasked is None else num_unasked - carried.num_left_out
    if earlier.num_answers and not carried.num_answered + num_beyond:
        raise _other_run_error(source, input_is, earlier)
    if num_beyond:  # only lines beyond the limit ask for them
        raise UsageError(
            f"an earlier run has answered lines of {source} beyond the first {limit} "
            f"({num_beyond:,}); give a larger --limit or none to keep these answers, or "
            "--restart"
        )


def _other_run_error(
    source: Path, input_is: str, earlier: EarlierAnswers
) -> UsageError:
    return UsageError(
        f"{earlier.path} belongs to a run that differs: the input was "
        f"{earlier.input_was}, is {input_is}, and none of the answers "
        f"({earlier.num_answers:,}) belongs to a line of it. Give --restart to "
        f"replace them by answers to {source}, or give another --output"
    )


def _count_equal_lines(
    line: Line, envelope: Envelope, counter: LineCounter
) -> int | RequestError:
    """Return how many equal lines came before one, 0 without chance; an error: it is refused."""
    try:
        return counter.count(line, envelope) or 0
    except Exception as error:
        return line_error(error, f"line {line.number}")


def _read_output_rows(
    source: Path,
    completed: CompletedOutput,
    counter: LineCounter | None,
    row_template: RowTemplate | None,
) -> Iterator[Row]:
    """Yield a row for each line of an input from a complete output; without counter, no keys."""
    output = completed.output
    vectors = VectorReader(output) if "vectors" in (completed.seals or {}) else None

    def changed_error(what: str) -> UsageError:
        return edited_error(output, Edit(output, what), can_stay=True)

    answers = read_records(output)
    errors = read_records(errors_path(output))
    answer = next(answers, None)
    error = next(errors, None)
    lines = read_lines(source, 0, limit=completed.limit, row_template=row_template)
    for line in lines:
        envelope = parse_envelope(line)
        crc = zlib.crc32(line.raw)
        repeat = 0 if counter is None else _count_equal_lines(line, envelope, counter)
        if error is not None and _is_error_of(error, line, envelope):
            yield Row(line.number, True, (0, 0, 0), crc, error, is_retryable(error))
            error = next(errors, None)
        elif answer is not None and _is_answer_to(answer, line, envelope):
            try:
                tokens = AnsweredRecord(answer, parse_record(answer)).tokens
            except ValueError as damage:
                raise changed_error("an answer has no usage") from damage
            num_equal = 0 if isinstance(repeat, RequestError) else repeat
            yield Row(
                number=line.number,
                is_error=False,
                tokens=tokens,
                input_crc=crc,
                record=answer,
                key=b"" if counter is None else make_record_key(envelope, num_equal),
                vector=b"" if vectors is None else vectors.read(line.number),
            )
            answer = next(answers, None)
        else:
            raise changed_error(f"line {line.number} of {source} has no record")
    if answer is not None or error is not None:
        raise changed_error(f"it has more records than {source} has lines")


def _is_error_of(record: bytes, line: Line, envelope: Envelope) -> bool:
    match = _LINE.match(record)
    return (
        int(match[1]) == line.number if match else _has_line_id(record, line, envelope)
    )


def _is_answer_to(record: bytes, line: Line, envelope: Envelope) -> bool:
    if envelope.shape == "batch":
        return _has_line_id(record, line, envelope)
    return record.startswith(b'{"request":' + envelope.request + b",")


def _has_line_id(record: bytes, line: Line, envelope: Envelope) -> bool:
    match = BATCH_RECORD.match(record)
    return match is not None and match[1] == make_line_id(line, envelope).encode()
