"""What an HTTP request gets instead of an answer: OpenAI's error object, and a status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from fminfer.contract.json_object import dump_json
from fminfer.core.errors import FminferError, RequestError

JSON = "application/json"


class HttpError(FminferError):
    """A request that ends with an error's status; `param` is the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    @property
    def type(self) -> str:
        """Whose fault it is, in OpenAI's words."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


def to_http_error(error: RequestError) -> HttpError:
    """Return a request's error with its status."""
    # One that is too large for this server is 400: clients try again after a 500, in vain.
    status = 500 if error.is_retryable and error.code != "out_of_memory" else 400
    return HttpError(status, error.message, code=error.code, param=error.param)


def shutting_down_error() -> HttpError:
    """Return the error of requests that a server leaves without an answer as it ends."""
    return HttpError(
        503,
        "the server is shutting down; ask another one",
        code="shutting_down",
        headers={"Retry-After": "10", "Connection": "close"},
    )


def describe_error(error: HttpError) -> dict[str, Any]:
    """Return the OpenAI error object."""
    return {
        "error": {
            "message": str(error),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def make_error_response(error: HttpError) -> Response:
    """Return the response that an error becomes."""
    return Response(
        dump_json(describe_error(error)), error.status, dict(error.headers or {}), JSON
    )
