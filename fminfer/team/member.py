"""One pipeline of several that answer one input: an engine, told of lines, telling of records."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

from fminfer.config import EngineConfig
from fminfer.engine.loop import LOOKAHEAD
from fminfer.errors import FminferError, StoppedError
from fminfer.input.lines import Line
from fminfer.models.checkpoint import Checkpoint
from fminfer.output.records import Record
from fminfer.pipeline.group import Group
from fminfer.team.place import Place
from fminfer.team.wire import (
    END,
    GO_ON,
    Answered,
    Ended,
    Failed,
    Loaded,
    Ready,
    Taken,
    receive,
    send,
)
from fminfer.worker import Engine

STATS_EVERY_S = 0.5


def serve_pipeline(
    config: EngineConfig, group: Group | None, place: Place, checkpoint: Checkpoint | None = None
) -> None:
    """Answer the lines that the run sends until it says that there are no more.

    Args:
        group: the ranks of this pipeline, of which this process is the first.
        checkpoint: the model, if it was opened before.

    Raises:
        FminferError: the pipeline cannot go on; the run has been told.
    """
    connection = place.connect()
    try:
        Member(config, group, connection, checkpoint).serve()
    except (EOFError, ConnectionError, TimeoutError):
        os._exit(1)  # the run is gone, or the network to it
    except Exception as error:
        told = FminferError(f"{type(error).__name__}: {error}")
        if isinstance(error, FminferError):
            told = error
        send(connection, Failed(str(told), told.kind))
        raise


class Member:
    """Keeps an engine busy with what comes over a connection."""

    def __init__(
        self,
        config: EngineConfig,
        group: Group | None,
        connection: Connection,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._connection = connection
        self._lines: deque[Line] = deque()
        self._has_ended = False

        def wait_for_others(file_digests: dict[str, str]) -> None:
            send(connection, Loaded(file_digests))
            assert receive(connection) == GO_ON

        self._engine = Engine(config, group=group, checkpoint=checkpoint, on_loaded=wait_for_others)

    def serve(self) -> None:
        """Answer until there are no more lines."""
        engine = self._engine
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        reasons = engine.why_plain, engine.why_slower
        send(self._connection, Ready(str(engine.device), engine.num_threads, *reasons))
        is_stopped, told_s = False, 0.0
        try:
            for record in engine.run(self._take(), LOOKAHEAD):
                now_s = time.monotonic()
                stats = engine.stats if now_s - told_s > STATS_EVERY_S else None
                told_s = told_s if stats is None else now_s
                send(self._connection, Answered(_light(record), stats))
        except StoppedError:
            is_stopped = True
        send(self._connection, Ended(engine.stats, engine.rows_by_warning, is_stopped))
        engine.close()

    def _take(self) -> Iterator[Line | None]:
        while True:
            if self._lines:
                send(self._connection, Taken())
                yield self._lines.popleft()
            elif self._has_ended:
                return
            else:
                yield None

    def _listen(self) -> None:
        """Hear what the run says; it may end without a word."""
        while True:
            try:
                told = receive(self._connection)
            except (EOFError, OSError):
                sys.stderr.flush()
                os._exit(1)
            if told is END:
                self._has_ended = True
            elif isinstance(told, float):
                self._engine.stop(told)
            else:
                self._lines += told


def _light(record: Record) -> Record:
    """Leave out what was parsed: the record's bytes are made of the line's own."""
    return replace(record, envelope=replace(record.envelope, fields={}))
