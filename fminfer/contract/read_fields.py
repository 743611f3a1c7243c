"""Parses a request's fields by the table.

Unsupported fields are errors, unknown ones are warnings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from fminfer.contract.constraint import CONSTRAINTS
from fminfer.contract.endpoints import Endpoint, choose_endpoint
from fminfer.contract.field_table import FIELDS, LINE_FIELDS
from fminfer.contract.fields import INT64, Field, describe_value
from fminfer.contract.row_warnings import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    RowWarning,
    cut_name,
)
from fminfer.core.errors import RequestError

MAX_GUESSED = 5  # of a line's unknown names: each guess takes a millisecond


def parse_fields(
    fields: Mapping[str, Any], endpoint: Endpoint, *, max_logprobs: int, is_strict: bool
) -> tuple[dict[str, Any], list[RowWarning]]:
    """Return the values of the fields that are acted on, and what is strange about the names.

    A null always means the default. With `is_strict` a name that is unknown is an error.
    """
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in fields.items():
        if value is None:
            continue
        each = find_field(name, endpoint)
        if each is None or each.is_data(value):
            unknown.append(name)
        elif each.fate == "acted on":
            most = max_logprobs if each.limit == "logprobs" else INT64 - 1
            values[name] = each.kind.parse(name, value, most)
        elif each.fate != "recorded" and not each.is_neutral_value(value):
            _check_unsupported_value(
                each, value, is_greedy=fields.get("temperature") == 0
            )
    if not unknown:
        return values, []
    return values, [
        _make_unknown_warning(fields, sorted(unknown), endpoint, is_strict=is_strict)
    ]


def normalize_name(name: str) -> str:
    """Return a name without what joins its words: `topk` for `top_k`, `topK` and `top-k`."""
    return name.casefold().replace("_", "").replace("-", "")


# By endpoint and plain name, what becomes of other spellings. A server compares a model's name
# by its right spelling alone.
_OTHER_SPELLINGS = {
    endpoint: {
        normalize_name(name): each
        if each.fate in ("refused", "recorded")
        else replace(each, fate="refused", ours=name)
        for name, each in table.items()
        if name not in ("model", "engine")
    }
    for endpoint, table in FIELDS.items()
}
# What has no effect beside a request; columns of data often have the names of its contents.
_PARAMS = {
    endpoint: {name for name, each in table.items() if each.fate == "acted on"}
    - (LINE_FIELDS - CONSTRAINTS.keys())
    for endpoint, table in FIELDS.items()
}


def find_field(name: str, endpoint: Endpoint) -> Field | None:
    """Return the field of a name in any spelling; one that is acted on is refused in another."""
    return (_find_cached_field if len(name) <= MAX_NAME_CHARS else _find_field)(
        name, endpoint
    )


@lru_cache(1024)  # a file may have a new name on each line
def _find_cached_field(name: str, endpoint: Endpoint) -> Field | None:
    return _find_field(name, endpoint)


def _find_field(name: str, endpoint: Endpoint) -> Field | None:
    other = _OTHER_SPELLINGS[endpoint].get(normalize_name(name))
    return FIELDS[endpoint].get(name) or (other and replace(other, name=cut_name(name)))


def find_params_beside(
    fields: Mapping[str, Any], request: Mapping[str, Any]
) -> list[str]:
    """Return parameters that stand beside a request, unless it says the same itself."""
    return sorted(
        name
        for name in fields.keys() & _PARAMS[choose_endpoint(request)]
        if fields[name] not in (None, request.get(name))
    )


def check_no_other_fields(
    fields: Mapping[str, Any], known: Collection[str], where: str
) -> None:
    """Raise an error for fields that an older route does not read, but for recorded ones."""
    recorded = {
        name for name, each in FIELDS["chat"].items() if each.fate == "recorded"
    }
    for name in find_unknown_names(fields, recorded.union(known)):
        raise RequestError(
            "unsupported_parameter",
            f"{name[:64]} is no field of {where}, which reads {', '.join(known)}. Remove it",
            name[:64],
        )


def find_unknown_names(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the names that are not known, in order; nulls are ignored."""
    return sorted(name for name in fields.keys() - known if fields[name] is not None)


@lru_cache(1024)  # a file may have a new name on each line
def describe_guess(name: str, known: frozenset[str]) -> str:
    """Return a hint at the field that a name may mean; "": none. `cut_name` has cut the name."""
    nearest = get_close_matches(name, known, 1, 0.8)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _make_unknown_warning(
    fields: Mapping[str, Any],
    unknown: list[str],
    endpoint: Endpoint,
    *,
    is_strict: bool,
) -> RowWarning:
    known = frozenset(
        n for n, each in FIELDS[endpoint].items() if each.fate != "refused"
    )
    names = list(map(cut_name, unknown[: MAX_NAMES + 1]))
    if is_strict:
        raise RequestError(
            "unsupported_parameter",
            f"{names[0]} is {describe_value(fields[unknown[0]])}, and no parameter has that "
            f"name{describe_guess(names[0], known)}; remove it, or run without --strict to keep "
            "it and not act on it",
            names[0],
        )
    names[:MAX_GUESSED] = [
        name + describe_guess(name, known) for name in names[:MAX_GUESSED]
    ]
    return RowWarning("unknown parameters are kept and not acted on", tuple(names))


def _check_unsupported_value(each: Field, value: object, *, is_greedy: bool) -> None:
    """Raise an error for what this version cannot do; a greedy `do_sample` may be false."""
    if normalize_name(each.name) == "dosample" and value is False and is_greedy:
        return
    text = f"{each.name} is {describe_value(value)}, and this version cannot do that"
    allowed = " or ".join(["null", *map(json.dumps, each.neutral)])
    remedy = f"; remove {each.name} or set it to {allowed}"
    if each.fate == "served":
        text = f"{each.name} is {describe_value(value)}, and a file's answers are not streamed"
    elif each.help:
        remedy += f". {each.help}"
    if each.ours:
        text = (
            f"{each.name} is {describe_value(value)}; fminfer calls that {each.ours}. "
            "Rename it"
        )
        remedy = ""
    raise RequestError("unsupported_parameter", text + remedy, each.name)
