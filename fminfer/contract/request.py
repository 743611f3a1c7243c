"""The fields of a request become a Request, or a RequestError that says what is wrong with it.

The rules are those of the OpenAI completions API as docs/contract.md spells them out. Lengths in
tokens are checked later, once prompts are tokenized.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any

from fminfer.contract.fields import INT64, FieldReader, out_of_range
from fminfer.contract.known_names import (
    RECORDED,
    WISHES,
    Neutral,
    check_names,
    refuse_wishes,
)
from fminfer.contract.prompts import check_choices, read_prompts
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.config import KnownParser
from fminfer.core.errors import RequestError

MAX_CANDIDATES = 128  # n and best_of
MAX_BIAS = 100  # of logit_bias, on either side of 0
MAX_REPETITION = 1000  # beyond it, or one over it, float32 logits lose their order
_SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "add_special_tokens",
    "skip_special_tokens",
    "return_token_ids",
)


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and what is reported of them."""

    max_tokens: int = 16
    min_tokens: int = 0  # no EOS, stop token or stop string before so many
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # of the likeliest token's probability
    n: int = 1
    best_of: int = 1  # never below n
    logprobs: int | None = None
    echo: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added)
    seed: int | None = None  # None: the run's seed, and equal lines differ
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    return_token_ids: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Tell whether a drawn token changes the logits of those after it."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)

    def num_to_feed(self, num_prompt_tokens: int) -> int:
        """Prompt tokens the model must see; one that is only scored is never fed."""
        if self.max_tokens > 0:
            return num_prompt_tokens
        return num_prompt_tokens - 1 if self.echo and self.logprobs is not None else 0

    @property
    def num_candidates(self) -> int:
        """Sequences to compute for each prompt: greedy ones are equal, so one is enough."""
        return 1 if self.is_greedy or self.max_tokens == 0 else self.best_of


DEFAULTS = SamplingParams()
RAW_TOKENS = 256  # most tokens of the completion of a text that comes without a request


@dataclass(slots=True, frozen=True)
class Request:
    """A request that passed: its prompts and its sampling params.

    A chat request's prompt is its rendered template.
    """

    prompts: list[str | list[int]]
    params: SamplingParams
    warnings: tuple[RowWarning, ...] = field(default=())
    is_chat: bool = False  # answered with messages
    fills_context: bool = False  # max_tokens is at most what the context leaves of params'
    tool_parser: KnownParser | None = None  # the form of tool calls in its answer; None: text


_CHAT_HAS_IT = "It belongs to chat: give messages in place of prompt"
# Parameters that mean nothing in a file of completions: accepted at the value that changes nothing
# and refused otherwise, so that no answer ever ignores a wish in silence.
NEUTRAL = WISHES | {
    "suffix": Neutral(("",)),
    "stream": Neutral((False,)),
    "stream_options": Neutral(({},)),
    "tools": Neutral(([],), _CHAT_HAS_IT),
    "tool_choice": Neutral(("none", "auto"), _CHAT_HAS_IT),
    "functions": Neutral(([],), _CHAT_HAS_IT),
    "chat_template_kwargs": Neutral(({},), _CHAT_HAS_IT),
    "reasoning_effort": Neutral((), _CHAT_HAS_IT),
    "max_completion_tokens": Neutral((), ours="max_tokens"),
    "top_logprobs": Neutral((0,), "Give that number as logprobs"),
}
PARAM_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_KNOWN = PARAM_NAMES | RECORDED | frozenset(NEUTRAL) | {"prompt", "messages"}


def parse_request(
    fields: dict[str, Any],
    *,
    max_logprobs: int,
    is_strict: bool = False,
    defaults: SamplingParams = DEFAULTS,
) -> Request:
    """Check one completions request.

    Args:
        fields: the request's object, parsed.
        max_logprobs: the largest `logprobs` that is allowed.
        is_strict: what is otherwise only warned of is an error.
        defaults: what a field that is absent or null means.

    Raises:
        RequestError: with one of the codes of the contract's section 3.
    """
    reader = FieldReader(fields)
    refuse_wishes(fields, NEUTRAL)
    warnings = check_names(fields, _KNOWN, is_strict=is_strict)
    n = reader.integer("n", DEFAULTS.n, 1, MAX_CANDIDATES)
    best_of = reader.integer("best_of", n, 0, MAX_CANDIDATES)
    is_below = best_of < n and fields.get("best_of") is not None
    if is_below and is_strict:
        raise out_of_range(
            "best_of", best_of, f"at least n, which is {n}; without --strict it is taken as {n}"
        )
    if is_below:
        values = (f"best_of {best_of} with n {n}",)
        warnings.append(RowWarning("best_of is below n and is taken as n", values))
    max_tokens = reader.integer("max_tokens", DEFAULTS.max_tokens, 0, INT64 - 1)
    params = replace(
        read_params(reader, max_tokens, defaults),
        best_of=max(n, best_of),
        logprobs=_logprobs(reader, fields, max_logprobs),
        echo=reader.boolean("echo", DEFAULTS.echo, also_0_1=True),
    )
    prompts = read_prompts(fields)
    check_choices(len(prompts), params.n, params.best_of)
    return Request(prompts=prompts, params=params, warnings=tuple(warnings))


def read_params(reader: FieldReader, max_tokens: int, defaults: SamplingParams) -> SamplingParams:
    """Read the sampling params that completions and chat have in common.

    Args:
        max_tokens: the request's, which `min_tokens` must not exceed.
        defaults: what a field that is absent or null means.

    Raises:
        RequestError: what is wrong with one.
    """
    n = reader.integer("n", DEFAULTS.n, 1, MAX_CANDIDATES)
    return replace(
        read_draws(reader, defaults),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(reader, max_tokens),
        n=n,
        best_of=n,
        stop=reader.strings("stop"),
        stop_token_ids=reader.token_ids("stop_token_ids"),
        frequency_penalty=reader.number("frequency_penalty", DEFAULTS.frequency_penalty, -2, 2),
        presence_penalty=reader.number("presence_penalty", DEFAULTS.presence_penalty, -2, 2),
        logit_bias=reader.biases("logit_bias", MAX_BIAS),
        seed=reader.optional_integer("seed", -INT64, INT64 - 1),
        **{name: reader.boolean(name, getattr(DEFAULTS, name)) for name in _SWITCHES},
    )


def read_draws(reader: FieldReader, defaults: SamplingParams = DEFAULTS) -> SamplingParams:
    """Read the params for which a model may have defaults of its own.

    Raises:
        RequestError: what is wrong with one.
    """
    return replace(
        defaults,
        temperature=reader.number("temperature", defaults.temperature, 0, 2),
        top_p=reader.number("top_p", defaults.top_p, 0, 1),
        top_k=max(0, reader.integer("top_k", defaults.top_k, -1, INT64 - 1)),  # -1: off in vLLM
        min_p=reader.number("min_p", defaults.min_p, 0, 1),
        repetition_penalty=reader.number(
            "repetition_penalty", defaults.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION
        ),
    )


def _logprobs(reader: FieldReader, fields: dict[str, Any], most: int) -> int | None:
    """Return how many alternatives are told of each token; false means none, as in chat."""
    is_off = fields.get("logprobs") is False
    return None if is_off else reader.optional_integer("logprobs", 0, most)


def _min_tokens(reader: FieldReader, max_tokens: int) -> int:
    min_tokens = reader.integer("min_tokens", DEFAULTS.min_tokens, 0, INT64 - 1)
    if min_tokens > max_tokens:
        raise RequestError(
            "out_of_range",
            f"min_tokens is {min_tokens} and max_tokens is {max_tokens}; min_tokens must not be "
            "larger. Lower min_tokens or raise max_tokens",
            "min_tokens",
        )
    return min_tokens
