"""Counts equal lines of a file: requests with chance draw by how many came before them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson

from fminfer.answers.seen_counts import SeenCounts
from fminfer.contract.chat import ChatRequest, parse_chat
from fminfer.contract.endpoints import DRAWING_ENDPOINTS, Endpoint, choose_endpoint
from fminfer.contract.envelope import (
    Envelope,
    Line,
    check_model_name,
    parse_envelope,
    read_clock,
)
from fminfer.contract.fields import describe_value
from fminfer.contract.request import Request, parse_request
from fminfer.contract.responses import parse_response
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.errors import RequestError, line_error
from fminfer.engine.intake import LineParser
from fminfer.engine.noise import (
    describe_params,
    digest_described_meaning,
    digest_meaning,
)

MAX_PARSED = 512  # sets of parameters
MAX_PARAMS_BYTES = 1024  # of one that is kept
SAME_DRAWS = RowWarning(
    "equal lines without a seed stand in several files, which get the same draws; put them into "
    "one file (fminfer split may cut it), or give each a seed"
)
MAX_LOGPROBS = 2**31  # whatever an engine allows; it refuses what it does not


class Meanings:
    """Tells requests' meanings, in a tenth of the time where only their prompts differ."""

    def __init__(
        self, parse: Callable[..., Request], *, reads_prompts: bool = False
    ) -> None:
        self._parse = parse
        self._reads_prompts = reads_prompts
        self._describe = lru_cache(MAX_PARSED)(self._describe_beside_prompt)

    def find(
        self, fields: dict[str, Any], endpoint: Endpoint | None, clock: str
    ) -> bytes | None:
        """Return a request's meaning; None: chance has no part in its answer."""
        prompt = fields.get("prompt")
        is_plain = endpoint in (None, "completions")
        others = b""
        if is_plain and not self._reads_prompts and isinstance(prompt, str):
            others = _dump_without_prompt(prompt, fields)
        if 0 < len(others) <= MAX_PARAMS_BYTES:
            described = self._describe(others, endpoint)
            return (
                None
                if described is None
                else digest_described_meaning([str(prompt)], described)
            )
        request = self._parse(fields, endpoint=endpoint, clock=clock)
        return (
            digest_meaning(request.prompts, request.params)
            if request.params.is_by_chance
            else None
        )

    def _describe_beside_prompt(
        self, others: bytes, endpoint: Endpoint | None
    ) -> str | None:
        """Return `describe_params` of requests with these fields; None: as `find`."""
        fields = orjson.loads(others) | {"prompt": "any"}
        params = self._parse(fields, endpoint=endpoint, clock="").params
        return describe_params(params) if params.is_by_chance else None


def _dump_without_prompt(prompt: str, fields: dict[str, Any]) -> bytes:
    """Return a request's fields without its prompt, as JSON; b"" if they do not read back."""
    try:
        prompt.encode()
        data = orjson.dumps(
            {name: value for name, value in fields.items() if name != "prompt"}
        )
    except (UnicodeEncodeError, orjson.JSONEncodeError):
        return b""
    return b"" if b"null" in data else data  # 1e400 becomes one


class LineCounter:
    """Counts the lines of a run's files in order; `check` raises for those of other runs."""

    def __init__(
        self, intake: LineParser, check: Callable[[Envelope], None] | None = None
    ) -> None:
        self._intake = intake
        self._check = check or self._check_model
        self._source = 0  # the file being read
        # its requests so far in which chance has a part, by meaning
        self._equal = SeenCounts()
        # those of earlier files, once there is a second
        self._elsewhere: SeenCounts | None = None
        self._custom_ids = SeenCounts()  # the file's so far
        config = intake.limits.config
        reads_prompts = config.strict or "prompt" in (config.request_args or {})
        self._meanings = Meanings(intake.parse, reads_prompts=reads_prompts)
        self._clock = read_clock()  # of lines that have none

    def parse_and_count(self, line: Line, envelope: Envelope) -> tuple[Request, int]:
        """Return a line's request, and how many equal ones came before it.

        Raises:
            RequestError: what is wrong with it, as far as that shows without its tokens.
            MachineError: the disk for temporary files is full or gone.
        """
        self._check_line(line, envelope)
        request = self._intake.parse(
            envelope.fields, endpoint=envelope.endpoint, clock=self.find_clock(line)
        )
        if not request.params.is_by_chance:
            return request, 0
        return request, self._count_meaning(
            line, digest_meaning(request.prompts, request.params)
        )

    def count(self, line: Line, envelope: Envelope) -> int | None:
        """Count a line that is not answered now; None: chance has no part in its answer."""
        self._check_line(line, envelope)
        clock = self.find_clock(line)
        meaning = self._meanings.find(envelope.fields, envelope.endpoint, clock)
        return None if meaning is None else self._count_meaning(line, meaning)

    def find_clock(self, line: Line) -> str:
        """Return the time that a chat template reads for a line."""
        return line.clock or self._clock

    def add_answered_line(self, line: Line) -> None:
        """Count a line that an earlier run has answered: those after it depend on it."""
        try:
            self.count(line, parse_envelope(line))
        except Exception as error:  # that run has told what is wrong with it
            line_error(error, f"line {line.number}")

    def count_request(self, fields: dict[str, Any], times: int = 1) -> int | None:
        """Count a request of the file by itself, so many times; as `count`."""
        meaning = self._meanings.find(fields, None, self._clock)
        return None if meaning is None else self._equal.add(meaning, times)

    def _count_meaning(self, line: Line, meaning: bytes) -> int:
        """Count a request; tell of one that another file of the run has."""
        if line.num_equal is not None:
            return line.num_equal
        count = self._equal.add(meaning)
        if not count and self._elsewhere is not None and self._elsewhere.add(meaning):
            self._intake.report_warnings(SAME_DRAWS)
        return count

    def _check_line(self, line: Line, envelope: Envelope) -> None:
        """Check what stands around the request, and that it is for this model."""
        if line.source != self._source:
            self._source = line.source
            if self._elsewhere is None:
                self._elsewhere = self._equal
                self._equal = SeenCounts()
            self._equal.clear()
            self._custom_ids.clear()
        name = None if line.is_alone else envelope.custom_id_text
        if name is not None and self._custom_ids.add_text(name):
            raise RequestError(
                "duplicate_custom_id",
                f"custom_id {describe_value(name)} of line {line.number} is also an "
                "earlier line's; "
                "each line of a file needs one of its own. Change or remove one of the two",
                "custom_id",
            )
        if envelope.error is not None:
            raise envelope.error
        if self._intake.limits.config.strict and envelope.warnings:
            raise RequestError(
                "unsupported_parameter",
                f"{envelope.warnings[0]}; take it out, or run without --strict",
            )
        self._check(envelope)

    def _check_model(self, envelope: Envelope) -> None:
        if (names := self._intake.limits.model_names) is not None:
            check_model_name(envelope.fields, names)


class EqualLines:
    """Counts equal requests of a file without an engine; chats by all that a template sees."""

    def __init__(self) -> None:
        self._meanings = Meanings(_parse_without_engine)
        self._seen = SeenCounts()

    def count(self, line: Line, envelope: Envelope) -> int:
        """Return how many came before a line."""
        endpoint = envelope.endpoint or choose_endpoint(envelope.fields)
        # A run refuses it before it counts, or chance has no part in its answer.
        if envelope.error is not None or endpoint not in DRAWING_ENDPOINTS:
            return 0
        try:
            meaning = self._meanings.find(envelope.fields, endpoint, "")
        except (RequestError, RecursionError):  # it is no request
            return 0
        repeat = 0 if meaning is None else self._seen.add(meaning)
        return repeat if line.num_equal is None else line.num_equal


def _parse_without_engine(
    fields: dict[str, Any], *, endpoint: Endpoint, clock: str
) -> Request:
    if endpoint == "responses":
        fields = parse_response(fields, max_logprobs=MAX_LOGPROBS).fields
    elif endpoint != "chat":
        return parse_request(fields, max_logprobs=MAX_LOGPROBS)
    chat = parse_chat(fields, max_logprobs=MAX_LOGPROBS)
    return Request([_show_prompt(chat)], chat.params)


def _show_prompt(chat: ChatRequest) -> str:
    """Return what a template would write a chat's prompt from."""
    messages = [sorted(message.items()) for message in chat.messages]
    flags = (chat.adds_generation_prompt, chat.continues_final_message)
    return repr((messages, chat.tools, sorted(chat.template_args.items()), flags))
