"""Writes the report of outputs: reads them once, and makes one HTML file that needs no other."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fminfer.contract.envelope import open_envelope, tell_shape
from fminfer.contract.record import load_record, make_id
from fminfer.core.errors import FminferError, OutputError
from fminfer.core.quantities import counted
from fminfer.files.disk import replacing
from fminfer.files.line_reader import read_lines
from fminfer.files.status_file import limit_of
from fminfer.files.streams import STDIN, changed_ns, digest_of
from fminfer.job.report.answer_fields import AnswerFields
from fminfer.job.report.report_page import make_page
from fminfer.job.report.report_place import check_place
from fminfer.job.report.row_choice import Place, Reason
from fminfer.job.report.scanning import LOOK_EVERY, OutOfTimeError, Scan
from fminfer.job.report.shown_rows import ShownRow
from fminfer.job.report.tally import AnswerTally
from fminfer.job.report.told_outputs import ToldOutput, find_runs

ID = "batch_req_"  # begins a record's id


@dataclass(slots=True)
class InputRequests:
    """What was found in the inputs of outputs with Batch lines."""

    requests: dict[str, tuple[int, Any]] = field(default_factory=dict)  # by record: line, request
    notes: list[str] = field(default_factory=list)

    def add(
        self, output: ToldOutput, wanted: dict[str, str], tally: AnswerTally, end_s: float
    ) -> None:
        """Read an output's input for the requests of wanted records; count parameters of all.

        Args:
            wanted: custom_id of each wanted record, by the record's id.
            end_s: in time.monotonic(); later it gives up.

        Raises:
            OutOfTimeError: it takes too long.
        """
        path = _find_input(output)
        if path is None:
            self._note(output, "its input is not known or not there any more")
            return
        own = (output.status or {}).get("fminfer") or {}
        try:
            is_same = changed_ns(path) == own.get("input_changed_ns") or _has_digest(output, path)
            num_found = self._read(path, output, wanted, tally if is_same else None, end_s)
        except OutOfTimeError:
            raise
        except (FminferError, OSError) as error:
            self._note(output, str(error))
            return
        if not is_same or num_found < len(wanted):
            self._note(output, f"{path} was changed since it was answered")

    def _read(
        self,
        path: Path,
        output: ToldOutput,
        wanted: dict[str, str],
        tally: AnswerTally | None,
        end_s: float,
    ) -> int:
        num_found, custom_ids = 0, {*wanted.values()}
        lines = read_lines(path, 0, limit=limit_of(output.status or {}))
        for count, line in enumerate(lines):
            if count % LOOK_EVERY == 0 and time.monotonic() > end_s:
                raise OutOfTimeError("to read the input takes too long; fminfer report does it")
            fields = _fields_of(line.raw)
            if tally is not None:
                tally.add_params(fields.get("body"))
            if str(fields.get("custom_id")) not in custom_ids:
                continue
            envelope = open_envelope(line)
            record = ID + make_id(line, envelope)
            if envelope.shape == "batch" and record in wanted:
                num_found += 1
                self.requests[record] = line.number, envelope.fields
        return num_found

    def _note(self, output: ToldOutput, why: str) -> None:
        self.notes.append(
            f"The Batch answers of {output.path.name} do not repeat their requests, and {why}. So "
            "their prompts and parameters are not known here."
        )


def _fields_of(raw: bytes) -> dict[str, Any]:
    """Return the fields of a Batch line; of any other line, none."""
    try:
        fields = load_record(raw)
    except (ValueError, RecursionError):
        return {}
    return fields if tell_shape(fields) == "batch" else {}


def wanted_ids(scan: Scan, answers: dict[int, dict[str, str]]) -> dict[int, dict[str, str]]:
    """Return, for each output with Batch lines, the ids of the shown records."""
    return {
        number: answers.get(number, {})
        for number, tally in enumerate(scan.tallies)
        if tally.num_without_requests or tally.shapes["batch"] or answers.get(number)
    }


def _has_digest(output: ToldOutput, path: Path) -> bool:
    """Tell whether a file has the bytes that were answered; a copy may have another time."""
    told = ((output.status or {}).get("metadata") or {}).get("the input")
    return told is not None and told == digest_of(path)


def _find_input(output: ToldOutput) -> Path | None:
    """Return the input; a relative path also counts from the output's folder."""
    source = output.source
    if source is None or source == STDIN:
        return None
    for path in (source, output.path.parent / source.name):
        if path.is_file():
            return path
    return None


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
    try:
        with replacing(path, is_durable=False) as file:
            file.write(page)
    except OSError as error:
        raise OutputError(
            f"the report {path} cannot be written: {error.strerror or error}. The answers are not "
            "touched by that"
        ) from error
