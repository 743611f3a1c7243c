"""From a line to a request that can run, and from its answer to the line's record."""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from fminfer.answers.answer_index import make_answer_key
from fminfer.answers.line_counter import LineCounter
from fminfer.contract.envelope import Envelope, Line, parse_envelope, quote_text
from fminfer.contract.record import Record, make_line_id, make_record_key
from fminfer.contract.request import RequestParams
from fminfer.contract.responses import make_response_head, make_result
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.errors import line_error
from fminfer.engine.engine_core import Failed, Finished
from fminfer.engine.intake import IncomingRequest, LineParser
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.vector_answer import make_answer_head

FILLS = RowWarning(
    "chats without max_tokens are answered until they end or the context is full"
)
SPECIAL_CELLS = (
    "cells spell special tokens of the model, which are more than text in the prompt"
)
MAX_GROUP = 64  # lines whose texts are tokenized together
MAX_CHATS = 16  # lines whose chats are rendered together
NameLine = Callable[[Line], str]
Answer = Finished | Failed
_Opened = tuple[
    Line, Envelope, IncomingRequest
]  # a line whose prompts are not tokenized yet


@dataclass(slots=True, eq=False)
class LineRequest:
    """One line with its request."""

    line: Line
    envelope: Envelope
    prepared: PreparedRequest
    key: (
        bytes | None
    )  # of its answer, see `make_answer_key`; None: chance has a part in it
    read_s: float = field(default_factory=time.perf_counter)
    added_s: float = 0.0  # when the engine had it

    @property
    def ids(self) -> list[int]:
        """Return the first prompt's, by which lines are put in order."""
        return self.prepared.prompts[0].ids

    @property
    def params(self) -> RequestParams:
        return self.prepared.params

    @property
    def num_prompts(self) -> int:
        return len(self.prepared.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prepared.prompts)


class LineIntake:
    """Opens the lines of a run in their order.

    Args:
        check: as `LineCounter` has it.
        name_line: says with what a line's warning is told; None: its number.
    """

    def __init__(
        self,
        intake: LineParser,
        check: Callable[[Envelope], None] | None = None,
        name_line: NameLine | None = None,
    ) -> None:
        self._intake = intake
        self.name_line = name_line or (lambda line: f"line {line.number}")
        self._counter = LineCounter(intake, check)
        # lines that are not to be answered again
        self.add_answered_line = self._counter.add_answered_line
        # How many lines it opens at once: as many as are tokenized or rendered together.
        self.group_size = MAX_CHATS if intake.limits.vectors is None else MAX_GROUP

    def open(self, line: Line) -> LineRequest | Record:
        """Return a line's request, or the record that says why it cannot be answered."""
        return self.open_all([line])[0]

    def open_all(self, lines: Iterable[Line]) -> list[LineRequest | Record]:
        """Do as `open` for each line; texts of all are tokenized together, where that
        is faster."""
        enclosed = [(line, _open_envelope(line)) for line in lines]
        self._intake.render_chats_ahead(
            (envelope.fields, envelope.endpoint, self._counter.find_clock(line))
            for line, envelope in enclosed
        )
        opened = [self._open(line, envelope) for line, envelope in enclosed]
        requests = [each[2] for each in opened if not isinstance(each, Record)]
        prepared = iter(self._intake.prepare_all(requests))
        return [
            each if isinstance(each, Record) else self._finish(*each, next(prepared))
            for each in opened
        ]

    def _open(self, line: Line, envelope: Envelope) -> _Opened | Record:
        """Return a line's request as far as that goes without its tokens."""
        try:
            request, repeat = self._counter.parse_and_count(line, envelope)
            return (
                line,
                envelope,
                IncomingRequest(request, repeat, is_openai=envelope.shape == "batch"),
            )
        except Exception as error:
            return Record(
                line, envelope, error=line_error(error, f"line {line.number}")
            )

    def _finish(
        self,
        line: Line,
        envelope: Envelope,
        incoming: IncomingRequest,
        prepared: PreparedRequest | Exception,
    ) -> LineRequest | Record:
        if isinstance(prepared, Exception):
            return Record(
                line, envelope, error=line_error(prepared, f"line {line.number}")
            )
        warnings = [*envelope.warnings, *incoming.request.warnings]
        if line.cells:
            warnings += self._find_special_cells(line, envelope)
        if (
            incoming.request.fills_context
            and self._intake.limits.max_new_tokens is None
        ):
            warnings.append(FILLS)
        self._intake.report_warnings(*warnings, where=f"{self.name_line(line)}: ")
        key = None if prepared.params.is_by_chance else make_answer_key(prepared)
        return LineRequest(line, envelope, prepared, key)

    def _find_special_cells(self, line: Line, envelope: Envelope) -> list[RowWarning]:
        """Return a warning if a row's cells spell special tokens, and the prompt has them."""
        texts = self._intake.tokenizer.find_special_texts(line.cells.decode())
        texts = [text for text in texts if text.encode() in envelope.request]
        return [RowWarning(SPECIAL_CELLS, tuple(texts))] if texts else []


def _open_envelope(line: Line) -> Envelope:
    """Return a line's envelope, also of one that cannot be opened."""
    try:
        return parse_envelope(line)
    except Exception as error:
        return Envelope(
            "bare", quote_text(line.raw), error=line_error(error, f"line {line.number}")
        )


def _split_vector(answer: Finished) -> tuple[Finished, bytes]:
    """Return an answer without its only vector, and that one."""
    (entry,) = answer.choices
    vector = entry["embedding"]
    raw = (
        b64decode(vector)
        if isinstance(vector, str)
        else np.asarray(vector, "<f4").tobytes()
    )
    return replace(answer, choices=[entry | {"embedding": None}]), raw


@dataclass(slots=True, frozen=True)
class RecordForm:
    """What the records of a run have in common."""

    model_name: str
    created: int  # the Unix time at which the run began, seconds
    keeps_vectors_apart: bool = False  # they go to a file of their own

    def build(self, request: LineRequest, answer: Answer) -> Record:
        """Return a line's record."""
        line = request.line
        envelope = request.envelope
        if isinstance(answer, Failed):
            return Record(
                line, envelope, error=answer.error, repeat=request.prepared.repeat
            )
        usage = answer.usage
        vector = b""
        if self.keeps_vectors_apart:
            answer, vector = _split_vector(answer)
        result = answer.result
        if is_response := envelope.is_response and answer.part == "choices":
            # Of the request, so that a later run gets the same ids of items by this answer.
            item_id = make_record_key(envelope, request.prepared.repeat).hex()
            result = make_result(answer.choices[0], usage, item_id)
        if envelope.shape == "batch":
            model = envelope.fields.get("model")
            name = model if isinstance(model, str) and model else self.model_name
            request_id = make_line_id(line, envelope)
            kind = request.prepared.kind
            result = (
                make_response_head(
                    envelope.fields, request_id, self.created, name, request.params
                )
                if is_response
                else make_answer_head(kind, request_id, self.created, name)
            ) | result
        else:
            times = dict(answer.times)
            times["queue_time"] += max(0.0, request.added_s - request.read_s)
            result_usage = result.pop("usage")
            result = {**result, "request_time": times, "usage": result_usage}
        return Record(
            line,
            envelope,
            result=result,
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            num_completion_tokens=usage.get("completion_tokens", 0),
            repeat=request.prepared.repeat,
            vector=vector,
        )
