"""What goes wrong at a server: errors by whose trouble it is.

A `RequestError` is the row's, a `ServerTroubleError` the machine's. A `ServerError`, or a
`UsageError`, is the run's.
"""

from __future__ import annotations

from fminfer.core.errors import FminferError


class ServerTroubleError(FminferError):
    """No answer came, through no fault of the request's: it is asked again, or elsewhere."""

    def __init__(
        self, message: str, *, is_overload: bool = False, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.is_overload = is_overload  # the server has more requests than it wants
        self.retry_after_s = retry_after_s  # which the server named; 0: it did not
