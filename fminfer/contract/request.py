"""Turns the fields of a request into a Request, or raises what is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fminfer.contract.constraint import find_constraint
from fminfer.contract.endpoints import Endpoint
from fminfer.contract.fields import out_of_range_error
from fminfer.contract.labels import make_label_params
from fminfer.contract.prompts import check_choices, parse_prompts
from fminfer.contract.read_fields import parse_fields
from fminfer.contract.row_warnings import RowWarning
from fminfer.contract.tool_choice import CallMode
from fminfer.core.config import Constraint, KnownParser
from fminfer.core.errors import RequestError
from fminfer.core.thought_form import Thought


@dataclass(slots=True, frozen=True)
class RequestParams:
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
    allowed_token_ids: tuple[int, ...] = ()  # in order, each once; none: all are
    bad_words: tuple[str, ...] = ()  # in order, each once
    truncate_prompt_tokens: int | None = None  # -1: what the context leaves
    truncation_side: str = "left"  # or "right"
    constraint: Constraint | None = None  # what the text must be
    thought: Thought | None = None  # before the text of a chat; None: all is text
    seed: int | None = None  # None: the run's seed, and equal lines differ
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    # None: the decoder begins at once
    decoder_prompt: str | tuple[int, ...] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def is_random(self) -> bool:
        """Return whether tokens are drawn at random, with a seed or without."""
        return self.max_tokens > 0 and not self.is_greedy

    @property
    def effective_seed(self) -> int | None:
        """The request's seed, if its answer depends on it."""
        return self.seed if self.is_random else None

    @property
    def is_by_chance(self) -> bool:
        """Return whether equal requests may have different answers."""
        return self.is_random and self.seed is None

    @property
    def has_penalties(self) -> bool:
        """Return whether a drawn token changes the logits of those after it."""
        return (
            self.frequency_penalty,
            self.presence_penalty,
            self.repetition_penalty,
        ) != (0, 0, 1)

    def count_fed_tokens(self, num_prompt_tokens: int) -> int:
        """Prompt tokens the model must see; one that is only scored is never fed."""
        if self.max_tokens > 0:
            return num_prompt_tokens
        return num_prompt_tokens - 1 if self.echo and self.logprobs is not None else 0

    @property
    def num_candidates(self) -> int:
        """Sequences to compute for each prompt: greedy ones are equal, so one is enough."""
        return self.best_of if self.is_random else 1


DEFAULTS = RequestParams()
_PARAMS = frozenset(each.name for each in dataclasses.fields(RequestParams))
# How two vectors are compared. Distances are negative, so that more is nearer.
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)
# The field in which a request has its text: that of vectors, chats or completions.
TextField = Literal["input", "messages", "prompt"]
RAW_TOKENS = 256  # most tokens of the completion of a text that comes without a request


@dataclass(slots=True, frozen=True)
class VectorSpec:
    """What a model's vectors are, and what requests for them may ask."""

    size: int  # numbers of a vector
    is_scored: bool = False  # they are the logits of classes
    # a pair's score is the logit itself, not the probability of it
    is_score_logit: bool = False
    # How probabilities of classes are made of logits; "identity": they are the logits.
    odds: Literal["softmax", "sigmoid", "identity"] = "softmax"
    is_normalized: bool = False  # their length is 1
    has_types: bool = False  # the second text of a pair has a token type of its own
    labels: tuple[str, ...] = ()  # of the classes
    # by name, what stands before a text
    prompts: Mapping[str, str] = field(default_factory=dict)
    # the name of the one that a request without a name gets
    default_prompt: str | None = None
    is_lowercased: bool = False  # lower texts before the tokenizer's own normalizer
    similarity: Similarity = "cosine"  # of an embedding model: how its scores are made


@dataclass(slots=True, frozen=True)
class VectorWish:
    """What is made of the vectors of a request's prompts."""

    facts: VectorSpec = field(repr=False)  # the same for all requests of a model
    prefix: str = ""  # before each text, or before a pair
    dimensions: int | None = None  # keep the first so many numbers
    is_normalized: bool = False  # to length 1
    is_base64: bool = False
    is_raw: bool = False  # scores and classes as logits
    # what prompts are compared with: each, or the only one with all
    seconds: tuple[str, ...] = ()
    top_n: int | None = None
    returns_documents: bool = True
    # The fields that hold the texts and the seconds, for errors.
    names: tuple[str, str] = field(default=("input", ""), repr=False, compare=False)


@dataclass(slots=True, frozen=True)
class Request:
    """A request that passed. A chat's prompt is its rendered template."""

    prompts: list[str | list[int]]
    params: RequestParams
    warnings: tuple[RowWarning, ...] = field(default=())
    endpoint: Endpoint = "completions"
    # max_tokens is at most what the context leaves of params'
    fills_context: bool = False
    # the form of tool calls in its answer; None: text
    tool_parser: KnownParser | None = None
    # the tools, if that form needs their schemas
    tools: tuple[dict[str, Any], ...] = ()
    keeps_one_call: bool = False  # its answer ends behind its first call
    call_mode: CallMode = "auto"  # whether its answer must be calls
    # what is made of its prompts' vectors; None: it draws
    vectors: VectorWish | None = None


def parse_request(
    fields: dict[str, Any],
    *,
    max_logprobs: int,
    is_strict: bool = False,
    defaults: RequestParams = DEFAULTS,
) -> Request:
    """Check one completions request; errors have the codes of the contract's section 3.

    `defaults` are what a field that is absent or null means.
    """
    prompts = parse_prompts(fields)
    values, warnings = parse_fields(
        fields, "completions", max_logprobs=max_logprobs, is_strict=is_strict
    )
    n = values.get("n", DEFAULTS.n)
    best_of = values.get("best_of")
    if best_of is not None and best_of < n:
        if is_strict:
            allowed = f"at least n, which is {n}; without --strict it is taken as {n}"
            raise out_of_range_error("best_of", best_of, allowed)
        shown = (f"best_of {best_of} with n {n}",)
        warnings.append(RowWarning("best_of is below n and is taken as n", shown))
    values["best_of"] = max(n, best_of or 0)
    params = make_params(
        values, defaults, values.get("max_tokens", DEFAULTS.max_tokens)
    )
    check_choices(len(prompts), n, params.best_of)
    return Request(prompts=prompts, params=params, warnings=tuple(warnings))


def make_params(
    values: Mapping[str, Any], defaults: RequestParams, max_tokens: int
) -> RequestParams:
    """Return the sampling params of a request's fields as they were read."""
    min_tokens = values.get("min_tokens", DEFAULTS.min_tokens)
    if min_tokens > max_tokens:
        raise RequestError(
            "out_of_range",
            f"min_tokens is {min_tokens} and max_tokens is {max_tokens}; min_tokens must not be "
            "larger. Lower min_tokens or raise max_tokens",
            "min_tokens",
        )
    if (
        values.get("truncation_side") == "right"
        and "truncate_prompt_tokens" not in values
    ):
        raise out_of_range_error(
            "truncation_side", "right", "null without truncate_prompt_tokens"
        )
    changes = {name: values[name] for name in values.keys() & _PARAMS}
    constraint = find_constraint(values)
    changes |= {"max_tokens": max_tokens, "constraint": constraint}
    if constraint is not None and constraint.kind == "labels":
        changes |= make_label_params(values)
    return replace(defaults, **changes)
