"""The user's cache folder, which no other user may write to: its files are loaded."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from pathlib import Path


def find_cache_path() -> Path:
    """Return where the cache folder is, or would be; without a home raise RuntimeError."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fminfer"


def make_cache_folder() -> Path | None:
    """Return the cache folder, which is made if needed; `describe_cache_fault` explains None."""
    return None if describe_cache_fault() else find_cache_path()


def describe_cache_fault() -> str:
    """Return why there is no cache folder, and what to do; "": there is one."""
    try:
        folder = find_cache_path()
        make_private_folder(folder)
        folder_status = folder.lstat()
        if (
            not stat.S_ISDIR(folder_status.st_mode)
            or folder_status.st_uid != os.getuid()
        ):
            return f"{folder} is not this user's own folder. Set XDG_CACHE_HOME to another one"
        if folder_status.st_mode & 0o022:  # what is loaded must not be another's
            return (
                f"{folder} is not used, since other users may write to it. Remove it, "
                "or see that what it holds is yours and give: chmod 700 "
                f"{shlex.quote(str(folder))}"
            )
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        return (
            f"{error.filename or 'the cache folder'} cannot be written: "
            f"{error.strerror or error}. Set XDG_CACHE_HOME to a folder that can be"
        )
    except RuntimeError:
        return "there is no home folder. Set XDG_CACHE_HOME to a folder for the cache"
    return ""


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone."""
    for path in reversed([folder, *folder.parents]):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
