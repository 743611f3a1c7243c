"""What travels between a run and its pipelines, each of which is a process with an engine.

Down go lists of lines, END, and the seconds of grace of a stop; up what is defined here. A message
is JSON that says what it is, and after it the bytes that it holds, as they are.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.connection import Connection
from typing import Any

import orjson

from fminfer.engine.stats import EngineStats, ReadWork, StageStats
from fminfer.errors import RequestError
from fminfer.input.envelope import Envelope
from fminfer.input.lines import Line
from fminfer.output.records import Record
from fminfer.row_warnings import RowWarning

END = None  # no more lines
GO_ON = "go on"  # all pipelines have their weights: the memory that is left can be shared out


@dataclass(slots=True, frozen=True)
class Loaded:
    """The weights are in memory."""

    file_digests: dict[str, str]  # of their files, which all pipelines must have the same


@dataclass(slots=True, frozen=True)
class Ready:
    """The pipeline can answer."""

    device: str
    num_threads: int  # that compute in each of its processes
    why_plain: str  # why a kernel that was to be used is not
    why_slower: str  # why it is slower than it could be


@dataclass(slots=True, frozen=True)
class Taken:
    """One line was taken in: there is room for another."""


@dataclass(slots=True, frozen=True)
class Answered:
    """A line's record, and now and then what was counted so far."""

    record: Record
    stats: EngineStats | None


@dataclass(slots=True, frozen=True)
class Ended:
    """All is answered, or what could be in the grace of a stop."""

    stats: EngineStats
    warnings: dict[str, int]  # rows by kind
    is_stopped: bool


@dataclass(slots=True, frozen=True)
class Failed:
    """The pipeline cannot go on."""

    text: str
    kind: str  # the name of one of fminfer's errors


Report = Loaded | Ready | Taken | Answered | Ended | Failed

_CLASSES = {
    each.__name__: each
    for each in (
        *(Loaded, Ready, Taken, Answered, Ended, Failed),
        *(Line, Envelope, RowWarning, Record, EngineStats, StageStats, ReadWork),
    )
}


def send(connection: Connection, what: object) -> None:
    """Say something.

    Raises:
        OSError: nobody listens any more.
    """
    connection.send_bytes(encode(what))


def receive(connection: Connection) -> Any:
    """Wait for what the other end says next.

    Raises:
        EOFError, OSError: it says nothing more.
    """
    return decode(connection.recv_bytes())


def encode(what: object) -> bytes:
    """Return a message's bytes."""
    parts: list[bytes] = []
    value = _plain(what, parts)
    head = _dumps([value, [len(part) for part in parts]])
    return b"".join((struct.pack("<I", len(head)), head, *parts))


def decode(data: bytes) -> Any:
    """Return what `encode` was given."""
    (size,) = struct.unpack_from("<I", data)
    start = 4 + size
    value, sizes = _loads(data[4:start])
    parts = []
    for length in sizes:
        parts.append(data[start : start + length])
        start += length
    return _restored(value, parts)


def _plain(value: object, parts: list[bytes]) -> object:
    """Return a value for JSON; all but plain ones become lists that begin with their kind."""
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", repr(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        parts.append(value)
        return ["bytes", len(parts) - 1]
    if isinstance(value, RequestError):
        return ["error", *value.__reduce__()[1]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *[_plain(each, parts) for each in value]]
    if isinstance(value, dict):
        if any(isinstance(each, bytes) for each in value.values()):
            return ["dict", [[name, _plain(each, parts)] for name, each in value.items()]]
        parts.append(_dumps(value))  # an answer, or counts: JSON already
        return ["json", len(parts) - 1]
    name = type(value).__name__
    assert is_dataclass(value) and name in _CLASSES, f"{name} does not travel"
    return ["object", name, *[_plain(getattr(value, f.name), parts) for f in fields(value)]]


def _restored(value: Any, parts: list[bytes]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    match kind:
        case "float":
            return float(rest[0])
        case "bytes":
            return parts[rest[0]]
        case "json":
            return _loads(parts[rest[0]])
        case "error":
            return RequestError(*rest)
        case "dict":
            return {name: _restored(each, parts) for name, each in rest[0]}
        case "list" | "tuple":
            items = [_restored(each, parts) for each in rest]
            return items if kind == "list" else tuple(items)
    assert kind == "object", f"unknown kind {kind!r}"
    cls = _CLASSES[rest[0]]
    names = [field.name for field in fields(cls)]
    values = [_restored(each, parts) for each in rest[1:]]
    return cls(**dict(zip(names, values, strict=True)))


def _dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, TypeError):  # half a surrogate pair, or a very large number
        return json.dumps(value).encode()


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)
