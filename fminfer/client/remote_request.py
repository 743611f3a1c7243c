"""A request that a server elsewhere answers."""

from __future__ import annotations

from dataclasses import dataclass

from fminfer.contract.endpoints import Endpoint
from fminfer.core.config import Constraint
from fminfer.engine.sequence import PreparedRequest


@dataclass(slots=True, frozen=True)
class RemoteRequest(PreparedRequest):
    """A request that was checked and translated; its server tokenizes it.

    Its prompts stand for the texts: one for each choice's prompt, at least one. The ids of
    the first are its text, four bytes each, by which lines that begin alike are put
    together. The text of the first is `body`, so that requests of other bodies have
    other answers. Its params have no constraint: nothing here watches how it is drawn.
    """

    endpoint: Endpoint = "completions"
    body: bytes = (
        b"{}"  # the fields in JSON, without `model`, `stream`, `stream_options`
    )
    constraint: Constraint | None = None  # what the answer is held to
