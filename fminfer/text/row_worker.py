"""Renders the templates of a table's rows in a limited process: one may loop without end."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class NullCell:
    """A cell without a value: false, equal to none, and an error where it is printed."""

    def __init__(self, name: object) -> None:
        self._name = name

    def __str__(self) -> str:
        raise ValueError(
            f"{self._name} is null, and a null cannot be printed. Say what stands in its "
            "place, as in {{ text or 'none' }}"
        )

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NullCell)

    def __hash__(self) -> int:
        return hash(None)


def _mark_null(value: Any, name: object) -> Any:
    return NullCell(name) if value is None else value


class RowEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a null is no text."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute, as `meta.title` has one."""
        return _mark_null(super().getattr(obj, attribute), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item, as `row["review text"]` has one."""
        return _mark_null(super().getitem(obj, argument), argument)


class RowWorker:
    """Answers a message with the texts that templates make of a row."""

    def __init__(self) -> None:
        environment = RowEnvironment(
            undefined=StrictUndefined,
            finalize=lambda value: str(_mark_null(value, "the value")),
        )
        environment.tests["none"] = lambda value: value == NullCell("")
        self._compile = cache(environment.from_string)

    def __call__(self, message: dict[str, Any]) -> list[str]:
        """Return a text for each template, which stand in it by their flags.

        Raises:
            ValueError: what is wrong with a template, or with this row.
        """
        row = message["row"]
        texts = []
        for flag, text in message["templates"].items():
            try:
                template = self._compile(text)
                if row is not None:  # otherwise they are only compiled
                    cells = {name: _mark_null(row[name], name) for name in row}
                    texts.append(template.render({**cells, "row": row}))
            except MemoryError:
                raise
            except TemplateSyntaxError as error:
                raise ValueError(
                    f"{flag} has an error in line {error.lineno}: {error.message}"
                ) from error
            except UndefinedError as error:
                raise ValueError(
                    f"{flag}: {error.message}. The row's columns are: {', '.join(row)}"
                ) from error
            except Exception as error:  # whatever a template does
                kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
                raise ValueError(f"{flag}: {kind}{error}") from error
        return texts
