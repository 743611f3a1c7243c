"""JSON lines, appended at once: what is known stays known, however a process ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Figures

Line = dict[str, Any]


def append(path: Path, line: Line) -> None:
    """Append one line, in one write, beside other processes that do."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def read(path: Path) -> list[Line]:
    """Return all lines; half a line, of a machine that went away, is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def cut_middle(path: Path, most_bytes: int) -> None:
    """Shorten a file to its beginning and its end, if it is larger."""
    if not path.exists() or path.stat().st_size <= most_bytes:
        return
    half = most_bytes // 2 - 100
    with path.open("r+b") as file:
        head = file.read(half)
        file.seek(-half, os.SEEK_END)
        tail = file.read()
        file.seek(0)
        file.truncate()
        file.write(head + b"\n--- the middle is left out ---\n" + tail)


def find_roof(path: Path, name: str) -> float | None:
    """Return a roof that phase 0 measured last; None: it has not run."""
    found: Iterable[Line] = (
        line
        for line in read(path)
        if line["phase"] == 0 and line.get("case") == f"roof {name}"
    )
    roofs = [line["figures"]["roof"] for line in found if line.get("state") == "passed"]
    return float(roofs[-1]) if roofs else None


def share_of(path: Path, rate: float, name: str) -> Figures:
    """Return the share of a roof that a rate reaches, as a figure; {}: the roof is not
    measured."""
    roof = find_roof(path, name)
    return {} if roof is None else {"share of the roof": rate / roof}
