"""Turns requests for vectors into requests that can run; texts of many are tokenized together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fminfer.contract.endpoints import Endpoint, find_asked
from fminfer.contract.field_table import FIELDS
from fminfer.contract.request import Request, VectorFacts
from fminfer.contract.row_warnings import RowWarning
from fminfer.contract.vectors import parse_vectors
from fminfer.core.errors import CheckpointError, RequestError
from fminfer.engine.prompt_fit import (
    MORE_TOKENS,
    PromptFit,
    RequestLimits,
    check_ids,
    needs_words,
)
from fminfer.engine.sequence import AnswerKind, Prepared
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.pairs import as_prompt, cut_encoding, encode_texts
from fminfer.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Text:
    """A text, or a pair of texts, and what the tokenizer makes of it."""

    first: str
    second: str | None = None
    encoding: Any = None


@dataclass(slots=True)
class _Asked:
    """A request that is being prepared."""

    request: Request
    fit: PromptFit
    prompts: list[_Text | list[int]] = field(default_factory=list)


class VectorIntake:
    """Prepares requests for vectors."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        facts: VectorFacts,
        warn: Callable[[RowWarning], None],
    ) -> None:
        if tokenizer.backend is None:
            raise CheckpointError(
                "this model's tokenizer has no fast form (tokenizer.json), which vectors need; "
                "convert it by transformers' AutoTokenizer, or name another by --tokenizer"
            )
        tokenizer.backend.no_truncation()  # its file may name some, which are the run's to choose
        tokenizer.backend.no_padding()
        if tokenizer.hf is not None and "token_type_ids" not in tokenizer.hf.model_input_names:
            facts = replace(facts, has_types=False)
        self._tokenizer, self._limits = tokenizer, limits
        self._facts, self._warn = facts, warn
        self._args = limits.config.request_args or {}

    def parse(self, fields: Mapping[str, Any], told: Endpoint | None) -> Request:
        """Check a request as far as that goes without tokens; its fields may tell the endpoint."""
        endpoint = told or find_asked(fields) or "embeddings"
        if told is None and endpoint == "embeddings" and self._facts.is_scored:
            endpoint = "classify"
        own = FIELDS[endpoint]
        args = {name: value for name, value in self._args.items() if name in own}
        config = self._limits.config
        request = parse_vectors({**fields, **args}, endpoint, self._facts, is_strict=config.strict)
        if config.embeddings == "npy":
            self._check_row(request)
        return request

    def _check_row(self, request: Request) -> None:
        """Refuse what is no row of the run's file of vectors."""
        asked = self._args.get("dimensions") or self._facts.size
        own = request.vectors and (request.vectors.dimensions or self._facts.size)
        if request.endpoint != "embeddings" or len(request.prompts) != 1 or own != asked:
            raise RequestError(
                "unsupported_parameter",
                f"with --embeddings npy each line asks for one embedding of {asked} numbers. Put "
                "each text on a line, and give --dimensions N --overwrite-request-args for shorter "
                "vectors; or leave --embeddings out",
                "input",
            )

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | RequestError]:
        """Tokenize the texts of requests; return each one, or what is wrong with it."""
        asked = [self._read(request) for request in requests]
        groups: dict[tuple[bool, bool], list[_Text]] = {}
        for each in asked:
            if isinstance(each, _Asked):
                adds = each.request.params.add_special_tokens
                for text in each.prompts:
                    if isinstance(text, _Text):
                        groups.setdefault((adds, text.second is not None), []).append(text)
        for (adds, _), texts in groups.items():
            seconds = [text.second for text in texts if text.second is not None]
            given = [text.first for text in texts], seconds
            if self._facts.is_lowercased:
                given = [text.lower() for text in given[0]], [text.lower() for text in seconds]
            found = encode_texts(self._tokenizer, *given, add_special_tokens=adds)
            for text, encoding in zip(texts, found, strict=True):
                text.encoding = encoding
        return [each if isinstance(each, RequestError) else self._finish(each) for each in asked]

    def _read(self, request: Request) -> _Asked | RequestError:
        """List a request's prompts: its pairs if the model scores them, or each of its texts."""
        wish = request.vectors
        assert wish is not None, "a request that draws"
        source = {"score": "text_1", "rerank": "documents"}.get(request.endpoint, "input")
        fit = PromptFit(
            self._tokenizer, self._limits, request.params, self._warn, source, is_source=True
        )
        asked, firsts, seconds = _Asked(request, fit), request.prompts, wish.seconds
        try:
            for text in (*firsts, *seconds):
                if isinstance(text, str):
                    fit.refuse_giant(text)
                    if not self._tokenizer.has_words:
                        raise needs_words(f"{source} is text", source)
        except RequestError as error:
            return error
        if seconds and wish.facts.is_scored:
            firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
            pairs = zip(firsts, seconds, strict=True)
            asked.prompts = [_Text(str(first), second) for first, second in pairs]
        else:
            prompts = (*firsts, *seconds)
            asked.prompts = [_Text(each) if isinstance(each, str) else each for each in prompts]
        return asked

    def _finish(self, asked: _Asked) -> Prepared | RequestError:
        request = asked.request
        prompts: list[EncodedPrompt] = []
        try:
            for prompt in asked.prompts:
                prompts.append(self._encode(prompt, asked.fit))
        except RequestError as error:
            if len(asked.prompts) > 1 and asked.fit.source == "input":
                text = f"input[{len(prompts)}]: {error.message}"
                return RequestError(error.code, text, error.param)
            return error
        kind, wish = cast(AnswerKind, request.endpoint), request.vectors
        return Prepared(request.params, prompts, kind=kind, vectors=wish)

    def _encode(self, prompt: _Text | list[int], fit: PromptFit) -> EncodedPrompt:
        """Return a prompt's ids, as its request and then the run cuts them."""
        if isinstance(prompt, list):
            return fit.encode(prompt)
        encoding, has_types = prompt.encoding, self._facts.has_types
        params, room = fit.params, self._limits.context_length
        if not encoding.ids:
            raise RequestError(
                "missing_prompt",
                f"{fit.source} has a text without tokens; give at least one character",
                fit.source,
            )
        check_ids([max(encoding.ids)], self._limits.vocab_size, fit.source, MORE_TOKENS)
        found = as_prompt(encoding, has_types=has_types)
        wished = room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
        if wished is not None and len(encoding.ids) > wished:
            side = params.truncation_side
            found = cut_encoding(encoding, wished, side, has_types=has_types)
        if len(found.ids) > room and fit.on_too_long != "error":
            side = fit.on_too_long.removeprefix("truncate-")
            found = cut_encoding(encoding, room, side, has_types=has_types)
            fit.warn_of_cut()
        return fit.fit(found) if len(found.ids) > room else found
