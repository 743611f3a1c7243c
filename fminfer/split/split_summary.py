"""What a split did, in words."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from fminfer.core.quantities import counted
from fminfer.split.grouping import Group, find_most_varied
from fminfer.split.manifest import Manifest

MAX_NAMED = 10  # folders
MANY_GROUPS, FEW_ROWS = 100, 10  # more groups than that, with fewer rows each, are told


@dataclass(slots=True, frozen=True)
class SplitSummary:
    """What a split did."""

    folder: Path
    manifest: Manifest
    groups: list[Group]
    num_bad: int  # lines that hold no request
    doubles: list[str]  # custom_ids that an earlier line has, each with its line

    def to_text(self) -> str:
        """Return the summary for people."""
        num_lines, num_groups = self.manifest.num_lines, len(self.groups)
        bad = f", {self.num_bad:,} of them no requests" if self.num_bad else ""
        lines = [
            f"split     {counted(num_lines, 'line')}{bad}",
            f"parts     {counted(len(self.manifest.parts), 'file')} for "
            f"{counted(num_groups, 'set')} of hyperparameters, in {self._folders()}",
        ]
        if num_groups > max(MANY_GROUPS, num_lines / FEW_ROWS):
            name, count = find_most_varied(self.groups)
            lines.append(
                f"note      most parts hold few lines: {name} alone has {count:,} values. fminfer "
                f"run answers {self.manifest.source} without splitting"
            )
        if self.doubles:
            lines.append(
                f"warning   custom_ids of earlier lines come again: {', '.join(self.doubles)}. "
                "A run over the whole file would refuse these lines"
            )
        merge = ["fminfer", "merge", "--input-dir", str(self.folder), "--output", "FILE"]
        return "\n".join([*lines, f"answers   merge them with: {shlex.join(merge)}"])

    def _folders(self) -> str:
        parts = self.manifest.parts
        found = list(dict.fromkeys(str((self.folder / part.path).parent) for part in parts))
        more = len(found) - MAX_NAMED
        return ", ".join(found[:MAX_NAMED]) + (
            f" and {counted(more, 'more folder')}" if more > 0 else ""
        )
