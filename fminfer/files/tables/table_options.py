"""The flags that say how a table's rows become requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from fminfer.contract.chat import overwrite_fields
from fminfer.contract.labels import MAX_LABELS
from fminfer.contract.request import TextField
from fminfer.core.errors import UsageError
from fminfer.core.option import Options, WholeTexts, option
from fminfer.files.tables.json_table import DECODER
from fminfer.files.tables.row_template import (
    PROMPT_FLAG,
    SYSTEM_FLAG,
    RowTemplate,
)
from fminfer.files.tables.table_file import find_delimiter

# a request that sets one of them draws as it says, and others take the likeliest tokens
DRAW_FIELDS = frozenset({"temperature", "top_p", "top_k", "n", "best_of"})
CONSTRAINT = "structured_outputs"

_option = partial(option, group="Tables", commands=("run", "check"))


@dataclass(frozen=True)
class TableOptions(Options):
    """How rows become requests."""

    calls_flags = True

    prompt_template: str | None = _option(
        "Inputs are tables (Parquet, CSV, TSV, rows in JSON), and this Jinja template "
        "makes each row's prompt: 'Is it good? {{ text }}'. row[\"a name\"] is any column.",
        metavar="TEXT|@FILE",
    )
    system_template: str | None = _option(
        "A Jinja template that makes the system message of each row's chat.",
        metavar="TEXT|@FILE",
    )
    fields: WholeTexts = _option(
        "Set a field of every row's request: seed=1. Texts are quoted JSON: "
        "'user=\"me\"'. May be repeated.",
        flags=("--field",),
        metavar="NAME=JSON",
    )
    columns: WholeTexts = _option(
        "Set a request field from a column: max_tokens=limit. An empty or null cell sets "
        "nothing. May be repeated.",
        flags=("--column",),
        metavar="FIELD=COLUMN",
    )
    choices: str | None = _option(
        "Labels, with commas between: each row gets the likeliest one and the "
        "probability of each. A space counts: ' good, bad'. @FILE has one label a line.",
        metavar="A,B,…|@FILE",
    )
    delimiter: str | None = _option(
        "The sign between a CSV's cells.  [default: a comma; a tab for .tsv]",
        metavar="CHAR",
    )

    @property
    def has_template(self) -> bool:
        """Return whether inputs are rows."""
        return self.prompt_template is not None

    def check(self) -> None:
        """Raise a UsageError for flags that need a template, or say one thing twice."""
        names = ("system_template", "fields", "columns", "choices", "delimiter")
        typed = [self.shown_name(name) for name in names if getattr(self, name)]
        if typed and not self.has_template:
            raise UsageError(
                f"{typed[0]} needs --prompt-template, which makes a prompt of each row. Add "
                "--prompt-template 'Is it good? {{ text }}'"
            )
        self._parse_fields()
        self._parse_columns()

    def make_template(
        self, text_field: TextField, flag_fields: Mapping[str, Any]
    ) -> RowTemplate:
        """Return what makes requests of rows.

        Args:
            flag_fields: those that request flags set, by their names in completions.

        Raises:
            UsageError: a template or file is wrong, or a field is set twice.
        """
        templates = {PROMPT_FLAG: _read_text(PROMPT_FLAG, self.prompt_template or "")}
        if self.system_template is not None:
            if text_field != "messages":
                raise UsageError(
                    f"{SYSTEM_FLAG} writes a message of a chat, and these rows are not "
                    "asked as chats. Put its text into --prompt-template"
                )
            templates[SYSTEM_FLAG] = _read_text(SYSTEM_FLAG, self.system_template)
        parts = [flag_fields, self._parse_fields(), self._make_constraint()]
        if text_field == "messages":
            parts[0] = overwrite_fields({}, flag_fields)
        columns = self._parse_columns()
        names = [*chain(*parts), *columns]
        _check_names_differ(names)
        if text_field != "input" and DRAW_FIELDS.isdisjoint(names):
            parts.append({"temperature": 0})
        fields = {name: each[name] for each in parts for name in each}
        template = RowTemplate(templates, text_field, fields, columns, self.delimiter)
        template.check_syntax()
        return template

    def _parse_fields(self) -> dict[str, Any]:
        texts = _split_pairs("--field", "NAME=JSON", self.fields)
        return {name: _parse_json(name, text) for name, text in texts.items()}

    def _parse_columns(self) -> dict[str, str]:
        return _split_pairs("--column", "FIELD=COLUMN", self.columns)

    def _make_constraint(self) -> dict[str, Any]:
        """Return the field that lets an answer be one of the labels."""
        if self.choices is None:
            return {}
        text = _read_text("--choices", self.choices)
        is_file = self.choices.startswith("@")
        labels = text.splitlines() if is_file else text.split(",")
        labels = [label for label in labels if label or not is_file]
        if "" in labels or len({*labels}) < len(labels) or not labels:
            raise UsageError(
                f"--choices {self.choices} has an empty label, or one twice; give labels "
                "that differ, as in good,bad. Labels with commas stand in a file: @FILE"
            )
        if len(labels) == 1 and not is_file:
            raise UsageError(
                f"--choices {self.choices} is one label; give several, as in good,bad, or "
                "@FILE with one a line"
            )
        if not is_file and len({label.startswith(" ") for label in labels}) > 1:
            raise UsageError(
                f"--choices {self.choices!r}: some labels begin with a space, and others do "
                "not. Write ' good, bad' or 'good,bad', or one a line in a file: @FILE"
            )
        if len(labels) > MAX_LABELS:
            raise UsageError(
                f"--choices has {len(labels):,} labels, and probabilities are told of at most "
                f"{MAX_LABELS:,}. For more, give --field '{CONSTRAINT}={{\"choice\": […]}}'"
            )
        return {CONSTRAINT: {"choice": labels, "probabilities": True}}


@dataclass(slots=True, frozen=True)
class RowRequests:
    """All that a command line says of the requests of rows."""

    table: TableOptions
    flag_fields: Mapping[str, Any]  # by their names in completions
    is_raw: bool

    def make_template(
        self, choose_text_field: Callable[..., TextField], inputs: Sequence[Path]
    ) -> RowTemplate | None:
        """Return what makes requests of rows for a model; None: lines are requests.

        Args:
            choose_text_field: as `engine.intake.Intake` has it.
        """
        if not self.table.has_template:
            return None
        text_field = choose_text_field(self.flag_fields, is_raw=self.is_raw)
        delimiter = find_delimiter(inputs, self.table.delimiter)
        table = replace(self.table, delimiter=delimiter)
        return table.make_template(text_field, self.flag_fields)


def _read_text(flag: str, text: str) -> str:
    """Return a flag's text, or what is in the file that it names."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {text}: the file cannot be read: {error}") from error


def _split_pairs(flag: str, form: str, texts: Sequence[str]) -> dict[str, str]:
    """Return what stands behind each field of requests."""
    pairs = [text.partition("=") for text in texts]
    for name, _, value in pairs:
        if not (name and value):
            raise UsageError(f"{flag} is {name!r}; it must be {form}")
        if name in ("prompt", "messages", "input"):
            raise UsageError(
                f"{flag} sets {name}, which the template makes; leave it out"
            )
    _check_names_differ([name for name, _, _ in pairs])
    return {name: value for name, _, value in pairs}


def _parse_json(name: str, text: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--field {name}={text} is not JSON ({error}); a text has double quotes, as in "
            f"--field '{name}=\"a text\"'"
        ) from None


def _check_names_differ(names: Sequence[str]) -> None:
    """Raise a UsageError if a field of requests is set twice."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{name} is set twice (--field, --column, --choices and request flags set "
                "fields of requests); keep one"
            )
