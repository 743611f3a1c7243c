"""What a phase is made of: cases, and what can become of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

Figure = float | int | str | bool | None
Figures = dict[str, Figure]


@dataclass(slots=True, frozen=True)
class Setting:
    """Where cases run.

    Args:
        device: "cuda", or "cpu" for tiny shapes that prove the code.
        results: the file of JSON lines, those of earlier phases among them.
        prepared: what `--prepare` wrote; None: a case makes what it needs.
        scratch: for files that nobody wants afterwards.
        seconds: what the phase may take.
    """

    device: str
    results: Path
    prepared: Path | None
    scratch: Path
    seconds: float

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"


@dataclass(slots=True, frozen=True)
class Case:
    """One thing that is tried; `run` returns what is worth to be written down."""

    name: str
    run: Callable[[], Figures]


class Wrong(Exception):
    """What was computed is not what it should be; the figures tell how far."""

    def __init__(self, text: str, figures: Figures | None = None) -> None:
        super().__init__(text)
        self.figures = figures or {}


class Skipped(Exception):
    """A case that cannot be tried here, and why."""


def save_once(folder: Path, save: Callable[[Path], None]) -> Path:
    """Save a model into a folder if it is not there; other processes see it whole."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(dir=folder.parent))
        save(draft)
        with suppress(OSError):  # another process was faster
            draft.rename(folder)
    return folder


def expect(is_right: bool, text: str, figures: Figures | None = None) -> None:
    """Raise Wrong unless something holds."""
    if not is_right:
        raise Wrong(text, figures)
