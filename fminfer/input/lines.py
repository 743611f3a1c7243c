"""Reads input files lazily: (source, line number, raw bytes). It knows no JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fminfer.errors import UsageError

UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True, frozen=True)
class Line:
    """One line that is not blank; `source` counts the files of a run, `number` starts at 1."""

    source: int
    number: int
    raw: bytes


def find_inputs(paths: list[Path]) -> list[Path]:
    """Return the files to answer, in order; a folder gives its `.jsonl` files by name.

    Files that are outputs of an earlier run (`output_*`, `*.errors.jsonl`) are left out of folders.

    Raises:
        UsageError: a path that does not exist, has another ending, or comes twice.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.glob("*.jsonl") if p.is_file() and not _is_output(p))
            if not found:
                raise UsageError(f"{path} holds no .jsonl file to answer")
            files += found
        elif not path.exists():
            raise UsageError(f"{path} does not exist; give a .jsonl file or a folder of them")
        elif path.suffix != ".jsonl":
            raise UsageError(f"{path} does not end in .jsonl, the one format this version reads")
        else:
            files.append(path)
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise UsageError(f"{file} is given twice; each file is answered once")
        seen.add(file.resolve())
    return files


def _is_output(path: Path) -> bool:
    return path.name.startswith("output_") or path.name.endswith(".errors.jsonl")


def read_lines(path: Path, source: int) -> Iterator[Line]:
    """Yield the lines of one file; blank ones are skipped but counted."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(UTF8_BOM)
            if raw.strip():
                yield Line(source, number, raw)
