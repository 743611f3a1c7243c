"""Which lines belong into a batch."""

from __future__ import annotations

from collections.abc import Callable

from fminfer.contract.envelope import CHAT, COMPLETIONS, Envelope
from fminfer.core.errors import RequestError
from fminfer.server.http_errors import HttpError
from fminfer.server.service import ServedModel


def make_check(endpoint: str, model: ServedModel) -> Callable[[Envelope], None]:
    """Return what refuses a line that is not of a batch, by a RequestError."""

    def check(envelope: Envelope) -> None:
        if envelope.shape != "batch":
            raise RequestError(
                "unsupported_parameter",
                'the line is no request of a batch; write {"custom_id": "…", "method": "POST", '
                f'"url": "{endpoint}", "body": {{…}}}}',
            )
        url = CHAT if envelope.is_chat else COMPLETIONS
        if url != endpoint:
            raise RequestError(
                "unsupported_parameter",
                f"url is {url}, and the batch is for {endpoint}; put the line into a batch for "
                f"{url}",
                "url",
            )
        try:
            model.check(envelope.fields.get("model"))
        except HttpError as error:
            raise RequestError("unsupported_parameter", str(error), "model") from None

    return check
