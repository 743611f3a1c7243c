"""Names of a request's fields: unknown ones are warned of, and no wish is ignored in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from fminfer.contract.fields import show
from fminfer.contract.row_warnings import MAX_NAMES, RowWarning, cut_name
from fminfer.core.errors import RequestError


@dataclass(slots=True, frozen=True)
class Neutral:
    """A field that is accepted only at values that change no answer.

    Args:
        values: these, beside null.
        remedy: what to do for what it asks for; "": nothing does it.
    """

    values: tuple[object, ...] = ()
    remedy: str = ""

    def accepts(self, value: object) -> bool:
        """Tell whether a value changes no answer."""
        return value is None or any(type(value) is type(ok) and value == ok for ok in self.values)


def check_names(
    fields: Mapping[str, Any], known: frozenset[str], *, is_strict: bool
) -> list[RowWarning]:
    """Return a warning of the fields that no parameter has the name of.

    Raises:
        RequestError: there is one, and `is_strict`.
    """
    unknown = sorted(fields.keys() - known)
    if unknown and is_strict:
        name = cut_name(unknown[0])
        raise RequestError(
            "unsupported_parameter",
            f"{name} is {show(fields[unknown[0]])}, and no parameter has that name"
            f"{_meant(name, known)}; remove it, or run without --strict to keep it and not act on "
            "it",
            name,
        )
    if not unknown:
        return []
    names = tuple(name + _meant(name, known) for name in map(cut_name, unknown[: MAX_NAMES + 1]))
    return [RowWarning("unknown parameters are kept and not acted on", names)]


def refuse_wishes(fields: Mapping[str, Any], neutral: Mapping[str, Neutral]) -> None:
    """Refuse fields whose values ask for what this version cannot do.

    Raises:
        RequestError: names the field, and what to do.
    """
    for name, each in neutral.items():
        value = fields.get(name)
        if each.accepts(value):
            continue
        allowed = " or ".join(["null", *(json.dumps(ok) for ok in each.values)])
        remedy = f". {each.remedy}" if each.remedy else ""
        raise RequestError(
            "unsupported_parameter",
            f"{name} is {show(value)}, and this version cannot do that; "
            f"remove {name} or set it to {allowed}{remedy}",
            name,
        )


@lru_cache(1024)  # for files with a key of their own on each line
def _meant(name: str, known: frozenset[str]) -> str:
    """Ask whether the nearest known parameter was meant."""
    nearest = get_close_matches(name, known, 1, 0.8)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
