"""Where the secret of a run comes from that every rank shows before it may take part."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from fminfer.core.errors import UsageError
from fminfer.machine.user_cache import cache_path, why_no_cache
from fminfer.pipeline.ranks import SECRET

WHOLE_S = 5.0  # time for another process to fill a file that it has created
POLL_S = 0.02


def new_secret() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_hex(32)


def secret_of_home() -> str:
    """Return this user's own secret, kept in the cache folder; the first rank to ask makes it.

    Raises:
        UsageError: there is no folder for it, it cannot be written, or others can read it.
    """
    if why := why_no_cache():
        raise UsageError(
            f"the ranks' common secret has no place: {why}; or set {SECRET} to the same text for "
            "every rank"
        )
    path = cache_path() / "ranks.secret"
    try:
        if not path.exists():
            create_own(path, new_secret() + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    until_s = time.monotonic() + WHOLE_S
    while not (text := read_own(path).strip()):
        if time.monotonic() > until_s:
            raise UsageError(f"{path} is empty; remove it, and start the ranks again")
        time.sleep(POLL_S)
    return text


def read_own(path: Path) -> str:
    """Read a file that only this user can read and write.

    Raises:
        OSError: it cannot be read.
        UsageError: it is another user's, or open to others.
    """
    with path.open() as file:
        found = os.fstat(file.fileno())
        is_ours = found.st_uid == os.getuid() or os.getuid() == 0
        if not is_ours or found.st_mode & 0o077:
            raise UsageError(
                f"{path} holds the ranks' secret and must be yours alone (mode 0600); remove it, "
                f"or set {SECRET} to the same text for every rank"
            )
        return file.read()


def create_own(path: Path, text: str) -> bool:
    """Create a file that only this user can read and write; return False if it is there.

    Who reads it at this very moment may find it empty. (A hard link would show it whole at once,
    but some file systems have none.)

    Raises:
        OSError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "w") as file:
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True
