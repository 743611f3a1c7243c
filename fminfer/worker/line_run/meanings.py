"""What requests mean, for counting equal ones; parameters that many share are parsed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from fminfer.contract.request import Request
from fminfer.engine.noise import describe_params, meaning_beside

MAX_PARSED = 512  # sets of parameters
MAX_PARAMS_BYTES = 1024  # of one that is kept


class Meanings:
    """Tells requests' meanings, in a tenth of the time where only their prompts differ.

    Args:
        parse: parses a request, as `Intake.parse` does.
        has_own_prompt: every request gets the run's prompt.
    """

    def __init__(self, parse: Callable[..., Request], *, has_own_prompt: bool = False) -> None:
        self._parse_request = parse
        self._parsed: dict[bytes, str | None] = {}  # what `_describe` says of a set of parameters
        self._has_own_prompt = has_own_prompt

    def find(self, fields: dict[str, Any], *, is_chat: bool | None, clock: str) -> bytes | None:
        """Return a request's meaning; None: chance has no part in its answer.

        Raises:
            RequestError: what is wrong with it, as far as that shows without its tokens.
        """
        prompt = fields.get("prompt")
        if not isinstance(prompt, str) or is_chat or self._has_own_prompt or not _is_text(prompt):
            prompts, described = self._parse(fields, is_chat=is_chat, clock=clock)
            return None if described is None else meaning_beside(prompts, described)
        others = {name: value for name, value in fields.items() if name != "prompt"}
        try:
            key = orjson.dumps(others)
        except orjson.JSONEncodeError:  # half of a surrogate pair
            key = b""
        if key in self._parsed:
            described = self._parsed[key]
        else:
            described = self._parse(fields, is_chat=is_chat, clock=clock)[1]
            if 0 < len(key) <= MAX_PARAMS_BYTES:
                self._keep(key, described)
        return None if described is None else meaning_beside([prompt], described)

    def _parse(
        self, fields: dict[str, Any], *, is_chat: bool | None, clock: str
    ) -> tuple[list[str | list[int]], str | None]:
        """Return a request's prompts and its parameters' description; None: no draw is random."""
        request = self._parse_request(fields, is_chat=is_chat, clock=clock)
        params = request.params
        is_certain = params.seed is not None or params.is_greedy
        return request.prompts, None if is_certain else describe_params(params)

    def _keep(self, key: bytes, described: str | None) -> None:
        if len(self._parsed) >= MAX_PARSED:
            del self._parsed[next(iter(self._parsed))]
        self._parsed[key] = described


def _is_text(prompt: str) -> bool:
    """Tell whether a prompt has a UTF-8 form, as the check of a request asks."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True
