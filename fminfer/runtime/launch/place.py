"""How one of several pipelines reaches the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(slots=True, frozen=True)
class Place:
    """A pipeline's way to the run."""

    descriptor: int

    def connect(self) -> Connection:
        """Return the way to the run, to which only one process of the pipeline speaks."""
        return Connection(self.descriptor)
