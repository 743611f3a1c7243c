"""Which files are to be answered: those that were named, and those of folders that hold requests.

Folders also hold what runs wrote. By their names these are left out everywhere; answers under a
name of the user's own are known by their first line. What else is left out is told.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from itertools import islice
from pathlib import Path

import orjson

from fminfer.core.errors import FminferError, UsageError
from fminfer.core.quantities import counted
from fminfer.files.line_reader import ENDINGS, is_input_name, read_lines
from fminfer.files.streams import STDIN, changed_ns, check_readable

MANIFEST = "manifest.json"  # of `fminfer split`: the folder's parts may stand below it
PART_NAME = re.compile(r"request_(0|[1-9][0-9]{0,17})\.jsonl")
MOST_NAMED = 5  # files or folders in a message
NUM_LOOKED_AT = 5  # lines, to tell whether a file holds requests
# Why a folder's files are left out, and how to have them answered.
ANSWERS = "answers of a run, by their first line; name the file itself to answer its requests"
CAPITALS = "an ending in capitals; rename the file to answer its requests"
NO_FILE = "a pipe, a device or a folder; name it itself to answer what is in it"
LOST = "cannot be reached; mend the link, or remove it"
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
                what = f"{path} holds no file to answer ({', '.join(ENDINGS)})"
                raise UsageError("; ".join([what, *describe_left_out([path], has_lost=True)]))
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


def find_left_out(folder: Path) -> dict[str, list[Path]]:
    """Return a folder's files that are left out and look like inputs by name; by why they are.

    Links that lead nowhere are not among them, see `find_lost`.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if why := _why_left_out(path):
            found.setdefault(why, []).append(path)
    return found


def _why_left_out(path: Path) -> str:
    if not is_input_name(path.name):
        is_meant = is_input_name(path.name.lower()) and os.path.isfile(path)
        return CAPITALS if is_meant else ""
    if not os.path.isfile(path):
        return NO_FILE if os.path.exists(path) else ""
    return ANSWERS if holds_answers(path) else ""


def find_lost(folder: Path) -> dict[Path, str]:
    """Return a folder's links that lead nowhere, each with what is wrong.

    Each may stand for a file whose requests would be lost.
    """
    return {
        path: f"{path} is a link to {os.readlink(path)}, which {LOST}"
        for path in sorted(folder.iterdir())
        if is_input_name(path.name) and path.is_symlink() and not os.path.exists(path)
    }


def folders_read(folder: Path) -> list[Path]:
    """Return the folders whose files `find_inputs` finds for one: itself, or those of its parts."""
    if not (folder / MANIFEST).exists() or list_requests(folder):
        return [folder]
    return [folder, *sorted({path.parent for path in _below(folder)})]


def describe_left_out(folders: list[Path], *, has_lost: bool = False) -> list[str]:
    """Name what is left out of folders: a text for each reason, with a few of the names.

    Args:
        has_lost: name links that lead nowhere, too.
    """
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for why, paths in find_left_out(folder).items():
            found.setdefault(why, []).extend(paths)
        for each in folders_read(folder) if has_lost else ():
            if lost := find_lost(each):
                found.setdefault(f"a link to a file that {LOST}", []).extend(lost)
    return [f"{_name_few(paths)}: {why}" for why, paths in found.items()]


def _name_few(paths: list[Path]) -> str:
    more = f", … ({len(paths):,} in all)" if len(paths) > MOST_NAMED else ""
    return ", ".join(map(str, paths[:MOST_NAMED])) + more


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
    found = (path for path in folder.iterdir() if is_input_name(path.name))
    return sorted(path for path in found if os.path.isfile(path))


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
            f"\n  {below} ({counted(len(files), 'file')})"
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
