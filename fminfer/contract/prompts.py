"""Parses a request's prompts: text or token ids, one or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from fminfer.contract.fields import describe_value, is_integral, wrong_type_error
from fminfer.core.errors import RequestError

# Of all prompts of a line together. A choice takes some kilobytes before its first token.
MAX_CHOICES = 16_384
# Of a line's logprobs: tokens and alternatives. As objects and JSON one takes 150 to 550 bytes.
MAX_ENTRIES = 1 << 24
# What a message or a document may not have beside its text, and the remedy.
MEDIA = dict.fromkeys(
    (
        "image",
        "images",
        "image_url",
        "image_urls",
        "image_data",
        "input_image",
        "video",
        "videos",
        "video_url",
        "input_audio",
        "audio_url",
        "attachments",
        "file_ids",
    ),
    "only text is read. Remove it",
)
# Requests of other services by a field of theirs, and what to write instead.
_FOREIGN = {
    "inputs": "fminfer calls it prompt, and the fields of parameters stand beside it",
    "contents": "Gemini calls it so. Write it as messages, each with a role and content",
    "modelInput": "Bedrock calls it so. Write its fields into an object that is called request",
    "params": "Anthropic calls it so. Call it body, and give the line a method and a url",
    "message": "Cohere calls it so. Write it as messages, each with a role and content",
    "chat_history": "Cohere calls it so. Write it as messages, each with a role and content",
}


def parse_prompts(
    obj: Mapping[str, Any], name: str = "prompt"
) -> list[str | list[int]]:
    """Return the prompts of a request, at least one, from the field of that name."""
    value = obj.get(name)
    if value is None:
        raise _missing_prompt_error(obj, name)
    if obj.get("messages") is not None:
        raise RequestError(
            "unsupported_parameter",
            "the request has a prompt and messages; keep the one that is to be answered",
            "messages",
        )
    if isinstance(value, str):
        return [check_text(value, name)]
    if isinstance(value, list) and not value:
        raise RequestError(
            "out_of_range", f"{name} is an empty list; give a prompt", name
        )
    if _is_list_of(value, lambda v: isinstance(v, str)):
        return [check_text(text, name) for text in value]
    if _is_list_of(value, is_integral):
        return [_parse_token_ids(value, name)]
    if _is_list_of(value, lambda ids: _is_list_of(ids, is_integral)):
        return [_parse_token_ids(ids, name) for ids in value]
    allowed = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    raise wrong_type_error(name, value, allowed)


def check_choices(
    num_prompts: int, n: int, best_of: int, source: str = "prompt"
) -> None:
    """Raise an error if a line has more choices or candidates than it may have."""
    num_choices = num_prompts * max(n, best_of)
    if num_choices <= MAX_CHOICES:
        return
    name = source if best_of == 1 else "n" if best_of == n else "best_of"
    each = (
        f" and {name} is {best_of}, {num_choices:,} choices in all"
        if name != source
        else ""
    )
    lower = f"Lower {name}, or put" if name != source else "Put"
    raise RequestError(
        "out_of_range",
        f"{source} holds {num_prompts:,} prompts{each}; a line may have at most "
        f"{MAX_CHOICES:,}. {lower} the prompts on several lines",
        name,
    )


def check_logprob_count(num_tokens: int, num_choices: int, logprobs: int) -> None:
    """Raise an error if a line asks for more logprobs than it may.

    `num_tokens` are those of one choice of each prompt.
    """
    num_entries = num_tokens * num_choices * (1 + logprobs)
    if num_entries <= MAX_ENTRIES:
        return
    choices = f"{num_choices} choices of " if num_choices > 1 else ""
    raise RequestError(
        "out_of_range",
        f"the line asks for {num_entries:,} logprobs: {choices}{num_tokens:,} tokens, "
        f"each with {logprobs} alternatives beside its own; a line may have at most "
        f"{MAX_ENTRIES:,}. Lower logprobs, max_tokens or n, or put prompts and choices "
        "on several lines",
        "logprobs",
    )


def describe_foreign_field(fields: Mapping[str, Any]) -> str:
    """Say what another service's field is called here; "": there is none."""
    return next(
        (
            f". {name} is no field of this request: {remedy}"
            for name, remedy in _FOREIGN.items()
            if fields.get(name) is not None
        ),
        "",
    )


def check_unsupported_keys(
    fields: Mapping[str, Any], name: str, remedies: Mapping[str, str]
) -> None:
    """Raise an error if a message or document has a value for a key of `remedies`."""
    for key in remedies.keys() & fields.keys():
        if fields[key]:
            raise RequestError(
                "unsupported_parameter",
                f"{name}.{key} is {describe_value(fields[key])}; {remedies[key]}",
                f"{name}.{key}",
            )


def _missing_prompt_error(obj: Mapping[str, Any], name: str) -> RequestError:
    if name == "prompt" and obj.get("messages") is not None:
        return RequestError(
            "missing_prompt",
            "the request has messages and no prompt, and /v1/completions answers "
            "prompts; send it to /v1/chat/completions",
            "messages",
        )
    state = "null" if name in obj else "absent"
    alike = get_close_matches(name, obj.keys() - {name}, 1, 0.75)
    from_start = ' ("" generates from the start)' if name == "prompt" else ""
    meant = f" (is {describe_value(alike[0])} meant to be it?)" if alike else ""
    return RequestError(
        "missing_prompt",
        f"{name} is {state}{meant}; give a string, a list of strings, token ids, or a list of "
        "lists of token "
        f"ids{from_start}{describe_foreign_field(obj) if name == 'prompt' else ''}",
        name,
    )


def _is_list_of(value: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(test(item) for item in value)


def _parse_token_ids(ids: list[Any], name: str) -> list[int]:
    if not ids:
        raise RequestError(
            "out_of_range",
            f"{name} holds an empty list of token ids; give at least one",
            name,
        )
    return [int(i) for i in ids]


def check_text(text: str, name: str = "prompt") -> str:
    """Return a text that has a UTF-8 form; raise an error for half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "invalid_utf8",
            f"{name} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}) "
            f"at character {error.start}, which is no text; write the whole pair or "
            "the character itself",
            name,
        ) from None
    return text
