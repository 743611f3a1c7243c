"""The control groups that this process is in: where Linux keeps their limits, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")


def group_folders(controller: str) -> Iterator[tuple[Path, int]]:
    """Give the folder of each control group that limits this process, from the innermost up.

    A container does not see all of them. `controller` is memory or cpu; with each folder comes the
    version of the control groups, 1 or 2.
    """
    try:
        lines = (SYSTEM / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        top = SYSTEM / "sys/fs/cgroup" / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == top:
                break
