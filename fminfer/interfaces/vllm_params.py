"""vLLM's `SamplingParams` as fields of a completions request."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from typing_extensions import Self

from fminfer.core.errors import UsageError

# These are no fields of a request, or are fields in another form.
_NOT_SENT = ("prompt_logprobs", "structured_outputs", "guided_decoding", "output_kind")


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids."""

    prompt_token_ids: list[int]


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """What a text must be: exactly one of the first five is given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def make_fields(self) -> dict[str, Any]:
        """Return the field `structured_outputs` of a request."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # an empty choice is none, and a request says so
        return {
            name: value for name, value in values.items() if value not in (None, False)
        }


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a prompt are drawn, with vLLM's names and defaults.

    Fields mean what they mean in a request (docs/contract.md). `vllm_arguments` lists what is
    refused when a prompt is answered.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: what the context leaves
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | dict[str, Any] | None = None
    logits_processors: Sequence[Any] | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: Any = None  # whole answers are returned, whatever it is

    def clone(self) -> Self:
        """Return a copy that shares nothing."""
        return deepcopy(self)

    def make_fields(self) -> dict[str, Any]:
        """Return the fields of a completions request; the prompt is not among them.

        Raises:
            UsageError: what no request can hold.
        """
        if self.logits_processors:
            raise UsageError(
                "SamplingParams: logits_processors are not supported. Use logit_bias, "
                "allowed_token_ids or structured_outputs"
            )
        sent = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _NOT_SENT:
            del sent[name]
        if self.logit_bias is not None:
            sent["logit_bias"] = {str(i): bias for i, bias in self.logit_bias.items()}
        if self.output_kind is not None:
            warnings.warn(
                "SamplingParams: without effect here: output_kind", stacklevel=2
            )
        constraint = self.structured_outputs
        if constraint is None:
            constraint = self.guided_decoding
        elif self.guided_decoding is not None:
            raise UsageError(
                "SamplingParams: structured_outputs and guided_decoding are both given; "
                "guided_decoding is the older name"
            )
        if isinstance(constraint, StructuredOutputsParams):
            sent["structured_outputs"] = constraint.make_fields()
        elif isinstance(constraint, Mapping):
            sent["structured_outputs"] = dict(constraint)
        elif constraint is not None:
            raise UsageError(
                f"SamplingParams: structured_outputs is a {type(constraint).__name__}; "
                "give fminfer.StructuredOutputsParams, or a dict of its fields"
            )

        if self.prompt_logprobs is not None:
            sent["echo"] = True
        if (most := self.most_logprobs) is not None:
            sent["logprobs"] = most
            # logprobs of the stop string's tokens are returned, too
            sent["include_stop_str_in_output"] = True
        return sent | {"return_token_ids": True}

    @property
    def most_logprobs(self) -> int | None:
        """The alternatives that prompt and answer need; None: no logprobs."""
        wanted = [n for n in (self.logprobs, self.prompt_logprobs) if n is not None]
        return max(wanted, default=None)
