"""Files of clients: what they uploaded, and what batches answered."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fminfer.core.errors import InUseError, UsageError
from fminfer.files.disk import sync_folder
from fminfer.files.ordered_output import errors_path
from fminfer.server.batches.state_folder import (
    ID,
    StateFolder,
    write_durably,
    writing_state,
)

Purpose = Literal["batch", "batch_output"]
PURPOSES: tuple[Purpose, ...] = ("batch", "batch_output")
UPLOAD = re.compile("[0-9a-f]{32}")  # the name of one that is still coming
OUTPUT = "output.jsonl"  # of a batch, in its folder
GONE = "deleted"  # where deleted files stood in their lists
MOST_GONE = 10_000  # of these that are kept at least: as many as a page may have


@dataclass(slots=True, frozen=True)
class ServerFile:
    """One file, as its JSON beside it says."""

    id: str
    owner: str
    bytes: int
    created_ns: int
    filename: str  # as its client called it; no path on this disk
    purpose: Purpose
    batch_id: str | None = None  # whose answers it holds
    is_errors: bool = False  # of these, the errors file
    # in seconds since 1970; None: it stays until it is deleted
    expires_at: int | None = None

    @classmethod
    def make(
        cls,
        file_id: str,
        owner: str,
        size: int,
        name: str,
        life_s: int | None,
        **others: Any,
    ) -> ServerFile:
        """Return a file that is made now, and stays for a while; None: until it is deleted."""
        now_ns = time.time_ns()
        ends_at = None if life_s is None else now_ns // 10**9 + life_s
        return cls(file_id, owner, size, now_ns, name, expires_at=ends_at, **others)

    @property
    def is_over(self) -> bool:
        """Whether it has expired. An open batch that needs it keeps it on the disk."""
        return self.expires_at is not None and time.time() >= self.expires_at

    def to_openai_object(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_ns // 10**9,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """All files of a state folder. Any thread may call it."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        # Files are deleted under it. Hold it to keep one.
        self.lock = threading.RLock()
        self._files: dict[str, ServerFile] = {}
        for path in folder.files.glob("file-*.json"):
            stored = _read_record(path)
            self._files[stored.id] = stored
        # deleted ones, of which only the place is known
        self._gone: dict[str, ServerFile] = {}
        self._read_gone()
        self._finish_uploads()
        self._check_records()

    def find(self, file_id: str, owner: str) -> ServerFile | None:
        """Return an owner's file; None: there is none of this id, or it is another's."""
        stored = self._files.get(file_id)
        return (
            stored if stored and stored.owner == owner and not stored.is_over else None
        )

    def find_input(self, file_id: str) -> ServerFile | None:
        """Return a file that an open batch reads, also if it has expired."""
        return self._files.get(file_id)

    def list_of_owner(self, owner: str, cursor: str | None = None) -> list[ServerFile]:
        """Return an owner's files, the newest first; the cursor's also if it was deleted."""
        # The event loop calls it, which must not wait for a lock under which others write.
        known = [*self._files.values(), *filter(None, [self._gone.get(cursor or "")])]
        owned = [
            stored
            for stored in known
            if stored.owner == owner and (stored.id == cursor or not stored.is_over)
        ]
        return sorted(
            owned, key=lambda stored: (stored.created_ns, stored.id), reverse=True
        )

    def path_of(self, stored: ServerFile) -> Path:
        """Return where a file's bytes are."""
        if stored.batch_id is None:
            return self.input_path(stored.id)
        output = self._folder.batches / stored.batch_id / OUTPUT
        return errors_path(output) if stored.is_errors else output

    def input_path(self, file_id: str) -> Path:
        """Return where the bytes of an uploaded file are."""
        assert ID.fullmatch(file_id), "an id of ours"
        return self._folder.files / f"{file_id}.jsonl"

    def add_upload(self, stored: ServerFile, upload: Path) -> None:
        """Keep an uploaded file, whose bytes are on the disk already."""
        path = self.input_path(stored.id)
        coming = self._folder.uploads / path.name
        with writing_state(path):
            try:
                os.replace(upload, coming)
                sync_folder(coming.parent)
                # from here on the next start moves the bytes, if this does not
                self._write_record(stored)
                os.replace(coming, path)
                sync_folder(path.parent)
            except BaseException:
                for left in (path, coming, upload, self._meta_path(stored.id)):
                    with suppress(OSError):
                        left.unlink(missing_ok=True)
                raise
        with self.lock:
            self._files[stored.id] = stored

    def add(self, stored: ServerFile) -> None:
        """Add a file whose bytes are in their place; it is known for good when this returns."""
        self._write_record(stored)
        with self.lock:
            self._files[stored.id] = stored

    def _write_record(self, stored: ServerFile) -> None:
        write_durably(self._meta_path(stored.id), _format_line(stored))

    @property
    def expired_files(self) -> list[ServerFile]:
        """The files whose time is over, and that are still on the disk."""
        return [stored for stored in list(self._files.values()) if stored.is_over]

    def remove(self, stored: ServerFile) -> None:
        """Remove a file, if nobody has; its place in its owner's list stays known."""
        path = self.path_of(stored)
        meta = self._meta_path(stored.id)
        with self.lock, writing_state(meta):
            if stored.id not in self._files:  # its owner was faster than its time
                return
            if stored.id not in self._gone:  # a disk that fails is asked each second
                self._note_deleted(stored)
            if path.exists():
                path.unlink()
                sync_folder(path.parent)  # a power cut leaves no bytes without a record
            meta.unlink(missing_ok=True)
            sync_folder(meta.parent)
            del self._files[stored.id]

    def _note_deleted(self, stored: ServerFile) -> None:
        """Keep where a file stood in its list, so that a page can go on behind it."""
        self._gone[stored.id] = place = replace(
            stored, bytes=0, filename="", expires_at=None
        )
        if len(self._gone) > 2 * MOST_GONE:
            self._write_gone()
            return
        with suppress(OSError), (self._folder.path / GONE).open("ab") as file:
            file.write(_format_line(place))

    def _write_gone(self) -> None:
        self._gone = dict([*self._gone.items()][-MOST_GONE:])
        with suppress(
            OSError, InUseError
        ):  # of a full disk, on which files must be deleted all the same
            write_durably(
                self._folder.path / GONE,
                b"".join(map(_format_line, self._gone.values())),
            )

    def _read_gone(self) -> None:
        path = self._folder.path / GONE
        for line in path.read_bytes().splitlines() if path.exists() else ():
            # a server died while it wrote the line
            with suppress(ValueError, TypeError):
                place = ServerFile(**json.loads(line))
                self._gone[place.id] = place
        self._write_gone()

    def _meta_path(self, file_id: str) -> Path:
        assert ID.fullmatch(file_id), "an id of ours"
        return self._folder.files / f"{file_id}.json"

    def _finish_uploads(self) -> None:
        """Move the bytes of uploads that are known already; remove others, which broke off."""
        for path in self._folder.uploads.iterdir():
            stored = self._files.get(path.stem)
            if stored and not self.path_of(stored).exists():
                os.replace(path, self.path_of(stored))
            elif UPLOAD.fullmatch(path.name) or ID.fullmatch(path.stem):
                path.unlink()
        sync_folder(self._folder.files)

    def _check_records(self) -> None:
        """Raise if bytes have no record: ours always have one."""
        for path in self._folder.files.iterdir():
            if ".json.new" in path.name:
                path.unlink()  # a record that was being written
            elif (
                path.suffix == ".jsonl"
                and ID.fullmatch(path.stem)
                and path.stem not in self._files
            ):
                raise UsageError(
                    f"{path} has no {path.stem}.json beside it, so nobody knows whose "
                    "it is; put that back, or move the file away"
                )


def _format_line(stored: ServerFile) -> bytes:
    return json.dumps(asdict(stored)).encode() + b"\n"


def _read_record(path: Path) -> ServerFile:
    try:
        stored = ServerFile(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged ({error}), so its file is not known; put it back as it "
            "was, or move it and its .jsonl away"
        ) from error
    if stored.id != path.stem or not ID.fullmatch(stored.id):
        raise UsageError(f"{path} is of another file, {stored.id}; move it away")
    return stored
