"""From a line to a request that can run: open it, see that it is this run's, count equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from fminfer.contract.chat import ChatRequest, parse_chat
from fminfer.contract.endpoints import OF_DRAWS, Endpoint, tell_endpoint
from fminfer.contract.envelope import (
    Envelope,
    Line,
    as_text,
    open_envelope,
    read_clock,
    refuse_other_model,
)
from fminfer.contract.fields import show
from fminfer.contract.record import Record
from fminfer.contract.request import Request, parse_request
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.errors import RequestError, row_error
from fminfer.engine.intake import Asked, Intake, kind_of
from fminfer.engine.noise import describe_params, meaning_beside, meaning_of
from fminfer.engine.sequence import Prepared
from fminfer.runtime.lines.asked import LineRequest
from fminfer.runtime.lines.seen_counts import SeenCounts

MAX_PARSED = 512  # sets of parameters
MAX_PARAMS_BYTES = 1024  # of one that is kept


class Meanings:
    """Tells requests' meanings, in a tenth of the time where only their prompts differ.

    Args:
        parse: parses a request, as `Intake.parse` does.
        has_own_prompt: every request gets the run's prompt.
    """

    def __init__(self, parse: Callable[..., Request], *, has_own_prompt: bool = False) -> None:
        self._parse_request = parse
        self._parsed: dict[bytes, str | None] = {}  # what `_describe` says of a set of parameters
        self._has_own_prompt = has_own_prompt

    def find(
        self, fields: dict[str, Any], *, endpoint: Endpoint | None, clock: str
    ) -> bytes | None:
        """Return a request's meaning; None: chance has no part in its answer.

        Raises:
            RequestError: what is wrong with it, as far as that shows without its tokens.
        """
        prompt = fields.get("prompt")
        is_plain = endpoint in (None, "completions") and not self._has_own_prompt
        if not (is_plain and isinstance(prompt, str) and _is_text(prompt)):
            prompts, described = self._parse(fields, endpoint=endpoint, clock=clock)
            return None if described is None else meaning_beside(prompts, described)
        others = {name: value for name, value in fields.items() if name != "prompt"}
        try:
            key = orjson.dumps(others)
        except orjson.JSONEncodeError:  # half of a surrogate pair
            key = b""
        if key in self._parsed:
            described = self._parsed[key]
        else:
            described = self._parse(fields, endpoint=endpoint, clock=clock)[1]
            if 0 < len(key) <= MAX_PARAMS_BYTES:
                self._keep(key, described)
        return None if described is None else meaning_beside([prompt], described)

    def _parse(
        self, fields: dict[str, Any], *, endpoint: Endpoint | None, clock: str
    ) -> tuple[list[str | list[int]], str | None]:
        """Return a request's prompts and its parameters' description; None: no draw is random."""
        request = self._parse_request(fields, endpoint=endpoint, clock=clock)
        params = request.params
        is_certain = params.seed is not None or params.is_greedy
        return request.prompts, None if is_certain else describe_params(params)

    def _keep(self, key: bytes, described: str | None) -> None:
        if len(self._parsed) >= MAX_PARSED:
            del self._parsed[next(iter(self._parsed))]
        self._parsed[key] = described


def _is_text(prompt: str) -> bool:
    """Tell whether a prompt has a UTF-8 form, as the check of a request asks."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


FILLS = RowWarning("chats without max_tokens are answered until they end or the context is full")
SAME_DRAWS = RowWarning(
    "equal lines without a seed stand in several files, which get the same draws; put them into "
    "one file (fminfer split may cut it), or give each a seed"
)
MAX_GROUP = 64  # lines whose texts are tokenized together
MAX_LOGPROBS = 2**31  # whatever an engine allows; it refuses what it does not
NameLine = Callable[[Line], str]


@dataclass(slots=True, frozen=True)
class _Opened:
    """A line whose prompts are not tokenized yet."""

    line: Line
    envelope: Envelope
    asked: Asked


class LineIntake:
    """Opens the lines of a run in their order.

    Args:
        intake: prepares their requests.
        check: raises a RequestError for a line that is not of this run; None: one that names
            another model is not, if models are checked.
        name_line: says with what a line's warning is told; None: its number.
    """

    def __init__(
        self,
        intake: Intake,
        check: Callable[[Envelope], None] | None = None,
        name_line: NameLine | None = None,
    ) -> None:
        self.intake = intake
        self._name_line = name_line or (lambda line: f"line {line.number}")
        self._check = check or (lambda envelope: self._check_model(envelope.fields))
        self._source = 0  # the file being read
        self._equal = SeenCounts()  # its unseeded requests so far, by meaning
        self._elsewhere: SeenCounts | None = None  # those of earlier files, once there is a second
        self._custom_ids = SeenCounts()  # the file's so far, by digest
        has_own_prompt = "prompt" in (intake.limits.config.request_args or {})
        self._meanings = Meanings(intake.parse, has_own_prompt=has_own_prompt)
        self._clock = read_clock()  # of lines that have none

    def open(self, line: Line) -> LineRequest | Record:
        """Return a line's request, or the record that says why it cannot be answered."""
        return self.open_all([line])[0]

    def open_all(self, lines: Iterable[Line]) -> list[LineRequest | Record]:
        """Do as `open` for each line; texts of all are tokenized together, where that is faster."""
        opened = [self._open(line) for line in lines]
        asked = [each.asked for each in opened if isinstance(each, _Opened)]
        prepared = iter(self.intake.prepare_all(asked))
        return [
            each if isinstance(each, Record) else self._finish(each, next(prepared))
            for each in opened
        ]

    @property
    def group_size(self) -> int:
        """How many lines it opens at once: as many as are tokenized together."""
        return MAX_GROUP if self.intake.limits.vectors is not None else 1

    def _open(self, line: Line) -> _Opened | Record:
        """Return a line's request as far as that goes without its tokens."""
        envelope = Envelope("bare", as_text(line.raw))  # until it is opened
        try:
            envelope = open_envelope(line)
            request, repeat = self._identify(line, envelope)
            asked = Asked(request, repeat, is_openai=envelope.shape == "batch")
            return _Opened(line, envelope, asked)
        except Exception as error:
            return Record(line, envelope, error=row_error(error, f"line {line.number}"))

    def _finish(self, opened: _Opened, prepared: Prepared | Exception) -> LineRequest | Record:
        line, envelope, asked = opened.line, opened.envelope, opened.asked
        if isinstance(prepared, Exception):
            return Record(line, envelope, error=row_error(prepared, f"line {line.number}"))
        request = asked.request
        warnings = [*envelope.warnings, *request.warnings]
        if request.fills_context and self.intake.limits.max_new_tokens is None:
            warnings.append(FILLS)
        self.intake.note(*warnings, where=f"{self._name_line(line)}: ")
        key = _answer_key(request, is_openai=asked.is_openai)
        return LineRequest(line, envelope, prepared, key)

    def pass_over(self, line: Line) -> None:
        """Count a line that an earlier run has answered: those after it depend on it.

        Equal lines draw differently by their number, and no two may have one custom_id.

        Raises:
            FminferError: the run cannot go on.
        """
        try:
            self.count(line, open_envelope(line))
        except Exception as error:  # that run has told what is wrong with it
            row_error(error, f"line {line.number}")

    def count(self, line: Line, envelope: Envelope) -> int | None:
        """Count a line that is not answered here; return how many equal ones came before it.

        None: chance has no part in its answer, and it does not count.

        Raises:
            RequestError: what is wrong with it, as far as that shows without its tokens.
            MachineError: the disk for temporary files is full or gone.
        """
        self._turn_to(line.source)
        self._check_envelope(line, envelope)
        clock = line.clock or self._clock
        meaning = self._meanings.find(envelope.fields, endpoint=envelope.endpoint, clock=clock)
        if meaning is None:
            return None
        return self._count_meaning(meaning) if line.num_equal is None else line.num_equal

    def count_request(
        self, fields: dict[str, Any], *, endpoint: Endpoint | None = None, times: int = 1
    ) -> int | None:
        """Count a request of the file by itself, some times; as `count`."""
        meaning = self._meanings.find(fields, endpoint=endpoint, clock=self._clock)
        return None if meaning is None else self._count_meaning(meaning, times)

    def _turn_to(self, source: int) -> None:
        if source != self._source:
            self._source = source
            if self._elsewhere is None:
                self._elsewhere, self._equal = self._equal, SeenCounts()
            self._equal.clear()
            self._custom_ids.clear()

    def _identify(self, line: Line, envelope: Envelope) -> tuple[Request, int]:
        """Return a line's request, and how many equal ones came before it.

        Raises:
            RequestError: what is wrong with it, as far as that shows without its tokens.
        """
        self._turn_to(line.source)
        self._check_envelope(line, envelope)
        request = self.intake.parse(
            envelope.fields, endpoint=envelope.endpoint, clock=line.clock or self._clock
        )
        return request, self._count_repeat(line, request)

    def _check_envelope(self, line: Line, envelope: Envelope) -> None:
        """Check what stands around the request, and that it is for this model."""
        name = None if line.is_alone else envelope.custom_id_text
        if name is not None and self._custom_ids.add(digest_id(name)):
            raise RequestError(
                "duplicate_custom_id",
                f"custom_id {show(name)} of line {line.number} is also an earlier line's; "
                "each line of a file needs one of its own. Change or remove one of the two",
                "custom_id",
            )
        if envelope.error is not None:
            raise envelope.error
        if self.intake.limits.config.strict and envelope.warnings:
            raise RequestError(
                "unsupported_parameter",
                f"{envelope.warnings[0]}; take it out, or run without --strict",
            )
        self._check(envelope)

    def _check_model(self, fields: dict[str, Any]) -> None:
        if (names := self.intake.limits.model_names) is not None:
            refuse_other_model(fields, names)

    def _count_repeat(self, line: Line, request: Request) -> int:
        """Count equal requests without a seed before this one in its file, so that they differ."""
        if _is_certain(request):
            return 0
        if line.num_equal is not None:
            return line.num_equal
        return self._count_meaning(meaning_of(request.prompts, request.params))

    def _count_meaning(self, meaning: bytes, times: int = 1) -> int:
        """Count an unseeded request of the file; tell of one that another file of the run has."""
        count = self._equal.add(meaning, times)
        if not count and self._elsewhere is not None and self._elsewhere.add(meaning):
            self.intake.note(SAME_DRAWS)
        return count


def _is_certain(request: Request) -> bool:
    return request.params.seed is not None or request.params.is_greedy


class EqualLines:
    """Counts a file's equal requests without a seed, without an engine.

    The template is the engine's. So chats are equal here if their messages are, and all else that a
    template sees.
    """

    def __init__(self) -> None:
        self._meanings, self._seen = Meanings(_parse_alone), SeenCounts()

    def count(self, line: Line, envelope: Envelope) -> int:
        """Return how many came before a line."""
        fields = envelope.fields
        endpoint = envelope.endpoint or tell_endpoint(fields)
        # A run refuses it before it counts, or chance has no part in its answer.
        if envelope.error is not None or endpoint not in OF_DRAWS:
            return 0
        try:
            meaning = self._meanings.find(fields, endpoint=endpoint, clock="")
        except (RequestError, RecursionError):  # it is no request
            return 0
        repeat = 0 if meaning is None else self._seen.add(meaning)
        return repeat if line.num_equal is None else line.num_equal


def _parse_alone(fields: dict[str, Any], *, endpoint: Endpoint, clock: str) -> Request:
    if endpoint != "chat":
        return parse_request(fields, max_logprobs=MAX_LOGPROBS)
    chat = parse_chat(fields, max_logprobs=MAX_LOGPROBS)
    return Request([_show_prompt(chat)], chat.params)


def _show_prompt(chat: ChatRequest) -> str:
    """Return what a template would write a chat's prompt from."""
    messages = [sorted(message.items()) for message in chat.messages]
    flags = (chat.adds_generation_prompt, chat.continues_final_message)
    return repr((messages, chat.tools, sorted(chat.template_args.items()), flags))


def _answer_key(request: Request, *, is_openai: bool) -> bytes | None:
    """Return what requests of one answer have in common; None: chance has a part in it."""
    params = request.params
    if params.is_greedy or params.max_tokens == 0:
        params = replace(params, seed=None)
    elif params.seed is None:
        return None
    meaning = meaning_of(request.prompts, params)
    kind = kind_of(request, is_openai=is_openai)
    form = f"{kind} {request.tool_parser} {request.keeps_one_call} {request.fills_context}"
    if request.vectors is not None:
        form += repr(request.vectors)
    return digest_id(f"{meaning.hex()} {params.seed} {form}")


def digest_id(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
