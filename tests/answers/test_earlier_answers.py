"""Earlier answers in files: which are sure, and what is said of those that are damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fminfer.answers.earlier_answers import JournalAnswers, OutputAnswers, PacedProgress
from fminfer.contract.envelope import MAX_QUOTED_BYTES, Line, parse_envelope
from fminfer.contract.record import Record, make_record_key
from fminfer.core.errors import RequestError, UsageError
from fminfer.files.journal_rows import Row, make_head_line
from fminfer.files.ordered_output import errors_path

PACE = PacedProgress(lambda text: None)


class OneOfEach:
    """In place of a LineCounter: no two lines are equal, and chance has a part in all."""

    def count_request(self, fields: Any, times: int = 1) -> int:
        return 0


def line_of(size: int) -> Line:
    request = json.dumps({"prompt": ""}).encode()
    return Line(0, 1, request.replace(b'""', b'"%s"' % (b"x" * (size - len(request)))))


@pytest.mark.parametrize(
    "size", [MAX_QUOTED_BYTES - 1, MAX_QUOTED_BYTES, MAX_QUOTED_BYTES + 1]
)
def test_beside_a_long_line_that_failed_only_long_ones_are_unsure(
    size: int, tmp_path: Path
) -> None:
    """Only the beginning of a long one is quoted, so that nobody knows how it went on."""
    output = tmp_path / "out.jsonl"
    failed = line_of(3 * MAX_QUOTED_BYTES)
    line = line_of(size)
    assert len(line.raw) == size
    error = RequestError("out_of_memory", "it failed")
    errors_path(output).write_bytes(
        Record(failed, parse_envelope(failed), error=error).to_json()
    )
    result = {"choices": [], "usage": {}}
    output.write_bytes(
        Record(line, parse_envelope(line), result=result).to_json() + b"\n"
    )
    with output.open("rb") as file:
        found: Any = OutputAnswers(output, file, "", PACE, OneOfEach())  # type: ignore[arg-type]
        assert (found.num_answers, found.num_unsure) == (1, size > MAX_QUOTED_BYTES)
        envelope = parse_envelope(line)
        assert bool(found.find(line, envelope, make_record_key(envelope, 0))) == (
            not found.num_unsure
        )
        assert found.num_left_out == found.num_unsure


def test_an_answer_that_changes_meanwhile_is_refused_with_its_place(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "journal"
    line = line_of(20)
    envelope = parse_envelope(line)
    key = make_record_key(envelope, 0)
    record = Record(line, envelope, result={"choices": [], "usage": {}}).to_json()
    head = make_head_line({})
    row = Row(1, False, (1, 0, 1), 7, record, key=key).to_line()
    journal.write_bytes(head + row)
    with journal.open("rb+") as file:
        earlier = JournalAnswers(journal, file, "", PACE)
        assert earlier.find(line, envelope, key) is not None
        journal.write_bytes(head + row.replace(b"choices", b"Choices"))
        what = f"a row is damaged, at byte {len(head)}"
        with pytest.raises(
            UsageError, match=f"{re.escape(str(journal))}.*{what}.*--restart"
        ):
            earlier.find(line, envelope, key)
