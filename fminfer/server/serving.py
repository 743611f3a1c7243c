"""One process of `fminfer serve`, by its role: the server itself, or another rank of its engine."""

from __future__ import annotations

from dataclasses import dataclass

import click

from fminfer.batch.process_roles import lead_or_join
from fminfer.batch.run_context import ProcessContext
from fminfer.batch.run_engine import MakeEngine, say, start_engine
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.fingerprint import fingerprint_of
from fminfer.server.http import open_socket, run_http
from fminfer.server.settings import ServerSettings
from fminfer.worker.part_process import Opening
from fminfer.worker.result_cache import ResultCache, open_result_cache


@dataclass(slots=True, frozen=True)
class ServeContext(ProcessContext):
    """A server in one of its processes."""

    settings: ServerSettings


def serve_process(run: ServeContext) -> None:
    """Serve until told to stop, or do another rank's part of it.

    Raises:
        FminferError: the server cannot go on.
    """
    lead_or_join(run, Opening(run.config), _serve)


def _serve(run: ServeContext, checkpoint: Checkpoint, make_engine: MakeEngine) -> None:
    """Make the engine, and let it answer over HTTP; only the first process does so."""
    address = open_socket(run.settings)  # before a model is loaded for nothing
    if not run.is_quiet:
        click.echo(f"Loading {checkpoint.name} …", err=True)
    engine = start_engine(run, lambda bar: make_engine(checkpoint, bar))
    try:
        if not run.is_quiet:
            click.echo(f"Ready after {run.elapsed_s():.1f} s.", err=True)
        engine.result_cache = _open_cache(run, checkpoint)
        run_http(engine, run.settings, run.stopper, address)
    finally:
        if engine.result_cache is not None:
            engine.result_cache.close()
        engine.close()


def _open_cache(run: ServeContext, checkpoint: Checkpoint) -> ResultCache | None:
    settings, tell = run.settings, (lambda text: None) if run.is_quiet else say
    if settings.cache_place is None and not settings.cache_size:
        return None  # a fingerprint reads of every tensor
    return open_result_cache(
        fingerprint_of(run.config, checkpoint),
        *(settings.cache_place, tell),
        size=settings.cache_size,
        list_size=settings.cache_list_size,
    )
