"""Writes the report of outputs: reads them once, and makes one HTML file that needs no other."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fminfer.batch.report.answer_fields import AnswerFields
from fminfer.batch.report.input_requests import InputRequests, wanted_ids
from fminfer.batch.report.report_page import make_page
from fminfer.batch.report.report_place import check_place
from fminfer.batch.report.row_choice import Place, Reason
from fminfer.batch.report.scanning import Scan
from fminfer.batch.report.shown_rows import ShownRow
from fminfer.batch.report.told_outputs import ToldOutput
from fminfer.batch.report.told_runs import find_runs
from fminfer.core.errors import OutputError
from fminfer.core.quantities import counted
from fminfer.files.file_names import beside

NEW = ".new"  # added to the report's name while it is written
MAX_READ_BYTES = 1 << 26  # of all rows to show, in the output
Answers = Sequence[tuple[Place, set[Reason], AnswerFields]]


@dataclass(slots=True, frozen=True)
class ReportSummary:
    """What a report holds."""

    path: Path
    num_rows: int
    num_shown: int
    num_bytes: int


def write_report(
    outputs: Sequence[ToldOutput], path: Path, *, end_s: float = math.inf
) -> ReportSummary:
    """Write the report of outputs.

    Args:
        path: of the HTML file; an older one is replaced at once, and no other file.
        end_s: in time.monotonic(); a report that takes longer is not written.

    Raises:
        UsageError: an output cannot be read, or another file is in the report's place.
        OutputError: the report cannot be written.
        OutOfTimeError: it takes too long.
    """
    scan = Scan(end_s=end_s)
    for output in outputs:
        scan.add(output)
    answers, notes = _read_chosen(scan)
    requests = _find_requests(outputs, scan, answers)
    shown = [_to_shown(*each, requests) for each in answers]
    page = make_page(outputs, scan, find_runs(outputs), shown, [*notes, *requests.notes])
    check_place(path)
    _replace(path, page)
    whole = scan.whole
    return ReportSummary(path, whole.num_answers + whole.num_errors, len(shown), len(page))


def _read_chosen(scan: Scan) -> tuple[Answers, list[str]]:
    """Read the rows to show again; say how many there is no memory for."""
    answers, num_left_out, num_bytes = [], 0, 0
    for place, reasons in scan.choice.chosen().items():
        if num_bytes + place.size > MAX_READ_BYTES:
            num_left_out += 1
            continue
        num_bytes += place.size
        if (answer := scan.read(place)) is not None:
            answers.append((place, reasons, answer))
    note = f"{counted(num_left_out, 'row')} among those chosen to be shown are too long for that."
    return answers, [note] * (num_left_out > 0)


def _find_requests(outputs: Sequence[ToldOutput], scan: Scan, answers: Answers) -> InputRequests:
    """Look for the requests of Batch lines in the inputs."""
    found = InputRequests()
    ids: dict[int, dict[str, str]] = {}
    for place, _, answer in answers:
        if answer.shape == "batch":
            output = scan.sources[place.file].output
            of_output = ids.setdefault(output, {})
            of_output[str(answer.fields.get("id"))] = str(answer.custom_id)
    for number, wanted in wanted_ids(scan, ids).items():
        found.add(outputs[number], wanted, scan.whole, scan.end_s)
    return found


def _to_shown(
    place: Place, reasons: set[Reason], answer: AnswerFields, requests: InputRequests
) -> ShownRow:
    line, request = None, answer.request
    if answer.shape == "batch":
        line, request = requests.requests.get(str(answer.fields.get("id")), (None, None))
    return ShownRow(place, reasons, answer, request, line)


def _replace(path: Path, page: bytes) -> None:
    new = beside(path, NEW)
    try:
        new.write_bytes(page)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OutputError(
            f"the report {path} cannot be written: {error.strerror or error}. The answers are not "
            "touched by that"
        ) from error
