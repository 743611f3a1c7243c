"""Whether an output and its errors file are as the run wrote them, by its status file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.files.ordered_output import Seal, Seals, errors_path, read_seal
from fminfer.files.status_file import status_path
from fminfer.files.streams import reading_file
from fminfer.files.vector_file import vectors_path


@dataclass(slots=True, frozen=True)
class Edit:
    """A file that is not as it was written."""

    path: Path
    what: str  # differs, for people


def find_edit(output: Path, seals: Seals | None, *, is_read: bool = False) -> Edit | None:
    """Return which file of a complete output was edited; None: none.

    Args:
        seals: with which they were written; None: they are not known.
        is_read: compare the bytes of all. Otherwise of a file that is older than its status file,
            which a run writes last, only the size is compared: there may be thousands of outputs,
            each too large to be read at every run. And an errors file that is gone was removed, to
            leave the output as it is.

    Raises:
        UsageError: a file cannot be read.
    """
    for path, then in _sealed(output, seals):
        with reading_file(path):
            if not is_read and _looks_as_written(path, then, output):
                continue
            now = read_seal(path)
        if now != then:
            return Edit(path, _show(then, now))
    return None


def edited(output: Path, edit: Edit, *, can_stay: bool = False) -> UsageError:
    """Return the refusal of a file that was edited.

    Args:
        can_stay: without its errors file the output would count as complete.
    """
    errors, moved = errors_path(output), "it" if edit.path == output else output.name
    text = (
        f"{edit.path} is not as it was written ({edit.what}). Put the file back as it was. Or move "
        f"{moved} away, or give --restart, to answer all again"
    )
    if can_stay and edit.path != errors:
        text += f". To leave the output as it is, remove {errors.name} and keep the --limit that "
        text += "it was made with"
    return UsageError(text)


def _sealed(output: Path, seals: Seals | None) -> list[tuple[Path, Seal | None]]:
    """List the files of an output, each with its seal."""
    if seals is None:
        return []
    paths = {"output": output, "errors": errors_path(output)}
    if "vectors" in seals:
        paths["vectors"] = vectors_path(output)
    return [(path, seals.get(name)) for name, path in paths.items()]


def _looks_as_written(path: Path, seal: Seal | None, output: Path) -> bool:
    """Tell whether a file has its size, and was written before the status file.

    A file that takes the place of another may have an old time of writing, but its entry is new.
    """
    if not path.exists():
        return path == errors_path(output)
    if seal is None:
        return False
    file, status = path.stat(), status_path(output).stat()
    is_older = file.st_mtime_ns < status.st_mtime_ns and file.st_ctime_ns <= status.st_ctime_ns
    return is_older and file.st_size == seal.get("bytes")


def _show(then: Seal | None, now: Seal | None) -> str:
    sizes = [f"{seal.get('bytes')} bytes" if seal else "no file" for seal in (then, now)]
    if sizes[0] == sizes[1]:
        return f"it still has {sizes[0]}, but other ones"
    return f"it was {sizes[0]} then, and is {sizes[1]} now"
