"""What `fminfer split` left in a folder, as a run over its parts sees it."""

from __future__ import annotations

import re
from array import array
from functools import lru_cache
from pathlib import Path

from fminfer.contract.json_object import parse_json
from fminfer.core.errors import UsageError
from fminfer.files.streams import (
    MANIFEST,
    digest_file,
    find_split_folder,
    read_changed_ns,
    read_manifest_head,
)

NUM_EQUAL = "num_equal"  # in what a manifest says of a part; see `envelope.Line`
_NUM_EQUAL = re.compile(rb'\{"num_equal":.*?\],"path":("(?:[^"\\]|\\.)*")')


def find_num_equal(path: Path) -> array[int] | None:
    """Return for each line of a part how many equal ones stand before it in what was split.

    None: it is no part, no line has an equal one, or it was edited since.
    """
    folder = find_split_folder(path)
    if folder is None or not path.is_file():
        return None
    manifest = folder / MANIFEST
    name = path.absolute().relative_to(folder).as_posix()
    try:
        place = _read_entry_places(manifest, read_changed_ns(manifest)).get(name)
        return (
            None
            if place is None
            else _read_num_equal(path, read_changed_ns(path), manifest, place)
        )
    except (
        OSError,
        UsageError,
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        RecursionError,
    ):
        return None  # `fminfer merge` tells it


@lru_cache(maxsize=8)
def _read_entry_places(manifest: Path, changed_at: int) -> dict[str, int]:
    """Return where a manifest's entries of parts with equal lines stand, by part path."""
    places = {}
    place = 0
    with manifest.open("rb") as file:
        for line in file:
            if match := _NUM_EQUAL.match(line):
                places[str(parse_json(match[1]))] = place
            place += len(line)
    return places


@lru_cache(maxsize=2)  # a run looks at a part several times
def _read_num_equal(
    path: Path, changed_at: int, manifest: Path, place: int
) -> array[int] | None:
    with manifest.open("rb") as file:
        file.seek(place)
        entry = parse_json(file.readline().rstrip(b",\n"))
    return (
        array("I", entry[NUM_EQUAL]) if entry["digest"] == digest_file(path) else None
    )


def is_split_folder(folder: Path) -> bool:
    """Tell whether `fminfer split` wrote a folder.

    Raises:
        UsageError: the split was not finished.
    """
    head = read_manifest_head(folder)
    if head and not re.search(rb'"is_complete": ?true', head):
        raise UsageError(
            f"the split into {folder} was not finished; repeat its command"
        )
    return bool(head)
