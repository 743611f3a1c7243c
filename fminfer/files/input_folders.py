"""Which files are to be answered: those that were named, and those of folders that hold requests.

Folders also hold what runs wrote. By their names these are left out everywhere; answers under a
name of the user's own are known by their first line. Whatever else is left out is told.
"""

from __future__ import annotations

import os
import shlex
from functools import lru_cache
from itertools import islice
from pathlib import Path

import orjson

from fminfer.core.errors import FminferError, UsageError
from fminfer.core.quantities import counted
from fminfer.files.first_bytes import explain_bytes, explain_text
from fminfer.files.line_reader import (
    ENDINGS,
    NAMED_ENDINGS,
    first_bytes,
    is_input_name,
    read_lines,
)
from fminfer.files.split_folders import MANIFEST, PART_NAME, is_split
from fminfer.files.streams import STDIN, changed_ns, check_readable, is_stream

MOST_NAMED = 5  # files or folders in a message
NUM_LOOKED_AT = 5  # lines, to tell whether a file holds requests
# Why a folder's files are left out, and how to have them answered.
ANSWERS = "answers of a run, by their first line; name the file itself to answer its requests"
CAPITALS = "an ending in capitals; rename the file to answer its requests"
NO_FILE = "a pipe, a device or a folder; name it itself to answer what is in it"
LINK = "a link to a file of the folder, which is answered; name the link itself to answer it too"
LOST = "cannot be reached; mend the link, or remove it"
REQUEST_KEYS = frozenset({"prompt", "request", "body", "messages", "max_tokens", "input"})


def find_inputs(paths: list[Path], *, may_be_empty: bool = False) -> list[Path]:
    """Return the files to answer, in order; a folder gives its requests, by name.

    A folder that `fminfer split` wrote gives the parts of its engine. `-` is stdin.

    Args:
        may_be_empty: a folder may hold no file to answer yet.

    Raises:
        UsageError: a path that does not exist, has another ending, holds no JSON lines by its first
            bytes, or comes twice; a folder with the parts of several engines.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = list_requests(path) or _below(path)
            if not found and not may_be_empty:
                what = f"{path} holds no file to answer ({NAMED_ENDINGS})"
                left_out = describe_left_out([path], has_lost=True) or _describe_others(path)
                raise UsageError("; ".join([what, *left_out]))
            files += found
        elif path != STDIN and not path.exists():
            raise UsageError(f"{path} does not exist; give a .jsonl file or a folder of them")
        else:
            _check_form(path)
            files.append(path)
    seen: set[Path] = set()
    for file in files:
        check_readable(file)
        place = file.parent.resolve() / file.name  # links to one file have outputs of their own
        if place in seen:
            raise UsageError(f"{file} is given twice; each file is answered once")
        seen.add(place)
    return files


def _check_form(path: Path) -> None:
    """Refuse a file that was named and cannot be answered; a pipe is read whatever its name is."""
    if is_stream(path) or not path.is_file():
        return
    trouble = what_is_wrong(path)
    if path.name.endswith(ENDINGS):
        if trouble:
            raise UsageError(f"{path} cannot be answered: {trouble}")
        return
    if holds_requests(path):
        trouble = (
            f"its lines are requests; rename it, or give it on stdin: - < {shlex.quote(str(path))}"
        )
    trouble = trouble or "it must hold JSON lines, each a request"
    raise UsageError(f"{path} has none of the endings {NAMED_ENDINGS}; {trouble}")


def _describe_others(folder: Path) -> list[str]:
    others = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return [f"it holds {_name_few(others)}"] if others else []


def list_requests(folder: Path) -> list[Path]:
    """Return a folder's own files to answer, by name: no answers, no links to others of them."""
    found = _with_endings(folder)
    others = _links_within(found)
    others |= {path for path in found if holds_answers(path) or what_is_wrong(path)}
    return [path for path in found if path not in others]


def find_left_out(folder: Path) -> dict[str, list[Path]]:
    """Return a folder's files that are left out and look like inputs by name; by why they are.

    Those that cannot be read are not among them, see `find_lost`.
    """
    found: dict[str, list[Path]] = {}
    links = _links_within(_with_endings(folder))
    for path in sorted(folder.iterdir()):
        if why := _why_left_out(path) or (LINK if path in links else ""):
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
    """Return a folder's links that lead nowhere and files that are no JSON lines: what is wrong.

    Each may stand for a file whose requests would be lost.
    """
    found = {}
    for path in sorted(path for path in folder.iterdir() if is_input_name(path.name)):
        if _is_lost(path):
            found[path] = f"{path} is a link to {os.readlink(path)}, which {LOST}"
        elif os.path.isfile(path) and (trouble := what_is_wrong(path)):
            found[path] = f"{path} cannot be answered: {trouble}"
    return found


def _is_lost(path: Path) -> bool:
    return path.is_symlink() and not os.path.exists(path)


def folders_read(folder: Path) -> list[Path]:
    """Return the folders whose files `find_inputs` finds for one: itself, or those of its parts."""
    if not (folder / MANIFEST).exists() or list_requests(folder):
        return [folder]
    return [folder, *sorted({path.parent for path in _below(folder)})]


def describe_left_out(folders: list[Path], *, has_lost: bool = False) -> list[str]:
    """Name what is left out of folders: a text for each reason, with a few of the names.

    Args:
        has_lost: name links that lead nowhere and files that are no JSON lines, too.
    """
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for why, paths in find_left_out(folder).items():
            found.setdefault(why, []).extend(paths)
        for each in folders_read(folder) if has_lost else ():
            for path in find_lost(each):
                why = what_is_wrong(path) or f"a link to a file that {LOST}"
                found.setdefault(why, []).append(path)
    return [f"{_name_few(paths)}: {why}" for why, paths in found.items()]


def describe_empty(files: list[Path]) -> list[str]:
    """Name the files that hold nothing: their outputs will be empty, too."""
    empty = [path for path in files if path.is_file() and not path.stat().st_size]
    return [f"{_name_few(empty)}: 0 bytes, so there is nothing to answer"] if empty else []


def _name_few(paths: list[Path]) -> str:
    more = f", … ({len(paths):,} in all)" if len(paths) > MOST_NAMED else ""
    return ", ".join(map(str, paths[:MOST_NAMED])) + more


def holds_answers(path: Path) -> bool:
    """Tell whether a file is one that fminfer wrote, by its first line."""
    return "answers" in _look_at(path)[0]


def holds_requests(path: Path) -> bool:
    """Tell whether one of a file's first lines looks like a request."""
    return "requests" in _look_at(path)[0]


def what_is_wrong(path: Path) -> str:
    """Say what a file is that holds no JSON lines, and what to do; "" if it may hold some."""
    return _look_at(path)[1]


def _look_at(path: Path) -> tuple[frozenset[str], str]:
    if not path.is_file():  # a pipe can be read only once
        return frozenset({"requests"}), ""
    try:
        return _look_into(path, changed_ns(path))
    except FminferError:  # told where it is opened
        return frozenset(), ""


@lru_cache(maxsize=100_000)
def _look_into(path: Path, changed_at: int) -> tuple[frozenset[str], str]:
    """Return what a file's first lines hold, and what is wrong; a later change asks anew."""
    head = first_bytes(path)
    is_spread = ".json" in path.suffixes and head.lstrip().startswith(b"{")  # which may end in CR
    is_known = is_spread or PART_NAME.fullmatch(path.name)  # a part may hold wrong lines alone
    if trouble := explain_bytes(head) or ("" if is_known else explain_text(head)):
        return frozenset(), trouble
    found = set()
    for number, line in enumerate(islice(read_lines(path, 0), NUM_LOOKED_AT)):
        try:
            fields = orjson.loads(line.raw)
        except ValueError:
            continue
        if not isinstance(fields, dict):
            continue
        if number == 0 and _is_record(fields):
            return frozenset({"answers"}), ""
        if REQUEST_KEYS & fields.keys():
            found.add("requests")
    return frozenset(found), ""


def _is_record(fields: dict[str, object]) -> bool:
    """Tell whether a line is one of an output or of an errors file, in any shape."""
    result, response = fields.get("result"), fields.get("response")
    if "request" in fields and isinstance(result, dict):
        made = {"data", "results"} & result.keys() and "usage" in result  # of vectors
        return bool(made) or "choices" in result
    if str(fields.get("id")).startswith("batch_req_") and isinstance(response, dict):
        return "status_code" in response
    return {"line", "custom_id", "error", "retryable", "request"} <= fields.keys()


def _with_endings(folder: Path) -> list[Path]:
    found = (path for path in folder.iterdir() if is_input_name(path.name))
    return sorted(path for path in found if os.path.isfile(path))


def _links_within(files: list[Path]) -> set[Path]:
    """Return the links to files that are there themselves."""
    links = [path for path in files if path.is_symlink()]
    there = {path.resolve() for path in files if not path.is_symlink()} if links else set()
    return {link for link in links if link.resolve() in there}


def _below(folder: Path) -> list[Path]:
    """Return the parts below a folder that `fminfer split` wrote: those of its only engine."""
    if not is_split(folder):
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
