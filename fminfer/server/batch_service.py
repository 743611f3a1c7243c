"""Finds, makes and ends an owner's files and batches, for their routes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from starlette.requests import Request

from fminfer.answers.carrying_over import RunTerms
from fminfer.server.batches.batch_request import PURPOSE, BatchRequest
from fminfer.server.batches.batch_run import BatchContext
from fminfer.server.batches.batch_work import BatchWork
from fminfer.server.batches.state_folder import make_random_id
from fminfer.server.batches.stored_batches import ServerState, StoredBatch
from fminfer.server.batches.stored_files import ServerFile
from fminfer.server.http_errors import HttpError
from fminfer.server.request_bodies import Upload
from fminfer.server.service import Service
from fminfer.server.settings import ServerSettings

SERVED_NAME = "the served model's name"  # in the fingerprint: it stands in records


class BatchService:
    """Serves clients that want files and batches. Its methods may wait for the disk.

    Raises:
        HttpError: what is asked for is not there, or is in use, or over.
        OutputError: the disk is full, or fails.
    """

    def __init__(
        self, state: ServerState, service: Service, settings: ServerSettings
    ) -> None:
        self.settings = settings
        self.uploads = state.folder.uploads
        self.files = state.files
        self.batches = state.batches
        self._folder = state.folder
        self._has_keys = bool(settings.api_keys)
        self._model_name = service.names[0]
        self._log = service.log.write
        context = BatchContext(
            engine=service.served,
            state=state,
            terms=RunTerms(
                model=service.served.model_name,
                fingerprint=state.fingerprint | {SERVED_NAME: self._model_name},
            ),
            model_name=self._model_name,
            check_model=service.check_model,
            log=self._log,
            max_lines=settings.max_batch_lines,
        )
        self.work = BatchWork(context)
        self._terms = context.terms

    def owner_of(self, request: Request) -> str:
        """Return the owner who sends a request, by its key, which was checked before."""
        _, _, key = request.headers.get("authorization", "").partition(" ")
        return self._folder.owner_of(key.strip() if self._has_keys else None)

    def add_upload(self, upload: Upload, owner: str) -> ServerFile:
        """Add what was uploaded to the files."""
        stored = ServerFile.make(
            make_random_id("file-"),
            owner,
            upload.num_bytes,
            upload.filename,
            upload.expires_after_s,
            purpose=PURPOSE,
        )
        self.files.add_upload(stored, upload.path)
        return stored

    def require_file(self, file_id: str, owner: str) -> ServerFile:
        """Return an owner's file."""
        stored = self.files.find(file_id, owner)
        if stored is None:
            raise _not_found_error("file", "GET /v1/files lists them")
        return stored

    def require_bytes(self, file_id: str, owner: str) -> Path:
        """Return the path of a file's bytes."""
        stored = self.require_file(file_id, owner)
        path = self.files.path_of(stored)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            self._log("error", f"{path} is not there, and a client asks for it")
            raise HttpError(
                410, "the file was removed from the server's disk", code="file_removed"
            ) from None
        if size != stored.bytes:
            change = f"has {size} bytes, and was written with {stored.bytes}"
            self._log("error", f"{path} {change}")
            raise HttpError(
                410,
                f"the file was changed on the server's disk: it {change}",
                code="file_changed",
            )
        return path

    def delete_file(self, file_id: str, owner: str) -> None:
        """Delete an owner's file."""
        with self.files.lock:  # so that no batch begins to need it meanwhile
            stored = self.require_file(file_id, owner)
            if (batch := self.batches.find_batch_using(stored.id)) is not None:
                raise HttpError(
                    409,
                    f"{batch.id} is {batch.status} and still needs the file; cancel it "
                    "first, or wait until it is over",
                    code="file_in_use",
                )
            self.files.remove(stored)

    def create_batch(self, request: BatchRequest, owner: str) -> StoredBatch:
        """Make a batch; it begins at once, or when others have ended."""
        now_ns = time.time_ns()
        with self.files.lock:  # so that the input is not deleted meanwhile
            stored = self.files.find(request.input_file_id, owner)
            if stored is None:
                raise _not_found_error(
                    "file", "upload one by POST /v1/files", "input_file_id"
                )
            if stored.purpose != PURPOSE:
                raise HttpError(
                    400,
                    f"input_file_id is a file of purpose {stored.purpose}; upload one "
                    f"with purpose {PURPOSE}",
                    code="invalid_purpose",
                    param="input_file_id",
                )
            batch = StoredBatch(
                id=make_random_id("batch_"),
                owner=owner,
                created_ns=now_ns,
                endpoint=request.endpoint,
                input_file_id=request.input_file_id,
                completion_window=request.completion_window.text,
                expires_at=now_ns // 10**9 + request.completion_window.seconds,
                metadata=request.metadata,
                model=self._model_name,
                answers_id=make_random_id("file-"),
                errors_id=make_random_id("file-"),
                made_for=self._terms.fingerprint,
                output_expires_after_s=request.output_expires_after,
            )
            self.batches.add(batch)
        self.work.wake(batch)
        return batch

    def require_batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return an owner's batch."""
        batch = self.batches.find(batch_id, owner)
        if batch is None:
            raise _not_found_error("batch", "GET /v1/batches lists them")
        return batch

    def cancel_batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Have a batch end; what is finished stays."""
        batch = self.batches.change(self.require_batch(batch_id, owner), _to_cancelling)
        self.work.wake(batch)
        return batch

    def describe(self, item: StoredBatch | ServerFile) -> dict[str, Any]:
        """Return OpenAI's object of a file, or of a batch with the newest counts."""
        if isinstance(item, ServerFile):
            return item.to_openai_object()
        return item.to_openai_object(self.work.progress_of(item))

    def close(self) -> None:
        """End all runs, and let another server have the folder."""
        self.work.stop()
        self._folder.close()


def _to_cancelling(batch: StoredBatch) -> StoredBatch:
    if batch.status in ("cancelling", "cancelled"):
        return batch
    # One that finalizes is over in a moment, unless trouble keeps it from that.
    if batch.status in ("validating", "in_progress") or (
        batch.is_open and batch.troubles
    ):
        return batch.with_status("cancelling")
    raise HttpError(
        409,
        f"the batch is {batch.status}, and only one that is validating or in_progress can be "
        "cancelled",
        code="batch_over",
    )


def _not_found_error(kind: str, remedy: str, param: str | None = None) -> HttpError:
    return HttpError(
        404,
        f"there is no {kind} with this id; {remedy}",
        code=f"{kind}_not_found",
        param=param,
    )
