"""Reads input files lazily, line by line; and one that may be edited while a run is at work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path

from fminfer.contract.envelope import Line as Line
from fminfer.core.errors import DamagedInputError, UsageError
from fminfer.core.quantities import with_noun
from fminfer.files.json_values import CutValue
from fminfer.files.numbered_values import (
    MAX_HEAD_BYTES,
    UTF8_BOM,
    is_spread,
    number_values,
    read_head,
    skip_blank_lines,
    strip_bom,
    strip_compression,
)
from fminfer.files.split_folders import find_num_equal
from fminfer.files.streams import (
    A_PIPE,
    CHUNK_BYTES,
    COMPRESSED,
    STDIN,
    Digest,
    digest_file,
    find_split_folder,
    opens_array,
    packing_of,
    raising_read_errors,
    read_changed_ns,
    read_chunks,
)
from fminfer.files.tables.row_template import RowTemplate

LINES = (".jsonl", ".ndjson")  # one request a line, unless the bytes say otherwise
ENDINGS = tuple(
    f"{kind}{packing}" for kind in (*LINES, ".json") for packing in ("", *COMPRESSED)
)
TABLE_ENDINGS = (  # whose rows a template makes requests of, as of those above
    ".parquet",
    *(f"{kind}{packing}" for kind in (".csv", ".tsv") for packing in ("", *COMPRESSED)),
)
ROW_ENDINGS = (*ENDINGS, *TABLE_ENDINGS)
NAMED_ENDINGS = (
    f"{', '.join(LINES)} and .json, each also with {' or '.join(COMPRESSED)}"
)


def is_input_name(name: str, endings: Sequence[str] = ENDINGS) -> bool:
    """Tell whether a name is an input's, and none that a run or a split writes."""
    is_written = name.startswith("output_") or name == "manifest.json"
    is_written = is_written or name.endswith((".errors.jsonl", ".status.json"))
    return name.endswith(tuple(endings)) and not is_written


def input_stem(path: Path) -> str:
    """Return an input's name without its ending: `a` for `a.jsonl` and `a.json.gz`."""
    return "stdin" if path == STDIN else strip_compression(path).stem


def count_lines(
    path: Path, limit: int | None = None, row_template: RowTemplate | None = None
) -> int | None:
    """Count the lines to answer; None if they would be decompressed or parsed twice."""
    return count_to_last_line(path, limit, row_template)[0]


def count_to_last_line(
    path: Path, limit: int | None = None, row_template: RowTemplate | None = None
) -> tuple[int | None, int]:
    """Count the lines to answer, and return the last one's number.

    None and 0 if they would be decompressed or parsed twice.
    """
    if row_template is not None:
        num_rows = row_template.count_rows(path)
        if num_rows is not None and limit is not None:
            num_rows = min(num_rows, limit)
        return num_rows, num_rows or 0
    if not holds_plain_lines(path):
        return None, 0
    count = last_number = 0
    for line in read_lines(path, 0, limit=limit):
        count = count + 1
        last_number = line.number
    return count, last_number


def sum_counts(counts: Sequence[int | None]) -> int | None:
    """Add up the lines of several files; None: one of the numbers is not known."""
    return None if None in counts else sum(count or 0 for count in counts)


def holds_plain_lines(path: Path) -> bool:
    """Tell whether a file is one request a line, unpacked, and can be read more than once."""
    if path.suffix not in LINES or not path.is_file():
        return False
    if find_split_folder(path):
        return True
    with raising_read_errors(path), path.open("rb") as file:
        head = file.read(CHUNK_BYTES)
        is_whole = not file.read(1)
    return not (
        packing_of(head, "")
        or opens_array(head.removeprefix(UTF8_BOM), is_whole=is_whole)
    )


def identify_input(path: Path) -> str:
    """Return an input's size and digest, and how it is read where its name has a part in that.

    Under another name the same bytes may be other requests, and then have other errors.
    """
    digest = digest_file(path)
    if digest == A_PIPE or strip_compression(path).suffix != ".json":
        return digest
    head = read_head(strip_bom(read_chunks(path)), MAX_HEAD_BYTES)
    if opens_array(head, is_whole=False):  # whatever its name is
        return digest
    is_values = head.lstrip().startswith(b"[") or is_spread(head)
    return f"{digest}, read as JSON values" if is_values else digest


def read_first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file that are not blank, unpacked, as far as they can be."""
    return skip_blank_lines(strip_bom(read_chunks(path)))[1]


def read_lines(
    path: Path,
    source: int,
    digest: Digest | None = None,
    limit: int | None = None,
    row_template: RowTemplate | None = None,
) -> Iterator[Line]:
    """Yield the lines of one file; blank ones are skipped but counted.

    Where the file breaks off, its last line says so in `damage`.

    Args:
        digest: takes all of the file's bytes; with a limit, those that were read.
        row_template: makes the lines of a table's rows.
    """
    if row_template is not None:
        return islice(row_template.read_lines(path, source, digest), limit)
    lines = islice(_read_file_lines(path, source, digest), limit)
    equal = find_num_equal(path)
    if equal is None:
        return lines
    # A line that no equal one precedes is counted as any other.
    counts = chain(equal, repeat(0))
    return (replace(line, num_equal=next(counts) or None) for line in lines)


class InputFile:
    """An input's lines, and whether its bytes are still those of the last look."""

    def __init__(
        self,
        path: Path,
        source: int,
        limit: int | None,
        row_template: RowTemplate | None = None,
    ) -> None:
        self.path = path
        self.limit = limit
        self._row_template = row_template
        self._source = source
        # before the digest: a later change is noticed
        self.changed_ns = read_changed_ns(path)
        self.digest = identify_input(path)
        self.num_rows: int | None = None  # not counted, or not known before its end
        self.num_read = 0
        self._last_number = 0  # of the last line that was read or counted
        self.is_read = False  # to its end

    def count_rows(self) -> None:
        """Count the lines to answer, where that is cheaper than to answer them."""
        self.num_rows, self._last_number = count_to_last_line(
            self.path, self.limit, self._row_template
        )

    def set_count(self, num_rows: int, last_number: int) -> None:
        """Note how many lines are to be answered, which another part has counted."""
        self.num_rows = num_rows
        self._last_number = last_number

    def mark_read(self, num_rows: int) -> None:
        """Note that all of its lines have their record."""
        self.num_read = num_rows
        self.is_read = True

    def update_digest(self) -> bool:
        """Tell whether it holds other bytes than at the last look."""
        now_ns = read_changed_ns(self.path)
        if now_ns == self.changed_ns:
            return False
        before = self.digest
        self.digest = identify_input(self.path)
        self.changed_ns = now_ns
        return self.digest != before

    def read_lines(self) -> Iterator[Line]:
        """Read the lines; raise a UsageError if the file was edited meanwhile."""
        digest = Digest()
        for line in read_lines(
            self.path, self._source, digest, self.limit, self._row_template
        ):
            self.num_read += 1
            self._last_number = max(self._last_number, line.number)
            yield line
        digest_now = str(digest) if self.limit is None else digest_file(self.path)
        if self.digest != A_PIPE and not self.digest.startswith(digest_now):
            raise UsageError(
                f"{self.path} was changed while it was being answered. Run the same "
                "command again: it keeps the answers to lines that are still there "
                "(--restart answers all anew)"
            )
        self.num_rows = self.num_read
        self.is_read = True

    def has_all_answers(self, num_answered: int, last_answered: int) -> bool:
        """Tell whether so many answers are all that it needs; False while it is read."""
        if not self.is_read:
            return False
        self.check_limit(last_answered)
        if num_answered > self.num_read:
            raise UsageError(
                f"an earlier run has answered {with_noun(num_answered, 'line')} of "
                f"{self.path}, and now it has {self.num_read}; give --restart to "
                "answer all from the start"
            )
        return num_answered == self.num_read

    def check_limit(self, last_answered: int) -> None:
        """Raise a UsageError if a line beyond the limit is answered, as far as that is known.

        Answers come in another order than lines, so their number says nothing of it.
        """
        if self.limit is not None and 0 < self._last_number < last_answered:
            raise UsageError(
                f"an earlier run has answered more than the first {self.limit} lines of "
                f"{self.path}; give a larger --limit or none to go on with them, or --restart"
            )


def _read_file_lines(path: Path, source: int, digest: Digest | None) -> Iterator[Line]:
    number = 0
    chunks = read_chunks(path, digest)
    try:
        for number, raw, fault in number_values(path, chunks):
            if isinstance(raw, CutValue):
                yield Line(source, number, raw.head, fault=raw.fault, is_cut=True)
            elif raw.strip():
                yield Line(source, number, raw, fault=fault)
    except DamagedInputError as error:
        with contextlib.suppress(DamagedInputError):
            for _ in chunks if digest is not None else ():
                pass
        yield Line(
            source,
            number + 1,
            error.rest,
            damage=f"{error}. The lines before it are answered, those after it are lost. Repair "
            "the file and answer it again with --restart",
        )
