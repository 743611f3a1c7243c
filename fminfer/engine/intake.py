"""Turns a request's fields into a request that can run: check, tokenize, check lengths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

from fminfer.contract.chat import overwrite, parse_chat
from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.endpoints import Endpoint, tell_endpoint
from fminfer.contract.fields import INT64, out_of_range
from fminfer.contract.prompts import check_entries, check_text
from fminfer.contract.read_fields import guess
from fminfer.contract.request import DEFAULTS, Request, SamplingParams, VectorFacts, parse_request
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, WarningCounts, cut_name
from fminfer.contract.vectors import check_model
from fminfer.core.config import EngineConfig
from fminfer.core.errors import RequestError, UncompiledError
from fminfer.engine.chat_intake import ChatIntake
from fminfer.engine.noise import meaning_of
from fminfer.engine.prompt_fit import KvSize, PromptFit
from fminfer.engine.sequence import AnswerKind, Prepared
from fminfer.engine.start import find_bans
from fminfer.engine.vector_intake import MORE_TOKENS, VectorIntake
from fminfer.text.chat_template import ChatTemplate
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.grammars import find_grammars
from fminfer.text.json_schemas import KNOWN_KEYS
from fminfer.text.tokenizer import Tokenizer

SHORTER = RowWarning(
    "chat requests without max_tokens may draw fewer tokens than the context leaves: the KV cache "
    "has no room for more, or a line for more logprobs. Raise --budget, or give max_tokens"
)

MAX_BAD_WORDS = 16_384  # a second of tokenizing


@dataclass(slots=True, frozen=True)
class RequestLimits:
    """What a model and a run allow, and what they take where a request does not say."""

    context_length: int
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    config: EngineConfig = field(default_factory=EngineConfig)
    model_names: frozenset[str] | None = None  # what a line may call the model; None: anything
    defaults: SamplingParams = DEFAULTS  # of params that a request leaves out
    max_new_tokens: int | None = None  # of a chat request that does not say; None: the context's
    kv_size: KvSize | None = None  # of each pipeline, once it is known
    chat_template: str | None = None  # in place of the model's own
    # What a decoder begins with, behind an encoder; None: there is no encoder.
    start_ids: tuple[int, ...] | None = None
    vectors: VectorFacts | None = None  # what the model gives; None: it generates text


@dataclass(slots=True, frozen=True)
class Asked:
    """A request that passed, and what `Intake.prepare` is told of it."""

    request: Request
    repeat: int
    is_openai: bool


class Intake:
    """Prepares requests, one by one, on any thread."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.warnings = WarningCounts()
        self.on_warning: Callable[[str], None] = lambda text: None  # told of each one that is new
        self._lock = threading.Lock()  # of the counts
        self.chat_template = ChatTemplate(tokenizer, limits.chat_template)
        if limits.chat_template is not None:
            self.chat_template.check()
        self._chat = ChatIntake(self.chat_template, limits.config.tool_call_parser)
        self._vectors: VectorIntake | None = None  # of a model that gives them
        if limits.vectors is not None:
            self._vectors = VectorIntake(
                *(tokenizer, limits.vectors, limits.context_length, limits.config),
                check_ids=self._check_ids,
                count=self._count_warning,
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can become a prompt."""
        template = self._chat.template
        return self.tokenizer.has_words and template.find_text(has_tools=False) is not None

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
            endpoint: to which it was sent; None: its fields tell.
            clock: the time that a template reads, in ISO format; "": now.
            compiles: whether to wait until a new constraint is compiled.

        Raises:
            RequestError: what is wrong with it.
            UncompiledError: it has a constraint that would have to be waited for.
        """
        if self._vectors is not None:
            return self._vectors.parse(fields, endpoint)
        told = endpoint or tell_endpoint(fields)
        check_model(told, self.limits.vectors)
        is_chat = told == "chat"
        request = self._parse_chat(fields, clock) if is_chat else self._parse_completion(fields)
        self._check_params(request.params)
        if request.params.decoder_prompt is not None and self.limits.start_ids is None:
            raise RequestError(
                "unsupported_parameter",
                "decoder_prompt is for models with an encoder and a decoder, such as T5, and this "
                "model has no encoder. Put it behind the prompt",
                "decoder_prompt",
            )
        warnings = (
            *self._check_constraint(request.params, fields, compiles=compiles),
            *self._warn_of_spelling(request),
        )
        if warnings and self.limits.config.strict:
            raise RequestError(
                "unsupported_parameter", f"{warnings[0]}; change that, or run without --strict"
            )
        return replace(request, warnings=request.warnings + warnings) if warnings else request

    def _check_constraint(
        self, params: SamplingParams, fields: Mapping[str, Any], *, compiles: bool
    ) -> Iterator[RowWarning]:
        """Compile a request's constraint; tell of what it ignores and cuts off.

        Raises:
            RequestError: it cannot be had.
        """
        limits = self.limits
        if params.constraint is None:
            return
        grammars = find_grammars(self.tokenizer, limits.vocab_size, limits.eos_ids)
        if not compiles and not grammars.has(params.constraint):
            raise UncompiledError("the constraint is not compiled yet")
        try:
            grammar = grammars.find(params.constraint)
        except RequestError as error:
            name = next((name for name in CONSTRAINTS if fields.get(name)), None)
            raise RequestError(error.code, error.message, name) from None
        if names := grammar.unknown[:MAX_NAMES]:
            told = tuple(cut_name(name) + guess(name, KNOWN_KEYS) for name in names)
            yield RowWarning("unknown keywords of JSON schemas have no effect", told)
        if params.max_tokens < grammar.shortest:
            yield RowWarning(
                "max_tokens is below what the shortest constrained answer takes, so that answers "
                "are cut off"
            )

    def _warn_of_spelling(self, request: Request) -> Iterator[RowWarning]:
        """Tell of special tokens that a request spells, and that do what nobody expects."""
        params = request.params
        bos = self.tokenizer.doubled_bos if params.add_special_tokens else None
        if bos and any(isinstance(each, str) and each.startswith(bos) for each in request.prompts):
            yield RowWarning(
                f"prompts begin with {bos} and the tokenizer adds one, so that they have two. "
                "Take it out, or set add_special_tokens to false"
            )
        stops = params.stop if params.skip_special_tokens else ()
        if names := tuple(filter(self.tokenizer.cannot_appear, stops)):
            yield RowWarning(
                "stop strings with a special token inside cannot match, for the text leaves these "
                "out. Set skip_special_tokens to false",
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

    def _parse_chat(self, fields: Mapping[str, Any], clock: str) -> Request:
        limits = self.limits
        if not self.tokenizer.has_words:
            raise self._needs_words("messages are text", "messages")
        chat = parse_chat(
            overwrite(fields, limits.config.request_args or {}),
            max_logprobs=limits.config.max_logprobs,
            is_strict=limits.config.strict,
            defaults=limits.defaults,
            max_new_tokens=limits.max_new_tokens or INT64 - 1,
        )
        return self._chat.render(chat, is_strict=limits.config.strict, clock=clock)

    def prepare(self, request: Request, *, repeat: int = 0, is_openai: bool = True) -> Prepared:
        """Tokenize a request's prompts, and check that they fit.

        Args:
            repeat: how many equal requests without a seed came before.
            is_openai: completions are answered as the OpenAI API does.

        Raises:
            RequestError: what is wrong with it.
        """
        if self._vectors is not None:
            (found,) = self._vectors.prepare([request])
            if isinstance(found, RequestError):
                raise found
            return found
        fit = self._fit_of(request)
        sources: list[EncodedPrompt] = []
        if self.limits.start_ids is None:
            prompts = [self._encode(prompt, fit) for prompt in request.prompts]
        else:
            sources = [self._encode_source(prompt, fit) for prompt in request.prompts]
            prompts = [self._encode_start(each, fit) for each in sources]
        params = self._settle(fit, max(len(prompt.ids) for prompt in prompts))
        _check_logprobs(prompts, params)
        draws_unseeded = params.seed is None and not params.is_greedy
        meaning = meaning_of(request.prompts, request.params) if draws_unseeded else b""
        return Prepared(
            params,
            prompts,
            repeat if meaning else 0,
            meaning,
            kind_of(request, is_openai=is_openai),
            request.tool_parser,
            request.keeps_one_call,
            sources,
            (1 if request.params.decoder_prompt else len(self.limits.start_ids or ())),
        )

    def prepare_all(self, asked: Sequence[Asked]) -> list[Prepared | Exception]:
        """Prepare requests; texts for vectors are tokenized together. A wrong one fails alone."""
        if self._vectors is not None and len(asked) > 1:
            with suppress(Exception):  # of one among them; it is found below
                return [*self._vectors.prepare([each.request for each in asked])]
        found: list[Prepared | Exception] = []
        for each in asked:
            try:
                prepared = self.prepare(each.request, repeat=each.repeat, is_openai=each.is_openai)
                found.append(prepared)
            except Exception as error:
                found.append(error)
        return found

    def note(self, *warnings: RowWarning, where: str = "") -> None:
        """Count a request's warnings, and pass on those that are new.

        Args:
            where: what a warning is told with, such as `line 3: `.
        """
        for warning in warnings:
            with self._lock:
                new = self.warnings.add(warning)
            if new:
                self.on_warning(f"Warning: {where}{new}")

    def _count_warning(self, warning: RowWarning) -> None:
        with self._lock:
            self.warnings.add(warning)

    def _fit_of(self, request: Request) -> PromptFit:
        limits = self.limits
        return PromptFit(
            self.tokenizer,
            limits.context_length,
            limits.config.on_too_long,
            request.params,
            request.fills_context,
            "messages" if request.endpoint == "chat" else "prompt",
        )

    def _settle(self, fit: PromptFit, num_prompt_tokens: int) -> SamplingParams:
        params = fit.settle(num_prompt_tokens, self.limits.kv_size)
        if fit.fills_context and params.max_tokens < fit.most_wished(num_prompt_tokens):
            self._count_warning(SHORTER)
        return params

    def _encode(self, prompt: str | list[int], fit: PromptFit) -> EncodedPrompt:
        """Return a prompt as ids that fit the context, with the text and offsets that it needs."""
        params = fit.params
        if isinstance(prompt, str):
            return self._cut(self._encode_text(prompt, fit), fit)
        self._check_ids(prompt, "prompt", "Was it tokenized for another model?")
        encoded = self._cut(EncodedPrompt(prompt, "", []), fit)
        needs_text = params.echo or params.logprobs is not None
        return fit.describe(prompt) if needs_text and not encoded.num_cut else encoded

    def _encode_source(self, prompt: str | list[int], fit: PromptFit) -> EncodedPrompt:
        """Return what the encoder reads, which has the whole context for itself."""
        params = replace(fit.params, max_tokens=0, logprobs=None, min_tokens=0)
        return self._encode(prompt, replace(fit, params=params, is_source=True))

    def _encode_start(self, source: EncodedPrompt, fit: PromptFit) -> EncodedPrompt:
        """Return what the decoder goes on from: the model's own start, and `decoder_prompt`.

        Raises:
            RequestError: it is too long, or prompts are to be scored and there is none.
        """
        params, given = fit.params, fit.params.decoder_prompt
        if params.echo and params.logprobs is not None and not given:
            raise RequestError(
                "unsupported_parameter",
                "echo with logprobs scores what a decoder is given, and this model's encoder reads "
                "the prompt. Give the text to be scored as decoder_prompt, or leave echo out",
                "echo",
            )
        fit = replace(fit, source="decoder_prompt", on_too_long="error")
        start = [*(self.limits.start_ids or ())][: 1 if given else None]  # not what forces a BOS
        if isinstance(given, str) and given:
            if not self.tokenizer.has_words:
                raise self._needs_words("decoder_prompt is text", "decoder_prompt")
            check_text(given, "decoder_prompt")
            fit.refuse_giant(given)
            own = self.tokenizer.encode(
                given,
                with_offsets=params.echo and params.logprobs is not None,
                add_special_tokens=False,
            )
            own = replace(own, is_whole_text=True)
            self._check_ids(own.ids, "decoder_prompt", MORE_TOKENS)
        else:
            ids = [*(given or ())]
            self._check_ids(ids, "decoder_prompt", "Was it tokenized for another model?")
            needs_text = bool(ids) and (params.echo or params.logprobs is not None)
            own = fit.describe(ids) if needs_text else EncodedPrompt(ids, "", [])
        text = source.text if params.echo and not given else own.text
        offsets = [0] * len(start) + own.offsets if own.offsets else []
        return fit.fit(replace(own, ids=start + own.ids, text=text, offsets=offsets))

    def _cut(self, encoded: EncodedPrompt, fit: PromptFit) -> EncodedPrompt:
        """Return a prompt as its request and then the run cuts it."""
        wished = fit.truncate(encoded)
        fitting = fit.fit(wished)
        if fitting is not wished:
            kind = f"prompts were cut by --on-too-long {self.limits.config.on_too_long}"
            self._count_warning(RowWarning(kind))
        return fitting

    def _encode_text(self, prompt: str, fit: PromptFit) -> EncodedPrompt:
        params = fit.params
        if not self.tokenizer.has_words:
            raise self._needs_words("prompt is text", "prompt")
        fit.refuse_giant(prompt)
        encoded = self.tokenizer.encode(
            prompt,
            with_offsets=params.echo and params.logprobs is not None,
            add_special_tokens=params.add_special_tokens,
        )
        encoded = replace(encoded, is_whole_text=True)
        if not encoded.ids:
            raise RequestError(
                "missing_prompt",
                'prompt is "", and this model\'s tokenizer has no token to begin with (BOS); '
                "give at least one character",
                "prompt",
            )
        self._check_ids(encoded.ids, "prompt", MORE_TOKENS)
        return encoded

    def _check_params(self, params: SamplingParams) -> None:
        hint = "Was it written for another model?"
        for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if texts and not self.tokenizer.has_words:
                raise self._needs_words(f"{name} is text", name)
        self._check_ids(params.stop_token_ids, "stop_token_ids", hint)
        self._check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias", hint)
        self._check_ids(params.allowed_token_ids, "allowed_token_ids", hint)
        if len(params.bad_words) > MAX_BAD_WORDS:
            raise out_of_range("bad_words", [*params.bad_words], f"at most {MAX_BAD_WORDS:,} words")
        for word in params.bad_words:
            check_text(word, "bad_words")
        words = self.tokenizer.spell_all(params.bad_words)
        if not all(words):
            raise out_of_range("bad_words", [*params.bad_words], "strings that have tokens")
        self._check_ids(chain(*chain(*words)), "bad_words", MORE_TOKENS)
        if len({ids[-1] for ids in chain(*words)} | self.limits.eos_ids) >= self.limits.vocab_size:
            raise out_of_range("bad_words", [*params.bad_words], "fewer: they can ban every token")
        bans = find_bans(params, self.tokenizer, self.limits.eos_ids)
        if bans is not None:
            bans.check(0, bans.find(0, []))

    @staticmethod
    def _needs_words(found: str, param: str) -> RequestError:
        instead = {"stop": "stop_token_ids", "bad_words": "logit_bias"}
        return RequestError(
            "unsupported_parameter",
            f"{found}, and this run has no tokenizer; give "
            f"{instead.get(param, 'a prompt of token ids')}, or run without --skip-tokenizer-init",
            param,
        )

    def _check_ids(self, ids: Iterable[int], param: str, hint: str) -> None:
        vocab_size = self.limits.vocab_size
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    "token_out_of_range",
                    f"{param} holds token id {token_id} at index {place}; this model's ids go from "
                    f"0 to {vocab_size - 1}. {hint}",
                    param,
                )


def kind_of(request: Request, *, is_openai: bool) -> AnswerKind:
    """Return the kind of a request's answer."""
    if request.vectors is not None:
        return cast(AnswerKind, request.endpoint)
    return "chat" if request.endpoint == "chat" else "openai" if is_openai else "plain"


def _check_logprobs(prompts: list[EncodedPrompt], params: SamplingParams) -> None:
    if params.logprobs is None:
        return
    scored = sum(len(prompt.ids) for prompt in prompts) if params.echo else 0
    num_tokens = scored + params.max_tokens * len(prompts)
    check_entries(num_tokens, max(params.n, params.num_candidates), params.logprobs)
