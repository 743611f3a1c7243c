"""Tells files that are not what their names say: web pages, pointers of git-LFS, others."""

from __future__ import annotations

import errno
import json
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fminfer.core.errors import CheckpointError, FminferError, MachineError

_POINTER = b"version https://git-lfs"
_NO_UTF_8 = re.compile(r"'utf-8' codec can't decode .*")  # Python's own words
_GZIP = b"\x1f\x8b\x08"
GGUF = ".gguf"
MAGIC = b"GGUF"
_PROJECTOR = "mmproj"  # of images, beside the model
_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Errors of the machine, which another copy of the file would not mend.
_MACHINE_ERRNOS = {
    errno.EIO,
    errno.ESTALE,
    errno.ENOMEM,
    errno.EINTR,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ETIMEDOUT,
    errno.ENOSPC,
    errno.EDQUOT,
}


def check_plain_file(path: Path) -> None:
    """Refuse a pipe, a socket or a device in the place of a file: reading it might never end."""
    with suppress(OSError, ValueError):  # the reader of the file says what is wrong
        if kind := _SPECIAL.get(stat.S_IFMT(path.stat().st_mode)):
            raise CheckpointError(
                f"{path} is {kind}, and no file. Give a plain file instead"
            )


def check_plain_files(folder: Path) -> None:
    """Refuse a model's folder with a pipe, socket or device in a file's place, at two depths."""
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if re.search(
            r"\.(json|txt|model|tiktoken|jinja|safetensors|bin|pt|gguf)$", path.name
        ):
            check_plain_file(path)


@contextmanager
def naming_broken_files(place: object) -> Iterator[None]:
    """Turn what a library raises over a model's files into an error that names the files.

    Failures of the machine, lack of memory and Ctrl-C are not blamed on the files.
    """
    try:
        yield
    except (FminferError, MemoryError):
        raise
    except BaseException as error:
        # A panic in a library of Rust is no Exception.
        if (
            not isinstance(error, Exception)
            and type(error).__name__ != "PanicException"
        ):
            raise
        if isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS:
            raise MachineError(
                f"the machine failed while {place} was read: {error}. Mend that, and run the "
                "same command again"
            ) from error
        raise broken_file_error(place, error) from error


def check_no_impostor(path: Path) -> None:
    """Refuse a file that a download put in the place of a model's file; say what to fetch."""
    check_plain_file(path)
    start = _read_start(path).removeprefix(b"\xef\xbb\xbf").lstrip()
    # The size that a weight file begins with may be a "<", but has zeros.
    if start.startswith(b"<") and b"\0" not in start:
        raise CheckpointError(
            f"{path} is a web page. An address with /blob/ shows a page about a file; "
            "download the file itself from the same address with /resolve/"
        )
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{path} is a pointer of git-LFS, not the file that it stands for; fetch that with "
            "'git lfs pull' in its repository"
        )
    if start.startswith(_GZIP):
        raise CheckpointError(f"{path} is compressed by gzip; unpack it: gunzip")


def _read_start(path: Path) -> bytes:
    with suppress(OSError, ValueError):  # the reader of the file says what is wrong
        if path.is_file():  # a pipe would be waited for
            with path.open("rb") as file:
                return file.read(64)
    return b""


def broken_file_error(place: object, why: object) -> CheckpointError:
    """Return the error of a file whose content is damaged, or that cannot be read."""
    if isinstance(why, PermissionError):
        return CheckpointError(
            f"{place} cannot be read: {why}. Let this user read it (chmod)"
        )
    text = _NO_UTF_8.sub(
        "a text in it is damaged: it is not UTF-8", " ".join(str(why).split())
    )
    if isinstance(why, json.JSONDecodeError):
        text = f"no JSON: {text}"
    elif isinstance(why, BaseException) and not (
        isinstance(why, OSError) or type(why) in (ValueError, UnicodeDecodeError)
    ):
        text = f"{type(why).__name__}: {text}"
    return CheckpointError(
        f"{place} is broken ({text}); fetch it again, or use the model's own files"
    )


def is_gguf(name: str | Path | None) -> bool:
    """Tell whether a model is a GGUF file, llama.cpp's form of a model, by name or content."""
    path = Path(str(name))
    is_named_so = str(name).endswith(GGUF) and not path.is_dir()
    return is_named_so or _read_start(path).startswith(MAGIC)  # Ollama's are sha256-…


def gguf_only_error(
    name: str, files: Sequence[str], *, is_of_hub: bool = False
) -> CheckpointError:
    """Return the error of a folder, or a model of the hub, that holds GGUF files alone."""
    names = sorted(file for file in files if not file.startswith(_PROJECTOR)) or sorted(
        files
    )
    first = names[0]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    remedy = (
        f"download one and give its path: hf download {name} {first} --local-dir ."
        if is_of_hub
        else f"give one by its name: --model-name {Path(name) / first}"
    )
    return CheckpointError(
        f"{name} holds models in GGUF, llama.cpp's form ({first}{more}); {remedy}"
    )
