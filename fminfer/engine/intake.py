"""From an input line to a request that can run: parse, tokenize, check lengths.

It knows the model's limits, and nothing of what else is running.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fminfer.config import OnTooLong
from fminfer.detokenizer import Detokenizer
from fminfer.engine.logit_edits import LogitEdits
from fminfer.engine.noise import digest, noise_key
from fminfer.engine.seen import SeenCounts
from fminfer.engine.sequence import PromptState, RequestState, Sequence
from fminfer.errors import RequestError, row_error
from fminfer.fields import show
from fminfer.input.envelope import Envelope, open_envelope
from fminfer.input.lines import Line
from fminfer.prompts import check_entries
from fminfer.request import Request, SamplingParams, parse_request
from fminfer.row_warnings import RowWarning, WarningCounts
from fminfer.tokenizer import EncodedPrompt, Tokenizer

MAX_COUNTED_CHARS = 2**16  # of a prompt that is tokenized whatever the context
MAX_CUT_CHARS = 2**22  # of a prompt that --on-too-long cuts; their tokens take about a gigabyte


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
    request_args: dict[str, Any] | None = None  # fields that replace each line's own


class Intake:
    """Prepares lines one by one.

    Args:
        seed: for requests without one of their own.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Limits, seed: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._seed = seed
        self._source = 0  # the file being read
        self._equal_lines = SeenCounts()  # its unseeded lines so far, by digest
        self._custom_ids = SeenCounts()  # the file's so far, by digest
        self.warnings = WarningCounts()
        self.on_warning: Callable[[str], None] = lambda text: None  # told of each one that is new

    def start_run(self) -> None:
        """Forget the lines of earlier runs, so that a run repeated gives the same answers."""
        self._start_file(0)
        self.warnings.clear()

    def prepare(self, line: Line, envelope: Envelope) -> RequestState:
        """Return the line's request, ready for the scheduler.

        Raises:
            RequestError: what is wrong with it.
        """
        request, request_digest, repeat = self.identify(line, envelope)
        state = RequestState(line, envelope, request, read_s=time.perf_counter())
        for index, prompt in enumerate(request.prompts):
            encoded = self._encode(prompt, request.params)
            state.prompts.append(self._start(state, index, encoded, request_digest, repeat))
        _check_logprobs(state)
        self.note(line, *envelope.warnings, *request.warnings)
        return state

    def note(self, line: Line, *warnings: RowWarning) -> None:
        """Count what is strange about a line, and tell what is new of it."""
        for warning in warnings:
            if new := self.warnings.add(warning):
                self.on_warning(f"Warning: line {line.number}: {new}")

    def pass_over(self, line: Line) -> None:
        """Count a line that an earlier run has answered: those after it depend on it.

        Equal lines draw differently by their number, and no two may have one custom_id.

        Raises:
            FminferError: the run cannot go on.
        """
        try:
            self.identify(line, open_envelope(line))
        except Exception as error:  # that run has told what is wrong with it
            row_error(error, line.number)

    def identify(self, line: Line, envelope: Envelope) -> tuple[Request, bytes, int]:
        """Return a line's request, its digest, and how many equal ones came before it.

        Raises:
            RequestError: what is wrong with it, as far as that shows without its tokens.
        """
        if line.source != self._source:
            self._start_file(line.source)
        self._check_envelope(line, envelope)
        request = parse_request(
            envelope.fields | (self._limits.request_args or {}),
            envelope.request,
            max_logprobs=self._limits.max_logprobs,
            is_strict=self._limits.is_strict,
        )
        self._check_params(request.params)
        request_digest = digest(request.raw)
        return request, request_digest, self._count_repeat(line, request.params, request_digest)

    def _start_file(self, source: int) -> None:
        self._source = source
        self._equal_lines.clear()
        self._custom_ids.clear()

    def _check_envelope(self, line: Line, envelope: Envelope) -> None:
        """Check what stands around the request, and that it is for this model."""
        custom_id = envelope.custom_id
        is_alone = line.num_equal is not None  # the lines before it in its file may be elsewhere
        if envelope.shape == "batch" and custom_id.startswith(b'"') and not is_alone:
            name = json.loads(custom_id.decode())  # one string can be written in many ways
            id_digest = digest(name.encode("utf-8", "surrogatepass"))
            if self._custom_ids.add(id_digest):
                raise RequestError(
                    "duplicate_custom_id",
                    f"custom_id {show(name)} of line {line.number} is also an earlier line's; "
                    "each line of a file needs one of its own. Change or remove one of the two",
                    "custom_id",
                )
        if envelope.error is not None:
            raise envelope.error
        if self._limits.is_strict and envelope.warnings:
            raise RequestError(
                "unsupported_parameter",
                f"{envelope.warnings[0]}; take it out, or run without --strict",
            )
        self._check_model(envelope.fields)

    def _check_model(self, fields: dict[str, Any]) -> None:
        names = self._limits.model_names
        for name in ("model", "engine"):
            asked = fields.get(name)
            is_same = asked is None or (isinstance(asked, str) and asked in (names or ()))
            if names is not None and not is_same:
                known = " or ".join(sorted(names))
                raise RequestError(
                    "unsupported_parameter",
                    f"{name} is {show(asked)}, and the model of this run is {known}; answer the "
                    "line with its own model, or run without --check-model",
                    name,
                )

    def _count_repeat(self, line: Line, params: SamplingParams, request_digest: bytes) -> int:
        """Count equal lines without a seed before this one in its file, so that they differ."""
        if params.seed is not None or params.is_greedy:
            return 0
        return self._equal_lines.add(request_digest) if line.num_equal is None else line.num_equal

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
        if self._limits.on_too_long == "error":
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
        vocab_size = self._limits.vocab_size
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
        return self._limits.context_length + is_scored_only - params.max_tokens

    def _fit(self, encoded: EncodedPrompt, params: SamplingParams) -> EncodedPrompt:
        """Return the prompt if it fits the context, or what is left of it if it may be cut."""
        room = self._room(params)
        if len(encoded.ids) <= room:
            return encoded
        if self._limits.on_too_long == "error" or room < 1:
            raise self._too_long(len(encoded.ids), params)
        return self._cut(encoded, room, params)

    def _too_long(self, num_prompt: int, params: SamplingParams, about: str = "") -> RequestError:
        context = self._limits.context_length
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
        kind = f"prompts were cut by --on-too-long {self._limits.on_too_long}"
        self.warnings.add(RowWarning(kind))
        if self._limits.on_too_long == "truncate-right":
            ids = ids[:room]
        else:
            num_kept = int(ids[0] == self._tokenizer.bos_id and room > 1)
            ids = ids[:num_kept] + ids[num_kept + num_cut :]
        return replace(self._describe(ids, params), num_cut=num_cut)

    def _start(
        self,
        state: RequestState,
        index: int,
        encoded: EncodedPrompt,
        request_digest: bytes,
        repeat: int,
    ) -> PromptState:
        params = state.request.params
        held_ids = self._limits.eos_ids.union(params.stop_token_ids)
        end_ids = frozenset(params.stop_token_ids) if params.ignore_eos else held_ids
        prompt = PromptState(state, index, encoded, end_ids=end_ids, held_ids=held_ids)
        seed = self._seed if params.seed is None else params.seed
        is_text = isinstance(state.request.prompts[index], str) and not encoded.num_cut
        for candidate in range(params.num_candidates):
            key = noise_key(seed, repeat, request_digest, index, candidate)
            sequence = Sequence(prompt, key, None)
            if params.max_tokens > 0:
                sequence.detokenizer = Detokenizer(
                    self._tokenizer,
                    encoded.ids,
                    is_whole_text=is_text,
                    skip_special_tokens=params.skip_special_tokens,
                )
            if params.logit_bias or params.has_penalties:
                sequence.edits = LogitEdits(params, encoded.ids)
            prompt.sequences.append(sequence)
        return prompt


def _check_logprobs(state: RequestState) -> None:
    params = state.request.params
    if params.logprobs is None:
        return
    scored = sum(len(prompt.ids) for prompt in state.prompts) if params.echo else 0
    num_tokens = scored + params.max_tokens * len(state.prompts)
    check_entries(num_tokens, max(params.n, params.num_candidates), params.logprobs)
