"""From a line to a request that can run: open it, see that it is this run's, tokenize it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fminfer.answers.answer_index import answer_key
from fminfer.answers.line_counter import LineCounter
from fminfer.contract.envelope import Envelope, as_text, open_envelope
from fminfer.contract.line import Line
from fminfer.contract.record import Record
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.errors import row_error
from fminfer.engine.intake import Asked, Intake
from fminfer.engine.sequence import Prepared
from fminfer.runtime.lines.asked import LineRequest

FILLS = RowWarning("chats without max_tokens are answered until they end or the context is full")
MAX_GROUP = 64  # lines whose texts are tokenized together
NameLine = Callable[[Line], str]


_Opened = tuple[Line, Envelope, Asked]  # a line whose prompts are not tokenized yet


class LineIntake:
    """Opens the lines of a run in their order.

    Args:
        intake: prepares their requests.
        check: as `LineCounter` has it.
        name_line: says with what a line's warning is told; None: its number.
    """

    def __init__(
        self,
        intake: Intake,
        check: Callable[[Envelope], None] | None = None,
        name_line: NameLine | None = None,
    ) -> None:
        self._intake = intake
        self._name_line = name_line or (lambda line: f"line {line.number}")
        self._counter = LineCounter(intake, check)
        self.pass_over = self._counter.pass_over  # lines that are not to be answered again
        # How many lines it opens at once: as many as are tokenized together.
        self.group_size = MAX_GROUP if intake.limits.vectors is not None else 1

    def open(self, line: Line) -> LineRequest | Record:
        """Return a line's request, or the record that says why it cannot be answered."""
        return self.open_all([line])[0]

    def open_all(self, lines: Iterable[Line]) -> list[LineRequest | Record]:
        """Do as `open` for each line; texts of all are tokenized together, where that is faster."""
        opened = [self._open(line) for line in lines]
        asked = [each[2] for each in opened if not isinstance(each, Record)]
        prepared = iter(self._intake.prepare_all(asked))
        return [
            each if isinstance(each, Record) else self._finish(*each, next(prepared))
            for each in opened
        ]

    def _open(self, line: Line) -> _Opened | Record:
        """Return a line's request as far as that goes without its tokens."""
        envelope = Envelope("bare", as_text(line.raw))  # until it is opened
        try:
            envelope = open_envelope(line)
            request, repeat = self._counter.parse(line, envelope)
            asked = Asked(request, repeat, is_openai=envelope.shape == "batch")
            return line, envelope, asked
        except Exception as error:
            return Record(line, envelope, error=row_error(error, f"line {line.number}"))

    def _finish(
        self, line: Line, envelope: Envelope, asked: Asked, prepared: Prepared | Exception
    ) -> LineRequest | Record:
        if isinstance(prepared, Exception):
            return Record(line, envelope, error=row_error(prepared, f"line {line.number}"))
        warnings = [*envelope.warnings, *asked.request.warnings]
        if asked.request.fills_context and self._intake.limits.max_new_tokens is None:
            warnings.append(FILLS)
        self._intake.note(*warnings, where=f"{self._name_line(line)}: ")
        key = None if prepared.params.is_by_chance else answer_key(prepared)
        return LineRequest(line, envelope, prepared, key)
