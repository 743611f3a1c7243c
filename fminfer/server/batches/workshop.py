"""What the runs of all batches share."""

from __future__ import annotations

from dataclasses import dataclass

from fminfer.files.run_terms import RunTerms
from fminfer.server.batches.stored_batches import BatchStore
from fminfer.server.batches.stored_files import FileStore
from fminfer.server.server_log import ServerLog
from fminfer.server.service import ServedModel
from fminfer.worker.engine_api import Engine


@dataclass(slots=True)
class DoneRows:
    """Lines that batches have answered since the server began."""

    completed: int = 0
    failed: int = 0


@dataclass(slots=True, frozen=True)
class Workshop:
    """What the runs of all batches share."""

    engine: Engine
    files: FileStore
    batches: BatchStore
    terms: RunTerms
    model: ServedModel
    done: DoneRows
    log: ServerLog
