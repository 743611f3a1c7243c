"""The user's cache folder: of this user alone, since what it holds is loaded and may be
private."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from pathlib import Path


def cache_path() -> Path:
    """Return where the cache folder is, or would be; without a home raise RuntimeError."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fminfer"


def cache_folder() -> Path | None:
    """Return the cache folder, made if it is not there; None: `why_no_cache` says why."""
    return None if why_no_cache() else cache_path()


def why_no_cache() -> str:
    """Say why there is no cache folder, and what to do; an empty text if there is one."""
    try:
        folder = cache_path()
        make_private(folder)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return f"{folder} is not this user's own folder. Set XDG_CACHE_HOME to another one"
        if found.st_mode & 0o022:  # what is loaded must not be another's
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


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone."""
    for path in reversed([folder, *folder.parents]):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
