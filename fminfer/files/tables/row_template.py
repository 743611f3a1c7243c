"""Makes a line with a request of each row of a table, by templates and fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fminfer.contract.envelope import Line, make_row_line, quote_text
from fminfer.contract.json_object import dump_json
from fminfer.contract.request import TextField
from fminfer.core.errors import RequestError, UsageError
from fminfer.files.streams import COMPRESSED, Digest
from fminfer.files.tables.table import Cells
from fminfer.files.tables.table_file import RowFault, TableFile, open_table
from fminfer.text.limited_process import LimitedPool, LimitError

# of rows that are rendered together
GROUP_ROWS = 128
GROUP_BYTES = 4 << 20
MAX_LIMITED_ROWS = 10  # in turn; more say that the template has no end
PROMPT_FLAG = "--prompt-template"
SYSTEM_FLAG = "--system-template"


@dataclass(slots=True, frozen=True)
class RowTemplate:
    """How the rows of a run's tables become requests.

    Args:
        text_field: of a request, for what the templates write.
        templates: by their flags.
        columns: by the field of a request that each sets.
    """

    templates: Mapping[str, str]
    text_field: TextField
    fields: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    delimiter: str | None = None

    @property
    def fingerprint(self) -> dict[str, str]:
        """Return what the requests depend on, beside the rows, by what people call it."""
        terms = {
            **self.templates,
            "--field, --choices and request flags": [self.text_field, self.fields],
            "--column": self.columns,
            "--delimiter": self.delimiter,
        }
        return {
            name: hashlib.blake2b(json.dumps(term).encode(), digest_size=8).hexdigest()
            for name, term in terms.items()
            if term
        }

    def check_syntax(self) -> None:
        """Raise a UsageError if a template does not compile, or that takes too long."""
        for fault in self._render([]):
            text = fault.removesuffix(".")
            raise UsageError(f"{text}. Correct the template (docs/tables.md)")

    def count_rows(self, path: Path) -> int | None:
        """Count the rows of a table; None: they would be decompressed twice, or are a pipe's."""
        table = self._open_table(path)
        if table.num_rows is not None:
            return table.num_rows
        if path.suffix in COMPRESSED or not path.is_file():
            return None
        return sum(1 for _ in table.read_rows())

    def read_lines(
        self, path: Path, source: int, digest: Digest | None = None
    ) -> Iterator[Line]:
        """Yield a line for each row of a table; its number is the row's.

        A row of which no request can be made is a line with a fault.
        """
        table = self._open_table(path)
        rows = enumerate(table.read_rows(digest), 1)
        # whoever writes a pipe may wait for the answer to a row
        group_rows = GROUP_ROWS if path.is_file() else 1
        for group in _split_groups(rows, group_rows):
            cells = [raw for _, row, raw in group if not isinstance(row, RowFault)]
            replies = iter(self._render(cells))
            for number, row, raw in group:
                if isinstance(row, RowFault):
                    yield _make_fault_line(source, number, row)
                else:
                    values = {
                        name: table.make_value(row[column])
                        for name, column in self.columns.items()
                        if column in row
                    }
                    reply = next(replies)
                    yield self._make_line(source, number, raw, values, reply)

    def _open_table(self, path: Path) -> TableFile:
        """Open a table that has the columns of --column, as far as that is known."""
        table = open_table(path, self.delimiter)
        for name, column in self.columns.items():
            table.check_column(column, f"--column {name}={column}")
        return table

    def _render(self, rows: list[bytes]) -> list[Any]:
        """Return the texts of each row, or what is wrong with it.

        Raises:
            UsageError: rows in turn take too long; all others may, too.
        """
        reply = self._ask_pool(rows)
        if not isinstance(reply, Exception):
            return list(reply)
        if not rows:
            return [str(reply)]
        replies = []
        num_limited = 0  # in turn
        for row in rows:
            if len(rows) > 1:
                reply = self._ask_pool([row])
            is_fault = isinstance(reply, Exception)
            replies.append(f"the template fails: {reply}" if is_fault else reply[0])
            num_limited = num_limited + 1 if isinstance(reply, LimitError) else 0
            if num_limited == MAX_LIMITED_ROWS:
                raise UsageError(
                    f"the template fails for {num_limited} rows in turn: {reply} for each. "
                    "See whether it loops; correct it, or take these rows out"
                )
        return replies

    def _ask_pool(self, rows: list[bytes]) -> Any:
        """Return what the process answers, or why it does not."""
        message = b'{"templates":%b,"rows":[%b]}' % (
            json.dumps(self.templates).encode(),
            b",".join(rows),
        )
        (reply,) = _find_pool().ask_all([message.decode()])
        if isinstance(reply, OSError):  # the process cannot run here
            raise reply
        return reply

    def _make_line(
        self,
        source: int,
        number: int,
        cells: bytes,
        values: dict[str, Any],
        reply: Any,
    ) -> Line:
        try:
            if isinstance(reply, str):
                raise RequestError("missing_prompt", reply)
            request = dump_json(self._make_request(reply, values))
        except RequestError as error:
            fault = error.message
            return make_row_line(
                source, number, cells, fault=fault, fault_code=error.code
            )
        return make_row_line(source, number, cells, request)

    def _make_request(self, texts: list[str], values: dict[str, Any]) -> dict[str, Any]:
        """Return the request of a row; a null leaves a field out."""
        prompt: object = texts[0]
        if self.text_field == "messages":
            roles = ("user", "system")
            messages = [
                {"role": role, "content": text}
                for role, text in zip(roles, texts, strict=False)
            ]
            prompt = messages[::-1]
        for name in self.columns.keys() - values.keys():
            raise RequestError(
                "missing_prompt",
                f"--column {name}={self.columns[name]}: the row has no such column",
                name,
            )
        set_values = {
            name: value for name, value in values.items() if value is not None
        }
        return {self.text_field: prompt, **self.fields, **set_values}


def _split_groups(
    rows: Iterable[tuple[int, Cells | RowFault]], most: int
) -> Iterator[list[tuple[int, Cells | RowFault, bytes]]]:
    """Yield numbered rows that are rendered together, with their bytes."""
    group = []
    num_bytes = 0
    for number, row in rows:
        raw = row.raw if isinstance(row, RowFault) else dump_json(row)
        group.append((number, row, raw))
        num_bytes += len(raw)
        if len(group) == most or num_bytes >= GROUP_BYTES:
            yield group
            group = []
            num_bytes = 0
    yield group


@cache
def _find_pool() -> LimitedPool:
    from fminfer.text.row_worker import RowWorker  # imports Jinja

    return LimitedPool(RowWorker)


def _make_fault_line(source: int, number: int, fault: RowFault) -> Line:
    has_raw = fault.raw or not fault.cells
    cells = quote_text(fault.raw) if has_raw else dump_json(fault.cells)
    damage = (
        f"{fault.message}. The rows before it are answered, those after it are lost. "
        "Repair the file and answer it again with --restart"
    )
    return make_row_line(
        source,
        number,
        cells,
        fault=fault.message,
        damage=damage if fault.is_damage else "",
    )
