"""Writes the report of outputs: reads them once, and makes one HTML file that needs no other."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fminfer.contract.envelope import parse_envelope
from fminfer.contract.record import make_line_id
from fminfer.core.errors import FminferError, OutputError
from fminfer.core.quantities import with_noun
from fminfer.files.disk import replacing_file
from fminfer.files.line_reader import read_lines
from fminfer.files.own_files import PAGE, require_own_file
from fminfer.files.status_file import limit_of
from fminfer.files.streams import STDIN
from fminfer.job.report.label_tally import LabelTally, find_label
from fminfer.job.report.report_page import make_page
from fminfer.job.report.reported_outputs import ReportedOutput, find_runs
from fminfer.job.report.scanning import CHECK_EVERY, OutOfTimeError, Scan
from fminfer.job.report.shown_rows import ShownRow

ID = "batch_req_"  # begins a record's id
MAX_READ_BYTES = 1 << 26  # of all rows to show, in the output


@dataclass(slots=True, frozen=True)
class ReportSummary:
    """What a report holds."""

    num_rows: int
    num_shown: int
    num_bytes: int


def write_report(
    outputs: Sequence[ReportedOutput],
    path: Path,
    *,
    truth: str | None = None,
    end_s: float = math.inf,
) -> ReportSummary:
    """Write the report of outputs; an older one is replaced at once, and no other file.

    Args:
        truth: the column, or the key beside requests, that has the true labels.

    Raises:
        UsageError: an output cannot be read, another file is in the report's place, or
            no row has a true label in that column.
        OutputError: the report cannot be written.
        OutOfTimeError: it takes longer than until `end_s`, in time.monotonic().
    """
    scan = Scan(labels=LabelTally(truth), end_s=end_s)
    for number, output in enumerate(outputs):
        scan.add(number, output)
    if scan.tally.num_answers:
        scan.labels.check_truth()
    shown, notes = _read_chosen_rows(scan)
    for number, output in enumerate(outputs):
        of_batch = [
            row
            for row in shown
            if row.answer.is_batch and scan.sources[row.place.file].output == number
        ]
        if of_batch:
            notes += _fill_requests(output, of_batch, end_s)
    page = make_page(outputs, scan, find_runs(outputs), shown, notes)
    require_own_file(path, PAGE, "The report")
    try:
        with replacing_file(path) as file:  # a torn page would look whole
            file.write(page)
    except OSError as error:
        raise OutputError(
            f"the report {path} cannot be written: {error.strerror or error}. The "
            "answers are not touched by that"
        ) from error
    return ReportSummary(scan.tally.num_rows, len(shown), len(page))


def _read_chosen_rows(scan: Scan) -> tuple[list[ShownRow], list[str]]:
    """Read the rows to show again; say how many there is no memory for."""
    shown: list[ShownRow] = []
    num_left_out = num_bytes = 0
    for place, reasons in scan.choice.choose_rows().items():
        if num_bytes + place.size > MAX_READ_BYTES:
            num_left_out += 1
            continue
        num_bytes += place.size
        if (answer := scan.read_row(place)) is not None:
            label = find_label(answer, scan.labels.truth)
            shown.append(ShownRow(place, reasons, answer, answer.request, label=label))
    note = (
        f"{with_noun(num_left_out, 'row')} among those chosen to be shown are too long "
        "for that."
    )
    return shown, [note] * (num_left_out > 0)


def _fill_requests(
    output: ReportedOutput, rows: list[ShownRow], end_s: float
) -> list[str]:
    """Fill in the requests of an output's Batch rows; return notes why some have none."""
    path = _find_input(output)
    why = "its input is not known or not there any more"
    if path is not None:
        wanted = {str(row.answer.fields.get("id")): row for row in rows}
        why = f"{path} was changed since it was answered"
        try:
            for record, line, request in _read_requests(path, output, end_s):
                if (row := wanted.pop(record, None)) is not None:
                    row.request = request
                    row.input_line = line
        except OutOfTimeError:
            raise
        except (FminferError, OSError) as error:
            why = str(error)
        if not wanted:
            return []
    return [
        f"The Batch answers of {output.path.name} do not repeat their requests, and {why}. So "
        "their prompts and parameters are not known here."
    ]


def _find_input(output: ReportedOutput) -> Path | None:
    """Return the input; a relative path also counts from the output's folder."""
    source = output.source
    if source is None or source == STDIN:
        return None
    places = (source, output.path.parent / source.name)
    return next((path for path in places if path.is_file()), None)


def _read_requests(
    path: Path, output: ReportedOutput, end_s: float
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the id of its record, the line's number and the request of each Batch line."""
    for count, line in enumerate(
        read_lines(path, 0, limit=limit_of(output.status or {}))
    ):
        if count % CHECK_EVERY == 0 and time.monotonic() > end_s:
            raise OutOfTimeError(
                "to read the input takes too long; fminfer report does it"
            )
        envelope = parse_envelope(line)
        if envelope.shape == "batch":
            yield ID + make_line_id(line, envelope), line.number, envelope.fields
