"""Checks the fields of a chat request (contract, section 12).

Its template is rendered later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fminfer.contract.chat_messages import parse_messages, parse_tools
from fminfer.contract.constraint import find_constraint
from fminfer.contract.fields import INT64, is_integral
from fminfer.contract.prompts import check_choices, describe_foreign_field
from fminfer.contract.read_fields import parse_fields
from fminfer.contract.request import DEFAULTS, RequestParams, make_params
from fminfer.contract.row_warnings import RowWarning
from fminfer.contract.tool_choice import HeldCalls, ToolChoice, make_held_calls
from fminfer.core.errors import RequestError

# What a template is rendered with, by its name or by that of what renders it.
_TEMPLATE_NAMES = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    }
    | {"conversation", "tokenize", "sanitize_control_tokens", "padding", "truncation"}
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "strftime_now"}
)


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """A chat request that passed; its prompt is what the template makes of it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # that the model may call; none with tool_choice "none"
    template_args: dict[str, Any]  # the request's own variables of the template
    adds_generation_prompt: bool
    continues_final_message: bool
    params: RequestParams
    fills_context: bool  # params.max_tokens is a bound: the context may leave less
    keeps_one_call: bool = False  # an answer ends behind its first call
    held_calls: HeldCalls | None = None  # what a grammar holds of its calls
    # most tokens of a thought; -1: any number; None: the request does not say
    thinking_budget: int | None = None
    includes_reasoning: bool = True
    warnings: tuple[RowWarning, ...] = ()


def overwrite_fields(
    fields: Mapping[str, Any], args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a chat request's fields with `args` over them.

    `args` have the names of completions.
    """
    merged = {**fields, **args}
    synonyms = {
        "max_tokens": "max_completion_tokens",
        "max_completion_tokens": "max_tokens",
    }
    for other in {synonyms[name] for name in synonyms if name in args} - args.keys():
        merged.pop(other, None)
    if is_integral(args.get("logprobs")):
        merged |= {"logprobs": True, "top_logprobs": args["logprobs"]}
    elif "logprobs" in args and "top_logprobs" not in args and not args["logprobs"]:
        merged.pop("top_logprobs", None)
    return merged


def parse_chat(
    fields: Mapping[str, Any],
    *,
    max_logprobs: int,
    is_strict: bool = False,
    defaults: RequestParams = DEFAULTS,
    max_new_tokens: int = INT64 - 1,
) -> ChatRequest:
    """Check one chat request; errors have the codes of the contract's section 3.

    Args:
        defaults: what a sampling parameter that is absent or null means.
        max_new_tokens: the most tokens of an answer whose request does not say.
    """
    if fields.get("messages") is None:
        raise _missing_messages_error(fields)
    values, warnings = parse_fields(
        fields, "chat", max_logprobs=max_logprobs, is_strict=is_strict
    )
    tools = parse_tools(values.get("tools"))
    choice: ToolChoice = values.get("tool_choice", ToolChoice())
    if choice.mode == "none":
        tools = []
    is_single = not values.get("parallel_tool_calls", True)
    held_calls = make_held_calls(choice, tools, is_single=is_single)
    if tools and find_constraint(values) is not None:
        _check_unforced(choice)
        held_calls = None
        warnings.append(
            RowWarning("tools cannot be called by an answer that is constrained")
        )
    if held_calls is not None:
        _check_ends(values)
    max_tokens = _parse_max_tokens(values)
    most = max_new_tokens if max_tokens is None else max_tokens
    values |= {
        "best_of": values.get("n", DEFAULTS.n),
        "logprobs": _parse_logprobs(values),
    }
    params = replace(make_params(values, defaults, most), add_special_tokens=False)
    check_choices(1, params.n, params.best_of)
    continues = values.get("continue_final_message", False)
    return ChatRequest(
        parse_messages(fields["messages"], continues=continues),
        tools,
        _parse_template_args(values),
        _parse_generation_prompt(values, continues=continues),
        continues,
        params,
        fills_context=max_tokens is None,
        keeps_one_call=is_single,
        held_calls=held_calls,
        thinking_budget=values.get("thinking_token_budget"),
        includes_reasoning=values.get("include_reasoning", True),
        warnings=tuple(warnings),
    )


def _check_unforced(choice: ToolChoice) -> None:
    if choice.is_forced:
        raise RequestError(
            "out_of_range",
            "tool_choice forces a call, and another field says what the answer must be. "
            "Keep one of them",
            "tool_choice",
        )


def _check_ends(values: Mapping[str, Any]) -> None:
    if values.get("ignore_eos"):
        raise RequestError(
            "out_of_range",
            "ignore_eos is true, and an answer whose calls follow their tools ends where "
            "it is complete. Remove ignore_eos",
            "ignore_eos",
        )


def _missing_messages_error(fields: Mapping[str, Any]) -> RequestError:
    state = "null" if "messages" in fields else "absent"
    instead = "; /v1/completions answers prompts" if "prompt" in fields else ""
    return RequestError(
        "missing_prompt",
        f'messages is {state}; give a list such as [{{"role": "user", "content": "Hello"}}]'
        f"{instead}{describe_foreign_field(fields)}",
        "messages",
    )


def _parse_max_tokens(values: Mapping[str, Any]) -> int | None:
    old = values.get("max_tokens")
    new = values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            "out_of_range",
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the "
            "same. Keep one",
            "max_completion_tokens",
        )
    return old if new is None else new


def _parse_logprobs(values: Mapping[str, Any]) -> int | None:
    """Return how many alternatives are told of each token; None: no logprobs."""
    num_top: int = values.get("top_logprobs", 0)
    if values.get("logprobs"):
        return num_top
    if num_top:
        raise RequestError(
            "out_of_range",
            f'top_logprobs is {num_top} without logprobs; add "logprobs": true',
            "top_logprobs",
        )
    return None


def _parse_generation_prompt(values: Mapping[str, Any], *, continues: bool) -> bool:
    adds: bool = values.get("add_generation_prompt", not continues)
    if adds and continues:
        raise RequestError(
            "out_of_range",
            "add_generation_prompt and continue_final_message are both true; a message "
            "is begun or continued. Set one of them to false",
            "add_generation_prompt",
        )
    return adds


def _parse_template_args(values: Mapping[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = values.get("chat_template_kwargs", {})
    for name in sorted(args.keys() & _TEMPLATE_NAMES):
        raise RequestError(
            "unsupported_parameter",
            f"chat_template_kwargs sets {name}, which the template gets from the "
            "request itself; remove it there",
            "chat_template_kwargs",
        )
    effort = values.get("reasoning_effort")
    return args if effort is None else {"reasoning_effort": effort} | args
