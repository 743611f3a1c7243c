"""Tells files that are not what their names say: web pages, pointers of git-LFS, others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fminfer.core.errors import CheckpointError

_POINTER = b"version https://git-lfs"
_NO_UTF_8 = re.compile(r"'utf-8' codec can't decode .*")  # Python's own words
_GZIP = b"\x1f\x8b\x08"
GGUF, MAGIC = ".gguf", b"GGUF"
_PROJECTOR = "mmproj"  # of images, beside the model


def refuse_impostor(path: Path) -> None:
    """Refuse a file that a download put in the place of a model's file; say what to fetch."""
    start = _start_of(path).removeprefix(b"\xef\xbb\xbf").lstrip()
    # The size that a weight file begins with may be a "<", but has zeros.
    if start.startswith(b"<") and b"\0" not in start:
        raise CheckpointError(
            f"{path} is a web page. An address with /blob/ shows a page about a file; download the "
            "file itself from the same address with /resolve/"
        )
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of git-LFS, not the file that it stands for; fetch that with "
            "'git lfs pull' in its repository"
        )
    if start.startswith(_GZIP):
        raise CheckpointError(f"{path} is compressed by gzip; unpack it: gunzip")


def _start_of(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:  # whoever reads on says what is wrong
        return file.read(64)
    return b""


def broken(path: Path, why: object) -> CheckpointError:
    """Return the error of a file whose content is damaged, or that cannot be read."""
    if isinstance(why, PermissionError):
        return CheckpointError(f"{path} cannot be read: {why}. Let this user read it by chmod")
    text = _NO_UTF_8.sub("a text in it is damaged: it is not UTF-8", str(why))
    return CheckpointError(f"{path} is broken ({text}); fetch it again")


def is_gguf(name: str | Path | None) -> bool:
    """Tell whether a model is a GGUF file, llama.cpp's form of a model, by name or content."""
    path = Path(str(name))
    is_named_so = str(name).endswith(GGUF) and not path.is_dir()
    return is_named_so or _start_of(path).startswith(MAGIC)  # Ollama's are sha256-…


def gguf_error(name: str, files: Sequence[str], *, is_of_hub: bool = False) -> CheckpointError:
    """Return the error of a folder, or a model of the hub, that holds GGUF files alone."""
    names = sorted(file for file in files if not file.startswith(_PROJECTOR)) or sorted(files)
    first, more = names[0], f" and {len(names) - 1} more" * (len(names) > 1)
    how = f"give one by its name: --model-name {Path(name) / first}"
    if is_of_hub:
        how = f"download one and give its path: hf download {name} {first} --local-dir ."
    return CheckpointError(f"{name} holds models in GGUF, llama.cpp's form ({first}{more}); {how}")
