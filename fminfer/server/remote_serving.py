"""`fminfer serve --engine`: files and batches, whose lines servers elsewhere answer."""

from __future__ import annotations

from pathlib import Path

from fminfer.client.remote_options import RemoteOptions
from fminfer.job.remote_answering import compute_remote_fingerprint
from fminfer.runtime.bars import say
from fminfer.runtime.launch.processes import ProcessContext
from fminfer.server.batch_engine import BatchEngine
from fminfer.server.connections import open_socket
from fminfer.server.http import open_state, serve_engine
from fminfer.server.settings import ServerSettings


def serve_remote(
    run: ProcessContext, settings: ServerSettings, folder: Path, options: RemoteOptions
) -> None:
    """Serve files and batches until told to stop; `folder` keeps them.

    Raises:
        ServerError: no server can go on. Open batches go on at the next start.
        UsageError: a key, a model or a flag that is wrong.
    """
    with run.stopper.listening():
        # Before servers are asked for nothing.
        address = open_socket(settings)
        print_note = (lambda text: None) if run.is_quiet else say
        engine = BatchEngine.connect(run.config, options, print_note)
        fingerprint = compute_remote_fingerprint(run.config, engine.facts)
        serve_engine(
            run,
            settings,
            engine,
            address,
            open_state(run, folder, fingerprint),
            lambda: fingerprint,
            f"{engine.model_name} at {options.engine}; files and batches alone",
        )
