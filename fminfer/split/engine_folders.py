"""The folder of an engine's parts: a name that is safe in any path and shell, and its own.

Names are told apart as the file system does; one that ignores case, or rewrites accents, is not
reckoned with.
"""

from __future__ import annotations

import hashlib
import unicodedata

NO_ENGINE = "default"  # of requests that name none
MAX_BYTES = 200  # of a folder's name, all components together
_KEPT = 40  # characters of a name that is too long
_SIGNS = frozenset("-_.+=@,")  # beside letters, marks and digits of any script


def folder_name(engine: str | None) -> str:
    """Return the folder for an engine, with a slash between components.

    What is not safe is written as in URLs: `%20` for a space. `org/model` is a folder in a folder.
    """
    if engine is None:
        return NO_ENGINE
    name = "/".join(map(_encode, engine.split("/")))
    if name == NO_ENGINE:
        return _percent(name[0]) + name[1:]
    if len(name.encode()) > MAX_BYTES:  # two digits follow any other %
        digest = hashlib.blake2b(engine.encode("utf-8", "surrogatepass"), digest_size=16)
        return f"{name[:_KEPT].replace('/', '_')}%-{digest.hexdigest()}"
    return name


def is_folder_name(name: str) -> bool:
    """Tell whether `folder_name` may have given this name: it leads nowhere else."""
    components = name.split("/")
    is_plain = all(_is_safe(sign) or sign in "%/" for sign in name)
    return (
        is_plain
        and len(name.encode()) <= MAX_BYTES
        and all(part and part[0] not in ".-" and ".json" not in part for part in components)
    )


def _encode(component: str) -> str:
    if not component:
        return "%empty"
    name = "".join(sign if _is_safe(sign) else _percent(sign) for sign in component)
    if name[0] in ".-":  # hidden, a way up, or a flag
        name = _percent(name[0]) + name[1:]
    return name.replace(".json", "%2Ejson")  # the ending of a part, its answers and their journal


def _is_safe(sign: str) -> bool:
    return sign in _SIGNS or unicodedata.category(sign)[0] in "LMN"


def _percent(sign: str) -> str:
    return "".join(f"%{byte:02X}" for byte in sign.encode("utf-8", "surrogatepass"))
