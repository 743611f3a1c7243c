"""--line-numbers: a record says which line of its input it is of."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fminfer.contract.envelope import Line, parse_envelope
from fminfer.contract.record import Record, readdress_record

RESULT = {"choices": [{"text": "x"}], "usage": {"prompt_tokens_details": {}}}


def make_record(raw: bytes, number: int, *, shows_number: bool) -> Record:
    line = Line(0, number, raw, shows_number=shows_number)
    return Record(line, parse_envelope(line), result=RESULT)


@pytest.mark.parametrize(
    "raw, rest",
    [
        (b'{"prompt":"a"}', {}),
        (b'{"request":{"prompt":"a"},"row":{"id":1}}', {"row": {"id": 1}}),
        (b'{"request":{"prompt":"a"},"line":"own","z":2}', {"z": 2}),
    ],
)
def test_shapes_a_and_b(raw: bytes, rest: dict[str, object]) -> None:
    """A column of that name gives way. Without the flag records are as they were."""
    fields = make_record(raw, 7, shows_number=True).to_dict()
    assert fields == {"request": {"prompt": "a"}, "result": RESULT, "line": 7, **rest}
    plain = make_record(raw, 7, shows_number=False).to_json()
    own = json.loads(raw)
    assert json.loads(plain).get("line") == own.get("line")


def test_moved_records_have_the_new_number() -> None:
    """Answers that are carried over to a changed input name their lines of now."""
    for raw in (b'{"prompt":"a"}', b'{"request":{"prompt":"a"},"line":1,"z":2}'):
        written = make_record(raw, 7, shows_number=True)
        now = make_record(raw, 9, shows_number=True)
        moved = readdress_record(written.to_json(), now.line, now.envelope, written.key)
        assert moved.record == now.to_json()
        same = readdress_record(now.to_json(), replace(now.line), now.envelope, now.key)
        assert same.record == now.to_json()


def test_batch_records_have_no_place() -> None:
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"a"}}'
    plain = make_record(raw, 7, shows_number=False).to_json()
    assert make_record(raw, 7, shows_number=True).to_json() == plain
