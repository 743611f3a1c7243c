"""What a server without a state folder says."""

from __future__ import annotations

from fminfer.server.batches.desk import Desk
from fminfer.server.http_errors import HttpError


def require(desk: Desk | None) -> Desk:
    """Return what serves files and batches.

    Raises:
        HttpError: the server was started without a folder for them.
    """
    if desk is None:
        raise HttpError(
            404,
            "this server keeps no files and batches; start it with --state FOLDER",
            code="no_state_folder",
        )
    return desk
