"""What all routes of a server share: the model that it serves, its log, its engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
from starlette.responses import Response

from fminfer.contract.field_table import MAX_NAME_CHARS
from fminfer.contract.fields import describe_value
from fminfer.contract.json_object import dump_json
from fminfer.core.errors import make_printable
from fminfer.runtime.engine_api import Engine
from fminfer.server.batch_engine import BatchEngine
from fminfer.server.dispatcher import Dispatcher
from fminfer.server.http_errors import JSON, HttpError
from fminfer.server.metrics import Metrics, Throughput
from fminfer.server.request_bodies import BodyReader
from fminfer.server.settings import LogLevel, ServerSettings

# each shows what those before it show
LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)


@dataclass(slots=True, frozen=True)
class ServerLog:
    """Writes to stderr what its level lets through. Any thread may call it."""

    level: LogLevel
    is_quiet: bool = False  # errors at most, whatever the level

    def is_shown(self, level: LogLevel) -> bool:
        """Whether a text of this level is written."""
        most: LogLevel = "error" if self.is_quiet else "debug"
        return LEVELS.index(level) <= min(LEVELS.index(self.level), LEVELS.index(most))

    def write(self, level: LogLevel, text: str) -> None:
        """Write a text, if its level is shown."""
        if self.is_shown(level):
            click.echo(make_printable(text), err=True)


class Service:
    """What routes need of an engine that is served."""

    def __init__(self, engine: Engine | BatchEngine, settings: ServerSettings) -> None:
        self.served = engine
        # where requests that are no batches are answered; "": here
        self.url_elsewhere = engine.facts.url if isinstance(engine, BatchEngine) else ""
        served_names = settings.served_model_names
        # of the model; the first one is in answers
        self.names = served_names or (engine.model_name,)
        self.accepted = frozenset(self.names)  # what a request may call it
        if not served_names:
            path = engine.intake.limits.config.model or engine.model_name
            line_names = engine.intake.limits.model_names or frozenset()
            self.accepted |= line_names | {path, str(Path(path))}
        # in seconds since 1970: when the model was ready
        self.created = int(time.time())
        self.log = ServerLog(settings.log_level, is_quiet=settings.is_quiet)
        engine.intake.on_warning = lambda text: self.log.write("warning", text)
        self.metrics = Metrics(engine, self.names[0])
        self.throughput = Throughput(engine)
        self.dispatcher = Dispatcher(engine, settings.queue_size, self.metrics)
        self.bodies = BodyReader(settings.max_body_bytes)

    @property
    def engine(self) -> Engine:
        """The engine of requests that are no batches."""
        assert not isinstance(self.served, BatchEngine), "it has no such routes"
        return self.served

    def check_model(self, name: object) -> None:
        """Raise an HttpError for another model's name, if that is wanted, or for a long one."""
        if isinstance(name, str) and len(name) > MAX_NAME_CHARS:
            raise HttpError(
                400,
                f"model has {len(name):,} characters, and at most {MAX_NAME_CHARS} "
                "are allowed; give the model's name",
                code="out_of_range",
                param="model",
            )
        if (
            self.served.intake.limits.config.check_model
            and name is not None
            and name not in self.accepted
        ):
            raise HttpError(
                404,
                f"model is {describe_value(name)}, and this server has "
                f"{' or '.join(self.names)}; ask for that, or start the server without "
                "--check-model",
                code="model_not_found",
                param="model",
            )

    def model_name_for(self, fields: Mapping[str, Any]) -> str:
        """Return the model's name in the answer to a request: as the request has it."""
        name = fields.get("model")
        return name if isinstance(name, str) and name else self.names[0]


def make_json_response(value: object) -> Response:
    """Return a response of JSON."""
    return Response(dump_json(value), media_type=JSON)
