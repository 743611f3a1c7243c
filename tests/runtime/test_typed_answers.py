"""Answers as objects: pydantic's instances, values of a schema, and why there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

from fminfer import Engine, UsageError
from fminfer.contract.record import Record
from fminfer.core.html_table import MOST_CHARS, make_html_table


class Room(pydantic.BaseModel):
    room: Literal["den", "porch"]
    is_near: bool


class Even(pydantic.BaseModel):
    number: Literal[1, 2]

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, value: int) -> int:
        if value != 0:
            raise ValueError("never right")
        return value


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32") as made:
        yield made


def answer(engine: Engine, requests: Any, kind: Any) -> list[Record]:
    records = engine.run(requests, answer=kind)
    return sorted(records, key=lambda record: record.line.number)


def test_answers_are_instances(engine: Engine) -> None:
    raw = {"prompt": "The next room, as JSON: ", "max_tokens": 200, "temperature": 0}
    for record in answer(engine, ["Which room?", raw], Room):
        assert isinstance(record.answer, Room) and not record.answer_error
        assert record.answer.model_dump() == json.loads(record.text)
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [3, 4]}},
        "required": ["n"],
    }
    (record,) = answer(engine, [raw], schema | {"additionalProperties": False})
    assert record.answer["n"] in (3, 4)


def test_what_is_no_instance_has_its_reason(engine: Engine) -> None:
    prompt = {"prompt": "JSON: ", "temperature": 0}
    cut, invalid, wrong, twice = (
        answer(engine, [prompt | {"max_tokens": 2}], Room)
        + answer(engine, [prompt | {"max_tokens": 60}], Even)
        + answer(engine, [prompt | {"temperature": 9}], Room)
        + answer(engine, [prompt | {"response_format": {"type": "json_object"}}], Room)
    )
    assert all(r.answer is None for r in (cut, invalid, wrong, twice))
    assert cut.answer_error == "the answer is cut off after 2 tokens; raise max_tokens"
    assert "never right" in invalid.answer_error and invalid.error is None
    assert "temperature is 9" in wrong.answer_error and wrong.error is not None
    assert twice.error is not None and "response_format" in twice.answer_error


def test_what_is_no_type_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="give a class of pydantic"):
        answer(engine, ["a"], int)


def test_tables_of_notebooks_are_escaped(engine: Engine) -> None:
    script = "<script>alert('&')</script>"
    requests = [
        {"prompt": script, "echo": True, "max_tokens": 1},
        {"prompt": script, "temperature": 9, "stop": script},
    ]
    for record in engine.run(requests):
        page = record._repr_html_()
        assert "<script" not in page and "&lt;script&gt;alert" in page
    assert "tokens" in engine.stats._repr_html_()
    assert len(make_html_table([("a", "x" * 10**6)])) < MOST_CHARS + 500
