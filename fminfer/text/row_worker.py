"""Renders the templates of a table's rows in a limited process: one may loop without end."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import (
    StrictUndefined,
    Template,
    TemplateSyntaxError,
    Undefined,
    UndefinedError,
)
from jinja2.filters import do_default
from jinja2.sandbox import ImmutableSandboxedEnvironment


class NullCellError(Exception):
    """A null is printed, or made a number; Jinja's filters do not replace this error."""


class NullCell:
    """A cell without a value: false, equal to none, and an error where it is printed."""

    def __init__(self, name: object) -> None:
        self._name = name

    def __str__(self) -> str:
        raise NullCellError(
            f"{self._name} is null, and a null cannot be printed. Say what stands in its "
            "place, as in {{ text or 'none' }}"
        )

    __repr__ = __str__
    __int__ = __str__
    __float__ = __str__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NullCell)

    def __hash__(self) -> int:
        return hash(None)


def _mark_nulls(value: Any, name: object) -> Any:
    """Return a cell with marks for nulls, also for those inside."""
    if isinstance(value, dict):
        return {key: _mark_nulls(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_mark_nulls(each, "the value") for each in value]
    return NullCell(name) if value is None else value


def _print_value(value: Any) -> str:
    """Return the text of what a template prints."""
    if value is None:
        value = NullCell("the value")
    if not isinstance(value, PRINTABLE):
        raise ValueError(
            f"{type(value).__name__} cannot be printed: it is no cell. Call it, or make a "
            "list or text of it"
        )
    return str(value)


def _use_default(value: Any, default: Any = "", boolean: bool = False) -> Any:
    """Replace what is null, too."""
    is_null = isinstance(value, NullCell)
    return default if is_null else do_default(value, default, boolean)


def _dump_null(value: Any) -> None:
    """Return what JSON has for a null."""
    if not isinstance(value, NullCell):
        raise TypeError(f"{type(value).__name__} is not JSON")


PRINTABLE = (str, int, float, list, tuple, dict, NullCell, Undefined)


class RowEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which cells stand before methods."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute, as `meta.title` has one."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


class RowWorker:
    """Answers a message with the texts that templates make of rows."""

    def __init__(self) -> None:
        environment = RowEnvironment(undefined=StrictUndefined, finalize=_print_value)
        environment.tests["none"] = lambda value: value == NullCell("")
        environment.filters |= {"default": _use_default, "d": _use_default}
        environment.policies["json.dumps_kwargs"] = {
            "sort_keys": True,
            "default": _dump_null,
        }
        self._environment = environment
        self._compile = cache(self._compile_template)

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

    def _compile_template(self, text: str) -> Template:
        template = self._environment.from_string(text)
        # Jinja's own map of two takes most of the time of a short template
        template.globals = dict(template.globals)
        return template


def _render_row(templates: dict[str, Template], row: dict[str, Any]) -> list[str] | str:
    texts = []
    for flag, template in templates.items():
        try:
            cells = _mark_nulls(row, "the row")
            texts.append(template.render(cells, row=cells))
        except MemoryError:
            raise
        except UndefinedError as error:
            columns = ", ".join(row)
            return f"{flag}: {error.message}. The row's columns are: {columns}"
        except Exception as error:  # whatever a template does
            is_ours = type(error) in (ValueError, NullCellError)
            kind = "" if is_ours else f"{type(error).__name__}: "
            return f"{flag}: {kind}{error}"
    return texts
