"""Job scripts from templates: fminfer's own (`templates/*.sh.j2`), or the user's."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Mapping
from pathlib import Path

import jinja2

from fminfer.core.errors import UsageError

TEMPLATES = Path(__file__).parent / "templates"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def quote(value: object) -> str:
    """Write a word, or a list of words, so that bash reads just that, on one line.

    A line of its own that begins with #BSUB or #SBATCH would be an order to the scheduler.
    """
    if isinstance(value, (list, tuple)):
        return " ".join(map(quote, value))
    text = str(value)
    if not _CONTROL.search(text):
        return shlex.quote(text)
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_CONTROL.sub(_escape_control, plain)}'"


def _escape_control(match: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in match[0].encode())


class ScriptTemplate:
    """A template, read and checked once; docs/clusters.md lists its values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A name without a value is a mistake, and never an empty word of a command.
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(path.parent),
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # this is a shell's script, and `quote` its escape
        )
        environment.filters["quote"] = quote
        try:
            self._template = environment.get_template(path.name)
        except jinja2.TemplateSyntaxError as error:
            raise self._template_error(
                error.lineno, error.message or "it is no template"
            ) from None
        except jinja2.TemplateNotFound:
            raise UsageError(f"--template {path}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--template {path} cannot be read: {error}") from None

    def render(self, values: Mapping[str, object]) -> str:
        """Return the script; raise UsageError if the template fails."""
        try:
            return self._template.render(values)
        except Exception as error:  # a template can fail in any of Python's ways
            lines = [
                frame.lineno
                for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == self._template.filename
            ]
            is_name = isinstance(error, jinja2.UndefinedError)
            names = (
                f"; the values there are: {', '.join(sorted(values))}"
                if is_name
                else ""
            )
            raise self._template_error(
                lines[-1] if lines else None, f"{error}{names}"
            ) from None

    def _template_error(self, line: int | None, message: str) -> UsageError:
        return UsageError(f"--template {self._path}, line {line or '?'}: {message}")
