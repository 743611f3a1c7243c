"""Renders the templates of a table's rows in a limited process: one may loop without end."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, UndefinedError
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
    """Answers a message with the texts that templates make of rows."""

    def __init__(self) -> None:
        environment = RowEnvironment(
            undefined=StrictUndefined,
            finalize=lambda value: str(_mark_null(value, "the value")),
        )
        environment.tests["none"] = lambda value: value == NullCell("")
        self._compile = cache(environment.from_string)

    def __call__(self, message: dict[str, Any]) -> list[list[str] | str]:
        """Return each row's texts, one for each template, or what is wrong with the row.

        Raises:
            ValueError: what is wrong with a template; they stand in a message by their flags.
        """
        templates = {}
        for flag, text in message["templates"].items():
            try:
                templates[flag] = self._compile(text)
            except TemplateSyntaxError as error:
                raise ValueError(
                    f"{flag}, line {error.lineno}: {error.message}"
                ) from error
        return [_render_row(templates, row) for row in message["rows"]]


def _render_row(templates: dict[str, Template], row: dict[str, Any]) -> list[str] | str:
    cells = {name: _mark_null(cell, name) for name, cell in row.items()}
    texts = []
    for flag, template in templates.items():
        try:
            texts.append(template.render(cells, row=row))
        except MemoryError:
            raise
        except UndefinedError as error:
            columns = ", ".join(row)
            return f"{flag}: {error.message}. The row's columns are: {columns}"
        except Exception as error:  # whatever a template does
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            return f"{flag}: {kind}{error}"
    return texts
