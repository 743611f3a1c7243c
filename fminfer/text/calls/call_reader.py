"""Reads tool calls in a chat model's text, whole or streamed, in any form of `call_forms`.

    reader = ToolCallReader("hermes")
    content, calls = reader.feed(piece)  # for each piece, as it comes
    content, calls = reader.finish()

How the text is cut into pieces does not change what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fminfer.core.config import KnownParser
from fminfer.text.calls.call_cursor import CallCursor
from fminfer.text.calls.call_forms import find_form
from fminfer.text.calls.tool_call import ToolCall


class ToolCallReader:
    """Splits one choice's text into content and tool calls.

    White space directly around calls is dropped. What is no valid call is content, verbatim.

    Args:
        tools: the request's, in OpenAI's form. Forms without types read them.
        keeps_one: what follows the first call is dropped.
        is_certain: calls keep to a grammar, so that they come in pieces as their text does.
            The first piece has the name, and the others have none. A call may be cut by the
            text's end. Otherwise calls come whole.
    """

    def __init__(
        self,
        parser: KnownParser,
        tools: Iterable[Mapping[str, Any]] = (),
        *,
        keeps_one: bool = False,
        is_certain: bool = False,
    ) -> None:
        functions = [tool["function"] for tool in tools]
        self._cursor = CallCursor(
            {each["name"]: each.get("parameters") for each in functions},
            keeps_one=keeps_one,
            is_certain=is_certain,
        )
        self._reading = find_form(parser).read(self._cursor)

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Read the next piece; return the content and the calls that are certain by now."""
        self._cursor.begin_piece(text)
        next(self._reading)
        return self._cursor.pop_results()

    def finish(self, text: str = "") -> tuple[str, list[ToolCall]]:
        """Read the last piece, and return the rest."""
        self._cursor.begin_piece(text)
        next(self._reading)
        self._cursor.finish()
        return self._cursor.pop_results()
