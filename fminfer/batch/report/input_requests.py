"""Finds the requests of Batch lines in the input: their records do not repeat them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from fminfer.batch.report.scanning import LOOK_EVERY, OutOfTimeError, Scan
from fminfer.batch.report.tally import Tally
from fminfer.batch.report.told_outputs import ToldOutput
from fminfer.contract.envelope import open_envelope, tell_shape
from fminfer.contract.record import make_id
from fminfer.core.errors import FminferError
from fminfer.files.line_reader import read_lines
from fminfer.files.status_file import limit_of
from fminfer.files.streams import STDIN, changed_ns, digest_of

ID = "batch_req_"  # begins a record's id


@dataclass(slots=True)
class InputRequests:
    """What was found in the inputs of outputs with Batch lines."""

    requests: dict[str, tuple[int, Any]] = field(default_factory=dict)  # by record: line, request
    notes: list[str] = field(default_factory=list)

    def add(self, output: ToldOutput, wanted: dict[str, str], tally: Tally, end_s: float) -> None:
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
        tally: Tally | None,
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
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            fields = json.loads(raw)  # which takes lone surrogates
        except (ValueError, RecursionError):
            return {}
    return fields if isinstance(fields, dict) and tell_shape(fields) == "batch" else {}


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
