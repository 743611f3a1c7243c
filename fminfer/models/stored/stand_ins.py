"""Files that stand where weights should be: web pages, pointers of git-LFS, nothing at all."""

from __future__ import annotations

from pathlib import Path

from fminfer.errors import CheckpointError


def refuse_stand_in(path: Path) -> None:
    """Refuse a file that was not fetched as it should have been.

    Raises:
        CheckpointError: the message says what the file is, and how to fetch the right one.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(256)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"<") and b"\0" not in text:  # a header's size may begin so, too
        raise CheckpointError(
            f"{path} is a web page; download it from an address with /resolve/ instead of /blob/"
        )
    if text.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a pointer of git-LFS, not the file itself; run `git lfs pull` in its folder"
        )
    if not start:
        raise CheckpointError(f"{path} is empty; fetch it again")


def broken(path: Path, why: object) -> CheckpointError:
    """Return the error of a file that does not hold what its kind holds."""
    return CheckpointError(f"{path} is broken ({why}); fetch it again")
