"""The fields of a chat request, checked; its template is rendered later (contract, section 12)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fminfer.contract.chat_messages import read_messages, read_tools
from fminfer.contract.fields import INT64, FieldReader, is_integral, show, wrong_type
from fminfer.contract.known_names import (
    NO_CONSTRAINT,
    RECORDED,
    WISHES,
    Neutral,
    check_names,
    refuse_wishes,
)
from fminfer.contract.prompts import check_choices
from fminfer.contract.request import DEFAULTS, PARAM_NAMES, SamplingParams, read_params
from fminfer.contract.row_warnings import RowWarning
from fminfer.core.errors import RequestError

_USE_TOOLS = "Give tools and tool_choice"
NEUTRAL = WISHES | {
    "prompt": Neutral((), "The prompt of a chat request is its messages"),
    "echo": Neutral((False, 0), "An answer in chat is a message; /v1/completions has echo"),
    "suffix": Neutral(("",)),
    "best_of": Neutral((1,), "/v1/completions has best_of"),
    "stream": Neutral((False,)),
    "stream_options": Neutral(),
    "functions": Neutral(([],), _USE_TOOLS),
    "function_call": Neutral(("none",), _USE_TOOLS),
    "modalities": Neutral((["text"],), "Answers are text"),
    "audio": Neutral((), "Answers are text"),
    "web_search_options": Neutral(),
    "chat_template": Neutral((), "A run takes one by --chat-template FILE"),
    "documents": Neutral((), 'Give {"documents": …} as chat_template_kwargs'),
    "add_special_tokens": Neutral((False,), "The template writes them"),
}
_OWN = frozenset(
    {"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message", "max_completion_tokens"}
    | {"top_logprobs", "reasoning_effort"}
)
_KNOWN = PARAM_NAMES | RECORDED | frozenset(NEUTRAL) | _OWN
# What a template is rendered with, by its name or by that of what renders it.
_TEMPLATE_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"conversation", "tokenize", "sanitize_control_tokens", "padding", "truncation"}
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "strftime_now"}
)


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """A chat request that passed; its prompt is what the template makes of it.

    With `fills_context`, `params.max_tokens` is an upper bound: the context may leave less.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # that the model may call; none with tool_choice "none"
    template_args: dict[str, Any]  # the request's own variables of the template
    adds_generation_prompt: bool
    continues_final_message: bool
    params: SamplingParams
    fills_context: bool
    warnings: tuple[RowWarning, ...] = ()


def is_chat(fields: Mapping[str, Any]) -> bool:
    """Tell whether a request that does not say so otherwise is one of chat."""
    return fields.get("messages") is not None and fields.get("prompt") is None


def overwrite(fields: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat request's fields with others in their place, which have completions' names."""
    found = {**fields, **args}
    same = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
    for other in {same[name] for name in same if name in args} - args.keys():
        found.pop(other, None)
    if is_integral(args.get("logprobs")):
        found |= {"logprobs": True, "top_logprobs": args["logprobs"]}
    elif "logprobs" in args and "top_logprobs" not in args and not args["logprobs"]:
        found.pop("top_logprobs", None)
    return found


def parse_chat(
    fields: Mapping[str, Any],
    *,
    max_logprobs: int,
    is_strict: bool = False,
    defaults: SamplingParams = DEFAULTS,
    max_new_tokens: int = INT64 - 1,
) -> ChatRequest:
    """Check one chat request.

    Args:
        fields: the request's object, parsed.
        max_logprobs: the largest `top_logprobs` that is allowed.
        is_strict: what is otherwise only warned of is an error.
        defaults: what a sampling parameter that is absent or null means.
        max_new_tokens: the most tokens of an answer whose request does not say.

    Raises:
        RequestError: with one of the codes of the contract's section 3.
    """
    if fields.get("messages") is None:
        raise _missing(fields)
    reader = FieldReader(dict(fields))
    refuse_wishes(fields, NEUTRAL)
    warnings = check_names(fields, _KNOWN, is_strict=is_strict)
    tools = _read_tools(fields, reader)
    warnings += _warn_of_strict(tools)
    max_tokens = _max_tokens(reader)
    most = max_new_tokens if max_tokens is None else max_tokens
    params = replace(
        read_params(reader, most, defaults),
        logprobs=_logprobs(fields, reader, max_logprobs),
        add_special_tokens=False,
    )
    check_choices(1, params.n, params.best_of)
    continues = reader.boolean("continue_final_message", False)
    return ChatRequest(
        read_messages(fields["messages"]),
        tools,
        _template_args(fields),
        _adds_generation_prompt(reader, continues),
        continues,
        params,
        fills_context=max_tokens is None,
        warnings=tuple(warnings),
    )


def _missing(fields: Mapping[str, Any]) -> RequestError:
    """Return the error of a request without messages."""
    found = "null" if "messages" in fields else "absent"
    instead = "; /v1/completions answers prompts" if "prompt" in fields else ""
    return RequestError(
        "missing_prompt",
        f'messages is {found}; give a list such as [{{"role": "user", "content": "Hello"}}]'
        f"{instead}",
        "messages",
    )


def _max_tokens(reader: FieldReader) -> int | None:
    """Return the most tokens that a request asks for, by either name."""
    old = reader.optional_integer("max_tokens", 0, INT64 - 1)
    new = reader.optional_integer("max_completion_tokens", 0, INT64 - 1)
    if old is not None and new is not None and old != new:
        raise RequestError(
            "out_of_range",
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same. Keep one",
            "max_completion_tokens",
        )
    return old if new is None else new


def _logprobs(fields: Mapping[str, Any], reader: FieldReader, most: int) -> int | None:
    """Return how many alternatives are told of each token; None: no logprobs."""
    value = fields.get("logprobs")
    if is_integral(value):
        raise RequestError(
            "invalid_type",
            f"logprobs is {show(value)}; in chat it is true, false or null. Write "
            f'"logprobs": true, "top_logprobs": {show(value)}',
            "logprobs",
        )
    is_asked = reader.boolean("logprobs", False)
    num_top = reader.integer("top_logprobs", 0, 0, most)
    if num_top and not is_asked:
        raise RequestError(
            "out_of_range",
            f'top_logprobs is {num_top} without logprobs; add "logprobs": true',
            "top_logprobs",
        )
    return num_top if is_asked else None


def _read_tools(fields: Mapping[str, Any], reader: FieldReader) -> list[dict[str, Any]]:
    """Return the tools that the model may call."""
    tools, choice = read_tools(fields.get("tools")), fields.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        raise RequestError(
            "unsupported_parameter",
            f"tool_choice is {show(choice)}, which forces a call. {NO_CONSTRAINT}, and set "
            'tool_choice to "auto" or "none"',
            "tool_choice",
        )
    if choice not in (None, "auto", "none"):
        raise wrong_type("tool_choice", choice, '"auto", "none" or null')
    if not reader.boolean("parallel_tool_calls", True) and tools and choice != "none":
        raise RequestError(
            "unsupported_parameter",
            "parallel_tool_calls is false, and nothing keeps the model from several calls. "
            "Remove it, and take the first call",
            "parallel_tool_calls",
        )
    return [] if choice == "none" else tools


def _warn_of_strict(tools: list[dict[str, Any]]) -> list[RowWarning]:
    """Return a warning if arguments are to follow their schema for certain."""
    if not any(tool["function"].get("strict") for tool in tools):
        return []
    return [RowWarning("strict of a tool is not enforced: arguments may differ from their schema")]


def _adds_generation_prompt(reader: FieldReader, continues: bool) -> bool:
    adds = reader.boolean("add_generation_prompt", not continues)
    if adds and continues:
        raise RequestError(
            "out_of_range",
            "add_generation_prompt and continue_final_message are both true; a message is begun or "
            "continued. Set one of them to false",
            "add_generation_prompt",
        )
    return adds


def _template_args(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables that the request sets."""
    value = fields.get("chat_template_kwargs")
    if value is not None and not isinstance(value, dict):
        raise wrong_type("chat_template_kwargs", value, "an object of the template's variables")
    args = dict(value or {})
    for name in sorted(args.keys() & _TEMPLATE_OWN):
        raise RequestError(
            "unsupported_parameter",
            f"chat_template_kwargs sets {name}, which the template gets from the request itself; "
            "remove it there",
            "chat_template_kwargs",
        )
    effort = fields.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong_type("reasoning_effort", effort, "a string or null")
    return args if effort is None else {"reasoning_effort": effort} | args
