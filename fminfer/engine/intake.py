"""Turns a request's fields into a request that can run: check, tokenize, check lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from fminfer.contract.chat import ChatRequest, overwrite_fields, parse_chat
from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.endpoints import Endpoint, choose_endpoint
from fminfer.contract.fields import INT64, out_of_range_error
from fminfer.contract.prompts import check_logprob_count, check_text
from fminfer.contract.read_fields import describe_guess
from fminfer.contract.request import (
    DEFAULTS,
    RAW_TOKENS,
    Request,
    RequestParams,
    TextField,
    parse_request,
)
from fminfer.contract.responses import (
    ResponseAsChat,
    parse_response,
    rename_error,
)
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, WarningCounts, cut_name
from fminfer.contract.vectors import check_endpoint
from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError, UncompiledError
from fminfer.core.quantities import with_noun
from fminfer.engine.chat_intake import OPEN_THOUGHT, ChatIntake
from fminfer.engine.noise import digest_meaning
from fminfer.engine.prompt_fit import (
    MAX_COUNTED_CHARS,
    MORE_TOKENS,
    PromptFit,
    RequestLimits,
    check_ids,
    no_tokenizer_error,
)
from fminfer.engine.sequence import PreparedRequest, no_token_error
from fminfer.engine.start import make_bans
from fminfer.engine.thinking import BUDGET, spell_ending
from fminfer.engine.vector_intake import Encodings, VectorIntake
from fminfer.text.chat_template import ChatTemplate, RenderCall
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.grammars import Grammars, find_grammars
from fminfer.text.json_schemas import KNOWN_KEYS
from fminfer.text.thoughts import ends_in_thought
from fminfer.text.tokenizer import Tokenizer

# with its request's fields
_BegunChat = tuple[Mapping[str, Any], ChatRequest, RenderCall]
MAX_TOKENS_NAMES = ("max_tokens", "max_completion_tokens")
# In which field a request of an endpoint has its text.
_TEXT_FIELDS: dict[Endpoint, str] = {"chat": "messages", "responses": "input"}
MAX_BAD_WORDS = 16_384  # a second of tokenizing
MAX_STOPS = 1024  # each token's text is searched for each of them
MAX_CHARS = 1 << 18  # of stop strings, or of bad words


@dataclass(slots=True, frozen=True)
class IncomingRequest:
    """A request that passed, with the arguments of `Intake.prepare`."""

    request: Request
    repeat: int
    is_openai: bool


class LineParser(Protocol):
    """What a run over lines needs of an intake: one that tokenizes, or one that does not."""

    tokenizer: Tokenizer
    limits: RequestLimits
    warnings: WarningCounts
    on_warning: Callable[[str], None]

    def parse(
        self,
        fields: Mapping[str, Any],
        *,
        endpoint: Endpoint | None = None,
        clock: str = "",
        compiles: bool = True,
    ) -> Request:
        """Check a request, as `Intake` does."""

    def prepare_all(
        self, incoming: Sequence[IncomingRequest]
    ) -> list[PreparedRequest | Exception]:
        """Prepare requests, as `Intake` does."""

    def render_chats_ahead(
        self, requests: Iterable[tuple[Mapping[str, Any], Endpoint | None, str]]
    ) -> None:
        """Render chats together, if they are rendered here."""

    def report_warnings(self, *warnings: RowWarning, where: str = "") -> None:
        """Count a request's warnings, and pass on those that are new behind `where`."""
        for warning in warnings:
            if new := self.warnings.add(warning):
                self.on_warning(f"Warning: {where}{new}")


def _encode_prompts(
    encode: Callable[[str | list[int]], EncodedPrompt], prompts: list[str | list[int]]
) -> list[EncodedPrompt]:
    """Encode prompts. An error names the prompt, if there are several."""
    encoded = list[EncodedPrompt]()
    for number, prompt in enumerate(prompts):
        try:
            encoded.append(encode(prompt))
        except RequestError as error:
            if len(prompts) == 1:
                raise
            message = f"prompt[{number}]: {error.message}"
            raise RequestError(error.code, message, error.param) from None
    return encoded


class Intake(LineParser):
    """Prepares requests, one by one, on any thread."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.warnings = WarningCounts()
        # called with each one that is new
        self.on_warning: Callable[[str], None] = lambda text: None
        self.chat_template = ChatTemplate(tokenizer, limits.chat_template)
        if limits.chat_template is not None:
            self.chat_template.check_syntax()
        self._chat = ChatIntake(self.chat_template, limits.config)
        # by `id` of their fields, which it keeps alive
        self._begun_chats: dict[int, _BegunChat] = {}
        self._vectors: VectorIntake | None = None  # of a model that gives them
        if limits.vectors is not None:
            self._vectors = VectorIntake(
                tokenizer, limits, limits.vectors, self.warnings.add
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can become a prompt."""
        text = self.chat_template.find_template(has_tools=False)
        return self.tokenizer.has_words and text is not None

    def choose_text_field(
        self, fields: Mapping[str, Any], *, is_raw: bool
    ) -> TextField:
        """Return the field for a text by itself, beside fields by their names in completions.

        `echo` and `best_of` are not of chats.
        """
        if self.limits.vectors is not None:
            return "input"
        is_of_chat = self.limits.chat_template is not None or not {
            "echo",
            "best_of",
        } & {*fields}
        as_chat = not is_raw and self.has_chat_template and is_of_chat
        return "messages" if as_chat else "prompt"

    def parse(
        self,
        fields: Mapping[str, Any],
        *,
        endpoint: Endpoint | None = None,
        clock: str = "",
        compiles: bool = True,
    ) -> Request:
        """Check a request as far as that goes without its tokens; render the template of a chat.

        Args:
            endpoint: to which it was sent; None: its fields say it.
            clock: the time that a template reads, in ISO format; "": now.

        Raises:
            UncompiledError: it may not wait until its new constraint is compiled.
        """
        if self._vectors is not None:
            return self._vectors.parse(fields, endpoint)
        endpoint = endpoint or choose_endpoint(fields)
        check_endpoint(endpoint, self.limits.vectors)
        if endpoint == "responses":
            return self._parse_response(fields, clock, compiles=compiles)
        is_chat = endpoint == "chat"
        request = (
            self._parse_chat(fields, clock)
            if is_chat
            else self._parse_completion(fields)
        )
        self._check_params(request.params)
        if request.params.decoder_prompt is not None and self.limits.start_ids is None:
            raise RequestError(
                "unsupported_parameter",
                "decoder_prompt is for models with an encoder and a decoder, such as "
                "T5, and this model has no encoder. Put it behind the prompt",
                "decoder_prompt",
            )
        request = self._set_label_max_tokens(request, fields, compiles=compiles)
        warnings = (
            *request.warnings,
            *self._check_constraint(request.params, fields, compiles=compiles),
            *self._find_spelling_warnings(request),
        )
        if warnings and self.limits.config.strict:
            raise RequestError(
                "unsupported_parameter",
                f"{warnings[0]}; change that, or run without --strict",
            )
        return replace(request, warnings=warnings)

    def _check_constraint(
        self, params: RequestParams, fields: Mapping[str, Any], *, compiles: bool
    ) -> Iterator[RowWarning]:
        """Compile a request's constraint; warn of what it ignores and cuts off."""
        limits = self.limits
        if params.constraint is None or params.constraint.kind == "labels":
            return
        grammars = self._find_grammars(params.constraint, compiles=compiles)
        try:
            grammar = grammars.find(params.constraint)
        except RequestError as error:
            is_of_calls = params.constraint.kind == "calls"
            names = ("tools",) if is_of_calls else (*CONSTRAINTS,)
            name = next((name for name in names if fields.get(name)), None)
            raise RequestError(error.code, error.message, name) from None
        bans = make_bans(params, self.tokenizer, limits.eos_ids)
        if (
            bans is not None
            and bans.narrow_mask(grammar.first_node.mask, bans.find_banned(0, [])).few
            == ()
        ):
            raise no_token_error(0)
        if params.min_tokens > grammar.num_shortest:
            yield RowWarning(
                "min_tokens lengthens constrained answers only as far as the constraint allows, "
                "so that some may be shorter"
            )
        if names := grammar.unknown_keywords[:MAX_NAMES]:
            hints = tuple(
                name + describe_guess(name, KNOWN_KEYS) for name in map(cut_name, names)
            )
            yield RowWarning("unknown keywords of JSON schemas have no effect", hints)
        if params.max_tokens < grammar.num_shortest:
            yield RowWarning(
                "max_tokens is below what the shortest constrained answer takes, so "
                "that answers are cut off"
            )

    def _find_grammars(self, constraint: Constraint, *, compiles: bool) -> Grammars:
        limits = self.limits
        grammars = find_grammars(self.tokenizer, limits.vocab_size, limits.eos_ids)
        if not compiles and not grammars.has_compiled(constraint):
            raise UncompiledError("the constraint is not compiled yet")
        return grammars

    def _set_label_max_tokens(
        self, request: Request, fields: Mapping[str, Any], *, compiles: bool
    ) -> Request:
        """Let a request for label probabilities have the tokens of the longest label."""
        params = request.params
        if params.constraint is None or params.constraint.kind != "labels":
            return request
        grammars = self._find_grammars(params.constraint, compiles=compiles)
        num_longest = grammars.find_labels(params.constraint).num_longest
        merged = {**fields, **(self.limits.config.request_args or {})}
        names = [name for name in MAX_TOKENS_NAMES if merged.get(name) is not None]
        if names and params.max_tokens < num_longest:
            raise RequestError(
                "out_of_range",
                f"{names[0]} is {params.max_tokens}, and the longest label takes "
                f"{with_noun(num_longest, 'token')}. Raise {names[0]}, or leave it out",
                names[0],
            )
        if params.thought is not None:  # which takes the other tokens
            return request
        settled = replace(params, max_tokens=num_longest)
        return replace(request, params=settled, fills_context=False)

    def _find_spelling_warnings(self, request: Request) -> Iterator[RowWarning]:
        """Warn of tokens in a request that have an effect which few expect."""
        params = request.params
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        is_apart = params.constraint is None or params.thought is not None
        if not is_apart and any(map(ends_in_thought, texts)):
            yield OPEN_THOUGHT
        bos = self.tokenizer.doubled_bos if params.add_special_tokens else None
        if bos and any(text.startswith(bos) for text in texts):
            yield RowWarning(
                f"prompts begin with {bos} and the tokenizer adds one, so that they have two. "
                "Take it out, or set add_special_tokens to false"
            )
        stops = params.stop if params.skip_special_tokens else ()
        if names := tuple(filter(self.tokenizer.cannot_appear, stops)):
            yield RowWarning(
                "stop strings with a special token inside cannot match, for the text "
                "leaves these out. Set skip_special_tokens to false",
                tuple(map(cut_name, names)),
            )

    def _parse_completion(self, fields: Mapping[str, Any]) -> Request:
        limits = self.limits
        return parse_request(
            {**fields, **(limits.config.request_args or {})},
            max_logprobs=limits.config.max_logprobs,
            is_strict=limits.config.strict,
            defaults=limits.defaults,
        )

    def _parse_response(
        self, fields: Mapping[str, Any], clock: str, *, compiles: bool
    ) -> Request:
        response = self._convert_response(fields)
        if begun := self._begun_chats.pop(id(fields), None):
            self._begun_chats[id(response.fields)] = begun
        try:
            request = self.parse(
                response.fields, endpoint="chat", clock=clock, compiles=compiles
            )
        except RequestError as error:
            raise rename_error(error, response.names) from None
        if request.params.n > 1:
            raise out_of_range_error("n", request.params.n, "1: a response is one")
        warnings = (*response.warnings, *request.warnings)
        return replace(request, endpoint="responses", warnings=warnings)

    def _convert_response(self, fields: Mapping[str, Any]) -> ResponseAsChat:
        config = self.limits.config
        return parse_response(
            fields, max_logprobs=config.max_logprobs, is_strict=config.strict
        )

    def render_chats_ahead(
        self, requests: Iterable[tuple[Mapping[str, Any], Endpoint | None, str]]
    ) -> None:
        """Render the chats among some requests, which `parse` gets next.

        Together they take less time than one by one. `parse` refuses wrong requests.

        Args:
            requests: the fields, the endpoint and the clock of each, as `parse` gets them.
        """
        self._begun_chats = {}

        def begin_renders() -> Iterator[tuple[RenderCall, str]]:
            for fields, endpoint, clock in requests:
                # such as a RecursionError of JSON; `parse` says it
                with suppress(Exception):
                    endpoint = endpoint or choose_endpoint(fields)
                    chat = fields
                    if endpoint == "responses":
                        chat = self._convert_response(fields).fields
                    if endpoint in _TEXT_FIELDS:
                        _, begun, call = self._begin_chat(chat, clock)
                        message = json.dumps(call.message)
                        self._begun_chats[id(fields)] = fields, begun, call
                        yield call, message

        if self.tokenizer.has_words and self._vectors is None:
            with suppress(OSError):  # no process can run here, as `parse` says, too
                self.chat_template.ask_calls_ahead(begin_renders())

    def _parse_chat(self, fields: Mapping[str, Any], clock: str) -> Request:
        begun = self._begun_chats.pop(id(fields), None)
        _, chat, call = begun or self._begin_chat(fields, clock)
        return self._chat.render(chat, call)

    def _begin_chat(self, fields: Mapping[str, Any], clock: str) -> _BegunChat:
        limits = self.limits
        if not self.tokenizer.has_words:
            raise no_tokenizer_error("messages are text", "messages")
        chat = parse_chat(
            overwrite_fields(fields, limits.config.request_args or {}),
            max_logprobs=limits.config.max_logprobs,
            is_strict=limits.config.strict,
            defaults=limits.defaults,
            max_new_tokens=limits.max_new_tokens or INT64 - 1,
        )
        return fields, chat, self._chat.begin_render(chat, clock)

    def prepare(
        self, request: Request, *, repeat: int = 0, is_openai: bool = True
    ) -> PreparedRequest:
        """Tokenize a request's prompts, and check that they fit.

        `repeat` counts the equal requests without a seed that came before.
        """
        if self._vectors is not None:
            return self._vectors.prepare(request, {})
        try:
            return self._prepare(request, repeat, is_openai=is_openai)
        except RequestError as error:
            if request.endpoint == "responses":
                raise rename_error(error) from None
            raise

    def _prepare(
        self, request: Request, repeat: int, *, is_openai: bool
    ) -> PreparedRequest:
        fit = PromptFit(
            self.tokenizer,
            self.limits,
            request.params,
            self.warnings.add,
            _TEXT_FIELDS.get(request.endpoint, "prompt"),
            fills_context=request.fills_context,
        )
        sources: list[EncodedPrompt] = []
        if self.limits.start_ids is None:
            prompts = _encode_prompts(fit.encode, request.prompts)
        else:
            sources = _encode_prompts(fit.encode_source, request.prompts)
            prompts = [fit.encode_decoder_start(each) for each in sources]
        params = fit.settle_max_tokens(max(len(prompt.ids) for prompt in prompts))
        self._check_budget(params)
        _check_logprobs(prompts, params)
        meaning = (
            digest_meaning(request.prompts, request.params)
            if params.is_by_chance
            else b""
        )
        return PreparedRequest(
            params,
            prompts,
            repeat if meaning else 0,
            meaning,
            "chat"
            if request.endpoint in _TEXT_FIELDS
            else "openai"
            if is_openai
            else "plain",
            request.tool_parser,
            request.keeps_one_call,
            sources,
            (1 if request.params.decoder_prompt else len(self.limits.start_ids or ())),
            tools=request.tools,
            call_mode=request.call_mode,
        )

    def _check_budget(self, params: RequestParams) -> None:
        """Check that a thought's budget leaves room for its end, and for a label behind it."""
        thought = params.thought
        if thought is None or thought.budget is None:
            return
        num_needed = thought.budget + len(spell_ending(self.tokenizer, thought))
        if not thought.is_open:
            num_needed += len(self.tokenizer.spell_inside(thought.form.opening) or ())
        if params.constraint is not None and params.constraint.kind == "labels":
            grammars = self._find_grammars(params.constraint, compiles=True)
            num_needed += grammars.find_labels(params.constraint).num_longest
        if num_needed > params.max_tokens:
            raise RequestError(
                "out_of_range",
                f"{BUDGET} (or --thinking-budget) is {thought.budget}, which with the tokens "
                f"that end a thought takes {num_needed}, and the whole answer has "
                f"{params.max_tokens}. Lower it, or raise max_tokens",
                BUDGET,
            )

    def prepare_all(
        self, incoming: Sequence[IncomingRequest]
    ) -> list[PreparedRequest | Exception]:
        """Prepare requests; texts for vectors are tokenized together.

        A wrong request fails alone: its error stands in its place.
        """
        vectors = self._vectors
        encodings = Encodings()
        if vectors is not None:
            with suppress(Exception):  # of one among them; it is found below
                encodings = vectors.tokenize([each.request for each in incoming])
        prepared: list[PreparedRequest | Exception] = []
        for each in incoming:
            try:
                if vectors is not None:
                    prepared.append(vectors.prepare(each.request, encodings))
                else:
                    prepared.append(
                        self.prepare(
                            each.request, repeat=each.repeat, is_openai=each.is_openai
                        )
                    )
            except Exception as error:
                prepared.append(error)
        return prepared

    def _check_params(self, params: RequestParams) -> None:
        hint = "Was it written for another model?"
        for name, texts, most in (
            ("stop", params.stop, MAX_STOPS),
            ("bad_words", params.bad_words, MAX_BAD_WORDS),
        ):
            if texts and not self.tokenizer.has_words:
                raise no_tokenizer_error(f"{name} is text", name)
            if len(texts) > most or sum(map(len, texts)) > MAX_CHARS:
                raise out_of_range_error(
                    name,
                    [*texts],
                    f"at most {most:,} texts of {MAX_CHARS:,} characters in all",
                )
        size = self.limits.vocab_size
        check_ids(params.stop_token_ids, size, "stop_token_ids", hint)
        check_ids(
            [token_id for token_id, _ in params.logit_bias], size, "logit_bias", hint
        )
        check_ids(params.allowed_token_ids, size, "allowed_token_ids", hint)
        for word in params.bad_words:
            check_text(word, "bad_words")
        words = self.tokenizer.spell_words(params.bad_words)
        if not all(words):
            raise out_of_range_error(
                "bad_words", [*params.bad_words], "strings that have tokens"
            )
        check_ids(chain(*chain(*words)), size, "bad_words", MORE_TOKENS)
        if len({ids[-1] for ids in chain(*words)} | self.limits.eos_ids) >= size:
            raise out_of_range_error(
                "bad_words", [*params.bad_words], "fewer: they can ban every token"
            )
        bans = make_bans(params, self.tokenizer, self.limits.eos_ids)
        if bans is not None:
            bans.require_token(0, bans.find_banned(0, []))


def _check_logprobs(prompts: list[EncodedPrompt], params: RequestParams) -> None:
    if params.logprobs is None:
        return
    scored = sum(len(prompt.ids) for prompt in prompts) if params.echo else 0
    num_tokens = scored + params.max_tokens * len(prompts)
    check_logprob_count(
        num_tokens, max(params.n, params.num_candidates), params.logprobs
    )


def make_text_request(
    text: str, fields: dict[str, Any], intake: Intake, *, as_chat: bool
) -> dict[str, Any]:
    """Make the fields of a request: a chat whose user writes the text, or a completion of it.

    `fields` have their names in completions.
    """
    if not {"temperature", "top_p", "top_k", "n", "best_of"} & {*fields}:
        fields["temperature"] = 0
    if as_chat:
        return overwrite_fields(
            {"messages": [{"role": "user", "content": text}]}, fields
        )
    most = fields.get("best_of") or fields.get("n") or 1
    return {
        "prompt": text,
        "max_tokens": _choose_max_raw_tokens(intake, text, most),
    } | fields


def _choose_max_raw_tokens(intake: Intake, text: str, num_sequences: int) -> int:
    limits = intake.limits
    tokenizer = intake.tokenizer
    if not tokenizer.has_words or len(text) > MAX_COUNTED_CHARS:
        return DEFAULTS.max_tokens
    num_tokens = len(tokenizer.encode(text.encode(errors="replace").decode()).ids)
    room = limits.context_length - num_tokens
    if limits.kv_size is not None:
        room = min(room, limits.kv_size.max_draws(num_tokens, num_sequences))
    return min(RAW_TOKENS, room) if room > 0 else DEFAULTS.max_tokens
