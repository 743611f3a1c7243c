"""Answers as objects: requests whose text must be JSON of a type, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from fminfer.contract.envelope import Line
from fminfer.contract.record import Record
from fminfer.core.errors import UsageError


@runtime_checkable
class AnswerModel(Protocol):
    """What a class of pydantic can do."""

    __name__: str

    def model_json_schema(self) -> dict[str, Any]:
        """Return the schema of its JSON."""
        ...

    def model_validate_json(self, json_data: str) -> Any:
        """Return an instance; it raises a ValueError for text that is none."""
        ...


AnswerType = AnswerModel | Mapping[str, Any]  # a class, or a JSON Schema


class AnswerReader:
    """Asks for answers of a type, and reads them.

    Raises:
        UsageError: this is no type of answers.
    """

    def __init__(self, kind: AnswerType) -> None:
        if isinstance(kind, Mapping):
            self._schema = dict(kind)
            self._parse: Any = json.loads
        elif isinstance(kind, AnswerModel):
            self._schema = kind.model_json_schema()
            self._parse = kind.model_validate_json
        else:
            raise UsageError(
                f"answer is {kind!r}; give a class of pydantic, or a JSON Schema as a dict"
            )

    def ask_for_type(self, request: Mapping[str, Any] | Line) -> dict[str, Any]:
        """Return a request whose answer must have the type.

        A request that says itself what its answer must be is refused: it then says so twice.
        """
        if isinstance(request, Line):
            raise UsageError("answer is of texts and dicts; parse the answers of lines")
        if "response_format" in request:
            return {**request, "structured_outputs": {"json": self._schema}}
        named = {"name": "answer", "schema": self._schema}
        form = {"type": "json_schema", "json_schema": named}
        return {**request, "response_format": form}

    def read(self, record: Record) -> Record:
        """Return a record with its first choice's object in `answer`, or with `answer_error`."""
        if record.error is not None:
            return replace(record, answer_error=record.error.message)
        choice = record.choices[0]
        if choice.fields.get("finish_reason") == "length":
            reason = (
                f"the answer is cut off after {record.num_completion_tokens} tokens; raise "
                "max_tokens"
            )
            return replace(record, answer_error=reason)
        try:
            return replace(record, answer=self._parse(choice.text))
        except ValueError as error:
            return replace(record, answer_error=f"{error}")
