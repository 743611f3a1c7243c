"""Turns a request's fields into a request that can run: check, tokenize, check lengths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fminfer.contract.prompts import check_entries
from fminfer.contract.request import Request, SamplingParams, parse_request
from fminfer.contract.row_warnings import RowWarning, WarningCounts
from fminfer.core.config import OnTooLong
from fminfer.core.errors import RequestError
from fminfer.engine.noise import meaning_of
from fminfer.engine.sequence import Prepared
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.tokenizer import Tokenizer

MAX_COUNTED_CHARS = 2**16  # a prompt up to this length is tokenized whatever the context
MAX_CUT_CHARS = 2**22  # longest prompt that --on-too-long cuts; its tokens take about a gigabyte


@dataclass(slots=True, frozen=True)
class Limits:
    """What a model and a run allow."""

    context_length: int
    vocab_size: int
    max_logprobs: int
    eos_ids: frozenset[int] = frozenset()
    on_too_long: OnTooLong = "error"
    is_strict: bool = False  # what is otherwise only warned of is an error
    model_names: frozenset[str] | None = None  # what a line may call the model; None: anything
    request_args: dict[str, Any] | None = None  # fields that replace each request's own


class Intake:
    """Prepares requests, one by one, on any thread."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self.limits = limits
        self.warnings = WarningCounts()
        self.on_warning: Callable[[str], None] = lambda text: None  # told of each one that is new
        self._lock = threading.Lock()  # of the counts

    def parse(self, fields: Mapping[str, Any]) -> Request:
        """Check a request as far as that goes without its tokens.

        Raises:
            RequestError: what is wrong with it.
        """
        limits = self.limits
        request = parse_request(
            {**fields, **(limits.request_args or {})},
            max_logprobs=limits.max_logprobs,
            is_strict=limits.is_strict,
        )
        self._check_params(request.params)
        return request

    def prepare(self, request: Request, *, repeat: int = 0, is_openai: bool = True) -> Prepared:
        """Tokenize a request's prompts, and check that they fit.

        Args:
            repeat: how many equal requests without a seed came before.
            is_openai: it is answered as the OpenAI API does.

        Raises:
            RequestError: what is wrong with it.
        """
        params = request.params
        prompts = [self._encode(prompt, params) for prompt in request.prompts]
        _check_logprobs(prompts, params)
        draws_unseeded = params.seed is None and not params.is_greedy
        meaning = meaning_of(request.prompts, params) if draws_unseeded else b""
        return Prepared(params, prompts, repeat if meaning else 0, meaning, is_openai)

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

    def _encode(self, prompt: str | list[int], params: SamplingParams) -> EncodedPrompt:
        """Return a prompt as ids that fit the context, with the text and offsets that it needs."""
        if isinstance(prompt, str):
            return self._fit(self._encode_text(prompt, params), params)
        self._check_ids(prompt, "prompt", "Was it tokenized for another model?")
        encoded = self._fit(EncodedPrompt(prompt, "", []), params)
        needs_text = params.echo or params.logprobs is not None
        return self._describe(prompt, params) if needs_text and not encoded.num_cut else encoded

    def _encode_text(self, prompt: str, params: SamplingParams) -> EncodedPrompt:
        if not self._tokenizer.has_words:
            raise self._needs_words("prompt is text", "prompt")
        self._refuse_giant(prompt, params)
        encoded = self._tokenizer.encode(
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
        hint = "The tokenizer has more tokens than the model has rows"
        self._check_ids(encoded.ids, "prompt", hint)
        return encoded

    def _describe(self, ids: list[int], params: SamplingParams) -> EncodedPrompt:
        return self._tokenizer.describe_ids(
            ids,
            with_offsets=params.echo and params.logprobs is not None,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _refuse_giant(self, prompt: str, params: SamplingParams) -> None:
        """Refuse what cannot fit before it is tokenized, which takes 300 times its size."""
        if len(prompt) <= MAX_COUNTED_CHARS:  # the error then has the exact number
            return
        least = self._tokenizer.least_tokens(prompt)
        if least <= self._room(params):
            return
        if self.limits.on_too_long == "error":
            raise self._too_long(least, params, about="at least ")
        if len(prompt) > MAX_CUT_CHARS:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt):,} characters; --on-too-long cuts prompts of at most "
                f"{MAX_CUT_CHARS:,}, for it must tokenize all of them. Shorten the prompt",
                "prompt",
            )

    def _check_params(self, params: SamplingParams) -> None:
        hint = "Was it written for another model?"
        if params.stop and not self._tokenizer.has_words:
            raise self._needs_words("stop is text", "stop")
        self._check_ids(params.stop_token_ids, "stop_token_ids", hint)
        self._check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias", hint)

    @staticmethod
    def _needs_words(found: str, param: str) -> RequestError:
        instead = "stop_token_ids" if param == "stop" else "token ids"
        return RequestError(
            "unsupported_parameter",
            f"{found}, and this run has no tokenizer; give {instead}, or run without "
            "--skip-tokenizer-init",
            param,
        )

    def _check_ids(self, ids: Iterable[int], param: str, hint: str) -> None:
        vocab_size = self.limits.vocab_size
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    "token_out_of_range",
                    f"{param} holds token id {token_id} at place {place}; this model's ids go from "
                    f"0 to {vocab_size - 1}. {hint}",
                    param,
                )

    def _room(self, params: SamplingParams) -> int:
        """Return how many tokens a prompt may have."""
        # A last token that is scored and never fed needs no place.
        is_scored_only = params.max_tokens == 0 and params.echo
        return self.limits.context_length + is_scored_only - params.max_tokens

    def _fit(self, encoded: EncodedPrompt, params: SamplingParams) -> EncodedPrompt:
        """Return the prompt if it fits the context, or cut it if that is allowed."""
        room = self._room(params)
        if len(encoded.ids) <= room:
            return encoded
        if self.limits.on_too_long == "error" or room < 1:
            raise self._too_long(len(encoded.ids), params)
        return self._cut(encoded, room, params)

    def _too_long(self, num_prompt: int, params: SamplingParams, about: str = "") -> RequestError:
        context = self.limits.context_length
        return RequestError(
            "context_length_exceeded",
            f"the prompt has {about}{num_prompt} tokens and max_tokens is {params.max_tokens}, "
            f"{about}{num_prompt + params.max_tokens} in all; the context is {context} "
            "tokens. Shorten the prompt or lower max_tokens, or let --on-too-long cut prompts",
            "max_tokens" if num_prompt < context else "prompt",
        )

    def _cut(self, encoded: EncodedPrompt, room: int, params: SamplingParams) -> EncodedPrompt:
        """Cut a prompt to `room` tokens; a BOS in front stays when the left is cut."""
        ids, num_cut = encoded.ids, len(encoded.ids) - room
        kind = f"prompts were cut by --on-too-long {self.limits.on_too_long}"
        with self._lock:
            self.warnings.add(RowWarning(kind))
        if self.limits.on_too_long == "truncate-right":
            ids = ids[:room]
        else:
            num_kept = int(ids[0] == self._tokenizer.bos_id and room > 1)
            ids = ids[:num_kept] + ids[num_kept + num_cut :]
        return replace(self._describe(ids, params), num_cut=num_cut)


def _check_logprobs(prompts: list[EncodedPrompt], params: SamplingParams) -> None:
    if params.logprobs is None:
        return
    scored = sum(len(prompt.ids) for prompt in prompts) if params.echo else 0
    num_tokens = scored + params.max_tokens * len(prompts)
    check_entries(num_tokens, max(params.n, params.num_candidates), params.logprobs)
