"""Reads requests' bodies within limits: JSON into memory, forms with a file onto the disk."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from fminfer.contract.fields import describe_value
from fminfer.contract.json_object import parse_object
from fminfer.core.quantities import describe_bytes
from fminfer.files.disk import write_all
from fminfer.files.numbered_values import UTF8_BOM
from fminfer.server.batches.batch_request import PURPOSE, parse_life
from fminfer.server.batches.state_folder import PRIVATE_FILE, state_write_error
from fminfer.server.http_errors import HttpError
from fminfer.server.settings import ServerSettings

READ_S = 60.0  # for a whole body
# bytes of a body that is refused already, so that its client hears
MOST_DISCARDED = 64 * 2**20
SMALL_BYTES = 2**16  # of each body, for which there is always room
MOST_AT_ONCE = 16  # bodies of the largest size that may be coming
PAUSE_S = 60.0  # in which nothing comes
LEAST_RATE = 8192  # bytes a second of an upload, apart from one such pause
MOST_VALUE_BYTES = 1024  # of a field that is no file, or of a header of a part
MOST_NAME_CHARS = 255
WRITE_BYTES = 2**20  # written at once
CLOSE = {"Connection": "close"}
HELD = "held_bytes"  # in the state of a request's scope
# as forms write it
LIFE = {f"expires_after[{name}]": name for name in ("anchor", "seconds")}


class BodyReader:
    """Reads bodies in an event loop.

    Bodies that are coming or being answered share `MOST_AT_ONCE` times the largest
    size. The first `SMALL_BYTES` of each do not count. One takes at most half of what
    others leave.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_held = 0  # bytes that count
        self._parsing = asyncio.Lock()

    async def read(self, request: Request) -> dict[str, Any]:
        """Return the JSON object that a request's body holds.

        Raises:
            HttpError: the body is too large or too slow.
            RequestError: it is no JSON object.
        """
        late = f"the body did not come within {READ_S:g} s; send it without pauses"
        with _raising_http_errors("body", late):
            body = await asyncio.wait_for(self._read_bytes(request), READ_S)
        if len(body) <= SMALL_BYTES:
            return _parse_object(body)
        # one at a time: the event loop has its turn between them
        async with self._parsing:
            return await asyncio.to_thread(_parse_object, body)

    async def _read_bytes(self, request: Request) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes <= self._max_bytes:
                pieces.append(piece)
                self._hold_bytes(
                    request.scope["state"], max(0, num_bytes - SMALL_BYTES)
                )
            elif num_bytes > self._max_bytes + MOST_DISCARDED:
                break
        if num_bytes > self._max_bytes:
            raise HttpError(
                413,
                f"the body has {num_bytes:,} bytes, and {self._max_bytes:,} are allowed "
                "(--max-body-size); send fewer or shorter prompts",
                code="body_too_large",
                headers=CLOSE,
            )
        return b"".join(pieces)

    def release(self, state: MutableMapping[str, Any]) -> None:
        """Count a request's body no longer; `state` is that of its scope."""
        self._num_held -= state.pop(HELD, 0)

    def _hold_bytes(self, state: MutableMapping[str, Any], num_bytes: int) -> None:
        """Count the bytes of a body that have come."""
        self.release(state)
        num_left = MOST_AT_ONCE * self._max_bytes - self._num_held
        if num_bytes > num_left / 2:
            raise HttpError(
                429,
                f"other bodies leave {describe_bytes(num_left)}, of which one may have "
                "half; try again in a second, or send a body of at most "
                f"{describe_bytes(SMALL_BYTES)}",
                code="too_many_bodies",
                headers=CLOSE | {"Retry-After": "1"},
            )
        state[HELD] = num_bytes
        self._num_held += num_bytes


@dataclass(slots=True)
class Upload:
    """A file whose bytes are on the disk, under a name of its own."""

    path: Path
    num_bytes: int
    filename: str
    expires_after_s: int | None = None  # None: it stays until it is deleted


class UploadForm:
    """Parses a body piece by piece. `pending` has the bytes of the file that have come."""

    def __init__(self, boundary: bytes) -> None:
        self.pending = bytearray()  # of the file
        self.filename: str | None = None  # once the file has begun
        self.values: dict[str, str] = {}
        self.is_complete = False
        self._names: set[str] = set()  # of the parts so far
        self._head: dict[bytes, bytes] = {}  # of the part that is coming
        self._name = ""
        self._header = bytearray()
        self._value = bytearray()
        self.num_lines = 0  # of the file, so far
        self.is_in_line = False  # a line has come in part
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": partial(self._append_text, self._header),
                "on_header_value": partial(self._append_text, self._value),
                "on_header_end": self._end_header,
                "on_headers_finished": self._parse_part_head,
                "on_part_data": self._add_part_data,
                "on_part_end": self._end_part,
                "on_end": self._end_form,
            },
        )

    def parse_piece(self, piece: bytes) -> None:
        """Parse a piece of the body."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _form_error(f"the body is no multipart form: {error}") from None

    def check_whole(self) -> None:
        """Raise for a form that broke off, or lacks a field."""
        if not self.is_complete:
            raise _form_error(
                "the form breaks off before its last boundary; send it whole"
            )
        for name in ("file", "purpose"):
            if name not in self._names:
                raise _form_error(
                    f"{name} is absent; send both, as curl -F purpose=batch -F file=@FILE does",
                    name,
                )

    @property
    def life_s(self) -> int | None:
        """How long the file lives; None: the form does not say."""
        life: dict[str, object] = {
            name: self.values[key] for key, name in LIFE.items() if key in self.values
        }
        if re.fullmatch("[0-9]{1,9}", str(life.get("seconds", ""))):
            life["seconds"] = int(str(life["seconds"]))
        return parse_life("expires_after", life) if life else None

    def _append_text(self, text: bytearray, data: bytes, start: int, end: int) -> None:
        text += data[start:end]
        if len(text) > MOST_VALUE_BYTES:
            raise _form_error(
                f"{self._name or 'the head of a part'} has more than {MOST_VALUE_BYTES} bytes",
                self._name or None,
            )

    def _end_header(self) -> None:
        self._head[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _parse_part_head(self) -> None:
        _, options = parse_options_header(self._head.get(b"content-disposition", b""))
        self._head.clear()
        self._name = name = _decode_text(options.get(b"name", b""))
        if name not in ("file", "purpose", *LIFE):
            raise _form_error(
                f"{describe_value(name)} is no field of an upload here; there are "
                "file, purpose, "
                f"{' and '.join(LIFE)}. Leave it out",
                name[:64],
                "unsupported_parameter",
            )
        if name in self._names:
            raise _form_error(f"{name} is there twice; send it once", name)
        self._names.add(name)
        if (name == "file") != (b"filename" in options):
            kind = "a file, with a filename" if name == "file" else "a text, not a file"
            raise _form_error(f"{name} must be {kind}", name, "invalid_type")
        if name == "file":
            self.filename = _decode_text(options[b"filename"])[:MOST_NAME_CHARS]

    def _add_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.pending += data[start:end]
            self.num_lines += data.count(b"\n", start, end)
            self.is_in_line = data[start:end][-1:] != b"\n"
            return
        self._append_text(self._value, data, start, end)

    def _end_part(self) -> None:
        if self._name == "file":
            return
        self.values[self._name] = value = _decode_text(self._value)
        self._value.clear()
        if self._name == "purpose" and value != PURPOSE:
            raise _form_error(
                f'purpose is {describe_value(value)}; it must be "{PURPOSE}"',
                "purpose",
                "out_of_range",
            )

    def _end_form(self) -> None:
        self.is_complete = True


async def receive_upload(
    request: Request, folder: Path, settings: ServerSettings
) -> Upload:
    """Write the file of a request's body into a folder.

    The caller moves or removes it. If this fails, nothing is left.

    Raises:
        HttpError: the form is wrong, too large or too slow; or the disk is full, with 507.
    """
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise _form_error(
            "the body is no multipart form; send one with file and purpose, as "
            "curl -F purpose=batch -F file=@FILE does"
        )
    try:
        form = UploadForm(boundary)
    except FormParserError as error:
        raise _form_error(f"the body is no multipart form: {error}") from None
    path = folder / secrets.token_hex(16)
    try:
        fd = await asyncio.to_thread(
            os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE
        )
        try:
            num_bytes = await _write_file(request, form, fd, settings)
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)
        return Upload(path, num_bytes, form.filename or "", form.life_s)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise state_write_error(path, error) from error
        raise


async def _write_file(
    request: Request, form: UploadForm, fd: int, settings: ServerSettings
) -> int:
    """Write the bytes of the file as they come; return how many there were.

    What comes after a mistake is discarded for a while, so that the client hears of it.
    """
    num_bytes = 0
    num_discarded = 0
    refusal: HttpError | None = None
    async for piece in _receive_pieces(request):
        if refusal is not None:
            num_discarded += len(piece)
            if num_discarded > MOST_DISCARDED:
                break
            continue
        try:
            form.parse_piece(piece)
            _check_upload_size(settings, num_bytes + len(form.pending), form.num_lines)
        except HttpError as error:
            refusal = error
            continue
        if len(form.pending) >= WRITE_BYTES:
            num_bytes = await _write_pending(form, fd, num_bytes)
    if refusal is not None:
        raise refusal
    form.check_whole()
    _check_upload_size(settings, num_bytes, form.num_lines + form.is_in_line)
    return await _write_pending(form, fd, num_bytes)


async def _write_pending(form: UploadForm, fd: int, offset: int) -> int:
    """Write what is pending at its offset; return the offset behind it."""
    data = bytes(form.pending)
    form.pending = bytearray()
    await asyncio.to_thread(write_all, fd, data, offset)
    return offset + len(data)


async def _receive_pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield a body as it comes."""
    pieces = aiter(request.stream())
    late = (
        f"the file comes too slowly; send it without pauses of {PAUSE_S:g} s, and at least "
        f"{describe_bytes(LEAST_RATE)} a second"
    )
    end_s = time.monotonic() + PAUSE_S
    with suppress(StopAsyncIteration), _raising_http_errors("file", late):
        while True:
            piece = await asyncio.wait_for(
                anext(pieces), min(PAUSE_S, end_s - time.monotonic())
            )
            end_s += len(piece) / LEAST_RATE
            yield piece


@contextmanager
def _raising_http_errors(noun: str, late: str) -> Iterator[None]:
    """Turn a client's silence, and its leaving, into an HttpError.

    Args:
        noun: what the client sends.
        late: the message if it comes too late.
    """
    try:
        yield
    except asyncio.TimeoutError:
        raise HttpError(408, late, headers=CLOSE) from None
    except ClientDisconnect:
        raise HttpError(400, f"the client left before its {noun} was there") from None


def _check_upload_size(
    settings: ServerSettings, num_bytes: int, num_lines: int
) -> None:
    """Raise an HttpError for a file that has more than is allowed."""
    if num_bytes > (most := settings.max_upload_bytes):
        raise _too_large_error(
            f"{describe_bytes(most)} ({most:,} bytes)", "--max-upload-size"
        )
    if num_lines > (most := settings.max_batch_lines):
        raise _too_large_error(
            f"{most:,} lines, blank ones among them", "--max-batch-lines"
        )


def _too_large_error(most: str, option: str) -> HttpError:
    return HttpError(
        413,
        f"the file has more than {most}, the most that is allowed ({option}); cut it "
        "into several",
        code="file_too_large",
        param="file",
        headers=CLOSE,
    )


def is_large(request: Request) -> bool:
    """Whether the body of a request that was read has more than `SMALL_BYTES`."""
    return bool(request.scope["state"].get(HELD))


def _parse_object(body: bytes) -> dict[str, Any]:
    return parse_object(body.removeprefix(UTF8_BOM).strip(), "the body")


def _decode_text(raw: bytes | bytearray) -> str:
    return raw.decode("utf-8", errors="replace")


def _form_error(
    message: str, param: str | None = None, code: str = "invalid_form"
) -> HttpError:
    return HttpError(400, message, code=code, param=param)
