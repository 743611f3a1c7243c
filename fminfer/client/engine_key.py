"""The key of servers elsewhere: from a variable or a file, and shown nowhere."""

from __future__ import annotations

from collections.abc import Mapping

from fminfer.client.remote_options import KEY_VARIABLE, RemoteOptions
from fminfer.core.errors import UsageError


def read_engine_key(options: RemoteOptions, environ: Mapping[str, str]) -> str:
    """Return the key of the servers; "": they want none.

    Raises:
        UsageError: its file cannot be read, or it is no key. The text does not show it.
    """
    path = options.engine_key_file
    source = KEY_VARIABLE if path is None else f"--engine-key-file {path}"
    try:
        text = environ.get(KEY_VARIABLE, "") if path is None else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} cannot be read: {type(error).__name__}") from None
    key = text.strip()
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if not is_plain or (path is not None and not key):
        raise UsageError(
            f"{source} holds no key: give one word of ASCII letters, digits and signs"
        )
    return key
