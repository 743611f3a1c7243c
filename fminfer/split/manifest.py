"""The manifest of a split folder: what was split, and which of its lines each part holds.

It is JSON with one part a line, so that people can read it and nobody has to hold it as a whole:

    {"fminfer_split":1,"is_complete":true,"source":"a.jsonl",…,"num_parts":2,"parts":[
    {"path":"gpt-j/request_0.jsonl","engine":"gpt-j",…,"num_rows":2,"digest":"…","lines":[3,1]},
    …
    ],"check":"6f0c…"}

While a split puts its files in place the manifest is not complete, and holds their paths alone.
`num_equal` stands first in a part whose lines have equal ones before them, with their numbers.
`check` is a digest of all that stands before it. Nothing that a manifest says is believed unseen:
its paths stay in the folder, whoever wrote them.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import orjson

from fminfer.core.errors import UsageError
from fminfer.files.disk import replacing
from fminfer.files.split_folders import MANIFEST, NUM_EQUAL, PART_NAME
from fminfer.split.grouping import dump

NO_ENGINE = "default"  # of requests that name none
MAX_BYTES = 200  # of a folder's name, all components together
_KEPT = 40  # characters of a name that is too long
_SIGNS = frozenset("-_.+=@,")  # beside letters, marks and digits of any script


def folder_name(engine: str | None) -> str:
    """Return the folder for an engine, with a slash between components.

    What is not safe is written as in URLs: `%20` for a space. `org/model` is a folder in a folder.
    """
    if engine is None:
        return NO_ENGINE
    name = "/".join(map(_encode, engine.split("/")))
    if name == NO_ENGINE:
        return _percent(name[0]) + name[1:]
    if len(name.encode()) > MAX_BYTES:  # two digits follow any other %
        digest = hashlib.blake2b(engine.encode("utf-8", "surrogatepass"), digest_size=16)
        return f"{name[:_KEPT].replace('/', '_')}%-{digest.hexdigest()}"
    return name


def is_folder_name(name: str) -> bool:
    """Tell whether `folder_name` may have given this name: it leads nowhere else."""
    components = name.split("/")
    is_plain = all(_is_safe(sign) or sign in "%/" for sign in name)
    return (
        is_plain
        and len(name.encode()) <= MAX_BYTES
        and all(part and part[0] not in ".-" and ".json" not in part for part in components)
    )


def _encode(component: str) -> str:
    if not component:
        return "%empty"
    name = "".join(sign if _is_safe(sign) else _percent(sign) for sign in component)
    if name[0] in ".-":  # hidden, a way up, or a flag
        name = _percent(name[0]) + name[1:]
    return name.replace(".json", "%2Ejson")  # the ending of a part, its answers and their journal


def _is_safe(sign: str) -> bool:
    return sign in _SIGNS or unicodedata.category(sign)[0] in "LMN"


def _percent(sign: str) -> str:
    return "".join(f"%{byte:02X}" for byte in sign.encode("utf-8", "surrogatepass"))


VERSION = 1
MAX_LINE = 2**53  # of line numbers; JSON readers agree up to there
_HEAD_END, _END = b'"parts":[', b'],"check":'


@dataclass(slots=True, frozen=True)
class SplitPart:
    """One file of a split. `lines` are the numbers of its lines in the source, in its own order."""

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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a split that is complete."""
    _write(folder, manifest, True, [part.path for part in manifest.parts])


def write_unfinished(folder: Path, manifest: Manifest, paths: list[str]) -> None:
    """Write, before the first of its files is put in place, what files a split may have left.

    Args:
        paths: of its parts and of those that it will remove.
    """
    _write(folder, manifest, False, paths)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a split that is complete.

    Raises:
        UsageError: there is none, its split was not finished, or it is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise UsageError(f"{folder} holds no {MANIFEST}; give a folder that fminfer split wrote")
    reader = _Reader(path)
    entries = reader.entries()
    head = next(entries)
    if not head["is_complete"]:
        raise UsageError(
            f"the split of {head['source']} into {folder} was not finished; repeat its command"
        )
    parts = [reader.part(entry) for entry in entries]
    reader.check_parts(head, parts)
    return Manifest(head["source"], head["digest"], head["options"], head["num_lines"], parts)


def read_paths(folder: Path) -> set[str]:
    """Return the paths of an earlier split's parts, whether it was finished or not.

    Raises:
        UsageError: its manifest is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return set()
    reader = _Reader(path)
    entries = reader.entries()
    is_complete = next(entries)["is_complete"]
    return {
        reader.part(entry).path if is_complete else reader.part_path(entry) for entry in entries
    }


def _write(folder: Path, manifest: Manifest, is_complete: bool, paths: list[str]) -> None:
    head = {
        "fminfer_split": VERSION,
        "is_complete": is_complete,
        "source": manifest.source,
        "digest": manifest.digest,
        "options": manifest.options,
        "num_lines": manifest.num_lines,
        "num_parts": len(paths),
    }
    entries: Iterable[object] = (part.to_dict() for part in manifest.parts)
    check = hashlib.blake2b(digest_size=8)
    with replacing(folder / MANIFEST) as file:
        for text in _to_text(head, entries if is_complete else paths):
            check.update(text)
            file.write(text)
        file.write(_END + b'"%s"}\n' % check.hexdigest().encode())


def _to_text(head: dict[str, Any], entries: Iterable[object]) -> Iterator[bytes]:
    yield dump(head)[:-1] + b"," + _HEAD_END
    before = b"\n"
    for entry in entries:
        yield before + dump(entry)
        before = b",\n"
    yield b"\n"


class _Reader:
    """Reads a manifest line by line, and believes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0  # of the line that was read last

    def entries(self) -> Iterator[Any]:
        """Yield the head, then what stands for each part."""
        check = hashlib.blake2b(digest_size=8)
        with self._opened() as file:
            for self._number, line in enumerate(file, start=1):
                is_head = self._number == 1
                if line.startswith(_END) and not is_head:
                    self._check_end(line, check.hexdigest(), file.read(1))
                    return
                yield self._head(line) if is_head else self._load(line.rstrip(b",\n"))
                check.update(line)
        self._refuse("it breaks off here")

    def part(self, entry: Any) -> SplitPart:
        """Check what stands for a part."""
        names = ("path", "engine", "hyperparameters", "num_rows", "digest", "lines")
        if not isinstance(entry, dict) or any(name not in entry for name in names):
            self._refuse(f"it must be an object with {', '.join(names)}")
        self._check_types(entry, engine=str | None, hyperparameters=dict, digest=str)
        self._check_types(entry, num_rows=int, lines=list)
        lines = entry["lines"]
        if not lines or len(lines) != entry["num_rows"]:
            self._refuse(f"num_rows is {entry['num_rows']}, and there are {len(lines)} lines")
        if not all(type(line) is int and 0 < line < MAX_LINE for line in lines):
            self._refuse("lines must be numbers of lines, from 1")
        equal = entry.get(NUM_EQUAL, [])
        if not isinstance(equal, list) or len(equal) not in (0, len(lines)):
            self._refuse(f"{NUM_EQUAL} must have a number for each line")
        if not all(type(number) is int and 0 <= number < 2**32 for number in equal):
            self._refuse(f"{NUM_EQUAL} must be counts of lines")
        path = self.part_path(entry["path"])
        engine, hyperparameters = entry["engine"], entry["hyperparameters"]
        numbers, counts = array("q", lines), array("I", equal)
        return SplitPart(path, engine, hyperparameters, entry["digest"], numbers, counts)

    def part_path(self, path: Any) -> str:
        """Check a part's path: it leads to a part, in this folder."""
        folder, _, name = path.rpartition("/") if isinstance(path, str) else ("", "", "")
        if not PART_NAME.fullmatch(name) or not (path == name or is_folder_name(folder)):
            self._refuse("a path must be that of a part, such as gpt-j/request_0.jsonl")
        return str(path)

    def check_parts(self, head: dict[str, Any], parts: list[SplitPart]) -> None:
        """See that each part and each line comes once, and that none is missing."""
        if len({part.path for part in parts}) < len(parts):
            self._refuse("two parts have the same path")
        if len(parts) != head["num_parts"]:
            self._refuse(f"num_parts is {head['num_parts']}, and there are {len(parts)}")
        num_lines = sum(len(part.lines) for part in parts)
        if num_lines != head["num_lines"]:
            self._refuse(f"num_lines is {head['num_lines']}, and the parts hold {num_lines}")
        if has_doubles([part.lines for part in parts]):
            self._refuse("a line of the source is in two places")

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                yield file
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror or error}") from error

    def _head(self, line: bytes) -> dict[str, Any]:
        text = line.rstrip(b"\n")
        head = self._load(text + b"]}") if text.endswith(_HEAD_END) else None
        if not isinstance(head, dict) or head.get("fminfer_split") != VERSION:
            self._refuse(f"it does not begin as a manifest of version {VERSION}")
        self._check_types(head, is_complete=bool, source=str, digest=str, options=dict)
        self._check_types(head, num_lines=int, num_parts=int)
        return head

    def _check_types(self, entry: dict[str, Any], **types: Any) -> None:
        for name, kind in types.items():
            value = entry.get(name)
            if not isinstance(value, kind) or (kind is int and type(value) is not int):
                self._refuse(f"{name} is missing, or not what it must be")

    def _check_end(self, line: bytes, check: str, rest: bytes) -> None:
        if line != _END + b'"%s"}\n' % check.encode() or rest:
            self._refuse("it was changed after it was written")

    def _load(self, text: bytes) -> Any:
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass
        try:
            return json.loads(text)  # which takes lone surrogates
        except (ValueError, RecursionError):
            self._refuse("it is not JSON as fminfer split writes it")

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(
            f"{self._path} is damaged, in its line {self._number}: {reason}. Split the file again "
            "into a new folder"
        )


def has_doubles(numbers: list[array[int]]) -> bool:
    """Tell whether a number comes twice in several arrays."""
    import numpy as np

    if not numbers:
        return False
    every = np.sort(np.concatenate([np.frombuffer(some, np.int64) for some in numbers]))
    return bool((every[1:] == every[:-1]).any())
