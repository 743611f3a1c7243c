"""The manifest of a split folder: what was split, and which of its lines each part holds.

It is JSON with one part a line, so that people can read it and nobody has to hold it as a whole:

    {"fminfer_split":1,"is_complete":true,"source":"a.jsonl",…,"num_parts":2,"parts":[
    {"path":"gpt-j/request_0.jsonl","engine":"gpt-j",…,"num_rows":2,"digest":"…","lines":[3,1]},
    …
    ],"check":"6f0c…"}

While a split puts its files in place the manifest is not complete, and holds their paths alone.
`num_equal` stands first in a part whose lines have equal ones before them, with their numbers.
`check` is a digest of all before it. Paths stay in the folder, whoever wrote them.
"""

from __future__ import annotations

import hashlib
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fminfer.contract.json_object import dump_json, parse_json
from fminfer.core.errors import UsageError
from fminfer.files.disk import replacing_file
from fminfer.files.split_folders import NUM_EQUAL
from fminfer.files.streams import MANIFEST, PART_NAME, raising_read_errors

NO_ENGINE = "default"  # of requests that name none
MAX_BYTES = 200  # of a folder's name, all components together
_KEPT = 40  # characters of a name that is too long
_SIGNS = frozenset("-_.+=@,")  # beside letters, marks and digits of any script


def make_folder_name(engine: str | None) -> str:
    """Return the folder of an engine: `org/model` is a folder in a folder, and `%20` a space."""
    if engine is None:
        return NO_ENGINE
    name = "/".join(map(_encode_component, engine.split("/")))
    if name == NO_ENGINE:
        return _encode_sign(name[0]) + name[1:]
    if len(name.encode()) > MAX_BYTES:  # two digits follow any other %
        digest = hashlib.blake2b(
            engine.encode("utf-8", "surrogatepass"), digest_size=16
        )
        return f"{name[:_KEPT].replace('/', '_')}%-{digest.hexdigest()}"
    return name


def is_folder_name(name: str) -> bool:
    """Tell whether `make_folder_name` may have given this name: it leads nowhere else."""
    components = name.split("/")
    is_plain = all(_is_safe(sign) or sign in "%/" for sign in name)
    return (
        is_plain
        and len(name.encode()) <= MAX_BYTES
        and all(
            part and part[0] not in ".-" and ".json" not in part for part in components
        )
    )


def _encode_component(component: str) -> str:
    if not component:
        return "%empty"
    name = "".join(sign if _is_safe(sign) else _encode_sign(sign) for sign in component)
    if name[0] in ".-":  # hidden, a way up, or a flag
        name = _encode_sign(name[0]) + name[1:]
    # the ending of a part, its answers and their journal
    return name.replace(".json", "%2Ejson")


def _is_safe(sign: str) -> bool:
    return sign in _SIGNS or unicodedata.category(sign)[0] in "LMN"


def _encode_sign(sign: str) -> str:
    return "".join(f"%{byte:02X}" for byte in sign.encode("utf-8", "surrogatepass"))


VERSION = 1
MAX_LINE = 2**53  # of line numbers; JSON readers agree up to there
_HEAD_END = b'"parts":['
_END = b'],"check":'


@dataclass(slots=True, frozen=True)
class SplitPart:
    """One file of a split. `lines` are the source's numbers of its lines, in its order."""

    path: str  # below the folder, with slashes
    engine: str | None
    hyperparameters: dict[str, Any]
    digest: str
    lines: array[int]
    # Equal lines before each in the source, for draws; empty: 0 for all.
    num_equal: array[int] = field(default_factory=lambda: array("I"))

    def to_dict(self) -> dict[str, Any]:
        equal = {NUM_EQUAL: self.num_equal.tolist()} if self.num_equal else {}
        return equal | {
            "path": self.path,
            "engine": self.engine,
            "hyperparameters": self.hyperparameters,
            "num_rows": len(self.lines),
            "digest": self.digest,
            "lines": self.lines.tolist(),
        }


@dataclass(slots=True, frozen=True)
class Manifest:
    """What was split: its path and digest, how, and how many lines that are not blank it had."""

    source: str
    digest: str
    options: dict[str, int]
    num_lines: int
    parts: list[SplitPart] = field(default_factory=list)


def write_manifest(
    folder: Path, manifest: Manifest, unfinished: list[str] | None = None
) -> None:
    """Write the manifest of a split.

    Args:
        unfinished: before the first file is put in place: the paths of the split's parts, and of
            those that it will remove. None: it is complete.
    """
    head = {
        "fminfer_split": VERSION,
        "is_complete": unfinished is None,
        "source": manifest.source,
        "digest": manifest.digest,
        "options": manifest.options,
        "num_lines": manifest.num_lines,
        "num_parts": len(manifest.parts if unfinished is None else unfinished),
    }
    parts = (part.to_dict() for part in manifest.parts)
    check = hashlib.blake2b(digest_size=8)
    with replacing_file(folder / MANIFEST) as file:

        def write(text: bytes) -> None:
            check.update(text)
            file.write(text)

        write(dump_json(head)[:-1] + b"," + _HEAD_END)
        for number, entry in enumerate(parts if unfinished is None else unfinished):
            write((b",\n" if number else b"\n") + dump_json(entry))
        write(b"\n")
        file.write(_END + b'"%s"}\n' % check.hexdigest().encode())


def sort_line_numbers(parts: list[SplitPart]) -> npt.NDArray[np.int64]:
    """Return the numbers of all lines of parts, in order."""
    lines = [np.frombuffer(part.lines, np.int64) for part in parts]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *lines]))


def read_manifest(folder: Path) -> Manifest:
    """Read a split's manifest; raise a UsageError if it is missing, unfinished or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no {MANIFEST}; give a folder that fminfer split wrote"
        )
    reader = _ManifestReader(path)
    entries = reader.read_entries()
    head = next(entries)
    if not head["is_complete"]:
        raise UsageError(
            f"the split of {head['source']} into {folder} was not finished; repeat its command"
        )
    parts = [reader.parse_part(entry) for entry in entries]
    reader.check_parts(head, parts)
    return Manifest(
        head["source"], head["digest"], head["options"], head["num_lines"], parts
    )


def read_part_paths(folder: Path) -> set[str]:
    """Return the paths of an earlier split's parts, whether it was finished or not."""
    path = folder / MANIFEST
    if not path.is_file():
        return set()
    reader = _ManifestReader(path)
    entries = reader.read_entries()
    is_complete = next(entries)["is_complete"]
    return {
        reader.parse_part(entry).path if is_complete else reader.parse_part_path(entry)
        for entry in entries
    }


class _ManifestReader:
    """Reads a manifest line by line, and checks everything in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0  # of the line that was read last

    def read_entries(self) -> Iterator[Any]:
        """Yield the head, then each part's entry."""
        check = hashlib.blake2b(digest_size=8)
        with raising_read_errors(self._path), self._path.open("rb") as file:
            for self._number, line in enumerate(file, start=1):
                if self._number == 1:
                    yield self._parse_head(line)
                elif not line.startswith(_END):
                    yield self._parse_json(line.rstrip(b",\n"))
                elif (
                    line == _END + b'"%s"}\n' % check.hexdigest().encode()
                    and not file.read(1)
                ):
                    return
                else:
                    self._raise_damage("it was changed after it was written")
                check.update(line)
        self._raise_damage("it breaks off here")

    def parse_part(self, entry: Any) -> SplitPart:
        """Parse a part's entry."""
        if not isinstance(entry, dict):
            self._raise_damage("it must be an object, as fminfer split writes it")
        self._check_types(entry, engine=str | None, hyperparameters=dict, digest=str)
        self._check_types(entry, num_rows=int, lines=list)
        lines = entry["lines"]
        if not lines or len(lines) != entry["num_rows"]:
            self._raise_damage(
                f"num_rows is {entry['num_rows']}, and there are {len(lines)} lines"
            )
        if not all(type(line) is int and 0 < line < MAX_LINE for line in lines):
            self._raise_damage("lines must be numbers of lines, from 1")
        equal = entry.get(NUM_EQUAL, [])
        if not isinstance(equal, list) or len(equal) not in (0, len(lines)):
            self._raise_damage(f"{NUM_EQUAL} must have a number for each line")
        if not all(type(number) is int and 0 <= number < 2**32 for number in equal):
            self._raise_damage(f"{NUM_EQUAL} must be counts of lines")
        return SplitPart(
            path=self.parse_part_path(entry.get("path")),
            engine=entry["engine"],
            hyperparameters=entry["hyperparameters"],
            digest=entry["digest"],
            lines=array("q", lines),
            num_equal=array("I", equal),
        )

    def parse_part_path(self, path: Any) -> str:
        """Check a part's path: it leads to a part, in this folder."""
        folder, _, name = (
            path.rpartition("/") if isinstance(path, str) else ("", "", "")
        )
        if not PART_NAME.fullmatch(name) or not (
            path == name or is_folder_name(folder)
        ):
            self._raise_damage(
                "a path must be that of a part, such as gpt-j/request_0.jsonl"
            )
        return str(path)

    def check_parts(self, head: dict[str, Any], parts: list[SplitPart]) -> None:
        """Check that each part and each line comes once, and that none is missing."""
        if len({part.path for part in parts}) < len(parts):
            self._raise_damage("two parts have the same path")
        if len(parts) != head["num_parts"]:
            self._raise_damage(
                f"num_parts is {head['num_parts']}, and there are {len(parts)}"
            )
        numbers = sort_line_numbers(parts)
        if len(numbers) != head["num_lines"]:
            self._raise_damage(
                f"num_lines is {head['num_lines']}, and the parts hold {len(numbers)}"
            )
        if (numbers[1:] == numbers[:-1]).any():
            self._raise_damage("a line of the source is in two places")

    def _parse_head(self, line: bytes) -> dict[str, Any]:
        text = line.rstrip(b"\n")
        head = self._parse_json(text + b"]}") if text.endswith(_HEAD_END) else None
        if not isinstance(head, dict) or head.get("fminfer_split") != VERSION:
            self._raise_damage(f"it does not begin as a manifest of version {VERSION}")
        self._check_types(head, is_complete=bool, source=str, digest=str, options=dict)
        self._check_types(head, num_lines=int, num_parts=int)
        return head

    def _check_types(self, entry: dict[str, Any], **types: Any) -> None:
        for name, kind in types.items():
            value = entry.get(name)
            is_kind = isinstance(value, kind) and (
                kind is not int or type(value) is int
            )
            if name not in entry or not is_kind:
                self._raise_damage(f"{name} is missing, or not what it must be")

    def _parse_json(self, text: bytes) -> Any:
        try:
            return parse_json(text)
        except (ValueError, RecursionError):
            self._raise_damage("it is not JSON as fminfer split writes it")

    def _raise_damage(self, reason: str) -> NoReturn:
        raise UsageError(
            f"{self._path} is damaged, in its line {self._number}: {reason}. Split the "
            "file again into a new folder"
        )
