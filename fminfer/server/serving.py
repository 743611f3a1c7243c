"""One process of `fminfer serve`, by its role: the server itself, or another rank of its engine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import click

from fminfer.batch.process_roles import lead_or_join
from fminfer.batch.run_context import ProcessContext
from fminfer.batch.run_engine import MakeEngine, say, start_engine
from fminfer.core.quantities import counted, show_dtypes
from fminfer.models.checkpoint import Checkpoint
from fminfer.models.fingerprint import fingerprint_of
from fminfer.server.batches.desk import ServerState
from fminfer.server.batches.state_folder import StateFolder
from fminfer.server.http import open_socket, run_http
from fminfer.server.settings import ServerSettings
from fminfer.worker.forecast import name_held_dtype
from fminfer.worker.part_process import Opening
from fminfer.worker.result_cache import ResultCache, open_result_cache

SWITCH_S = 0.0005  # between threads of Python


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
    # Both before a model is loaded for nothing.
    address = open_socket(run.settings)
    state = _open_state(run, checkpoint)
    if not run.is_quiet:
        click.echo(f"Loading {checkpoint.name} …", err=True)
    engine = start_engine(run, lambda bar: make_engine(checkpoint, bar))
    try:
        if not run.is_quiet:
            types = show_dtypes(engine.facts.dtype, name_held_dtype(run.config, checkpoint))
            place = f"{types} on {engine.device}, {counted(engine.facts.num_threads, 'thread')}"
            kernels = "compiled kernels" if engine.facts.has_kernel else "plain torch"
            click.echo(f"Ready after {run.elapsed_s():.1f} s: {place}, {kernels}.", err=True)
        engine.result_cache = _open_cache(run, checkpoint)
        run_http(engine, run.settings, run.stopper, address, state)
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


def _open_state(run: ServeContext, checkpoint: Checkpoint) -> ServerState | None:
    """Take the state folder, if there is to be one.

    Raises:
        UsageError: it cannot be used.
    """
    path = run.settings.state
    if path is None:
        return None
    os.umask(0o077)  # this process writes for nobody else
    # Batches are prepared in threads. With Python's 5 ms, each step would wait for them so long.
    sys.setswitchinterval(SWITCH_S)
    folder = StateFolder(path)
    if folder.was_narrowed and not run.is_quiet:
        click.echo(f"--state {path} could be read by others; now only you can.", err=True)
    return ServerState(folder, fingerprint_of(run.config, checkpoint))
