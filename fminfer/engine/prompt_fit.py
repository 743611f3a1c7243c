"""Fits prompts, as ids, into the model's context beside what is to be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from fminfer.contract.prompts import MAX_ENTRIES, check_text
from fminfer.contract.request import DEFAULTS, RequestParams, VectorSpec
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.config import EngineConfig, OnTooLong
from fminfer.core.errors import RequestError
from fminfer.core.quantities import with_noun
from fminfer.engine.scheduler import Scheduler
from fminfer.engine.sequence import PromptState, RequestState, Walk
from fminfer.text.encoded_prompt import EncodedPrompt
from fminfer.text.tokenizer import Tokenizer

# a prompt up to this length is tokenized whatever the context
MAX_COUNTED_CHARS = 2**16
# longest prompt that --on-too-long cuts; its tokens take about a gigabyte
MAX_CUT_CHARS = 2**22
# that a request cuts itself: any client of a server may ask for it
MAX_OWN_CUT_CHARS = 2**20


CUT = "--on-too-long truncate-left"  # a flag of run, check and serve
MORE_TOKENS = "The tokenizer has more tokens than the model has rows"
OTHER_MODEL = "Was it tokenized for another model?"
SHORTER = RowWarning(
    "chat requests without max_tokens may draw fewer tokens than the context leaves: "
    "the KV cache has no room for more, or a line for more logprobs. Raise --budget, "
    "or give max_tokens"
)


Ends = tuple[int, int]  # number of special tokens before a text, and after it


@dataclass(slots=True, frozen=True)
class KvSize:
    """The size of the KV cache."""

    num_blocks: int
    block_size: int  # tokens

    def max_draws(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Return how many tokens each sequence of a prompt can draw; below 1 if none."""
        num_common = num_prompt_tokens // self.block_size  # full blocks that they share
        num_blocks = self.num_blocks + (num_sequences - 1) * num_common
        # The last token drawn is never fed.
        return num_blocks // num_sequences * self.block_size - num_prompt_tokens + 1


@dataclass(slots=True, frozen=True)
class RequestLimits:
    """What a model and a run allow, and what they take where a request does not say."""

    context_length: int
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    config: EngineConfig = field(default_factory=EngineConfig)
    # what a line may call the model; None: anything
    model_names: frozenset[str] | None = None
    defaults: RequestParams = DEFAULTS  # of params that a request leaves out
    # of a chat request that does not say; None: the context's
    max_new_tokens: int | None = None
    kv_size: KvSize | None = None  # of each pipeline, once it is known
    chat_template: str | None = None  # in place of the model's own
    # What a decoder begins with, behind an encoder; None: there is no encoder.
    start_ids: tuple[int, ...] | None = None
    vectors: VectorSpec | None = None  # what the model gives; None: it generates text
    source_length: int = 0  # tokens that an encoder before a decoder reads, at most


@dataclass(slots=True, frozen=True)
class PromptFit:
    """Fits the prompts of one request; they are from the field `source`, which errors name."""

    tokenizer: Tokenizer
    limits: RequestLimits
    params: RequestParams
    warn: Callable[[RowWarning], object]
    source: str = "prompt"
    # an encoder reads them, and a decoder has a context of its own
    is_source: bool = False
    # max_tokens of the params is a bound, lowered to what is left
    fills_context: bool = False
    is_cut: bool = True  # the run may cut it by --on-too-long
    # Cuts it to so many tokens on a side; None: here, by its ids alone.
    cut: Callable[[int, str], EncodedPrompt] | None = None

    @property
    def on_too_long(self) -> OnTooLong:
        return self.limits.config.on_too_long if self.is_cut else "error"

    @property
    def is_scored(self) -> bool:
        """Whether the prompts' own logprobs are told, at their offsets."""
        return self.params.echo and self.params.logprobs is not None

    def encode(self, prompt: str | list[int]) -> EncodedPrompt:
        """Return a prompt as ids that fit the context, with its text and offsets if needed."""
        if isinstance(prompt, str):
            return self.cut_to_fit(
                self._encode_text(prompt, self.params.add_special_tokens)
            )
        check_ids(prompt, self.limits.vocab_size, self.source, OTHER_MODEL)
        encoded = self.cut_to_fit(EncodedPrompt(prompt, "", []))
        return encoded if encoded.num_cut else self._describe_if_returned(prompt)

    def encode_source(self, prompt: str | list[int]) -> EncodedPrompt:
        """Return what the encoder reads, which has the whole context for itself."""
        params = replace(self.params, max_tokens=0, logprobs=None, min_tokens=0)
        most = self.limits.source_length or self.limits.context_length
        limits = replace(self.limits, context_length=most)
        return replace(self, params=params, limits=limits, is_source=True).encode(
            prompt
        )

    def encode_decoder_start(self, source: EncodedPrompt) -> EncodedPrompt:
        """Return what the decoder goes on from: the model's own start, and `decoder_prompt`."""
        decoder_prompt = self.params.decoder_prompt
        if self.is_scored and not decoder_prompt:
            raise RequestError(
                "unsupported_parameter",
                "echo with logprobs scores what a decoder is given, and this model's "
                "encoder reads the prompt. Give the text to be scored as "
                "decoder_prompt, or leave echo out",
                "echo",
            )
        fit = replace(self, source="decoder_prompt", is_cut=False)
        # not what forces a BOS
        start = [*(self.limits.start_ids or ())][: 1 if decoder_prompt else None]
        if isinstance(decoder_prompt, str) and decoder_prompt:
            encoded = fit._encode_text(
                check_text(decoder_prompt, fit.source), adds_special_tokens=False
            )
        else:
            check_ids(
                decoder_prompt or (), self.limits.vocab_size, fit.source, OTHER_MODEL
            )
            encoded = fit._describe_if_returned([*(decoder_prompt or ())])
        text = source.text if self.params.echo and not decoder_prompt else encoded.text
        offsets = [0] * len(start) + encoded.offsets if encoded.offsets else []
        return fit._cut_to_context(
            replace(encoded, ids=start + encoded.ids, text=text, offsets=offsets)
        )

    def _encode_text(self, text: str, adds_special_tokens: bool) -> EncodedPrompt:
        if not self.tokenizer.has_words:
            raise no_tokenizer_error(f"{self.source} is text", self.source)
        self.check_text_size(text)
        encoded = self.tokenizer.encode(
            text, with_offsets=self.is_scored, add_special_tokens=adds_special_tokens
        )
        if not encoded.ids and self.source != "decoder_prompt":
            raise RequestError(
                "missing_prompt",
                'prompt is "", and this model\'s tokenizer has no token to begin with (BOS); '
                "give at least one character",
                "prompt",
            )
        check_ids(encoded.ids, self.limits.vocab_size, self.source, MORE_TOKENS)
        return replace(encoded, is_whole_text=True)

    def _describe_if_returned(self, ids: list[int]) -> EncodedPrompt:
        needs_text = bool(ids) and (
            self.params.echo or self.params.logprobs is not None
        )
        return self.describe_ids(ids) if needs_text else EncodedPrompt(ids, "", [])

    def cut_to_fit(self, encoded: EncodedPrompt) -> EncodedPrompt:
        """Return a prompt as its request and then the run cuts it."""
        is_framed = encoded.is_whole_text and self.params.add_special_tokens
        front, back = self.tokenizer.added_ids if is_framed else ([], [])
        added = (len(front), len(back))
        wished = self._cut_to_request(encoded, added)
        fitting = self._cut_to_context(wished, added)
        if fitting is not wished:
            self.warn(
                RowWarning(f"prompts were cut by --on-too-long {self.on_too_long}")
            )
        return fitting

    def check_text_size(self, prompt: str) -> None:
        """Check that a text can fit before it is tokenized, which takes 300 times its size."""
        if len(prompt) <= MAX_COUNTED_CHARS:  # the error then has the exact number
            return
        least = self.tokenizer.count_least_tokens(prompt)
        if least <= self._max_prompt_tokens:
            return
        if self.on_too_long == "error" and self.params.truncate_prompt_tokens is None:
            raise self._too_long_error(least, about="at least ")
        most = MAX_OWN_CUT_CHARS if self.on_too_long == "error" else MAX_CUT_CHARS
        if len(prompt) > most:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt):,} characters; prompts are cut that have at most "
                f"{most:,}, because all of them must be tokenized. Shorten the prompt",
                self.source,
            )

    def _cut_to_request(self, encoded: EncodedPrompt, added: Ends) -> EncodedPrompt:
        """Return the prompt, cut to `truncate_prompt_tokens`."""
        wished = self.params.truncate_prompt_tokens
        num_tokens = len(encoded.ids)
        if wished == -1:
            wished = (
                self._max_prompt_tokens
                if num_tokens <= self._max_prompt_tokens
                else self._max_cut_tokens
            )
        if wished is None or not 0 < wished < num_tokens:
            return encoded
        return self._cut_ids(encoded, wished, self.params.truncation_side, added)

    def _cut_to_context(
        self, encoded: EncodedPrompt, added: Ends = (0, 0)
    ) -> EncodedPrompt:
        """Return the prompt if it fits the context; otherwise cut it, or raise a RequestError.

        The tokenizer's special tokens, or BOS, stay also if ids or a chat template contain them.
        """
        if len(encoded.ids) <= self._max_prompt_tokens:
            return encoded
        room = self._max_cut_tokens
        if self.on_too_long == "error" or room < 1:
            raise self._too_long_error(len(encoded.ids))
        start: list[int | None] = [*self.tokenizer.added_ids[0]] or [
            self.tokenizer.bos_id
        ]
        if encoded.ids[: len(start)] == start:
            added = (len(start), added[1])
        return self._cut_ids(
            encoded, room, self.on_too_long.removeprefix("truncate-"), added
        )

    def describe_ids(self, ids: list[int]) -> EncodedPrompt:
        return self.tokenizer.describe_ids(
            ids,
            with_offsets=self.is_scored,
            skip_special_tokens=self.params.skip_special_tokens,
        )

    def settle_max_tokens(self, num_prompt_tokens: int) -> RequestParams:
        """Return the params with the `max_tokens` that the context leaves.

        That is for a chat which does not say it. No default may make a request impossible,
        through what the KV cache cannot hold, or more logprobs than a line may have.
        """
        params = self.params
        kv = self.limits.kv_size
        if not self.fills_context:
            return params
        num_choices = max(params.n, params.num_candidates)
        wished = most = min(
            params.max_tokens, self.limits.context_length - num_prompt_tokens
        )
        if kv is not None:
            most = min(most, kv.max_draws(num_prompt_tokens, params.num_candidates))
        if params.logprobs is not None:
            most = min(most, MAX_ENTRIES // (num_choices * (1 + params.logprobs)))
        most = max(1, params.min_tokens, most)
        if most < wished:
            self.warn(SHORTER)
        return replace(params, max_tokens=most)

    @property
    def _max_prompt_tokens(self) -> int:
        """How many tokens a prompt may have."""
        if self.fills_context:
            return self.limits.context_length - max(1, self.params.min_tokens)
        # A last token that is scored and never fed needs no place.
        is_scored_only = (
            not self.is_source and self.params.max_tokens == 0 and self.params.echo
        )
        return self.limits.context_length + is_scored_only - self.params.max_tokens

    @property
    def _max_cut_tokens(self) -> int:
        """How many tokens a cut prompt may have.

        If a chat does not say `max_tokens`, it leaves room for what completions draw.
        """
        if not self.fills_context:
            return self._max_prompt_tokens
        least = max(DEFAULTS.max_tokens, self.params.min_tokens)
        return self.limits.context_length - min(least, self.params.max_tokens)

    def _too_long_error(self, num_prompt: int, about: str = "") -> RequestError:
        context = self.limits.context_length
        max_tokens = self.params.max_tokens
        if self.is_source:
            return RequestError(
                "context_length_exceeded",
                f"the prompt has {about}{with_noun(num_prompt, 'token')}; this model's "
                f"encoder reads at most {context} tokens. Shorten the prompt, or have "
                f"it cut by {CUT}",
                self.source,
            )
        longest = "max_tokens is"
        shorter = "lower max_tokens"
        if (
            self.params.constraint is not None
            and self.params.constraint.kind == "labels"
        ):
            longest = "the longest label takes"
            shorter = "its labels"
        needs = (
            f" and {longest} {max_tokens}, {about}{num_prompt + max_tokens:,} in all"
        )
        if self.fills_context:
            least = self.params.min_tokens
            needs = (
                f" and min_tokens is {least}"
                if least > 1
                else ", and one more is to be drawn"
            )
        remedy = f"Shorten the prompt or {shorter}, or have it cut by {CUT}"
        if self._max_prompt_tokens < 1:  # for any prompt
            name = "min_tokens" if self.fills_context else "max_tokens"
            remedy = f"Lower {name}, which leaves no place for a prompt"
        return RequestError(
            "context_length_exceeded",
            f"the prompt has {about}{with_noun(num_prompt, 'token')}{needs}; this "
            "model's maximum "
            f"context length is {context} tokens. {remedy}",
            "max_tokens" if num_prompt < context else self.source,
        )

    def _cut_ids(
        self, encoded: EncodedPrompt, room: int, side: str, added: Ends
    ) -> EncodedPrompt:
        """Cut a prompt to `room` tokens, but keep the special tokens at both ends."""
        if self.cut is not None:
            return self.cut(room, side)
        ids = encoded.ids
        front, back = added
        text = ids[front : len(ids) - back]
        ends = [ids[:front], ids[len(ids) - back :]]
        if front + back >= room:  # no text would be left
            ends = [[], []]
        size = room - len(ends[0]) - len(ends[1])
        text = text[:size] if side == "right" else text[-size:]

        kept = ends[0] + text + ends[1]
        num_cut = encoded.num_cut + len(ids) - len(kept)
        return replace(self.describe_ids(kept), num_cut=num_cut)


def no_tokenizer_error(reason: str, param: str) -> RequestError:
    """Return the error of a text in a run without a tokenizer."""
    instead = {"stop": "stop_token_ids", "bad_words": "logit_bias"}
    return RequestError(
        "unsupported_parameter",
        f"{reason}, and this run has no tokenizer; give "
        f"{instead.get(param, 'a prompt of token ids')}, or run without --skip-tokenizer-init",
        param,
    )


def check_ids(ids: Iterable[int], vocab_size: int, param: str, hint: str) -> None:
    """Check that the model has these ids."""
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                "token_out_of_range",
                f"{param} holds token id {token_id} at index {place}; this model's ids go from "
                f"0 to {vocab_size - 1}. {hint}",
                param,
            )


def _check_room_of_labels(
    prompt: PromptState, walk: Walk, scheduler: Scheduler
) -> None:
    branch = walk.make_longest_branch()
    num_read = len(prompt.ids_to_read)
    fits = num_read <= scheduler.most_read and scheduler.kv.fits(branch)
    branch.sequences = []  # which point back at it
    if not fits:
        raise RequestError(
            "out_of_memory",
            f"the prompt and its longest label need {with_noun(len(branch.ids), 'token')} of "
            f"KV cache, and an encoder reads {num_read:,}; the budget is "
            f"{scheduler.pool.num_tokens} tokens. Raise --budget, or shorten the prompt",
            "prompt",
        )


def check_room(state: RequestState, scheduler: Scheduler) -> None:
    """Check that the KV cache could hold each prompt of a request alone."""
    params = state.prepared.params
    name, num = (
        ("best_of", params.best_of) if params.best_of > params.n else ("n", params.n)
    )
    lower = f"max_tokens or {name}" if num > 1 else "max_tokens"
    for prompt in state.prompts:
        if prompt.walk is not None:
            _check_room_of_labels(prompt, prompt.walk, scheduler)
            continue
        if len(prompt.sequences) > scheduler.max_rows:
            raise RequestError(
                "out_of_memory",
                f"{name} is {num}, and these {len(prompt.sequences)} candidates run "
                "together; --max-rows allows "
                f"{with_noun(scheduler.max_rows, 'sequence')} at once. Raise it, or "
                f"lower {name}",
                name,
            )
        if len(prompt.ids_to_read) > scheduler.most_read:
            raise RequestError(
                "out_of_memory",
                f"the prompt has {with_noun(len(prompt.ids_to_read), 'token')}, which an "
                f"encoder reads at once; there is memory for {scheduler.most_read:,}. "
                "Shorten it, or run on a machine with more memory",
                "prompt",
            )
        if prompt.num_to_feed > 0 and not scheduler.kv.fits(prompt):
            num_read = len(prompt.ids_to_read)
            beside = (
                f" beside {with_noun(num_read, 'token')} for its encoder"
                if num_read
                else ""
            )
            raise RequestError(
                "out_of_memory",
                "the prompt needs the KV cache of "
                f"{with_noun(prompt.num_kv_tokens, 'token')} for each of its "
                f"{with_noun(len(prompt.sequences), 'candidate')} at once{beside}; the "
                f"budget is {scheduler.pool.num_tokens} tokens. Raise --budget, lower "
                f"{lower}, or shorten the prompt",
                "max_tokens",
            )
