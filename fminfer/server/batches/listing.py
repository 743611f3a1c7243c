"""Lists in pages, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from fminfer.server.http_errors import HttpError


class HasId(Protocol):
    """What is listed."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)


def page_of(items: Sequence[T], after: str | None, limit: int) -> tuple[list[T], bool]:
    """Return the items behind the one of an id, and whether there are more.

    Raises:
        HttpError: none has that id.
    """
    start = 0
    if after is not None:
        start = 1 + next((place for place, each in enumerate(items) if each.id == after), -1)
        if start == 0:
            raise HttpError(
                400,
                "after is no id in this list; give the last_id of the page before, or leave it out",
                param="after",
            )
    return list(items[start : start + limit]), len(items) > start + limit


def as_list(objects: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list object."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }
