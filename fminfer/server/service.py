"""What all routes of a server share: the model that it serves, and the way to its engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from fminfer.contract.field_table import MAX_NAME_CHARS
from fminfer.contract.fields import show
from fminfer.server.dispatcher import Dispatcher
from fminfer.server.http_errors import HttpError
from fminfer.server.metrics import Metrics
from fminfer.server.request_bodies import Bodies
from fminfer.server.server_log import ServerLog
from fminfer.server.throughput import Throughput
from fminfer.worker.engine_api import Engine


@dataclass(slots=True, frozen=True)
class ServedModel:
    """The model, and what requests may call it.

    `created` is the Unix time at which it was ready, seconds.
    """

    names: tuple[str, ...]  # the first one stands in answers
    max_model_len: int
    has_chat_template: bool
    others: frozenset[str]  # by which it may be asked for, too
    is_checked: bool  # a request that names another model is refused
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, asked: object) -> None:
        """Refuse a foreign model's name, if that is wanted, and one of a length that none has.

        Raises:
            HttpError: the request is for another model.
        """
        if isinstance(asked, str) and len(asked) > MAX_NAME_CHARS:
            raise HttpError(
                400,
                f"model has {len(asked):,} characters, and at most {MAX_NAME_CHARS} are allowed; "
                "give the model's name",
                code="out_of_range",
                param="model",
            )
        if self.is_checked and asked is not None and asked not in (*self.names, *self.others):
            raise HttpError(
                404,
                f"model is {show(asked)}, and this server has {' or '.join(self.names)}; ask for "
                "that, or start the server without --check-model",
                code="model_not_found",
                param="model",
            )

    def name_for(self, fields: Mapping[str, Any]) -> str:
        """Return the model's name in the answer to a request: as it was asked for."""
        asked = fields.get("model")
        return asked if isinstance(asked, str) and asked else self.names[0]


@dataclass(slots=True, frozen=True)
class Service:
    """What routes need."""

    engine: Engine
    dispatcher: Dispatcher
    model: ServedModel
    metrics: Metrics
    throughput: Throughput
    bodies: Bodies
    log: ServerLog

    async def read(self, request: Request) -> dict[str, Any]:
        """Return the JSON object of a request's body.

        Raises:
            HttpError: there is none.
        """
        return await self.bodies.read_object(request)
