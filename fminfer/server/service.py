"""What all routes of a server share: the model that it serves, its log, the way to its
engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
from starlette.responses import Response

from fminfer.contract.field_table import MAX_NAME_CHARS
from fminfer.contract.fields import show
from fminfer.contract.json_object import dump
from fminfer.core.errors import make_printable
from fminfer.runtime.engine_api import Engine
from fminfer.server.dispatcher import Dispatcher
from fminfer.server.http_errors import JSON, HttpError
from fminfer.server.metrics import Metrics, Throughput
from fminfer.server.request_bodies import BodyReader
from fminfer.server.settings import LogLevel, ServerSettings

# each tells what those before it tell
LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)


@dataclass(slots=True, frozen=True)
class ServerLog:
    """Tells on stderr what its level lets through. Any thread may call it."""

    level: LogLevel
    is_quiet: bool = False  # errors at most, whatever the level

    def tells(self, level: LogLevel) -> bool:
        """Return whether what is of this level is told."""
        most: LogLevel = "error" if self.is_quiet else "debug"
        return LEVELS.index(level) <= min(LEVELS.index(self.level), LEVELS.index(most))

    def tell(self, level: LogLevel, text: str) -> None:
        """Tell something, if its level is told."""
        if self.tells(level):
            click.echo(make_printable(text), err=True)


class Service:
    """What routes need of an engine that is served."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        given = settings.served_model_names
        # of the model; the first one is in answers
        self.names = given or (engine.model_name,)
        self.accepted = frozenset(self.names)  # what a request may call it
        if not given:
            path = engine.config.model or engine.model_name
            of_lines = engine.intake.limits.model_names or frozenset()
            self.accepted |= of_lines | {path, str(Path(path))}
        # in seconds since 1970: when the model was ready
        self.created = int(time.time())
        self.log = ServerLog(settings.log_level, is_quiet=settings.is_quiet)
        engine.intake.on_warning = lambda text: self.log.tell("warning", text)
        self.metrics = Metrics(engine, self.names[0])
        self.throughput = Throughput(engine)
        self.dispatcher = Dispatcher(engine, settings.queue_size, self.metrics)
        self.bodies = BodyReader(settings.max_body_bytes)

    def check_model(self, asked: object) -> None:
        """Raise an HttpError for another model's name, if that is wanted, or for a long one."""
        if isinstance(asked, str) and len(asked) > MAX_NAME_CHARS:
            raise HttpError(
                400,
                f"model has {len(asked):,} characters, and at most {MAX_NAME_CHARS} "
                "are allowed; give the model's name",
                code="out_of_range",
                param="model",
            )
        if (
            self.engine.config.check_model
            and asked is not None
            and asked not in self.accepted
        ):
            raise HttpError(
                404,
                f"model is {show(asked)}, and this server has "
                f"{' or '.join(self.names)}; ask for that, or start the server without "
                "--check-model",
                code="model_not_found",
                param="model",
            )

    def name_for(self, fields: Mapping[str, Any]) -> str:
        """Return the model's name in the answer to a request: as it was asked for."""
        asked = fields.get("model")
        return asked if isinstance(asked, str) and asked else self.names[0]


def respond_json(value: object) -> Response:
    """Return a response of JSON."""
    return Response(dump(value), media_type=JSON)
