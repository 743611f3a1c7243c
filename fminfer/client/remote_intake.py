"""Opens lines for servers elsewhere: checks them by the contract, and translates them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import orjson

from fminfer.answers.line_counter import SAME_DRAWS
from fminfer.client.dialects import (
    DRAWING_NONE,
    MADE_HERE,
    TEXT_ONLY,
    VLLM,
    Dialect,
)
from fminfer.client.remote_request import RemoteRequest
from fminfer.contract.chat import overwrite_fields, parse_chat
from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.endpoints import (
    DRAWING_ENDPOINTS,
    URL_OF,
    Endpoint,
    choose_endpoint,
)
from fminfer.contract.field_table import FIELDS
from fminfer.contract.fields import Field, describe_value, is_same, out_of_range_error
from fminfer.contract.request import (
    DEFAULTS,
    Request,
    RequestParams,
    TextField,
    VectorSpec,
    parse_request,
)
from fminfer.contract.responses import parse_response, rename_error
from fminfer.contract.row_warnings import RowWarning, WarningCounts
from fminfer.contract.vectors import parse_vectors
from fminfer.core.config import Constraint, EngineConfig
from fminfer.core.errors import RequestError
from fminfer.engine.chat_intake import choose_call_mode
from fminfer.engine.intake import MAX_TOKENS_NAMES, IncomingRequest, LineParser
from fminfer.engine.noise import digest_meaning
from fminfer.engine.prompt_fit import RequestLimits
from fminfer.engine.sequence import AnswerKind, PreparedRequest
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.tokenizer import NoTokenizer

BYTES_AN_ID = 4
# Sent as they were read; ids of biases are texts in JSON.
_READ_FIELDS = {each.name for each in fields(RequestParams)} - {"logit_bias"}
_SET_APART = {*MADE_HERE, *MAX_TOKENS_NAMES, *CONSTRAINTS}
# What changes nothing, beside a field's default.
_NEUTRAL: dict[str, object] = {"tool_choice": "auto", "thinking_token_budget": -1}
_EMBEDDED = VectorSpec(2**31)
_SCORED = VectorSpec(1, is_scored=True)


@dataclass(slots=True, frozen=True)
class ParsedLine(Request):
    """A request that passed, with its fields as they are sent."""

    fields: dict[str, Any] = field(default_factory=dict)


class RemoteIntake(LineParser):
    """Prepares requests for servers of one dialect, as `engine.intake.Intake` does.

    Args:
        model_names: what a line may call the model; None: anything.
    """

    has_chat_template = True

    def __init__(
        self,
        config: EngineConfig,
        dialect: Dialect,
        model_names: frozenset[str] | None = None,
    ) -> None:
        self.dialect = dialect
        self.tokenizer = NoTokenizer()  # the servers' is not known here
        self.limits = RequestLimits(0, 0, config=config, model_names=model_names)
        self.warnings = WarningCounts()
        # called with each one that is new
        self.on_warning: Callable[[str], None] = lambda text: None

    def choose_text_field(
        self, fields: Mapping[str, Any], *, is_raw: bool
    ) -> TextField:
        """Return the field for a text by itself, as `Intake` does for a chat model."""
        is_of_chat = not is_raw and not {"echo", "best_of"} & {*fields}
        return "messages" if is_of_chat else "prompt"

    def render_chats_ahead(
        self, requests: Iterable[tuple[Mapping[str, Any], Endpoint | None, str]]
    ) -> None:
        """Do nothing: the server renders chats."""

    def report_warnings(self, *warnings: RowWarning, where: str = "") -> None:
        """Count warnings as `LineParser` does, but for the one of our engine's own draws."""
        others = (each for each in warnings if each is not SAME_DRAWS)
        super().report_warnings(*others, where=where)

    def parse(
        self,
        fields: Mapping[str, Any],
        *,
        endpoint: Endpoint | None = None,
        clock: str = "",
        compiles: bool = True,
    ) -> ParsedLine:
        """Check a request by the contract. An `input` by itself asks for embeddings."""
        if endpoint is None:
            endpoint = choose_endpoint(fields)
            endpoint = "embeddings" if endpoint == "responses" else endpoint
        config = self.limits.config
        args = config.request_args or {}
        most = config.max_logprobs
        is_strict = config.strict
        if endpoint == "responses":
            response = parse_response(fields, max_logprobs=most, is_strict=is_strict)
            try:
                parsed = self.parse(response.fields, endpoint="chat")
            except RequestError as error:
                raise rename_error(error, response.names) from None
            if parsed.params.n > 1:
                raise out_of_range_error("n", parsed.params.n, "1: a response is one")
            warnings = (*response.warnings, *parsed.warnings)
            return replace(parsed, endpoint="responses", warnings=warnings)
        if endpoint == "chat":
            sent = overwrite_fields(fields, args)
            chat = parse_chat(sent, max_logprobs=most, is_strict=is_strict)
            return ParsedLine(
                [_dump_json([chat.messages, chat.tools], "messages").decode()],
                chat.params,
                chat.warnings,
                endpoint,
                fills_context=chat.fills_context,
                call_mode=choose_call_mode(chat.held_calls),
                fields=sent,
            )
        if endpoint == "completions":
            sent = {**fields, **args}
            request = parse_request(sent, max_logprobs=most, is_strict=is_strict)
        else:
            table = FIELDS[endpoint]
            known = {name for name in args.keys() & table if _is_read(table[name])}
            sent = {**fields, **{name: args[name] for name in known}}
            spec = _EMBEDDED if endpoint == "embeddings" else _SCORED
            request = parse_vectors(sent, endpoint, spec, is_strict=is_strict)
        return ParsedLine(
            request.prompts,
            request.params,
            request.warnings,
            endpoint,
            vectors=request.vectors,
            fields=sent,
        )

    def prepare_all(
        self, incoming: Sequence[IncomingRequest]
    ) -> list[PreparedRequest | Exception]:
        """Translate requests. A wrong request fails alone: its error stands in its place."""
        prepared: list[PreparedRequest | Exception] = []
        for each in incoming:
            try:
                prepared.append(self._prepare(each))
            except Exception as error:
                prepared.append(error)
        return prepared

    def _prepare(self, incoming: IncomingRequest) -> RemoteRequest:
        request = incoming.request
        assert isinstance(request, ParsedLine), "this intake parsed it"
        endpoint: Endpoint = request.endpoint
        kind: AnswerKind = "openai" if incoming.is_openai else "plain"
        if endpoint == "chat" or endpoint == "responses":
            endpoint = kind = "chat"
        elif endpoint != "completions":
            kind = endpoint
        params = request.params
        try:
            body = _dump_json(self._translate(request, endpoint), "the request")
        except RequestError as error:
            if request.endpoint == "responses":
                raise rename_error(error) from None
            raise
        prompts = [EncodedPrompt(_make_ids(each), "", []) for each in request.prompts]
        prompts[0] = EncodedPrompt(prompts[0].ids, body.decode(), [])
        meaning = (
            digest_meaning(request.prompts, params) if params.is_by_chance else b""
        )
        constraint = params.constraint
        return RemoteRequest(
            params if constraint is None else replace(params, constraint=None),
            prompts,
            incoming.repeat if meaning else 0,
            meaning,
            kind,
            vectors=request.vectors,
            call_mode=request.call_mode,
            endpoint=endpoint,
            body=body,
            constraint=constraint,
        )

    def _translate(self, request: ParsedLine, endpoint: Endpoint) -> dict[str, Any]:
        """Return a request's fields by the names that its server has for them."""
        dialect = self.dialect
        if not dialect.has_endpoint(endpoint):
            raise RequestError(
                "unsupported_parameter",
                f"{dialect.title} has no {URL_OF[endpoint]}; ask another server",
            )
        params = request.params
        is_drawn = endpoint in DRAWING_ENDPOINTS
        body = {**dialect.defaults} if is_drawn else {}
        for name in ("temperature", *request.fields):
            if not _is_wish(name, endpoint, request):
                continue
            value = request.fields.get(name)
            if name in _READ_FIELDS and (endpoint, name) != ("chat", "logprobs"):
                value = getattr(params, name)  # in its plainest form: 1 for true
            their_name = dialect.find_name(endpoint, name)
            is_text = isinstance(value, str)
            if their_name is None or (
                not is_text and (dialect.name, name) in TEXT_ONLY
            ):
                raise self._lack_error(name, value)
            body[their_name] = value
        if is_drawn:
            self._settle(body, request, endpoint)
        return body

    def _settle(
        self, body: dict[str, Any], request: ParsedLine, endpoint: Endpoint
    ) -> None:
        """Set what stands in several fields of a request that draws, or in none."""
        dialect = self.dialect
        params = request.params
        constraint = params.constraint
        if params.top_p == 0:  # means the same, and not all servers take it
            body |= {"temperature": 0.0, "top_p": 1.0}
        if params.logprobs == 0 and dialect.name == "llama-server":  # 0 is none there
            body["top_logprobs" if endpoint == "chat" else "logprobs"] = 1
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and "name" in choice:  # as responses have it
            function = {"name": choice["name"]}
            body["tool_choice"] = {"type": "function", "function": function}
        if body.get("continue_final_message") and dialect.name in VLLM:
            body["add_generation_prompt"] = False
        if params.max_tokens == 0 and dialect.name not in DRAWING_NONE:
            raise self._lack_error("max_tokens", 0)
        is_said = any(request.fields.get(name) is not None for name in MAX_TOKENS_NAMES)
        is_labelled = constraint is not None and constraint.kind == "labels"
        if not request.fills_context and (is_said or not is_labelled):
            most_name = dialect.find_name(endpoint, "max_tokens") or "max_tokens"
            body[most_name] = params.max_tokens
        if constraint is not None:
            has_tools = "tools" in body and dialect.name != "fminfer"
            if has_tools and dialect.find_name(endpoint, "tool_choice"):
                body["tool_choice"] = "none"  # they cannot be called then
            body |= self._write_constraint(request, constraint, endpoint)

    def _write_constraint(
        self, request: ParsedLine, constraint: Constraint, endpoint: Endpoint
    ) -> dict[str, Any]:
        named = {
            name: request.fields[name]
            for name in CONSTRAINTS
            if request.fields.get(name) not in (None, "", {"type": "text"})
        }
        if self.dialect.name == "fminfer":
            return named
        name, value = next(iter(named.items()))
        is_official = name == "response_format" and "schema" not in value
        if is_official and endpoint == "chat" and not constraint.whitespace:
            return {name: value}  # with `strict`, which some act on
        written = self.dialect.write_constraint(constraint, endpoint)
        if written is None:
            raise self._lack_error(name, value)
        return written

    def _lack_error(self, name: str, value: object) -> RequestError:
        return RequestError(
            "unsupported_parameter",
            f"{name} is {describe_value(value)}, for which {self.dialect.title} has no name. "
            "Change or remove it, or ask a server that has one",
            name,
        )


def _dump_json(value: object, what: str) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise RequestError(
            "invalid_utf8",
            f"{what} cannot be sent as JSON: {error}. Change or remove that",
        ) from None


def _make_ids(prompt: str | list[int]) -> list[int]:
    """Return a prompt as numbers, by which those that begin alike are put together."""
    if isinstance(prompt, list):
        return prompt
    data = prompt.encode()
    return array("I", data + bytes(-len(data) % BYTES_AN_ID)).tolist()


def _is_read(entry: Field) -> bool:
    """Return whether a field is one that a run reads, or records."""
    return entry.fate != "refused"


def _is_wish(name: str, endpoint: Endpoint, request: ParsedLine) -> bool:
    """Return whether a field asks for more than its absence does."""
    entry = FIELDS[endpoint].get(name)
    if entry is None or entry.fate != "acted on" or name in _SET_APART:
        return False
    if name == "best_of":
        return request.params.best_of > request.params.n
    if name in _READ_FIELDS and entry.default is None:
        return bool(getattr(request.params, name) != getattr(DEFAULTS, name))
    value = request.fields.get(name)
    continues = bool(request.fields.get("continue_final_message"))
    if name == "add_generation_prompt":
        return value is False and not continues
    if name == "tool_choice" and not request.fields.get("tools"):
        return value not in (None, "auto", "none")
    neutral: tuple[object, ...] = (None, [], {}, entry.default, _NEUTRAL.get(name))
    return entry.is_required or not any(is_same(value, each) for each in neutral)
