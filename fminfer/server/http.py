"""Answers HTTP requests with an engine."""

from __future__ import annotations

from fminfer.machine.stopper import Stopper
from fminfer.server.settings import ServerSettings
from fminfer.worker.engine_api import Engine


def run_http(engine: Engine, settings: ServerSettings, stopper: Stopper) -> None:
    """Serve until told to stop; the main thread runs the engine's steps."""
    raise NotImplementedError
