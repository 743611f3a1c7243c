"""Which files are to be answered: those that were named, and those of folders that hold requests.

Folders also hold what runs wrote. By their names these are left out everywhere; answers under a
name of the user's own are known by their first line.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from itertools import islice
from pathlib import Path

import orjson

from fminfer.errors import FminferError, UsageError
from fminfer.input.lines import ENDINGS, is_input_name, read_lines
from fminfer.input.streams import STDIN, changed_ns, check_readable

MANIFEST = "manifest.json"  # of `fminfer split`: the folder's parts may stand below it
PART_NAME = re.compile(r"request_(0|[1-9][0-9]{0,17})\.jsonl")
MOST_NAMED = 5  # files or folders in a message
NUM_LOOKED_AT = 5  # lines, to tell whether a file holds requests
REQUEST_KEYS = frozenset({"prompt", "request", "body", "messages", "max_tokens"})


def find_inputs(paths: list[Path], *, may_be_empty: bool = False) -> list[Path]:
    """Return the files to answer, in order; a folder gives its requests, by name.

    A folder that `fminfer split` wrote gives the parts of its engine. `-` is stdin.

    Args:
        may_be_empty: a folder may hold no file to answer yet.

    Raises:
        UsageError: a path that does not exist, has another ending, or comes twice; a folder with
            the parts of several engines.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = list_requests(path) or _below(path)
            if not found and not may_be_empty:
                raise UsageError(
                    f"{path} holds no file to answer ({', '.join(ENDINGS)}){_tell_answers(path)}"
                )
            files += found
        elif path != STDIN and not path.exists():
            raise UsageError(f"{path} does not exist; give a .jsonl file or a folder of them")
        elif path != STDIN and not path.name.endswith(ENDINGS):
            raise UsageError(f"{path} has none of the endings {', '.join(ENDINGS)}; rename it")
        else:
            files.append(path)
    seen: set[Path] = set()
    for file in files:
        check_readable(file)
        if file.resolve() in seen:
            raise UsageError(f"{file} is given twice; each file is answered once")
        seen.add(file.resolve())
    return files


def list_requests(folder: Path) -> list[Path]:
    """Return a folder's own files to answer, by name: no answers, and each file once."""
    return [path for path in _once(_with_endings(folder)) if not holds_answers(path)]


def find_answers(folder: Path) -> list[Path]:
    """Return what looks like a folder's inputs by name, and holds answers."""
    return [path for path in _with_endings(folder) if holds_answers(path)]


def holds_answers(path: Path) -> bool:
    """Tell whether a file is one that fminfer wrote, by its first line."""
    return "answers" in _look_at(path)


def holds_requests(path: Path) -> bool:
    """Tell whether one of a file's first lines looks like a request."""
    return "requests" in _look_at(path)


def _look_at(path: Path) -> frozenset[str]:
    if not path.is_file():  # a pipe can be read only once
        return frozenset({"requests"})
    try:
        return _look_into(path, changed_ns(path))
    except FminferError:  # told where it is opened
        return frozenset()


@lru_cache(maxsize=100_000)
def _look_into(path: Path, changed_at: int) -> frozenset[str]:
    """Return what a file's first lines hold; a later change asks anew."""
    found = set()
    for number, line in enumerate(islice(read_lines(path, 0), NUM_LOOKED_AT)):
        try:
            fields = orjson.loads(line.raw)
        except ValueError:
            continue
        if not isinstance(fields, dict):
            continue
        if number == 0 and _is_record(fields):
            return frozenset({"answers"})
        if REQUEST_KEYS & fields.keys():
            found.add("requests")
    return frozenset(found)


def _is_record(fields: dict[str, object]) -> bool:
    """Tell whether a line is one of an output or of an errors file, in any shape."""
    result, response = fields.get("result"), fields.get("response")
    if "request" in fields and isinstance(result, dict):
        return "choices" in result
    if str(fields.get("id")).startswith("batch_req_") and isinstance(response, dict):
        return "status_code" in response
    return {"line", "custom_id", "error", "retryable", "request"} <= fields.keys()


def _with_endings(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_input_name(path.name) and path.is_file())


def _once(files: list[Path]) -> list[Path]:
    """Leave out links to files that are there themselves, or by an earlier link."""
    links = [path for path in files if path.is_symlink()]
    if not links:
        return files
    seen = {path.resolve() for path in files if not path.is_symlink()}
    left_out = set()
    for link in links:
        if link.resolve() in seen:
            left_out.add(link)
        seen.add(link.resolve())
    return [path for path in files if path not in left_out]


def _below(folder: Path) -> list[Path]:
    """Return the parts below a folder that `fminfer split` wrote: those of its only engine."""
    if not _is_split(folder):
        return []
    engines = {}
    for below, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if any(map(PART_NAME.fullmatch, names)):
            files = list_requests(Path(below))
            engines[below] = [path for path in files if PART_NAME.fullmatch(path.name)]
    if len(engines) > 1:
        listed = [
            f"\n  {below} ({len(files):,} file{'s' * (len(files) > 1)})"
            for below, files in list(engines.items())[:MOST_NAMED]
        ]
        more = f"\n  … and {len(engines) - MOST_NAMED:,} more" if len(engines) > MOST_NAMED else ""
        raise UsageError(
            f"{folder} holds the parts of {len(engines)} engines. Answer each folder with its own "
            f"model:{''.join(listed)}{more}"
        )
    return next(iter(engines.values()), [])


def _is_split(folder: Path) -> bool:
    """Tell whether `fminfer split` wrote a folder.

    Raises:
        UsageError: it was ended in the middle, and parts of an earlier split may be there.
    """
    try:
        with (folder / MANIFEST).open("rb") as file:
            head = file.readline()
    except OSError:
        return False
    if not head.startswith(b'{"fminfer_split"'):
        return False
    if not re.search(rb'"is_complete": ?true', head):
        raise UsageError(f"the split into {folder} was not finished; repeat its command")
    return True


def _tell_answers(folder: Path) -> str:
    answers = [path.name for path in find_answers(folder)]
    if not answers:
        return ""
    more = ", …" if len(answers) > MOST_NAMED else ""
    return (
        f"; {', '.join(answers[:MOST_NAMED])}{more}: answers of a run, by their first line. Name "
        "the file itself to answer the requests in it"
    )
