"""What the routes of files and batches do: an owner's files and batches, found, made and ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from starlette.requests import Request

from fminfer.answers.run_terms import RunTerms
from fminfer.core.errors import OutputError, UsageError
from fminfer.files.journal_rows import Fingerprint
from fminfer.runtime.engine_api import Engine
from fminfer.server.batches.batch_request import BatchRequest
from fminfer.server.batches.batch_run import BatchShared, DoneRows
from fminfer.server.batches.batch_work import BatchWork
from fminfer.server.batches.state_folder import StateFolder, new_id
from fminfer.server.batches.stored_batches import BatchStore, StoredBatch
from fminfer.server.batches.stored_files import FileStore, ServerFile
from fminfer.server.batches.upload import PURPOSE, Upload, no_room
from fminfer.server.http_errors import HttpError
from fminfer.server.server_log import ServerLog
from fminfer.server.service import ServedModel

SERVED_NAME = "the served model's name"  # in the fingerprint: it stands in records


class ServerState:
    """What a server keeps.

    Args:
        fingerprint: what must be the same for its rows to be kept.

    Raises:
        UsageError: what is in the folder cannot be read.
    """

    def __init__(self, folder: StateFolder, fingerprint: Fingerprint) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        try:
            self.files = FileStore(folder)
            self.batches = BatchStore(folder)
        except OSError as error:
            raise UsageError(
                f"{error.filename or folder.path} cannot be read or written: {error.strerror}; see "
                "that all of --state is this user's and its disk is sound"
            ) from error


class BatchService:
    """Serves clients that want files and batches. Its methods may wait for the disk."""

    def __init__(
        self,
        state: ServerState,
        engine: Engine,
        model: ServedModel,
        log: ServerLog,
        *,
        max_upload_bytes: int,
        has_keys: bool,
    ) -> None:
        self.max_upload_bytes = max_upload_bytes
        self.uploads = state.folder.uploads
        self._folder = state.folder
        self._has_keys = has_keys
        self._model = model
        self._log = log
        self.files, self.batches = state.files, state.batches
        self._terms = RunTerms(engine.model_name, state.fingerprint | {SERVED_NAME: model.names[0]})
        self.done = DoneRows()
        shop = BatchShared(engine, self.files, self.batches, self._terms, model, self.done, log)
        self.work = BatchWork(shop)

    def owner_of(self, request: Request) -> str:
        """Return whose a request is, by its key, which was checked before."""
        if not self._has_keys:
            return self._folder.owner_of(None)
        _, _, key = request.headers.get("authorization", "").partition(" ")
        return self._folder.owner_of(key.strip())

    @property
    def num_open(self) -> int:
        """Batches that are not over."""
        return len(self.batches.open_ones)

    def keep_upload(self, upload: Upload, owner: str) -> ServerFile:
        """Keep what was uploaded.

        Raises:
            HttpError: the disk is full.
        """
        now_ns, lives_s = time.time_ns(), upload.expires_after_s
        stored = ServerFile(
            *(new_id("file-"), owner, upload.num_bytes, now_ns, upload.filename),
            purpose=PURPOSE,
            expires_at=None if lives_s is None else now_ns // 10**9 + lives_s,
        )
        try:
            self.files.take_upload(stored, upload.path)
        except OutputError as error:
            upload.path.unlink(missing_ok=True)
            raise self._refuse(error) from error
        return stored

    def find_file(self, file_id: str, owner: str) -> ServerFile:
        """Return an owner's file.

        Raises:
            HttpError: there is none of this id.
        """
        stored = self.files.get(file_id, owner)
        if stored is None:
            raise _no_such("file", "GET /v1/files")
        return stored

    def find_bytes(self, file_id: str, owner: str) -> Path:
        """Return where a file's bytes are.

        Raises:
            HttpError: there is no such file, or they are gone, or others than were written.
        """
        stored = self.find_file(file_id, owner)
        path = self.files.path_of(stored)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            self._log.error(f"{path} is not there, and a client asks for it")
            raise HttpError(
                410, "the file was removed from the server's disk", code="file_removed"
            ) from None
        if size != stored.bytes:
            self._log.error(f"{path} has {size} bytes, and was written with {stored.bytes}")
            raise HttpError(
                410,
                f"the file was changed on the server's disk: it has {size} bytes, and was written "
                f"with {stored.bytes}",
                code="file_changed",
            )
        return path

    def delete_file(self, file_id: str, owner: str) -> None:
        """Delete an owner's file.

        Raises:
            HttpError: there is none of this id, a batch needs it, or the disk fails.
        """
        with self.files.lock:  # so that no batch begins to need it meanwhile
            stored = self.find_file(file_id, owner)
            if (batch := self.batches.find_user(stored.id)) is not None:
                raise HttpError(
                    409,
                    f"{batch.id} is {batch.status} and still needs the file; cancel it first, or "
                    "wait until it is over",
                    code="file_in_use",
                )
            try:
                self.files.remove(stored)
            except OutputError as error:
                raise self._refuse(error) from error

    def create_batch(self, wish: BatchRequest, owner: str) -> StoredBatch:
        """Make a batch; it begins at once, or when others have ended.

        Raises:
            HttpError: its input is not there, or the disk fails.
        """
        now_ns = time.time_ns()
        with self.files.lock:  # so that the input is not deleted meanwhile
            stored = self.files.get(wish.input_file_id, owner)
            if stored is None:
                raise _no_such("file", "POST /v1/files", param="input_file_id")
            if stored.purpose != PURPOSE:
                raise HttpError(
                    400,
                    f"input_file_id is a file of purpose {stored.purpose}; upload one with purpose "
                    f"{PURPOSE}",
                    code="invalid_purpose",
                    param="input_file_id",
                )
            batch = StoredBatch(
                *(new_id("batch_"), owner, now_ns, wish.endpoint, wish.input_file_id),
                *(wish.completion_window, now_ns // 10**9 + wish.window_s, wish.metadata),
                *(self._model.names[0], new_id("file-"), new_id("file-")),
                made_for=self._terms.fingerprint,
                output_expires_after_s=wish.output_expires_after_s,
            )
            try:
                self.batches.create(batch)
            except OutputError as error:
                raise self._refuse(error) from error
        self.work.wake(batch)
        return batch

    def find_batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return an owner's batch.

        Raises:
            HttpError: there is none of this id.
        """
        batch = self.batches.get(batch_id, owner)
        if batch is None:
            raise _no_such("batch", "GET /v1/batches")
        return batch

    def cancel_batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Have a batch end; what is finished stays.

        Raises:
            HttpError: there is none of this id, it is over, or the disk fails.
        """

        def change(batch: StoredBatch) -> StoredBatch:
            if batch.status in ("cancelling", "cancelled"):
                return batch
            # One that finalizes is over in a moment, unless trouble keeps it from that.
            if batch.status in ("validating", "in_progress") or (batch.is_open and batch.troubles):
                return batch.moved("cancelling")
            raise HttpError(
                409,
                f"the batch is {batch.status}, and only one that is validating or in_progress can "
                "be cancelled",
                code="batch_over",
            )

        try:
            batch = self.batches.change(self.find_batch(batch_id, owner), change)
        except OutputError as error:
            raise self._refuse(error) from error
        self.work.wake(batch)
        return batch

    def describe(self, found: StoredBatch | ServerFile) -> dict[str, Any]:
        """Return OpenAI's object of a file, or of a batch with the newest counts."""
        if isinstance(found, ServerFile):
            return found.to_object()
        return found.to_object(self.work.progress_of(found))

    def close(self) -> None:
        """End all runs, and let another server have the folder."""
        self.work.stop()
        self._folder.close()

    def _refuse(self, error: OutputError) -> HttpError:
        self._log.error(f"A client was refused: {error}")
        return no_room(error)


def _no_such(kind: str, where: str, param: str | None = None) -> HttpError:
    remedy = f"upload one by {where}" if where.startswith("POST") else f"{where} lists them"
    return HttpError(
        404,
        f"there is no {kind} with this id; {remedy}",
        code=f"{kind}_not_found",
        param=param,
    )
