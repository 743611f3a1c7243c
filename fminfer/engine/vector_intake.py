"""Turns requests for vectors into requests that can run, and tokenizes texts together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from fminfer.contract.endpoints import Endpoint, find_endpoint
from fminfer.contract.field_table import FIELDS
from fminfer.contract.request import Request, VectorSpec
from fminfer.contract.row_warnings import RowWarning
from fminfer.contract.vectors import parse_vectors
from fminfer.core.errors import CheckpointError, RequestError
from fminfer.engine.prompt_fit import (
    MORE_TOKENS,
    PromptFit,
    RequestLimits,
    check_ids,
    no_tokenizer_error,
)
from fminfer.engine.sequence import AnswerKind, PreparedRequest
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.pairs import cut_encoding, lower_texts, make_text_prompt
from fminfer.text.tokenizer import PANICS, Tokenizer

Text = str | tuple[str, str]  # or a pair of texts
MOST_PAIRED_CHARS = 1 << 26  # of one text before each of many others
# with special tokens or not: a `tokenizers.Encoding`
Encodings = dict[tuple[bool, Text], Any]


def _text_error(error: RequestError, request: Request, number: int) -> RequestError:
    """Return the error with the name of the text, if a request has several texts.

    Args:
        number: the text's index; second texts of pairs are counted after the first texts.
    """
    wish = request.vectors
    assert wish is not None, "a request that draws"
    name = wish.names[0]
    num_texts = len(request.prompts)
    if number >= num_texts:
        number -= num_texts
        name = wish.names[1]
        num_texts = len(wish.seconds)
    if not wish.seconds and num_texts == 1:
        return error
    place = f"{name}[{number}]" if num_texts > 1 else name
    param = name if error.param == wish.names[0] else error.param
    return RequestError(error.code, f"{place}: {error.message}", param)


class VectorIntake:
    """Prepares requests for vectors."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        facts: VectorSpec,
        warn: Callable[[RowWarning], object],
    ) -> None:
        if tokenizer.backend is None:
            raise CheckpointError(
                "this model's tokenizer has no fast form (tokenizer.json), which vectors need; "
                "convert it by transformers' AutoTokenizer, or name another by --tokenizer"
            )
        self._backend = tokenizer.backend
        # its file may name some, which are the run's to choose
        tokenizer.backend.no_truncation()
        tokenizer.backend.no_padding()
        if facts.is_lowercased:
            lower_texts(tokenizer.backend)
        if (
            tokenizer.hf is not None
            and "token_type_ids" not in tokenizer.hf.model_input_names
        ):
            facts = replace(facts, has_types=False)
        self._tokenizer = tokenizer
        self._limits = limits
        self._facts = facts
        self._warn = warn
        self._args = limits.config.request_args or {}

    def parse(
        self, fields: Mapping[str, Any], path_endpoint: Endpoint | None
    ) -> Request:
        """Check a request as far as that goes without tokens.

        Without an endpoint of its path, its fields say which it is for.
        """
        endpoint = path_endpoint or find_endpoint(fields) or "embeddings"
        if path_endpoint is None and endpoint in ("responses", "embeddings"):
            endpoint = "classify" if self._facts.is_scored else "embeddings"
        supported = {
            name for name, row in FIELDS[endpoint].items() if row.fate != "refused"
        }
        args = {name: value for name, value in self._args.items() if name in supported}
        config = self._limits.config
        request = parse_vectors(
            {**fields, **args}, endpoint, self._facts, is_strict=config.strict
        )
        if config.embeddings == "npy":
            self._check_row(request)
        return request

    def _check_row(self, request: Request) -> None:
        """Check that a request makes one row of the run's file of vectors."""
        size = self._args.get("dimensions") or self._facts.size
        row_size = request.vectors and (request.vectors.dimensions or self._facts.size)
        if (
            request.endpoint != "embeddings"
            or len(request.prompts) != 1
            or row_size != size
        ):
            raise RequestError(
                "unsupported_parameter",
                f"with --embeddings npy each line asks for one embedding of {size} "
                "numbers. Put each text on a line, and give --dimensions N "
                "--overwrite-request-args for shorter vectors; or leave --embeddings "
                "out",
                "input",
            )

    def tokenize(self, requests: Sequence[Request]) -> Encodings:
        """Return the encodings of the texts of all requests that `prepare` may pass."""
        texts: dict[bool, list[Text]] = {True: [], False: []}
        for request in requests:
            with suppress(RequestError):
                listed = self._list_prompts(request, self._make_fit(request))
                texts[request.params.add_special_tokens] += [
                    each for each in listed if not isinstance(each, list)
                ]
        encodings: Encodings = {}
        for adds, batch in texts.items():
            with PANICS:
                encoded = self._backend.encode_batch(batch, add_special_tokens=adds)
            encodings |= {
                (adds, text): each for text, each in zip(batch, encoded, strict=True)
            }
        return encodings

    def prepare(self, request: Request, encodings: Encodings) -> PreparedRequest:
        """Return a request that can run; `encodings` has its texts, or nothing."""
        fit = self._make_fit(request)
        prompts = list[EncodedPrompt]()
        listed = self._list_prompts(request, fit)
        adds = request.params.add_special_tokens
        encodings = encodings or self.tokenize([request])
        try:
            for each in listed:
                if isinstance(each, list):
                    prompts.append(fit.encode(each))
                else:
                    prompts.append(self._cut_encoding(encodings[adds, each], fit))
        except RequestError as error:
            num_before = (
                len(request.prompts) if listed and isinstance(listed[0], tuple) else 0
            )
            raise _text_error(error, request, num_before + len(prompts)) from None
        kind = cast(AnswerKind, request.endpoint)
        return PreparedRequest(
            request.params, prompts, kind=kind, vectors=request.vectors
        )

    def _make_fit(self, request: Request) -> PromptFit:
        assert request.vectors is not None, "a request that draws"
        source = request.vectors.names[0]
        return PromptFit(
            self._tokenizer,
            self._limits,
            request.params,
            self._warn,
            source,
            is_source=True,
        )

    def _list_prompts(
        self, request: Request, fit: PromptFit
    ) -> Sequence[Text | list[int]]:
        """List a request's prompts: its pairs if the model scores them, or each of its texts."""
        wish = request.vectors
        assert wish is not None, "a request that draws"
        firsts = request.prompts
        seconds = wish.seconds
        for number, text in enumerate((*firsts, *seconds)):
            if isinstance(text, str):
                if not self._tokenizer.has_words:
                    raise no_tokenizer_error(f"{fit.source} is text", fit.source)
                try:
                    fit.check_text_size(text)
                except RequestError as error:
                    raise _text_error(error, request, number) from None
        if seconds and wish.facts.is_scored:
            if len(firsts) == 1 and len(firsts[0]) * len(seconds) > MOST_PAIRED_CHARS:
                raise RequestError(
                    "out_of_range",
                    f"{wish.names[0]} has {len(firsts[0]):,} characters, which stand "
                    f"before each of {len(seconds):,} texts; at most "
                    f"{MOST_PAIRED_CHARS:,} are allowed in all. Send fewer texts in a "
                    "request",
                    wish.names[0],
                )
            firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
            pairs = zip(firsts, seconds, strict=True)
            return [(f"{wish.prefix}{first}", second) for first, second in pairs]
        texts = (*firsts, *seconds)
        return [wish.prefix + each if isinstance(each, str) else each for each in texts]

    def _cut_encoding(self, encoding: Any, fit: PromptFit) -> EncodedPrompt:
        """Return a text's ids, as its request and then the run cuts them."""
        if not encoding.ids:
            raise RequestError(
                "missing_prompt",
                f"{fit.source} has a text without tokens; give at least one character",
                fit.source,
            )
        check_ids([max(encoding.ids)], self._limits.vocab_size, fit.source, MORE_TOKENS)
        has_types = self._facts.has_types
        cut = partial(cut_encoding, encoding, has_types=has_types)
        return replace(fit, cut=cut).cut_to_fit(
            make_text_prompt(encoding, has_types=has_types)
        )
