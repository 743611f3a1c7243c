"""Which files are to be answered: those named, and those of folders that no run has written."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.core.quantities import with_noun
from fminfer.files.first_lines import classify_lines, describe_trouble, holds_requests
from fminfer.files.input_models import check_no_models
from fminfer.files.line_reader import (
    ENDINGS,
    NAMED_ENDINGS,
    ROW_ENDINGS,
    TABLE_ENDINGS,
    is_input_name,
    read_first_bytes,
)
from fminfer.files.numbered_values import strip_compression
from fminfer.files.split_folders import is_split_folder
from fminfer.files.streams import (
    MANIFEST,
    PART_NAME,
    STDIN,
    is_stream,
    require_zstd,
)
from fminfer.files.tables.table_file import open_table
from fminfer.files.tables.table_writer import is_own_table

EMPTY = (b"", b"[]")  # an input, less its white space
MOST_NAMED = 5  # files or folders in a message
# Why a folder's files are left out, and how to have them answered.
ANSWERS = (
    "answers of a run, by their first line; name the file itself to answer its requests"
)
CAPITALS = "an ending in capitals; rename the file to answer its requests"
NO_FILE = "a pipe, a device or a folder; name it itself to answer what is in it"
LINK = "a link to a file of the folder, which is answered; name the link itself to answer it too"
LOST = "cannot be reached; mend the link, or remove it"


def find_inputs(
    paths: list[Path], *, may_be_empty: bool = False, has_rows: bool = False
) -> list[Path]:
    """Return the files to answer, in order; a folder gives its requests, by name.

    A folder that `fminfer split` wrote gives the parts of its engine. `-` is stdin.
    With `has_rows`, files hold rows of tables, and not requests.

    Raises:
        UsageError: a path that does not exist, is a model, has another ending, holds no JSON
            lines by its first bytes, or comes twice; a folder with the parts of several engines,
            or, unless it `may_be_empty`, without a file to answer.
    """
    check_no_models(paths)
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            requests = sort_folder(path, has_rows=has_rows).requests
            requests = requests or ([] if has_rows else _find_parts(path))
            if not requests and not may_be_empty:
                message = f"{path} holds no file to answer ({NAMED_ENDINGS})"
                others = [file for file in sorted(path.iterdir()) if file.is_file()]
                contents = [f"it holds {_join_names(others)}"] if others else []
                left_out = describe_left_out([path], has_lost=True, has_rows=has_rows)
                left_out = left_out or contents
                tables = sort_folder(path, has_rows=True).requests
                if tables and not has_rows:
                    command = _describe_command(path, tables[0])
                    left_out.append(f"tables need a template. Type: {command}")
                raise UsageError("; ".join([message, *left_out]))
            files += requests
        elif path != STDIN and not path.exists():
            raise UsageError(
                f"{path} does not exist; give a .jsonl file or a folder of them"
            )
        else:
            _check_input_file(path, has_rows=has_rows)
            files.append(path)
    seen: set[Path] = set()
    for file in files:
        if file.suffix == ".zst":
            require_zstd(file)
        # links to one file have outputs of their own
        unresolved = file.parent.resolve() / file.name
        if unresolved in seen:
            raise UsageError(f"{file} is given twice; each file is answered once")
        seen.add(unresolved)
    return files


def _check_input_file(path: Path, *, has_rows: bool) -> None:
    """Raise a UsageError if a named file cannot be answered; a pipe may have any name."""
    if is_stream(path) or not path.is_file():
        return
    is_table = path.name.endswith(TABLE_ENDINGS)
    if is_table and has_rows:
        return
    trouble = describe_trouble(path)
    if path.name.endswith(ENDINGS):
        if trouble:
            raise UsageError(f"{path} cannot be answered: {trouble}")
        return
    if holds_requests(path):
        trouble = (
            "its lines are requests; rename it, or give it on stdin: - < "
            f"{shlex.quote(str(path))}"
        )
    elif is_table and (not trouble or strip_compression(path).suffix in trouble):
        raise UsageError(
            f"{path} is a table, and tables need a template. Type: "
            f"{_describe_command(path, path)}"
        )
    trouble = trouble or "it must hold JSON lines, each a request"
    raise UsageError(f"{path} has none of the endings {NAMED_ENDINGS}; {trouble}")


def _describe_command(path: Path, table: Path) -> str:
    """Return a command that answers the rows of a path, with a column that a table there has."""
    columns: tuple[str, ...] = ()
    with suppress(UsageError):  # the run will say it
        columns = open_table(table).columns
    name = "text" if "text" in columns else next(iter(columns), "text")
    cell = name if name.isidentifier() else f'row["{name}"]'
    template = shlex.quote(f"Is it good? {{{{ {cell} }}}}")
    return f"fminfer run {shlex.quote(str(path))} --prompt-template {template}"


@dataclass(slots=True, frozen=True)
class FolderContents:
    """A folder's own files whose names are those of inputs, or nearly so."""

    requests: list[Path] = field(default_factory=list)  # to answer, by name
    left_out: dict[str, list[Path]] = field(default_factory=dict)  # by why they are
    # What is wrong with links that lead nowhere, and with files that are no JSON lines: requests
    # may be lost with each.
    lost: dict[Path, str] = field(default_factory=dict)


def sort_folder(folder: Path, *, has_rows: bool = False) -> FolderContents:
    """Sort a folder's files into requests, those left out, and lost ones.

    Answers are left out, and so are links to others of its files.
    """
    contents = FolderContents()
    endings = ROW_ENDINGS if has_rows else ENDINGS
    paths = sorted(folder.iterdir())
    links = _find_links(
        [path for path in paths if is_input_name(path.name, endings) and isfile(path)]
    )
    for path in paths:
        why = trouble = ""
        if not is_input_name(path.name, endings):
            if not (is_input_name(path.name.lower(), endings) and isfile(path)):
                continue
            why = CAPITALS
        elif isfile(path):
            is_table = path.name.endswith(TABLE_ENDINGS)
            if is_table:
                is_own = is_own_table(path)
            else:
                kind, trouble = classify_lines(path)
                is_own = kind == "answers"
            if is_own:
                why = ANSWERS
            elif path in links:
                why = LINK
            if trouble:
                trouble = f"{path} cannot be answered: {trouble}"
        elif os.path.exists(path):
            why = NO_FILE
        elif path.is_symlink():
            trouble = f"{path} is a link to {os.readlink(path)}, which {LOST}"
        else:
            continue  # removed just now
        if why:
            contents.left_out.setdefault(why, []).append(path)
        if trouble:
            contents.lost[path] = trouble
        if not (why or trouble):
            contents.requests.append(path)
    return contents


def list_read_folders(folder: Path, *, has_rows: bool = False) -> list[Path]:
    """Return the folders that `find_inputs` reads for one: itself, or those of its parts."""
    is_split = (folder / MANIFEST).exists() and not has_rows
    if not is_split or sort_folder(folder).requests:
        return [folder]
    return [folder, *sorted({path.parent for path in _find_parts(folder)})]


def describe_left_out(
    folders: list[Path], *, has_lost: bool = False, has_rows: bool = False
) -> list[str]:
    """Name some of the files left out of folders, by reason; `has_lost`: lost files too."""
    paths_by_reason: dict[str, list[Path]] = {}
    for folder in folders:
        for why, paths in sort_folder(folder, has_rows=has_rows).left_out.items():
            paths_by_reason.setdefault(why, []).extend(paths)
        for each in list_read_folders(folder, has_rows=has_rows) if has_lost else ():
            for path in sort_folder(each, has_rows=has_rows).lost:
                why = describe_trouble(path) or f"a link to a file that {LOST}"
                paths_by_reason.setdefault(why, []).append(path)
    return [f"{_join_names(paths)}: {why}" for why, paths in paths_by_reason.items()]


def describe_empty_files(files: list[Path]) -> list[str]:
    """Name the files that hold nothing: their outputs will be empty, too."""
    starts = {path: read_first_bytes(path) for path in files if path.is_file()}
    empty = [path for path, start in starts.items() if b"".join(start.split()) in EMPTY]
    remark = "0 bytes, or only blank lines or [], so there is nothing to answer"
    return [f"{_join_names(empty)}: {remark}"] if empty else []


def _join_names(paths: list[Path]) -> str:
    more = f", … ({len(paths):,} in all)" if len(paths) > MOST_NAMED else ""
    return ", ".join(map(str, paths[:MOST_NAMED])) + more


def _find_links(files: list[Path]) -> set[Path]:
    """Return the links whose targets are among the files."""
    links = [path for path in files if path.is_symlink()]
    targets = (
        {path.resolve() for path in files if not path.is_symlink()} if links else set()
    )
    return {link for link in links if link.resolve() in targets}


def _find_parts(folder: Path) -> list[Path]:
    """Return the parts below a folder that `fminfer split` wrote: those of its only engine."""
    if not is_split_folder(folder):
        return []
    engines = {}
    for below, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if any(map(PART_NAME.fullmatch, names)):
            files = sort_folder(Path(below)).requests
            engines[below] = [path for path in files if PART_NAME.fullmatch(path.name)]
    if len(engines) > 1:
        listed = [
            f"\n  {below} ({with_noun(len(files), 'file')})"
            for below, files in list(engines.items())[:MOST_NAMED]
        ]
        more = (
            f"\n  … and {len(engines) - MOST_NAMED:,} more"
            if len(engines) > MOST_NAMED
            else ""
        )
        raise UsageError(
            f"{folder} holds the parts of {len(engines)} engines. Answer each folder "
            f"with its own model:{''.join(listed)}{more}"
        )
    return next(iter(engines.values()), [])
