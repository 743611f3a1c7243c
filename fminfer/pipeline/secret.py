"""Where the secret of a run comes from that every rank shows before it may take part."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from fminfer.cache import cache_path, why_no_cache
from fminfer.errors import UsageError
from fminfer.ranks import SECRET


def new_secret() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_hex(32)


def secret_of_home() -> str:
    """Return this user's own secret, kept in the cache folder; the first rank to ask makes it.

    Raises:
        UsageError: there is no folder for it, or others can read it.
    """
    if why := why_no_cache():
        raise UsageError(
            f"the ranks' common secret has no place: {why}; or set {SECRET} to the same text for "
            "every rank"
        )
    path = cache_path() / "ranks.secret"
    if not path.exists():
        _keep(path, new_secret())
    return read_own(path).strip()


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


def _keep(path: Path, text: str) -> None:
    """Write a file with mode 0600, whole, unless another process was faster."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
