"""Takes an uploaded file: a multipart body, written to disk as it comes."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from fminfer.contract.fields import show
from fminfer.core.errors import OutputError
from fminfer.core.quantities import show_bytes
from fminfer.server.batches.batch_request import read_life
from fminfer.server.batches.state_folder import PRIVATE_FILE, explain_state
from fminfer.server.batches.stored_files import Purpose
from fminfer.server.http_errors import HttpError

PAUSE_S = 60.0  # in which nothing comes
MOST_DISCARDED = 64 * 2**20  # bytes of a body that is refused already
MOST_VALUE_BYTES = 1024  # of a field that is no file
MOST_PARTS = 16
MOST_NAME_CHARS = 255
WRITE_BYTES = 2**20  # written at once
PURPOSE: Purpose = "batch"
LIFE = {f"expires_after[{name}]": name for name in ("anchor", "seconds")}  # as forms write it


@dataclass(slots=True)
class _Part:
    """One part of the body, as its head says."""

    head: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    filename: str | None = None
    value: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Upload:
    """A file whose bytes are on the disk, under a name of its own."""

    path: Path
    num_bytes: int
    filename: str
    expires_after_s: int | None = None  # None: it stays until it is deleted


class UploadForm:
    """Parses a body piece by piece. What of the file has come is taken from `pending`."""

    def __init__(self, boundary: bytes) -> None:
        self.pending = bytearray()  # of the file
        self.filename: str | None = None  # once the file has begun
        self.values: dict[str, str] = {}
        self.is_complete = False
        self._part = _Part()
        self._num_parts = 0
        self._header, self._value = bytearray(), bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._read_head,
                "on_part_data": self._take,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def write(self, piece: bytes) -> None:
        """Parse a piece of the body.

        Raises:
            HttpError: it is none of such a form.
        """
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _wrong(f"the body is no multipart form: {error}") from None

    def _begin(self) -> None:
        self._part = _Part()
        self._num_parts += 1
        if self._num_parts > MOST_PARTS:
            raise _wrong(f"the form has more than {MOST_PARTS} fields; send file and purpose")

    def _end_header(self) -> None:
        self._part.head[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _read_head(self) -> None:
        part = self._part
        _, options = parse_options_header(part.head.get(b"content-disposition", b""))
        part.name = _decode(options.get(b"name", b""))
        if b"filename" in options:
            part.filename = _decode(options[b"filename"])[:MOST_NAME_CHARS]
        if part.name not in ("file", "purpose", *LIFE):
            raise _wrong(
                f"{show(part.name)} is no field of an upload here; there are file, purpose, "
                f"{' and '.join(LIFE)}. Leave it out",
                part.name[:64],
                "unsupported_parameter",
            )
        if part.name in self.values or (part.name == "file" and self.filename is not None):
            raise _wrong(f"{part.name} is there twice; send it once", part.name)
        if (part.name == "file") != (part.filename is not None):
            what = "a file, with a filename" if part.name == "file" else "a text, not a file"
            raise _wrong(f"{part.name} must be {what}", part.name, "invalid_type")
        if part.name == "file":
            self.filename = part.filename

    def _take(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.filename is not None:
            self.pending += data[start:end]
            return
        part.value += data[start:end]
        if len(part.value) > MOST_VALUE_BYTES:
            raise _wrong(f"{part.name} has more than {MOST_VALUE_BYTES} bytes", part.name)

    def _end(self) -> None:
        part = self._part
        if part.filename is None:
            self.values[part.name] = _decode(bytes(part.value))
        if part.name == "purpose":
            check_purpose(self.values["purpose"])

    def _finish(self) -> None:
        self.is_complete = True


def check_purpose(purpose: str) -> None:
    """Refuse what a file cannot be for.

    Raises:
        HttpError: it cannot be for this.
    """
    if purpose != PURPOSE:
        raise _wrong(
            f'purpose is {show(purpose)}; it must be "{PURPOSE}"', "purpose", "out_of_range"
        )


async def take_upload(request: Request, folder: Path, max_bytes: int) -> Upload:
    """Write the file of a request's body into a folder.

    The caller moves or removes it. If this fails, nothing is left.

    Raises:
        HttpError: the form is wrong, too large or too slow; or the disk is full, with 507.
    """
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise _wrong(
            "the body is no multipart form; send one with file and purpose, as "
            "curl -F purpose=batch -F file=@FILE does"
        )
    try:
        form = UploadForm(boundary)
    except FormParserError as error:
        raise _wrong(f"the body is no multipart form: {error}") from None
    path = folder / secrets.token_hex(16)
    try:
        fd = await asyncio.to_thread(
            os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE
        )
        try:
            num_bytes = await _write_all(request, form, fd, max_bytes)
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)
        return Upload(path, num_bytes, form.filename or "", _read_life(form.values))
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise no_room(explain_state(path.parent, error)) from error
        raise


async def _write_all(request: Request, form: UploadForm, fd: int, max_bytes: int) -> int:
    """Write what comes of the file; return how much that was.

    What comes after a mistake is passed over for a while, so that the client hears of it.
    """
    num_bytes = num_passed = 0
    refusal: HttpError | None = None
    async for piece in _pieces(request):
        if refusal is not None:
            num_passed += len(piece)
            if num_passed > MOST_DISCARDED:
                break
            continue
        try:
            form.write(piece)
            if num_bytes + len(form.pending) > max_bytes:
                raise _too_large(max_bytes)
        except HttpError as error:
            refusal = error
            continue
        if len(form.pending) >= WRITE_BYTES:
            num_bytes += await _write_pending(form, fd)
    if refusal is not None:
        raise refusal
    _check_whole(form)
    return num_bytes + await _write_pending(form, fd)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield a body as it comes.

    Raises:
        HttpError: the client has left, or pauses for too long.
    """
    pieces = aiter(request.stream())
    while True:
        try:
            piece = await asyncio.wait_for(anext(pieces), PAUSE_S)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise HttpError(
                408,
                f"nothing came for {PAUSE_S:g} s; send the file without pauses",
                headers={"Connection": "close"},
            ) from None
        except ClientDisconnect:
            raise HttpError(400, "the client left before its file was there") from None
        yield piece


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"the file has more than {show_bytes(max_bytes)} ({max_bytes:,} bytes), the most that is "
        "allowed (--max-upload-size); cut it into several",
        code="file_too_large",
        param="file",
        headers={"Connection": "close"},
    )


async def _write_pending(form: UploadForm, fd: int) -> int:
    data, form.pending = bytes(form.pending), bytearray()
    await asyncio.to_thread(_write, fd, data)
    return len(data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _check_whole(form: UploadForm) -> None:
    if not form.is_complete:
        raise _wrong("the form breaks off before its last boundary; send it whole")
    found = {*form.values} | ({"file"} if form.filename is not None else set())
    for name in ("file", "purpose"):
        if name not in found:
            raise _wrong(
                f"{name} is absent; send both, as curl -F purpose=batch -F file=@FILE does", name
            )


def _read_life(values: dict[str, str]) -> int | None:
    """Return how long a file lives; None: its form does not say."""
    found: dict[str, object] = {LIFE[name]: values[name] for name in LIFE if name in values}
    if re.fullmatch("[0-9]{1,9}", values.get("expires_after[seconds]", "")):
        found["seconds"] = int(values["expires_after[seconds]"])
    return read_life("expires_after", found) if found else None


def no_room(error: OutputError) -> HttpError:
    """Return what a client hears when the disk fails; the log has the path."""
    return HttpError(
        507,
        "the server's disk is full, or cannot be written; nothing of this is kept. Delete files "
        "that are not needed any more, or have whoever runs the server make room",
        code="disk_full",
    )


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _wrong(message: str, param: str | None = None, code: str = "invalid_form") -> HttpError:
    return HttpError(400, message, code=code, param=param)
