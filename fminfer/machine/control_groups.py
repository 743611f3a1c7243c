"""The system's files: the control groups of this process, version 1 and 2, with their limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")


def read_system_file(path: Path) -> str:
    """Return the text of one of the system's files; "": it has none, or it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def find_group_folders(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each control group that limits this process, innermost first.

    A container does not see all of them. `controller` is memory or cpu; with each
    folder comes the version of the control groups, 1 or 2.
    """
    lines = read_system_file(SYSTEM / "proc/self/cgroup").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        top = SYSTEM / "sys/fs/cgroup" / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == top:
                break
