"""The status file beside an output: how far it is, as the OpenAI Batch object says it.

Fields: https://platform.openai.com/docs/api-reference/batch/object
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fminfer.core.errors import StoppedError, UsageError
from fminfer.files.disk import disk_error, path_beside, replacing_file
from fminfer.files.journal_rows import Counts
from fminfer.files.ordered_output import Seals, errors_path, vectors_path

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "cancelled",
    "expired",
]
BROKEN_OFF: tuple[Status, ...] = ("failed", "cancelled", "expired")
ENDS: tuple[Status, ...] = ("completed", *BROKEN_OFF)
WRITE_EVERY_S = 1.0
STATUS = ".status.json"  # instead of .jsonl in the output's name


def status_path(output: Path) -> Path:
    """Return where an output's status stands: `answers.status.json` for `answers.jsonl`."""
    return path_beside(output, STATUS, without=".jsonl")


def read_status(output: Path) -> dict[str, Any] | None:
    """Read an output's status; None: there is none that can be read."""
    try:
        path = status_path(output)
        fields = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and _has_status_form(fields) else None


def read_sound_status(output: Path) -> dict[str, Any] | None:
    """Read an output's status; None: there is none. Raise if it cannot be read."""
    status = read_status(output)
    if status is None and os.path.lexists(status_path(output)):
        raise UsageError(
            f"{status_path(output)} cannot be read, or is damaged, and it tells "
            f"whether {output} is complete. See that it can be read; or answer its "
            "input again (--restart)"
        )
    return status


def _has_status_form(fields: dict[str, Any]) -> bool:
    """Tell whether a status has the form that `StatusFile` gives it."""
    parts = (
        fields.get(name) or {}
        for name in ("request_counts", "metadata", "fminfer", "errors")
    )
    if not all(isinstance(part, dict) for part in parts):
        return False
    counts = fields.get("request_counts") or {}
    if fields.get("status") != "completed" and not counts:
        return True
    return all(
        isinstance(counts.get(name), int) for name in ("total", "completed", "failed")
    )


def fminfer_fields(status: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a status holds beside the fields of a Batch object."""
    return (status or {}).get("fminfer") or {}


def limit_of(status: dict[str, Any]) -> int | None:
    """Return how many lines of its input an output was to answer; None: all."""
    limit = fminfer_fields(status).get("limit")
    return limit if isinstance(limit, int) else None


def seals_of(status: dict[str, Any] | None) -> Seals | None:
    """Return the seals that a complete output was written with; None: by an older version."""
    seals = fminfer_fields(status).get("written")
    if not isinstance(seals, dict):
        return None
    return (
        seals if all(isinstance(seal, dict | None) for seal in seals.values()) else None
    )


def has_vectors(output: Path) -> bool:
    """Tell whether an output's status says that the vectors beside it are its own."""
    return fminfer_fields(read_status(output)).get("has_vectors") is True


def check_vectors_owned(output: Path) -> None:
    """Raise a UsageError if vectors would replace a file that fminfer did not write."""
    if (path := vectors_path(output)).exists() and not has_vectors(output):
        raise UsageError(
            f"{path} exists, and nothing tells that fminfer wrote it. Move it away, or give "
            "another --output"
        )


@dataclass(slots=True)
class StatusFile:
    """Writes the status of one output; always whole, by replacing the file."""

    source: Path
    output: Path
    model: str
    # of the run, by which a later one knows whether it is its own
    fingerprint: dict[str, str]
    counts: Counts  # kept up to date by the caller
    # how many lines are to be answered, the first ones; None: all
    limit: int | None = None
    input_changed_ns: int = 0  # of the input that is answered, by its disk's clock
    journal_bytes: int = 0  # of the rows that are counted
    seals: Seals | None = None  # once the output is written
    list_runs: Callable[[], list[dict[str, Any]]] = list  # those that answered it
    # those of an earlier run, until the output is written
    has_vectors: bool = field(init=False)
    _status: Status = "validating"
    _errors: list[dict[str, Any]] = field(default_factory=list)
    _times: dict[str, int] = field(
        default_factory=lambda: {"created_at": int(time.time())}
    )
    _written_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.has_vectors = has_vectors(self.output)

    def set_status(self, status: Status, error: str | None = None) -> None:
        """Set the status and write the file; `error` says why a run failed."""
        self._status = status
        if status != "validating":
            self._times[f"{status}_at"] = int(time.time())
        if error is not None:
            self._errors.append(
                {"code": "run_failed", "message": error, "param": None, "line": None}
            )
        self._write()

    def end_with_error(self, error: BaseException) -> None:
        """Note why the run ends before the output is complete."""
        if isinstance(error, StoppedError):
            self.set_status(error.status)
        elif isinstance(error, KeyboardInterrupt):
            self.set_status("cancelled")
        else:
            self.set_status("failed", f"{type(error).__name__}: {error}")

    def update(self) -> None:
        """Write the newest counts, at most once a second."""
        if time.perf_counter() - self._written_s >= WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        batch = self._make_batch()
        try:
            # Later commands rely on an end's status, also after a power cut. Vectors get their
            # name after this; only by the status does the next run know them as its own.
            is_durable = self.has_vectors or self._status in ENDS
            with replacing_file(
                status_path(self.output), is_durable=is_durable
            ) as file:
                file.write(json.dumps(batch, indent=2).encode() + b"\n")
        except OSError as error:
            # they grow, and there may be room only for what was there
            batch["fminfer"].pop("runs")
            text = json.dumps(batch, indent=2) + "\n"
            if self._status not in BROKEN_OFF or not self._overwrite(text):
                raise disk_error(status_path(self.output), error) from error
        self._written_s = time.perf_counter()

    def _overwrite(self, text: str) -> bool:
        """Write into the file that is there, as a full disk may allow; False: it does not."""
        try:
            with status_path(self.output).open("r+") as file:
                file.write(text)
                file.truncate()
        except OSError:
            return False
        return True

    def _make_batch(self) -> dict[str, Any]:
        counts = self.counts
        is_completed = self._status == "completed"
        digest = hashlib.blake2b(os.fsencode(self.source.resolve()), digest_size=16)
        times = ("created", "in_progress", "finalizing", *ENDS)
        return {
            "id": f"batch_{digest.hexdigest()}",
            "object": "batch",
            "endpoint": "/v1/completions",
            "model": self.model,
            "errors": {"object": "list", "data": self._errors}
            if self._errors
            else None,
            "input_file_id": str(self.source),
            # the schema wants a string, and there is no window
            "completion_window": "none",
            "status": self._status,
            "output_file_id": str(self.output) if is_completed else None,
            "error_file_id": str(errors_path(self.output))
            if is_completed and counts.num_failed
            else None,
            **{f"{name}_at": self._times.get(f"{name}_at") for name in times},
            "request_counts": {
                "total": counts.num_rows,
                "completed": counts.num_completed,
                "failed": counts.num_failed,
            },
            "usage": {
                "input_tokens": counts.input_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached_tokens},
                "output_tokens": counts.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts.input_tokens + counts.output_tokens,
            },
            "metadata": self.fingerprint,
            "fminfer": {
                "output": self.output.name,
                "kept_rows": counts.kept.num_rows,
                "limit": self.limit,
                "input_changed_ns": self.input_changed_ns,
                "journal_bytes": self.journal_bytes,
                "written": self.seals,
                "has_vectors": self.has_vectors,
                "runs": self.list_runs(),
            },
        }
