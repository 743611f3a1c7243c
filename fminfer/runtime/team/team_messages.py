"""What travels between a run and its pipelines, each of which is a process with an engine."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, fields, is_dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from fminfer.contract.json_object import dump_json, parse_json
from fminfer.contract.request import RequestParams, VectorSpec, VectorWish
from fminfer.core.config import Constraint
from fminfer.core.errors import RequestError
from fminfer.core.messages import MemoryPeak, RankMemory
from fminfer.core.thought_form import Thought, ThoughtForm
from fminfer.engine.engine_core import (
    Delta,
    Event,
    Failed,
    Finished,
)
from fminfer.engine.observation import LabelSpelling, Observation, ObservedMass
from fminfer.engine.sequence import PreparedRequest
from fminfer.engine.stats import EngineState, EngineStats, ReadWork, StageStats
from fminfer.pipeline.watch import Fault
from fminfer.plan.machine_facts import Machine
from fminfer.runtime.load.properties import LoadedPipeline, Measured
from fminfer.text.encoded_prompt import EncodedPrompt

# To a pipeline go Ask, Cancel and these words; a Report comes from it.
# all pipelines have their weights: the memory that is left can be shared out
GO_ON = "go on"
END = "end"  # no more is asked
Order = Literal[
    "start_run", "drain", "expect_no_more_requests"
]  # methods of the engine's loop


@dataclass(slots=True, frozen=True)
class Ask:
    """A request to answer."""

    request_id: int
    prepared: PreparedRequest
    priority: int
    is_streamed: bool
    is_counted: bool


@dataclass(slots=True, frozen=True)
class Cancel:
    """A request to forget."""

    request_id: int


@dataclass(slots=True, frozen=True)
class Report:
    """What a pipeline tells; None: nothing new of that."""

    events: list[Event] = field(default_factory=list)
    state: EngineState | None = None
    stats: EngineStats | None = None  # now and then, and when nothing is left to do
    memory: list[RankMemory] | None = None  # of its ranks, with the stats
    # Its weights are in memory: digests of their files, which all pipelines must have the same.
    file_digests: dict[str, str] | None = None
    loaded: LoadedPipeline | None = None  # it can answer
    failure: Fault | None = None  # it cannot go on


_CLASSES = {
    each.__name__: each
    for each in (
        Ask,
        Cancel,
        Report,
        PreparedRequest,
        Observation,
        LabelSpelling,
        RequestParams,
        Thought,
        ThoughtForm,
        EncodedPrompt,
        VectorWish,
        VectorSpec,
        Constraint,
        Delta,
        Finished,
        ObservedMass,
        Failed,
        LoadedPipeline,
        Machine,
        Measured,
        EngineState,
        EngineStats,
        StageStats,
        ReadWork,
        RankMemory,
        MemoryPeak,
        Fault,
    )
}


def send(connection: Connection, what: object) -> None:
    """Say something; an OSError: nobody listens any more."""
    connection.send_bytes(encode(what))


def receive(connection: Connection) -> Any:
    """Wait for the next message; an EOFError or OSError: the other end says nothing more."""
    return decode(connection.recv_bytes())


def encode(what: object) -> bytes:
    """Return a message's bytes."""
    parts: list[bytes] = []
    value = _plain(what, parts)
    head = dump_json([value, [len(part) for part in parts]])
    return b"".join((struct.pack("<I", len(head)), head, *parts))


def decode(data: bytes) -> Any:
    """Return what `encode` was given."""
    (size,) = struct.unpack_from("<I", data)
    start = 4 + size
    value, sizes = parse_json(data[4:start])
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
    if (
        isinstance(value, list)
        and len(value) > 8
        and all(type(each) is int for each in value)
    ):
        parts.append(dump_json(value))  # token ids
        return ["json", len(parts) - 1]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *[_plain(each, parts) for each in value]]
    if isinstance(value, dict):
        if any(isinstance(each, bytes) for each in value.values()):
            return [
                "dict",
                [[name, _plain(each, parts)] for name, each in value.items()],
            ]
        parts.append(dump_json(value))  # an answer, or counts: JSON already
        return ["json", len(parts) - 1]
    name = type(value).__name__
    assert is_dataclass(value) and name in _CLASSES, f"{name} does not travel"
    return [
        "object",
        name,
        *[_plain(getattr(value, f.name), parts) for f in fields(value)],
    ]


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
            return parse_json(parts[rest[0]])
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
