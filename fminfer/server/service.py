"""What all routes of a server share: the model that it serves, and the way to its engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from fminfer.contract.field_table import MAX_NAME_CHARS
from fminfer.contract.fields import show
from fminfer.engine.stats import Observed
from fminfer.runtime.engine_api import Engine
from fminfer.server.dispatcher import Dispatcher
from fminfer.server.http_errors import HttpError
from fminfer.server.metrics import Metrics
from fminfer.server.request_bodies import BodyReader
from fminfer.server.server_log import ServerLog

WINDOW_S = 5.0  # of the means of tokens a second


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
class Rates:
    """Tokens a second."""

    prompt_tokens: float
    generation_tokens: float


class Throughput:
    """Looks at an engine's counts now and then."""

    def __init__(self, engine: Observed) -> None:
        self._engine = engine
        self._started_s = time.monotonic()
        self._seen: deque[tuple[float, int, int]] = deque()
        self.look()

    def look(self) -> None:
        """Take note of the counts."""
        stats = self._engine.stats
        now_s = time.monotonic()
        self._seen.append((now_s, stats.num_prompt_tokens, stats.num_generated_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def uptime_s(self) -> float:
        """Seconds since it began to look."""
        return time.monotonic() - self._started_s

    @property
    def num_tokens(self) -> int:
        """Tokens so far, when it last looked."""
        return sum(self._seen[-1][1:])

    @property
    def rates(self) -> Rates:
        """The mean over the last seconds."""
        (first_s, *first), (last_s, *last) = self._seen[0], self._seen[-1]
        passed_s = max(last_s - first_s, 1e-3)
        prompt, generated = (
            (now - before) / passed_s for before, now in zip(first, last, strict=True)
        )
        return Rates(prompt, generated)


@dataclass(slots=True, frozen=True)
class Service:
    """What routes need."""

    engine: Engine
    dispatcher: Dispatcher
    model: ServedModel
    metrics: Metrics
    throughput: Throughput
    bodies: BodyReader
    log: ServerLog

    async def read(self, request: Request) -> dict[str, Any]:
        """Return the JSON object of a request's body.

        Raises:
            HttpError: there is none.
        """
        return await self.bodies.read_object(request)
