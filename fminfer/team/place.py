"""Whether this process belongs to one of several pipelines, and how it reaches the run itself.

It knows environment variables and needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

PLACE = "FMINFER_PIPELINE"  # set for a pipeline's processes: the three numbers of its place


@dataclass(slots=True, frozen=True)
class Place:
    """A pipeline's way to the run, and its place among those of this machine."""

    descriptor: int
    number: int
    num_engines: int

    def connect(self) -> Connection:
        """Return the way to the run, to which only one process of the pipeline speaks."""
        return Connection(self.descriptor)

    def to_text(self) -> str:
        return f"{self.descriptor} {self.number} {self.num_engines}"


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place; None: it is no pipeline's."""
    text = environ.get(PLACE)
    return None if text is None else Place(*map(int, text.split()))
