"""Why a batch cannot go on at the moment, in words for its client and for who runs the server."""

from __future__ import annotations

import errno
from pathlib import Path

from fminfer.core.errors import FminferError, InUseError, MachineError, UsageError
from fminfer.files.journal import journal_path
from fminfer.files.journal_rows import INPUT, Fingerprint, read_fingerprint, show_changes
from fminfer.server.batches.stored_batches import StoredBatch, Trouble

LATER = "Finished lines are kept, and the server tries again by itself"
MODEL_CHANGED = "model_changed"


class ChangedError(UsageError):
    """The rows of a batch are of another model, or of other settings."""


def check_unchanged(batch: StoredBatch, output: Path, fingerprint: Fingerprint) -> None:
    """See that a batch, and its rows if it has some, are of this server's model and settings.

    Raises:
        ChangedError: what differs.
    """
    any_input = {INPUT: ""}
    for old in (batch.made_for, _fingerprint_of(output)):
        if old and (changes := show_changes(old | any_input, fingerprint | any_input)):
            raise ChangedError(
                f"it was sent to another server: {changes}. Start the server as before, and the "
                "batch goes on. Or cancel the batch, which keeps its finished lines, and send the "
                "others in a new one"
            )


def _fingerprint_of(output: Path) -> Fingerprint | None:
    """Read what the rows of an output that is not finished depend on; None: there are none."""
    path = journal_path(output)
    if not path.exists():
        return None
    with path.open("rb") as file:
        head, first = file.readline(), file.readline()
    if not (head.endswith(b"\n") and first.endswith(b"\n")):  # nothing is lost
        return None
    return read_fingerprint(path, head)


def trouble_of(error: Exception) -> Trouble:
    """Say why a batch pauses, without paths of the server."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(error, ChangedError):
        return Trouble(MODEL_CHANGED, str(error))
    if isinstance(cause, OSError):
        return _of_disk(cause)
    if isinstance(error, InUseError):
        return Trouble("in_use", f"another process still writes its output. {LATER}")
    if isinstance(error, MachineError):
        return Trouble("machine_failed", f"the server's machine failed. {LATER}")
    if isinstance(error, UsageError):
        return Trouble(
            "input_changed",
            "its input or output in the server's state folder was edited; the server's log says "
            "what. Cancel the batch, or have the edit undone",
        )
    if isinstance(error, FminferError):
        return Trouble("server_failed", f"{error}. {LATER}")
    name = type(error).__name__
    return Trouble("internal_error", f"fminfer failed ({name}); please report it. {LATER}")


def _of_disk(error: OSError) -> Trouble:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Trouble("disk_full", f"the server's disk is full; make room there. {LATER}")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return Trouble(
            "state_not_writable",
            f"the server may not write its state folder; mend the folder's rights. {LATER}",
        )
    return Trouble("disk_failed", f"the server's disk failed; check it. {LATER}")
