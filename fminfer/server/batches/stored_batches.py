"""Batches: how each stands. Its batch.json says so before a client hears of it."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fminfer.core.errors import InUseError, UsageError
from fminfer.files.disk import sync_folder
from fminfer.files.journal_rows import Counts, Fingerprint
from fminfer.server.batches.state_folder import (
    ID,
    PRIVATE_FOLDER,
    StateFolder,
    write_durably,
    writing_state,
)
from fminfer.server.batches.stored_files import OUTPUT, FileStore

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Ending = Literal["cancelled", "expired"]  # before all lines are answered
OPEN: tuple[BatchStatus, ...] = (
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
)
TIMES = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
RECORD = "batch.json"
NEW_RECORD = f"{RECORD}.new"  # while it is written


@dataclass(slots=True, frozen=True)
class Progress:
    """What was done of a batch. Tokens are those of answered lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def from_counts(cls, counts: Counts) -> Progress:
        """Return what an input's counts say."""
        return cls(
            counts.num_rows, counts.num_completed, counts.num_failed, *counts.tokens
        )


@dataclass(slots=True, frozen=True)
class Trouble:
    """Why a batch pauses, or has failed."""

    code: str
    message: str


@dataclass(slots=True, frozen=True)
class StoredBatch:
    """One batch. Its output's ids are chosen with it, so that finishing can be repeated."""

    id: str
    owner: str
    created_ns: int
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    metadata: dict[str, str] | None
    model: str
    answers_id: str
    errors_id: str
    status: BatchStatus = "validating"
    times: dict[str, int] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    troubles: tuple[Trouble, ...] = ()
    output_file_id: str | None = None  # once it is there, and has a line
    error_file_id: str | None = None
    # The model and settings of the server that made it; None: an older version's.
    made_for: Fingerprint | None = None
    output_expires_after_s: int | None = None  # None: its output stays

    @property
    def is_open(self) -> bool:
        """Whether something is left to do."""
        return self.status in OPEN

    @property
    def file_ids(self) -> tuple[str, ...]:
        """Its input, and its outputs, which may not be there."""
        return self.input_file_id, self.answers_id, self.errors_id

    @property
    def created_at(self) -> int:
        """Seconds since 1970."""
        return self.created_ns // 10**9

    def with_status(self, status: BatchStatus, **changes: Any) -> StoredBatch:
        """Return it in another status, entered now."""
        times = self.times | {f"{status}_at": int(time.time())}
        return replace(self, status=status, times=times, **changes)

    def to_openai_object(self, progress: Progress | None = None) -> dict[str, Any]:
        """Return OpenAI's batch object; progress: newer than its own, while it is answered."""
        done = progress or self.progress
        times = {"expires_at": self.expires_at} | self.times
        errors = [
            {"line": None, "param": None} | asdict(each) for each in self.troubles
        ]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **{name: times.get(name) for name in TIMES},
            "request_counts": {
                "total": done.total,
                "completed": done.completed,
                "failed": done.failed,
            },
            "usage": {
                "input_tokens": done.input_tokens,
                "input_tokens_details": {"cached_tokens": done.cached_tokens},
                "output_tokens": done.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": done.input_tokens + done.output_tokens,
            },
            "metadata": self.metadata,
        }


class BatchStore:
    """All batches of a state folder. Any thread may call it."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._batches: dict[str, StoredBatch] = {}
        for path in folder.batches.glob("batch_*"):
            if (path / RECORD).exists():
                batch = _read_record(path / RECORD)
                self._batches[batch.id] = batch
            elif others := {
                name for name in os.listdir(path) if not name.startswith(NEW_RECORD)
            }:
                raise UsageError(
                    f"{path} has {min(others)}, but no {RECORD}, so the state of its "
                    "batch is not known; put the file back, or move the folder away"
                )
            else:  # its creation was broken off, and its client did not hear of it
                shutil.rmtree(path, ignore_errors=True)

    def find(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Return an owner's batch; None: there is none of this id, or it is another's."""
        batch = self._batches.get(batch_id)
        return batch if batch is not None and batch.owner == owner else None

    def list_of_owner(self, owner: str) -> list[StoredBatch]:
        """Return an owner's batches, the newest first."""
        owned = [batch for batch in self._all_batches if batch.owner == owner]
        return sorted(
            owned, key=lambda batch: (batch.created_ns, batch.id), reverse=True
        )

    @property
    def open_batches(self) -> list[StoredBatch]:
        """The batches with something left to do, the oldest first."""
        batches = [batch for batch in self._all_batches if batch.is_open]
        return sorted(batches, key=lambda batch: (batch.created_ns, batch.id))

    @property
    def ended_batches(self) -> list[StoredBatch]:
        """The batches that are over."""
        return [batch for batch in self._all_batches if not batch.is_open]

    def find_batch_using(self, file_id: str) -> StoredBatch | None:
        """Return a batch that still needs a file, or has just made it; None: none does."""
        return next(
            (each for each in self.open_batches if file_id in each.file_ids), None
        )

    def find_newest(self, batch: StoredBatch) -> StoredBatch:
        """Return a batch as it is now."""
        return self._batches[batch.id]

    def output_path(self, batch: StoredBatch) -> Path:
        """Return where a batch's answers go."""
        return self._folder_of(batch) / OUTPUT

    def add(self, batch: StoredBatch) -> None:
        """Add a batch, for good."""
        folder = self._folder_of(batch)
        with self._lock, writing_state(folder):
            folder.mkdir(mode=PRIVATE_FOLDER)
            try:
                self._write_record(batch)
                sync_folder(folder.parent)
            except (OSError, InUseError):
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._batches[batch.id] = batch

    def change(
        self, batch: StoredBatch, change: Callable[[StoredBatch], StoredBatch]
    ) -> StoredBatch:
        """Change a batch, for good; return it."""
        with self._lock, writing_state(self._folder_of(batch) / RECORD):
            old = self._batches[batch.id]
            new = change(old)
            if new != old:
                self._write_record(new)
                self._batches[batch.id] = new
            return new

    def change_in_memory(
        self, batch: StoredBatch, change: Callable[[StoredBatch], StoredBatch]
    ) -> None:
        """Change a batch for as long as this server lives, where the disk may be what fails."""
        with self._lock:
            self._batches[batch.id] = change(self._batches[batch.id])

    @property
    def _all_batches(self) -> list[StoredBatch]:
        """All batches, without the lock: the event loop asks, and others write under it."""
        return list(self._batches.values())

    def _write_record(self, batch: StoredBatch) -> None:
        write_durably(
            self._folder_of(batch) / RECORD, json.dumps(asdict(batch)).encode() + b"\n"
        )

    def _folder_of(self, batch: StoredBatch) -> Path:
        assert ID.fullmatch(batch.id), "an id of ours"
        return self._folder.batches / batch.id


def _read_record(path: Path) -> StoredBatch:
    try:
        fields = json.loads(path.read_bytes())
        fields["progress"] = Progress(**fields["progress"])
        fields["troubles"] = tuple(Trouble(**each) for each in fields["troubles"])
        batch = StoredBatch(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path} is damaged ({error}), so the state of its batch is not known; put "
            "it back as it was, or move its folder away"
        ) from error
    if batch.id != path.parent.name or not ID.fullmatch(batch.id):
        raise UsageError(f"{path} is of another batch, {batch.id}; move it away")
    return batch


class ServerState:
    """What a server keeps: the files and batches of a state folder.

    Raises:
        UsageError: what is in the folder cannot be read.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint) -> None:
        self.folder = StateFolder(path)
        self.fingerprint = fingerprint  # must be the same for its rows to be kept
        try:
            self.files = FileStore(self.folder)
            self.batches = BatchStore(self.folder)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise UsageError(
                f"{error.filename or path} cannot be read or written: "
                f"{error.strerror}; see that all of --state is this user's and its "
                "disk is sound"
            ) from error

    def close(self) -> None:
        """Unlock the folder for another server."""
        self.folder.close()
